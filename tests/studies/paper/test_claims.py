"""The paper's claims: every measurement by an independent route, and broken things are refuted."""

import copy
import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch

from ecinn import equations
from ecinn.data.mnist import load_mnist
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import counterfactual
from ecinn.metrics.statistics import Interval, bootstrap_interval, proportion
from ecinn.model import Model, load
from ecinn.pixels import to_uint8
from ecinn.studies.benchmark.quality import random_of_class
from ecinn.studies.judges import Judges, load_judges, scaled
from ecinn.studies.paper import claims_counterfactuals as digits
from ecinn.studies.paper import claims_heatmaps, claims_planted
from ecinn.studies.paper.artefact import ARTEFACTS, Context
from ecinn.studies.paper.claim import (
    CLAIMS_COMMAND,
    Claim,
    claim_of,
    entries,
    judge,
    share_votes,
)
from ecinn.studies.paper.claims import make, measure_claims, page
from ecinn.studies.paper.measuring import (
    Sample,
    Sizes,
    explained_sample,
    median_seconds,
    pearson,
    spearman,
)
from ecinn.studies.paper.words import show
from helpers.paper import with_counterfactuals

N = 48


@pytest.fixture(scope="module")
def sample() -> Sample:
    return explained_sample(load("mnist"), load_mnist("test"), N, 0)


@pytest.fixture(scope="module")
def judges():
    return load_judges("mnist")


def count(share: Interval) -> int:
    return round(share.mean * share.n)


def broken(sample: Sample) -> Sample:
    """A model whose measured means belong to other classes."""
    model = Model(copy.copy(sample.model.checkpoint))
    model.mu_bar = sample.model.mu_bar.roll(3, 0)
    return explained_sample(model, load_mnist("test"), N, 0)


def test_correlations_are_those_of_scipy_and_intervals_cover_them(generator) -> None:
    a = torch.randn(300, generator=generator).double()
    b = 0.6 * a + 0.8 * torch.randn(300, generator=generator) + (a > 1)
    rounded = (2 * b).round()  # with ties
    for ours, theirs, other in (
        (pearson, scipy.stats.pearsonr, b),
        (spearman, scipy.stats.spearmanr, rounded),
    ):
        found = ours(a, other, generator)
        assert found.mean == pytest.approx(theirs(a.numpy(), other.numpy()).statistic)
        # Fisher's interval is half as wide to within a third.
        width = 2 * 1.96 * (1 - found.mean**2) / math.sqrt(300)
        assert found.high - found.low == pytest.approx(width, rel=1 / 3)
        assert found.low < found.mean < found.high
    gaps = torch.where(torch.arange(300) == 5, torch.nan, b)
    kept = [i for i in range(300) if i != 5]
    assert pearson(a, gaps, generator).mean == pytest.approx(np.corrcoef(a[kept], b[kept])[0, 1])
    with pytest.raises(InputError, match="at least 3 pairs"):
        pearson(a[:2], b[:2], generator)


def timer(both: float) -> Callable[..., float]:
    """Pretend that a counterfactual takes this many times as long as a forward pass."""
    seconds = itertools.cycle([both, 1.0])
    return lambda run, repeats, device: next(seconds)


def test_two_evaluations_are_counted_and_a_third_refutes(sample) -> None:
    claim = claim_of(digits.two_evaluations(sample, 1, timer=timer(2.4)))
    assert (claim.verdict, claim.numbers["encodes"], claim.numbers["decodes"]) == (
        "supported", 1, 1,
    )  # fmt: skip

    def twice(classifier, mu_bar, x, q):
        classifier.encode_with_log_det(x)
        return counterfactual(classifier, mu_bar, x, q)

    again = digits.two_evaluations(sample, 1, method=twice, timer=timer(2.4))
    assert claim_of(again).verdict == "refuted"


def test_the_time_of_three_evaluations_supports_only_partly(sample) -> None:
    claim = claim_of(digits.two_evaluations(sample, 1, timer=timer(3.0)))
    assert (claim.verdict, claim.numbers["times_forward"]) == ("partly", 3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_clock_waits_for_the_device(device, monkeypatch) -> None:
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr("time.perf_counter", lambda: events.append("clock") or 1.0)
    median_seconds(lambda: events.append("run"), 2, torch.device(device))
    each = ["wait", "clock", "run", "wait", "clock"]
    waited = ["run", *each, *each]
    assert events == [e for e in waited if device == "cuda" or e != "wait"]


@pytest.mark.slow
def test_tipping_points_are_equally_far_from_both_means(sample, monkeypatch) -> None:
    claim = claim_of(digits.tipping_points(sample))
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
    assert claim_of(digits.tipping_points(wrong)).verdict == "refuted"


@pytest.mark.slow
def test_a_broken_model_reaches_and_convinces_nothing(sample, judges) -> None:
    assert claim_of(digits.reaches_target(sample)).verdict in ("supported", "partly")
    assert claim_of(digits.reaches_target(sample)).numbers["reached"].mean >= 0.95
    wrong = broken(sample)
    assert claim_of(digits.reaches_target(wrong)).verdict == "refuted"
    assert claim_of(digits.convinces_oracles(wrong, judges)).verdict == "refuted"


def test_posterior_of_q_in_latent_space(sample) -> None:
    model = sample.model
    claim = claim_of(digits.reaches_target(sample))
    z = model.classifier.encode(model.pixels(sample.images))
    alpha = sample.gather(lambda e: e.alpha_1)
    moved = z + alpha * (model.mu_bar[sample.q] - model.mu_bar[sample.p])
    squared = torch.cdist(moved.double(), model.classifier.mu.double()).square()
    of_q = (-squared / 2).softmax(1)[torch.arange(N), sample.q]
    assert claim.numbers["median_p_q"] == pytest.approx(float(of_q.median()), abs=1e-4)
    assert f"{100 * float((of_q > 0.99).double().mean()):.1f} % [" in claim.measured


def test_the_most_expensive_search_decides(sample, judges, monkeypatch) -> None:
    n, asked = 6, {"ecinn": 2, digits.SEARCHES[0]: 700, digits.SEARCHES[1]: 30}
    answers = {
        "ecinn": sample.stored[:n],
        digits.SEARCHES[0]: sample.images[:n],
        digits.SEARCHES[1]: sample.real[:n],
    }
    names = iter(asked)

    def make(method, pairs, device) -> SimpleNamespace:
        name = next(names)
        assert torch.equal(pairs.q, sample.q[:n])
        return SimpleNamespace(images=answers[name], passes=torch.full((n,), asked[name]))

    monkeypatch.setattr(digits, "make_counterfactuals", make)
    claim = claim_of(digits.competitors(sample, judges, n))
    for name, images in answers.items():
        read = judges.convolutional(scaled(images)).argmax(1)
        assert count(claim.numbers[name]["convinced"]) == int((read == sample.q[:n]).sum())
        assert claim.numbers[name]["passes"] == asked[name]
        assert f"| {name} | {asked[name]}.0 |" in claim.table
    assert claim.verdict == "partly"  # many times, but not a thousand
    assert "queries this classifier 700 times" in claim.measured
    names = iter(asked)
    asked[digits.SEARCHES[0]] = 1000
    assert claim_of(digits.competitors(sample, judges, n)).verdict == "supported"


def test_oracles_read_the_stored_images(sample, judges) -> None:
    claim = claim_of(digits.convinces_oracles(sample, judges))
    network = judges.fully_connected
    read = network(scaled(to_uint8(sample.gather(lambda e: e.convincing[:, 0])))).argmax(1)
    share = claim.numbers["fully connected"].mean
    assert share == pytest.approx(float((read == sample.q).double().mean()))
    control = network(scaled(sample.real)).argmax(1)
    (row,) = [line for line in claim.table.splitlines() if "fully connected" in line]
    assert row.split("|")[3].startswith(
        f" {100 * float((control == sample.q).double().mean()):.1f} % ["
    )
    same = with_counterfactuals(sample, sample.images)
    assert claim_of(digits.convinces_oracles(same, judges)).verdict == "refuted"
    # The unchanged digit is read as p, so nobody is torn.
    (part,) = sample.parts
    untouched = dataclasses.replace(part, tipping_point=part.x[:, None])
    unmoved = dataclasses.replace(sample, parts=(untouched,))
    torn = claim_of(digits.torn_oracles(unmoved, judges))
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
        claim = claim_of(digits.torn_oracles(sample, judges))
        assert [claim.numbers[name]["torn"].mean for name in families] == [torn, torn]
        assert claim.verdict == ("partly" if torn else "refuted")  # supported only by people
        assert ("Refuted for two networks" in claim.measured) is not torn


@pytest.mark.slow
def test_the_correction_is_minimal_only_along_the_model_means(sample) -> None:
    claim = claim_of(digits.minimal(sample, N))
    model = sample.model
    mu, mu_bar = (m.detach().double().numpy() for m in (model.classifier.mu, model.mu_bar))
    z = model.classifier.encode(model.pixels(sample.images)).detach().double().numpy()
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
    straight = Model(sample.model.checkpoint)
    straight.mu_bar = model.classifier.mu.detach()
    assert (
        claim_of(digits.minimal(dataclasses.replace(sample, model=straight), N)).verdict
        == "supported"
    )


def test_the_change_of_the_input_at_the_boundary(sample) -> None:
    """Along Δ it is the tipping point's; along w the nearest point's, from where both tie."""
    n, model = 12, sample.model
    claim = claim_of(digits.minimal(sample, n))
    tipping = sample.gather(lambda e: e.tipping_point[:, 0] - e.x)[:n].flatten(1).norm(dim=1)
    mu, z = model.classifier.mu.detach(), model.classifier.encode(model.pixels(sample.images[:n]))
    ends = []
    for one, p, q in zip(z.detach(), sample.p, sample.q, strict=False):
        w = mu[q] - mu[p]
        w = w / w.norm()
        ends.append(one - w * (w @ (one - (mu[p] + mu[q]) / 2)))
    change = model.classifier.decode(torch.stack(ends)) - model.pixels(sample.images[:n])
    ratio = tipping / change.flatten(1).norm(dim=1)
    assert claim.numbers["input"].mean == pytest.approx(float(ratio.mean()), rel=1e-3)
    assert count(claim.numbers["along_w_is_smaller"]) == int((ratio > 1).sum())


def test_inverse_and_nearest_mean(sample) -> None:
    assert claim_of(digits.exact_inverse(sample)).verdict == "supported"
    (part,) = sample.parts
    worse = dataclasses.replace(part, round_trip_error=part.round_trip_error + 0.01)
    assert (
        claim_of(digits.exact_inverse(dataclasses.replace(sample, parts=(worse,)))).verdict
        == "refuted"
    )
    assert claim_of(digits.nearest_mean(sample, N)).numbers["same"].mean == 1


@pytest.mark.slow
def test_copies_keep_every_feature_and_random_images_of_q_keep_none(sample) -> None:
    data = load_mnist("test").first(400)
    copies = digits.kept_features(with_counterfactuals(sample, sample.images), data, 0, 50)
    for kept in copies.values():
        assert kept.r.mean == pytest.approx(1)
        assert kept.change == 0
    other = random_of_class(data, sample.q, torch.Generator().manual_seed(5))
    features = digits.kept_features(with_counterfactuals(sample, other), data, 0, 200)
    lost = claim_of(digits.features_kept(features, N))
    assert lost.verdict == "refuted"
    assert all(abs(kept.within.mean) < 0.5 for kept in lost.numbers.values())


@pytest.mark.slow
def test_features_within_classes_by_regression_on_classes(sample) -> None:
    """What is left of a feature when the mean of its class in the pool is taken away."""
    data = load_mnist("test").first(400)
    kept = digits.kept_features(sample, data, 0, 50)["slant"]
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
    claim = claim_of(digits.features_kept(found, 9))
    assert claim.verdict == "partly"
    assert "Not kept by this standard: bad, lucky." in claim.measured
    assert "of the raw features would fail class's, bad." in claim.measured
    assert "| good | 0.80 [0.70, 0.90] |" in claim.table


def test_identical_images_are_not_diverse_and_noise_is_not_realistic(sample, judges) -> None:
    same = torch.stack([sample.real[sample.q == q][0] for q in sample.q])
    assert claim_of(digits.diverse(with_counterfactuals(sample, same))).verdict == "refuted"
    assert (
        claim_of(digits.diverse(with_counterfactuals(sample, sample.real))).verdict == "supported"
    )
    noise = torch.randint(256, sample.real.shape, generator=torch.Generator().manual_seed(0))
    data = load_mnist("test").first(500)
    claim = claim_of(
        digits.realistic(with_counterfactuals(sample, noise.to(torch.uint8)), judges, data)
    )
    assert claim.verdict == "refuted"


def test_realism_is_compared_with_real_images_and_originals(sample, judges, monkeypatch) -> None:
    data = load_mnist("test").first(500)
    claim = claim_of(digits.realistic(sample, judges, data))
    everything = judges.features(data.images)
    for name, images in (
        ("frechet", sample.stored), ("frechet_real", sample.real),
        ("frechet_originals", sample.images),
    ):  # fmt: skip
        ours = judges.features(images)
        expected = digits.metrics.frechet_distance(ours, everything)
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
        distances = iter([3.0 * times, 3.0, 1.0, 3.0 * times, 1.0, 3.0])
        monkeypatch.setattr(digits.metrics, "frechet_distance", lambda a, b, d=distances: next(d))
        assert claim_of(digits.realistic(sample, judges, data)).verdict == verdict
        assert claim_of(digits.realistic(sample, judges, data)).verdict == verdict


def test_diversity_is_relative_to_real_images_of_the_target(sample) -> None:
    claim = claim_of(digits.diverse(sample))
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


def test_vague_claims_are_measured(sample) -> None:
    assert claim_of(digits.same_class(sample)).numbers["alpha_is_nan"]
    bits = claim_of(digits.bits_per_dim(sample)).numbers
    assert bits["constant"] == pytest.approx(math.log2(2 * math.pi / 2))
    assert bits["exact"]["MNIST"] == pytest.approx(3.54, abs=0.005)
    posterior = sample.gather(lambda e: e.tipping_certificate.posterior[:, 0])
    best = posterior.argsort(1, descending=True)[:, 0]
    # p and q tie, so a third class wins where it alone is first.
    third = [w not in (p, q) for w, p, q in zip(best, sample.p, sample.q, strict=True)]
    assert count(claim_of(digits.third_class(sample)).numbers["latent"]) == sum(map(bool, third))
    stored = sample.model.predict(to_uint8(sample.gather(lambda e: e.tipping_point[:, 0])))
    read = zip(stored.argmax(1).tolist(), sample.p.tolist(), sample.q.tolist(), strict=True)
    another = sum(winner not in (p, q) for winner, p, q in read)
    assert count(claim_of(digits.third_class(sample)).numbers["stored"]) == another
    alpha_0 = sample.gather(lambda e: e.alpha_0[:, 0])
    assert count(claim_of(digits.alpha_1(sample)).numbers["beyond"]) == int((alpha_0 < 1.6).sum())
    means = claim_of(digits.alpha_1(sample)).numbers
    assert means["alpha_0"].mean == pytest.approx(float(alpha_0.mean()), rel=1e-5)
    assert means["alpha_1"].mean == pytest.approx(0.8 + float(alpha_0.mean()) / 2, rel=1e-5)
    x = sample.gather(lambda e: e.x)
    ends = sample.gather(lambda e: torch.cat([e.tipping_point, e.convincing], 1)) - x[:, None]
    cosine = torch.nn.functional.cosine_similarity(*ends.flatten(2).double().unbind(1))
    found = claim_of(digits.which_alpha(sample)).numbers["cosine"]
    assert found.mean == pytest.approx(float(cosine.mean()))
    lengths = ends.flatten(2).norm(dim=2)
    size = claim_of(digits.which_alpha(sample)).numbers["size"]
    assert size.mean == pytest.approx(float((lengths[:, 0] / lengths[:, 1]).mean()), rel=1e-5)


@pytest.mark.slow
def test_errors_are_comparable_unless_the_inn_errs_far_more_often(sample, judges) -> None:
    claim = claim_of(digits.comparable_errors(sample, judges))
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
    assert claim_of(digits.comparable_errors(wrong, judges)).verdict == "refuted"


def test_the_worst_group_of_votes_decides() -> None:
    def of_share(k: int, n: int) -> str:
        return judge([share_votes(proportion(torch.arange(n) < k), 0.99)])

    assert [of_share(*counts) for counts in ((1000, 1000), (95, 100), (30, 100))] == [
        "supported", "partly", "refuted",
    ]  # fmt: skip
    groups = ([True, True], [True, False], [False, False])
    assert [judge([group]) for group in groups] == ["supported", "partly", "refuted"]
    assert judge([[True], [True, False], [True]]) == "partly"
    assert judge([[True, False], [False]]) == "refuted"


def test_intervals_are_shown_in_order() -> None:
    share = proportion(torch.arange(200) < 30)
    low, high = scipy.stats.binomtest(30, 200).proportion_ci(0.95, method="wilson")
    assert show(share, ".2%") == f"15.00 % [{100 * low:.2f}, {100 * high:.2f}]"
    assert show(Interval(0.5, 0.25, 0.875, 8), ".2f") == "0.50 [0.25, 0.88]"


def test_every_claim_has_a_figure_and_every_threshold_a_reason() -> None:
    artefacts = {artefact.name for artefact in ARTEFACTS}
    for entry in entries().values():
        assert entry.sentence.endswith(".")
        assert not entry.figure or entry.figure in artefacts
        for limit in entry.thresholds.values():
            assert {"value", "reason", "set"} == set(limit)
            assert limit["reason"].endswith((".", ","))
            datetime.date.fromisoformat(limit["set"])


def test_the_page_counts_verdicts_and_names_detailed_commands() -> None:
    verdicts = ("supported", "refuted", "supported", "untested")
    claims = [
        Claim(f"n{k}", "4.2", f"It is so {k}.", verdict, "Yes.", command="more" if k == 1 else "x")
        for k, verdict in enumerate(verdicts)
    ]
    claims[0] = dataclasses.replace(claims[0], command=CLAIMS_COMMAND, table="| a |")
    text = page(claims)
    assert "4 claims: 2 supported, 1 refuted, 1 untested." in text
    entries = {say: text.rpartition(f"**{say}**")[2].split("**")[0] for say in
               (claim.sentence for claim in claims)}  # fmt: skip
    assert entries["It is so 0."].endswith("Measured by `ecinn paper claims`.\n\n| a |\n\n")
    assert "; in more detail: `more`." in entries["It is so 1."]
    assert "Measured by" not in entries["It is so 3."]


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_seconds_are_the_median_of_runs_after_the_first(repeats, monkeypatch) -> None:
    clock, taken = 0.0, iter([100.0, 7.0, 1.0, 3.0, 9.0, 2.0])

    def run() -> None:
        nonlocal clock
        clock += next(taken)

    monkeypatch.setattr("time.perf_counter", lambda: clock)
    upper = sorted([7.0, 1.0, 3.0, 9.0, 2.0][:repeats])[repeats // 2]
    assert median_seconds(run, repeats, torch.device("cpu")) == upper


@pytest.mark.slow
def test_all_claims_are_on_the_page() -> None:
    sizes = Sizes(digits=40, searched=4, maps=2, twins=1, twin_images=192, averaged=12)
    claims = measure_claims(Context(), sizes)
    needing_faces = {name for name, entry in entries().items() if entry.needs == "celeba"}
    assert [claim.name for claim in claims] == [n for n in entries() if n not in needing_faces]
    text = page(claims)
    for claim in claims:
        assert text.count(claim.sentence) == 2  # in the overview and with the measurement
        assert claim.measured in text
        assert "nan %" not in claim.measured
    assert "--celeba" in text  # faces are skipped, and the page says so


class Seen(Exception):  # noqa: N818
    """Stops a measurement and carries its arguments."""


def test_claims_are_measured_on_test_images(monkeypatch) -> None:
    context = Context()
    test, training = (context.data("mnist", split) for split in ("test", "train"))

    def stop(*given: object, **more: object) -> None:
        raise Seen(*given)

    for module, dataset in (
        (digits, test),
        (claims_planted, context.data("fakemnist", "test")),
    ):
        monkeypatch.setattr(module, "explained_sample", stop)
        with pytest.raises(Seen) as seen:
            next(module.measure(context, Sizes()))
        assert seen.value.args[1] is dataset
    given = {}
    noise = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    explained = SimpleNamespace(inn=None, maps=lambda *_: {}, white_noise=lambda *_: noise)
    for name, value in {
        "draw_pairs": lambda *a: given.update(pairs=a),
        "explained_digits": lambda *a: given.update(digits=a) or explained,
        "relu_twins": stop,
        "less_noisy": lambda values: given.update(noise=values),
        "faithful": lambda *_: None,
        "less_noisy_with_relu": lambda *_: None,
    }.items():
        monkeypatch.setattr(claims_heatmaps, name, value)
    with pytest.raises(Seen) as seen:
        list(claims_heatmaps.measure(context, Sizes(twin_images=100)))
    assert given["pairs"][1] is test
    assert given["digits"][2] is training
    steps = sum(noise.diff(dim=dim).abs().sum((1, 2, 3)) for dim in (2, 3))
    variation = given["noise"]["white noise"]["total variation"]
    torch.testing.assert_close(variation, steps / noise.abs().sum((1, 2, 3)))
    assert torch.equal(seen.value.args[1].images, training.images[:100])
    assert torch.equal(seen.value.args[2].images, test.images[:2000])


def test_artefact_is_a_page_and_json(monkeypatch) -> None:
    share = bootstrap_interval(torch.rand(9).double(), generator=torch.Generator().manual_seed(0))
    claim = Claim("a", "1", "It is so.", "supported", "Yes.", numbers={"share": share})
    monkeypatch.setattr("ecinn.studies.paper.claims.measure_claims", lambda context: [claim])
    made = make(Context())
    assert "*Supported.* Yes." in made.pages["claims"]
    assert json.loads(json.dumps(made.data["claims"]))[0]["name"] == "a"
