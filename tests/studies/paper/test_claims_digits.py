"""Claims about digits: every measurement by an independent route, and faults refute."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from ecinn.data.mnist import load_mnist
from ecinn.metrics.statistics import Interval
from ecinn.model import Model, load
from ecinn.pixels import to_uint8
from ecinn.studies.benchmark.quality import random_of_class
from ecinn.studies.judges import Judges, scaled
from ecinn.studies.paper import claims_digits as digits
from ecinn.studies.paper.claim import judgement
from helpers.builders import small_model
from helpers.paper import N, count, with_counterfactuals


def test_oracles_classify_the_stored_images(sample, judges) -> None:
    claim = judgement(digits.convinces_oracles(sample, judges))
    network = judges.fully_connected
    read = network(scaled(to_uint8(sample.gather(lambda e: e.convincing[:, 0])))).argmax(1)
    share = claim.numbers["fully connected"].mean
    assert share == pytest.approx(float((read == sample.q).double().mean()))
    control = network(scaled(sample.real)).argmax(1)
    (row,) = [line for line in claim.table.markdown().splitlines() if "fully connected" in line]
    assert row.split("|")[3].startswith(
        f" {100 * float((control == sample.q).double().mean()):.1f} % ["
    )
    same = with_counterfactuals(sample, sample.images)
    assert judgement(digits.convinces_oracles(same, judges)).verdict == "refuted"
    # The unchanged digit is read as p, so nobody is torn.
    (part,) = sample.parts
    untouched = dataclasses.replace(part, tipping_point=part.x[:, None])
    unmoved = dataclasses.replace(sample, parts=(untouched,))
    torn = judgement(digits.torn_oracles(unmoved, judges))
    assert torn.verdict == "refuted"
    assert torn.numbers["convolutional"]["p"].mean > 0.9


def test_an_oracle_is_torn_where_p_and_q_are_about_as_likely(sample, judges, monkeypatch) -> None:
    """From odds of 1:3 to 3:1, whatever the third class has."""
    rows, families = torch.arange(N), ("convolutional", "fully connected")
    for odds, torn in ((1 / 3.1, False), (1 / 2.9, True), (2.9, True), (3.1, False)):
        logits = torch.full((N, 10), 5.0)
        logits[rows, sample.p] = 2
        logits[rows, sample.q] = 2 + math.log(odds)
        monkeypatch.setattr(
            Judges, "scores", lambda self, images, of=logits: dict.fromkeys(families, of)
        )
        claim = judgement(digits.torn_oracles(sample, judges))
        assert [claim.numbers[name]["torn"].mean for name in families] == [torn, torn]
        assert claim.verdict == ("partly" if torn else "refuted")  # supported only by people
        assert ("Refuted for two networks" in claim.measured) is not torn


@pytest.mark.slow
def test_copies_keep_every_feature_and_random_images_of_q_keep_none(sample) -> None:
    data = load_mnist("test").first(400)
    real = digits.class_means(data)
    copies = digits.kept_features(with_counterfactuals(sample, sample.images), real, 0, 50)
    for kept in copies.values():
        assert kept.r.mean == pytest.approx(1)
        assert kept.change == 0
    other = random_of_class(data, sample.q, torch.Generator().manual_seed(5))
    features = digits.kept_features(with_counterfactuals(sample, other), real, 0, 200)
    lost = judgement(digits.features_kept(features, N))
    assert lost.verdict == "refuted"
    assert all(abs(kept.within.mean) < 0.5 for kept in lost.numbers.values())


@pytest.mark.slow
def test_features_within_classes_by_regression_on_classes(sample) -> None:
    """What is left of a feature when the mean of its class in the pool is taken away."""
    data = load_mnist("test").first(400)
    kept = digits.kept_features(sample, digits.class_means(data), 0, 50)["slant"]
    slant = digits.FEATURES["slant"]
    every, labels = slant(data.images).numpy(), data.labels.numpy()
    means = np.array([every[labels == label].mean() for label in range(10)])
    before = slant(sample.images).numpy() - means[sample.p]
    after = slant(sample.stored).numpy() - means[sample.q]
    assert kept.within.mean == pytest.approx(np.corrcoef(before, after)[0, 1])
    control = np.corrcoef(slant(sample.images), slant(sample.real))[0, 1]
    assert kept.control.mean == pytest.approx(control)
    rho = scipy.stats.spearmanr(slant(sample.images), slant(sample.stored)).statistic
    assert kept.rho.mean == pytest.approx(rho)
    for found, images in ((kept.change, sample.stored), (kept.control_change, sample.real)):
        change = np.abs((slant(images) - slant(sample.images)).numpy())
        assert found == pytest.approx(np.nanmean(change))


def kept(r: float, within: float, control: float, spread: float) -> digits.Kept:
    of_r, inside, other = (Interval(v, v - spread, v + spread, 48) for v in (r, within, control))
    return digits.Kept(of_r, of_r, inside, other, 1.0, 2.0)


@pytest.mark.parametrize(
    ("r", "within", "control", "spread", "is_kept"),
    [
        (0.7, 0.6, 0.1, 0.1, True), (0.7, 0.49, 0.1, 0.1, False), (0.3, 0.6, 0.1, 0.05, True),
        # More than the control: whole intervals apart, of both correlations.
        (0.7, 0.6, 0.45, 0.1, False), (0.2, 0.6, 0.1, 0.1, False),
        # And more than nothing.
        (0.05, 0.6, -0.5, 0.1, False),
    ],
)  # fmt: skip
def test_kept_features_exceed_the_control_in_both_correlations(
    r, within, control, spread, is_kept
) -> None:
    assert kept(r, within, control, spread).kept is is_kept


def test_features_that_are_not_kept_are_named() -> None:
    found = {
        "good": kept(0.8, 0.8, 0.0, 0.1), "class's": kept(0.3, 0.8, 0.0, 0.1),
        "bad": kept(0.1, 0.1, 0.0, 0.2), "lucky": kept(0.9, 0.2, 0.0, 0.1),
    }  # fmt: skip
    claim = judgement(digits.features_kept(found, 9))
    assert claim.verdict == "partly"
    assert "measured on 9 digits: bad, lucky." in claim.measured
    assert "of the raw features would fail class's, bad." in claim.measured
    assert "| good | 0.80 [0.70, 0.90] |" in claim.table.markdown()


def test_identical_images_are_not_diverse_and_noise_is_not_realistic(sample, judges) -> None:
    same = torch.stack([sample.real[sample.q == q][0] for q in sample.q])
    assert judgement(digits.diverse(with_counterfactuals(sample, same))).verdict == "refuted"
    assert (
        judgement(digits.diverse(with_counterfactuals(sample, sample.real))).verdict == "supported"
    )
    noise = torch.randint(256, sample.real.shape, generator=torch.Generator().manual_seed(0))
    real = judges.features(load_mnist("test").images[:500])
    claim = judgement(
        digits.realistic(with_counterfactuals(sample, noise.to(torch.uint8)), judges, real)
    )
    assert claim.verdict == "refuted"


def test_realism_is_compared_with_real_images_and_originals(sample, judges, monkeypatch) -> None:
    everything = judges.features(load_mnist("test").images[:500])
    claim = judgement(digits.realistic(sample, judges, everything))
    for name, images in (
        ("frechet", sample.stored), ("frechet_real", sample.real),
        ("frechet_originals", sample.images),
    ):  # fmt: skip
        ours = judges.features(images)
        expected = digits.metrics.frechet_distance(ours, everything).mean
        assert claim.numbers[name] == pytest.approx(expected)
        said = {
            "frechet": "all test digits is", "frechet_real": "compared with",
            "frechet_originals": "same targets and",
        }[name]  # fmt: skip
        assert f"{said} {expected:.2f}" in claim.measured
    x_hat = sample.gather(lambda e: e.convincing[:, 0])
    clamped = ((x_hat < 0) | (x_hat > 1)).double().mean()
    assert f"{100 * float(clamped):.1f} % of the pixels" in claim.measured
    for times, verdict in ((1.9, "supported"), (2.1, "partly"), (9.0, "partly"), (11, "refuted")):
        # Chance is the larger of the two.
        values = [3.0 * times, 3.0, 1.0, 3.0 * times, 1.0, 3.0]
        distances = iter([Interval(value, 0.0, 99.0, 48) for value in values])
        monkeypatch.setattr(digits.metrics, "frechet_distance", lambda a, b, d=distances: next(d))
        assert judgement(digits.realistic(sample, judges, everything)).verdict == verdict
        assert judgement(digits.realistic(sample, judges, everything)).verdict == verdict


def test_diversity_is_relative_to_real_images_of_the_target(sample) -> None:
    claim = judgement(digits.diverse(sample))
    ratios = []
    for label in range(10):
        rows = (sample.q == label).nonzero()[:, 0].tolist()
        if len(rows) < 2:
            continue
        apart = [
            np.mean([
                np.linalg.norm(images[i].float() - images[j].float())
                for i, j in itertools.combinations(rows, 2)
            ])
            for images in (sample.stored, sample.real)
        ]  # fmt: skip
        ratios.append(apart[0] / apart[1])
    assert claim.numbers["ratio"].mean == pytest.approx(np.mean(ratios))
    assert f"({len(ratios)} target classes)" in claim.measured


@pytest.mark.slow
def test_errors_are_comparable_unless_the_inn_errs_far_more_often(sample, judges) -> None:
    claim = judgement(digits.comparable_errors(sample, judges))
    assert claim.verdict == "supported"
    metrics = sample.model.checkpoint.metrics
    assert count(claim.numbers["INN"]) == round(metrics["error"] * metrics["n"])
    data, network = load_mnist("test"), judges.convolutional
    with torch.no_grad():
        read = torch.cat([network(scaled(part)).argmax(1) for part in data.images.split(500)])
    wrong, cnn = int((read != data.labels).sum()), claim.numbers["CNN"]
    assert cnn.n == len(data)
    assert count(cnn) == pytest.approx(wrong, abs=2)
    worse = dataclasses.replace(sample.model.checkpoint, metrics={**metrics, "error": 0.05})
    wrong = dataclasses.replace(sample, model=Model(worse))
    assert judgement(digits.comparable_errors(wrong, judges)).verdict == "refuted"


def test_samples_are_the_class_mean_plus_noise_of_variance_one(monkeypatch) -> None:
    model, asked = small_model(), []
    model.mu_bar = model.mu_bar + 2  # takes no part
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda z: asked.append(z) or decode(z))
    images, labels = digits.draw_digits(model, 400, torch.Generator().manual_seed(4), 150)
    assert labels.tolist() == [0, 1, 2] * 133 + [0]
    noise = torch.cat(asked) - model.mu[labels]
    kind, p = scipy.stats.kstest(noise.flatten().numpy(), "norm")
    assert p > 0.01, kind
    assert noise.unique(dim=0).shape == noise.shape
    with torch.no_grad():
        assert torch.equal(images, to_uint8(decode(model.mu[labels] + noise)))


@pytest.mark.parametrize(
    ("right", "verdict"),
    [((96, 97), "supported"), ((96, 80), "partly"), ((97, 30), "refuted"), ((47, 99), "partly")],
)
def test_samples_must_convince_both_oracles(judges, monkeypatch, right, verdict) -> None:
    """By votes of oracles that are right about so many of a hundred."""
    n, drawn = 400, []

    def verdicts(self, images) -> dict:
        drawn.append(images)
        labels = torch.arange(n) % 10
        wrong = (labels + 1) % 10
        return {
            name: torch.where(torch.arange(n) % 100 < k, labels, wrong)
            for name, k in zip(("convolutional", "fully connected"), right, strict=True)
        }

    monkeypatch.setattr(Judges, "verdicts", verdicts)
    model = load("mnist")
    monkeypatch.setattr(model, "decode", lambda z: z[:, :784].reshape(-1, 1, 28, 28))
    claim = judgement(digits.sampling(model, judges, n, 0))
    assert claim.verdict == verdict
    assert [count(share) for share in claim.numbers.values()] == [4 * k for k in right]
    assert drawn[0].shape == (n, 1, 28, 28)
    assert f"classifies {right[0]}.0 % [" in claim.measured
