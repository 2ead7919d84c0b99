"""Claims about FakeMNIST: every measurement by hand, and broken counterfactuals are refuted."""

import dataclasses

import numpy as np
import pytest
import torch

from ecinn.data.planted import FAKE_MNIST_CUE, load_fake_mnist
from ecinn.model import load
from ecinn.studies.paper import claims_planted as planted
from ecinn.studies.paper.claim import judgement
from ecinn.studies.paper.measuring import Sample, explained_sample
from helpers.paper import with_counterfactuals

N = 48


@pytest.fixture(scope="module")
def dots() -> Sample:
    return explained_sample(load("fakemnist"), load_fake_mnist("test"), N, 0)


def test_a_moved_dot_is_supported_and_another_digit_refuted(dots, judges) -> None:
    cue = FAKE_MNIST_CUE
    assert judgement(planted.few_class_pixels()).verdict == "supported"
    perfect = with_counterfactuals(dots, cue.paint(dots.images, dots.q))
    claim = judgement(planted.only_dots_change(perfect, cue, judges, 0))
    assert claim.verdict != "refuted"
    assert claim.numbers["inside_squared"].mean == pytest.approx(1)
    assert claim.numbers["inside_absolute"].mean == pytest.approx(1)
    assert claim.numbers["outside_grey_levels"].mean == claim.numbers["outside_at_most"] == 0
    assert claim.numbers["truth"].mean == 1
    elsewhere = judgement(
        planted.only_dots_change(with_counterfactuals(dots, dots.real), cue, judges, 0)
    )
    assert elsewhere.verdict == "refuted"  # the dot is right, but so much else has changed
    assert elsewhere.numbers["truth"].mean == 1
    same = judgement(
        planted.only_dots_change(with_counterfactuals(dots, dots.images), cue, judges, 0)
    )
    assert same.verdict == "refuted"


def test_share_of_the_change_in_the_dots(dots, judges) -> None:
    claim = judgement(planted.only_dots_change(dots, FAKE_MNIST_CUE, judges, 0))
    change = dots.change[:, 0].double().numpy()
    shares, absolute, outside, most = [], [], [], 0.0
    for one, p, q in zip(change, dots.p.tolist(), dots.q.tolist(), strict=True):
        shares.append((one[p, 0] ** 2 + one[q, 0] ** 2) / (one**2).sum())
        absolute.append((abs(one[p, 0]) + abs(one[q, 0])) / np.abs(one).sum())
        outside.append((np.abs(one).sum() - np.abs(one[:10, 0]).sum()) / 774 * 256)
        most = max(most, 256 * np.abs(one[10:]).max(), 256 * np.abs(one[:, 1:]).max())
    assert claim.numbers["inside_squared"].mean == pytest.approx(np.mean(shares))
    assert claim.numbers["inside_absolute"].mean == pytest.approx(np.mean(absolute))
    assert claim.numbers["outside_at_most"] == pytest.approx(most)
    # By squares alone a share of 0.9 would be enough for "supported".
    assert claim.verdict == ("partly" if np.mean(shares) >= 0.9 else "refuted")
    assert claim.numbers["outside_grey_levels"].mean == pytest.approx(np.mean(outside), rel=1e-4)
    outside = np.abs(change) * ~FAKE_MNIST_CUE.mask.numpy()
    assert claim.numbers["seen_outside"].mean * N == pytest.approx(
        (outside.max((1, 2)) > 0.1).sum()
    )
    assert 0 < claim.numbers["seen_outside"].mean < 1


def test_dots_at_tipping_points_and_images_without_a_dot(dots) -> None:
    cue = FAKE_MNIST_CUE
    claim = judgement(planted.no_dot_at_tipping_points(dots, cue))
    stored = dots.gather(lambda e: e.stored_tipping_point[:, 0])[:, 0].double() / 255
    of_q = [float(stored[i, q, 0]) for i, q in enumerate(dots.q.tolist())]
    assert claim.numbers["q"].mean == pytest.approx(np.mean(of_q))
    of_p = [float(stored[i, p, 0]) for i, p in enumerate(dots.p.tolist())]
    assert claim.numbers["p"].mean == pytest.approx(np.mean(of_p))
    assert claim.numbers["brighter"].mean == pytest.approx(np.mean(np.maximum(of_p, of_q)))
    (part,) = dots.parts
    bright = dataclasses.replace(part, tipping_point=part.x[:, None])
    lit = dataclasses.replace(dots, parts=(bright,))
    assert judgement(planted.no_dot_at_tipping_points(lit, cue)).verdict == "refuted"
    nothing = judgement(planted.no_class_without_dot(dots, cue))
    blank = dots.images.clone()
    blank[:, 0, :10, 0] = 0
    surest = dots.model.predict(blank).amax(1).double().mean()
    assert nothing.numbers["surest"].mean == pytest.approx(float(surest))
    posterior = dots.model.predict(blank).double()
    # Total variation: the most by which any event is likelier than if all were alike.
    apart = (posterior - 0.1).clamp(min=0).sum(1).mean()
    assert nothing.numbers["from_uniform"].mean == pytest.approx(float(apart))
    assert judgement(planted.reaches_target(dots)).verdict in ("supported", "partly")


@pytest.mark.parametrize(
    ("of_q", "verdict"), [(0.94, "refuted"), (0.96, "supported"), (0.0, "refuted")]
)
def test_certainty_of_q_needs_a_high_posterior(dots, of_q, verdict) -> None:
    (part,) = dots.parts
    posterior = torch.full((N, 1, 10), (1 - of_q) / 9)
    posterior[torch.arange(N), 0, dots.q] = of_q
    certificate = dataclasses.replace(part.convincing_certificate, stored_posterior=posterior)
    part = dataclasses.replace(part, convincing_certificate=certificate)
    # Nine times as many, so that intervals are narrow enough.
    fields = {name: getattr(dots, name) for name in ("index", "images", "p", "q", "real")}
    many = {name: torch.cat([values] * 9) for name, values in fields.items()}
    claim = judgement(planted.reaches_target(Sample(**many, model=dots.model, parts=(part,) * 9)))
    assert claim.verdict == verdict
    assert claim.numbers["certain"].mean == (of_q > 0.95)
    smoothing = dots.model.checkpoint.recipe.label_smoothing
    # Of ten equal parts of the smoothing nine go to other classes.
    assert f"ask for {1 - 0.9 * smoothing:.3f}" in claim.measured


@pytest.mark.parametrize(
    ("surest", "verdict"),
    [(0.1, "supported"), (0.15, "supported"), (0.4, "partly"), (0.9, "refuted")],
)
def test_posterior_without_a_dot_must_be_uniform(dots, monkeypatch, surest, verdict) -> None:
    posterior = torch.full((N, 10), (1 - surest) / 9)
    posterior[:, 3] = surest
    monkeypatch.setattr(dots.model, "predict", lambda images: posterior[: len(images)])
    claim = judgement(planted.no_class_without_dot(dots, FAKE_MNIST_CUE))
    assert claim.verdict == verdict
    assert claim.numbers["from_uniform"].mean == pytest.approx(surest - 0.1, abs=1e-6)
    assert "cannot exceed 0.9" in claim.measured
