"""Claims about the method: every measurement by an independent route, and faults refute."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecinn import equations
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.explanation.counterfactual import counterfactual
from ecinn.model import Model
from ecinn.pixels import to_uint8
from ecinn.studies.judges import scaled
from ecinn.studies.paper import claims_digits
from ecinn.studies.paper import claims_method as method
from ecinn.studies.paper.claim import judgement
from ecinn.studies.paper.measuring import Sample, explained_sample
from helpers.paper import N, count


def no_training() -> Dataset:
    raise AssertionError("gradient searches need no training images")


def broken(sample: Sample) -> Sample:
    """A model whose measured means belong to other classes."""
    model = Model(copy.copy(sample.model.checkpoint))
    model.mu_bar = sample.model.mu_bar.roll(3, 0)
    return explained_sample(model, load_mnist("test"), N, 0)


def timer(both: float) -> Callable[..., float]:
    """Pretend that a counterfactual takes this many times as long as a forward pass."""
    seconds = itertools.cycle([both, 1.0])
    return lambda run, repeats, device: next(seconds)


def test_two_evaluations_are_counted_and_a_third_refutes(sample) -> None:
    claim = judgement(method.two_evaluations(sample, 1, timer=timer(2.4)))
    assert (claim.verdict, claim.numbers["encodes"], claim.numbers["decodes"]) == (
        "supported", 1, 1,
    )  # fmt: skip

    def twice(classifier, mu_bar, x, q):
        classifier.encode_with_log_det(x)
        return counterfactual(classifier, mu_bar, x, q)

    again = method.two_evaluations(sample, 1, method=twice, timer=timer(2.4))
    assert judgement(again).verdict == "refuted"


def test_the_time_of_three_evaluations_supports_only_partly(sample) -> None:
    claim = judgement(method.two_evaluations(sample, 1, timer=timer(3.0)))
    assert (claim.verdict, claim.numbers["times_forward"]) == ("partly", 3)


@pytest.mark.slow
def test_tipping_points_are_equally_far_from_both_means(sample, monkeypatch) -> None:
    claim = judgement(method.tipping_points(sample))
    assert claim.numbers["tied"].mean == 1
    model = sample.model
    z = model.classifier.encode(model.pixels(sample.images)).double()
    alpha = sample.gather(lambda e: e.alpha_0).double()
    moved = z + alpha * (model.mu_bar[sample.q] - model.mu_bar[sample.p])
    apart = [
        (moved - model.classifier.mu[label].double()).norm(dim=1) for label in (sample.p, sample.q)
    ]
    torch.testing.assert_close(apart[0], apart[1], atol=1e-4, rtol=0)
    stored = model.predict(to_uint8(sample.gather(lambda e: e.tipping_point[:, 0])))
    rows = torch.arange(N)
    expected = (stored[rows, sample.p] - stored[rows, sample.q]).abs().median()
    assert claim.numbers["stored_median"] == pytest.approx(float(expected), abs=1e-3)
    apart = (stored[rows, sample.p] - stored[rows, sample.q]).abs()
    assert count(claim.numbers["stored_within_tenth"]) == int((apart <= 0.1).sum())
    alone = apart / (stored[rows, sample.p] + stored[rows, sample.q])
    renormalised = claim.numbers["stored_renormalised_median"]
    assert renormalised == pytest.approx(float(alone.median()), abs=1e-3)
    assert f"or {renormalised:.3f} if" in claim.measured
    right = equations.tipping_point_alpha
    monkeypatch.setattr(equations, "tipping_point_alpha", lambda *a: right(*a) + 0.3)
    wrong = explained_sample(model, load_mnist("test"), N, 0)
    assert judgement(method.tipping_points(wrong)).verdict == "refuted"


@pytest.mark.slow
def test_a_broken_model_reaches_and_convinces_nothing(sample, judges) -> None:
    assert judgement(method.reaches_target(sample)).verdict in ("supported", "partly")
    assert judgement(method.reaches_target(sample)).numbers["reached"].mean >= 0.95
    wrong = broken(sample)
    assert judgement(method.reaches_target(wrong)).verdict == "refuted"
    assert judgement(claims_digits.convinces_oracles(wrong, judges)).verdict == "refuted"


def test_posterior_of_q_in_latent_space(sample) -> None:
    model = sample.model
    claim = judgement(method.reaches_target(sample))
    z = model.classifier.encode(model.pixels(sample.images))
    alpha = sample.gather(lambda e: e.alpha_1)
    moved = z + alpha * (model.mu_bar[sample.q] - model.mu_bar[sample.p])
    squared = torch.cdist(moved.double(), model.classifier.mu.double()).square()
    of_q = (-float(model.tau) * squared / 2).softmax(1)[torch.arange(N), sample.q]
    assert claim.numbers["median_p_q"] == pytest.approx(float(of_q.median()), abs=1e-4)
    assert f"{100 * float((of_q > 0.99).double().mean()):.1f} % [" in claim.measured


def test_the_most_expensive_search_decides(sample, judges, monkeypatch) -> None:
    n, asked = 6, {"ecinn": 2, method.SEARCHES[0]: 700, method.SEARCHES[1]: 30}
    answers = {
        "ecinn": sample.stored[:n],
        method.SEARCHES[0]: sample.images[:n],
        method.SEARCHES[1]: sample.real[:n],
    }
    names = iter(asked)

    def make(method, pairs, device) -> SimpleNamespace:
        name = next(names)
        assert torch.equal(pairs.q, sample.q[:n])
        return SimpleNamespace(images=answers[name], passes=torch.full((n,), asked[name]))

    monkeypatch.setattr(method, "make_counterfactuals", make)
    claim = judgement(method.competitors(sample, judges, no_training, n))
    for name, images in answers.items():
        read = judges.convolutional(scaled(images)).argmax(1)
        assert count(claim.numbers[name]["convinced"]) == int((read == sample.q[:n]).sum())
        assert claim.numbers[name]["passes"] == asked[name]
        assert f"| {name} | {asked[name]}.0 |" in claim.table.markdown()
    assert claim.verdict == "partly"  # many times, but not a thousand
    assert "queries this classifier 700 times" in claim.measured
    names = iter(asked)
    asked[method.SEARCHES[0]] = 1000
    assert judgement(method.competitors(sample, judges, no_training, n)).verdict == "supported"


@pytest.fixture(scope="session")
def oblique(sample) -> Sample:
    """The sample of a model whose Δ is not the normal of the boundary."""
    model = Model(sample.model.checkpoint)
    model.mu_bar = model.mu.lerp(model.mu.roll(1, 0), 0.4)
    return explained_sample(model, load_mnist("test"), N, 0)


@pytest.mark.slow
def test_the_correction_is_minimal_only_along_the_normal_and_in_latent_space(oblique) -> None:
    claim = judgement(method.minimal(oblique, 12))
    model = oblique.model
    mu, mu_bar = (m.detach().double().numpy() for m in (model.classifier.mu, model.mu_bar))
    z = model.classifier.encode(model.pixels(oblique.images)).detach().double().numpy()
    longer = []
    for p, q in itertools.combinations(range(10), 2):
        delta, w = mu_bar[q] - mu_bar[p], mu[q] - mu[p]
        # By the lengths themselves, from any z.
        side = w @ (z[0] - (mu[p] + mu[q]) / 2)
        alpha = -side / (w @ delta)
        longer.append(abs(alpha) * np.linalg.norm(delta) / (abs(side) / np.linalg.norm(w)))
    latent = claim.numbers["latent"]
    assert latent["pairs"] == 45
    for name, of in (("mean", np.mean), ("least", np.min), ("most", np.max)):
        assert latent[name] == pytest.approx(of(longer), rel=1e-4)
    assert latent["most"] > 1.1
    assert claim.verdict == "refuted"
    tied = Model(model.checkpoint)
    tied.mu_bar = model.classifier.mu.detach()
    claim = judgement(method.minimal(dataclasses.replace(oblique, model=tied), 12))
    # Minimal in latent space; in the input a search finds less.
    assert claim.numbers["latent"]["most"] == pytest.approx(1)
    assert claim.verdict == "partly"


def test_the_smallest_change_is_that_of_a_search(sample, monkeypatch) -> None:
    """By a search that adds the same grey levels everywhere, and gives up on some images."""
    n, levels = 12, torch.linspace(1, 105, 12).round().to(torch.uint8)
    gave_up = torch.arange(n) % 4 == 3
    dark = dataclasses.replace(sample, images=sample.images.clamp(max=150))

    def search(model, mu_bar, x, q, **options) -> SimpleNamespace:
        assert torch.equal(q[:, 0], sample.q[:n])
        stored = dark.images[:n] + levels[:, None, None, None]
        return SimpleNamespace(stored=stored[:, None], failed=gave_up[:, None])

    monkeypatch.setattr(method, "pixel_gradient", search)
    claim = judgement(method.minimal(dark, n))
    tipping = sample.gather(lambda e: e.tipping_point[:, 0] - e.x)[:n].flatten(1).norm(dim=1)
    # The 784 pixels of an image change by c: ‖c‖₂ = 28c.
    searched = torch.where(gave_up, torch.inf, 28 * levels.float() / 256)
    assert claim.numbers["input"].mean == pytest.approx(
        float((tipping / searched).mean()), rel=1e-3
    )
    smaller = int((searched < tipping).sum())
    assert 0 < smaller < n - int(gave_up.sum())
    assert count(claim.numbers["search_is_smaller"]) == smaller


def test_inverse_and_nearest_mean(sample) -> None:
    assert judgement(method.exact_inverse(sample)).verdict == "supported"
    (part,) = sample.parts
    worse = dataclasses.replace(part, round_trip_error=part.round_trip_error + 0.01)
    assert (
        judgement(method.exact_inverse(dataclasses.replace(sample, parts=(worse,)))).verdict
        == "refuted"
    )
    assert judgement(method.nearest_mean(sample, N)).numbers["same"].mean == 1


def test_vague_claims_are_measured(sample) -> None:
    assert judgement(method.same_class()).numbers["alpha_is_nan"]
    bits = judgement(method.bits_per_dim()).numbers
    assert bits["constant"] == pytest.approx(math.log2(2 * math.pi / 2))
    assert bits["exact"]["MNIST"] == pytest.approx(3.54, abs=0.005)
    posterior = sample.gather(lambda e: e.tipping_certificate.posterior[:, 0])
    best = posterior.argsort(1, descending=True)[:, 0]
    # p and q tie, so a third class wins where it alone is first.
    third = [w not in (p, q) for w, p, q in zip(best, sample.p, sample.q, strict=True)]
    assert count(judgement(method.third_class(sample)).numbers["latent"]) == sum(map(bool, third))
    stored = sample.model.predict(to_uint8(sample.gather(lambda e: e.tipping_point[:, 0])))
    read = zip(stored.argmax(1).tolist(), sample.p.tolist(), sample.q.tolist(), strict=True)
    another = sum(winner not in (p, q) for winner, p, q in read)
    assert count(judgement(method.third_class(sample)).numbers["stored"]) == another
    alpha_0 = sample.gather(lambda e: e.alpha_0[:, 0])
    assert count(judgement(method.alpha_1(sample)).numbers["beyond"]) == int((alpha_0 < 1.6).sum())
    means = judgement(method.alpha_1(sample)).numbers
    assert means["alpha_0"].mean == pytest.approx(float(alpha_0.mean()), rel=1e-5)
    assert means["alpha_1"].mean == pytest.approx(0.8 + float(alpha_0.mean()) / 2, rel=1e-5)
    x = sample.gather(lambda e: e.x)
    ends = sample.gather(lambda e: torch.cat([e.tipping_point, e.convincing], 1)) - x[:, None]
    cosine = torch.nn.functional.cosine_similarity(*ends.flatten(2).double().unbind(1))
    found = judgement(method.which_alpha(sample)).numbers["cosine"]
    assert found.mean == pytest.approx(float(cosine.mean()))
    lengths = ends.flatten(2).norm(dim=2)
    size = judgement(method.which_alpha(sample)).numbers["size"]
    assert size.mean == pytest.approx(float((lengths[:, 0] / lengths[:, 1]).mean()), rel=1e-5)
