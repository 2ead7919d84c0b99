"""Measure claims about the method: its cost, its inverse, tipping points and α."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ecinn import equations
from ecinn.attribution.search import pixel_gradient
from ecinn.data.dataset import Dataset
from ecinn.explanation.counterfactual import counterfactual
from ecinn.metrics.heatmaps import map_similarity
from ecinn.metrics.statistics import proportion
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.progress import ignore
from ecinn.studies.benchmark.quality import MAIN_ORACLE
from ecinn.studies.benchmark.side_by_side import METHODS, Pairs
from ecinn.studies.benchmark.side_by_side import make as make_counterfactuals
from ecinn.studies.judges import Judges
from ecinn.studies.paper.claim import Measurement, limits, share_votes
from ecinn.studies.paper.measuring import Bench, Sample, means, median_seconds
from ecinn.studies.published import PUBLISHED

SEARCHES = ("pixel-gradient-l1", "latent-gradient")
SEARCHED_CONFIDENCE = 0.9
"""p(q) that a search for a small correction must reach: more than at the tipping point."""


def measure(bench: Bench, model: Model) -> Iterator[Measurement]:
    """Measure all of them on one sample of test digits."""
    sample, sizes = bench.sample(model), bench.sizes
    few, searched = (min(n, sizes.digits) for n in (sizes.few, sizes.searched))
    yield two_evaluations(sample, sizes.timings)
    yield competitors(sample, bench.judges, partial(bench.training, model), searched)
    yield from (nearest_mean(sample, few), minimal(sample, searched))
    yield from (exact_inverse(sample), tipping_points(sample), third_class(sample))
    yield from (reaches_target(sample), alpha_1(sample), which_alpha(sample))


class Counted:
    """A model that counts the calls of some of its methods."""

    def __init__(self, model: Model, names: tuple[str, ...]) -> None:
        self.model, self.names, self.calls = model, names, Counter[str]()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return what the model has."""
        value = getattr(self.model, name)
        if name not in self.names:
            return value

        def call(*given: Tensor) -> Any:  # noqa: ANN401
            self.calls[name] += 1
            return value(*given)

        return call


def two_evaluations(
    sample: Sample,
    repeats: int,
    *,
    method: Callable[..., Any] = counterfactual,
    timer: Callable[..., float] = median_seconds,
) -> Measurement:
    """Count and time the evaluations that one counterfactual takes."""
    model, x = sample.model, sample.model.pixels(sample.images[:1])
    q, counted = sample.q[:1].to(model.device), Counted(model, ("encode_with_log_det", "decode"))
    # Gradients are off: whatever needs them would fail.
    with torch.inference_mode():
        method(counted, model.mu_bar, x, q)
        both = timer(lambda: method(model, model.mu_bar, x, q), repeats, x.device)
        forward = timer(lambda: model.encode_with_log_det(x), repeats, x.device)
    times, (encodes, decodes) = both / forward, map(counted.calls.__getitem__, counted.names)
    once = encodes == decodes == 1
    return Measurement(
        "two-evaluations",
        {"encodes": encodes, "decodes": decodes, "times_forward": times},
        [[once and times <= limits("two-evaluations")["times"], once]],
        {"repeats": repeats},
    )


def competitors(
    sample: Sample, judges: Judges, training: Callable[[], Dataset], n: int
) -> Measurement:
    """Run two gradient searches on the same classifier and compare passes and persuasion."""
    pairs = Pairs(sample.index[:n], sample.images[:n], sample.p[:n], sample.q[:n])
    numbers: dict[str, dict[str, Any]] = {}
    for name in ("ecinn", *SEARCHES):
        prepare = partial(METHODS[name], sample.model, training, ignore)
        made = make_counterfactuals(prepare, pairs, sample.model.device)
        convinced = proportion(judges.verdicts(made.images)[MAIN_ORACLE] == pairs.q)
        numbers[name] = {"passes": float(made.passes.double().mean()), "convinced": convinced}
    most = max(figures["passes"] for figures in numbers.values())
    limit = limits("competitors")
    return Measurement(
        "competitors",
        numbers,
        [[most > limit["ours"], most >= limit["many"]]],
        {"n": n, "most": most},
        rows=[[name, *figures.values()] for name, figures in numbers.items()],
    )


def exact_inverse(sample: Sample) -> Measurement:
    """max |x − f⁻¹(f(x))|, in grey levels."""
    error = 256 * float(sample.gather(lambda e: e.round_trip_error).max())
    votes = [[error < limits("exact-inverse")["levels"]]]
    return Measurement("exact-inverse", {"grey_levels": error}, votes, {"n": len(sample.q)})


def nearest_mean(sample: Sample, n: int) -> Measurement:
    """Compare the argmax of the densities, Jacobian included, with the nearest mean."""
    model = sample.model
    with torch.inference_mode():
        z, log_det = model.encode_with_log_det(model.pixels(sample.images[:n]))
    by_density = equations.log_likelihood(z, log_det, model.mu).argmax(1)
    nearest = torch.cdist(z.double(), model.mu.double()).argmin(1)
    same = proportion((by_density == nearest).cpu())
    votes = [share_votes(same, limits("nearest-mean")["share"])]
    return Measurement("nearest-mean", {"same": same}, votes)


def minimal(sample: Sample, n: int) -> Measurement:
    """Divide the way to the boundary along Δ by the shortest in z, and by a search's in x."""
    model, x = sample.model, sample.model.pixels(sample.images[:n])
    mu, mu_bar = (mean.detach().cpu().double() for mean in (model.mu, model.mu_bar))
    first, second = torch.combinations(torch.arange(len(mu))).unbind(1)
    delta = equations.latent_direction(mu_bar, first, second)
    # |α₀|‖Δ‖ over |wᵀz + b| / ‖w‖, in which z cancels.
    latent = 1 / F.cosine_similarity(delta, mu[second] - mu[first]).abs()
    q = sample.q[:n, None].to(x.device)
    search = pixel_gradient(model, model.mu_bar, x, q, norm="l2", confidence=SEARCHED_CONFIDENCE)
    found, ours = (
        change.flatten(1).double().norm(dim=1).cpu()
        for change in (
            to_pixels(search.stored[:, 0]) - x,
            sample.gather(lambda e: e.tipping_point[:, 0] - e.x)[:n],
        )
    )
    found[search.failed[:, 0].cpu()] = math.inf
    (in_input,), smaller = means(ours / found), proportion(found < ours)
    mean, least, most = (float(value) for value in (latent.mean(), latent.min(), latent.max()))
    ratios = {"mean": mean, "least": least, "most": most, "pairs": len(latent)}
    limit = limits("minimal")["longer"]
    return Measurement(
        "minimal",
        {"latent": ratios, "input": in_input, "search_is_smaller": smaller},
        [[most < limit, in_input.high < limit]],
        {"confidence": SEARCHED_CONFIDENCE},
    )


def tipping_points(sample: Sample) -> Measurement:
    """|p(p) − p(q)| at α₀, in latent space and in the stored image."""
    pair = torch.stack([sample.p, sample.q], 1)
    latent = sample.gather(lambda e: e.tipping_certificate.posterior[:, 0])
    stored = sample.gather(lambda e: e.tipping_certificate.verdict[:, 0])
    latent, stored = (posterior.double().gather(1, pair) for posterior in (latent, stored))
    apart, stored_apart, renormalised_apart = (
        (values[:, 0] - values[:, 1]).abs()
        for values in (latent, stored, stored / stored.sum(1, keepdim=True))
    )
    limit = limits("tipping-points")
    tied = proportion(apart <= limit["tie"])
    return Measurement(
        "tipping-points",
        {
            "tied": tied,
            "largest": float(apart.max()),
            "stored_tied": proportion(stored_apart <= limit["tie"]),
            "stored_median": float(stored_apart.median()),
            "stored_within_tenth": proportion(stored_apart <= 0.1),
            "stored_renormalised_median": float(renormalised_apart.median()),
        },
        [share_votes(tied, limit["share"])],
    )


def third_class(sample: Sample) -> Measurement:
    """Count the tipping points where a class other than p and q is the most likely."""
    latent = proportion(sample.gather(lambda e: e.third_class[:, 0]) >= 0)
    winner = sample.gather(lambda e: e.tipping_certificate.verdict[:, 0]).argmax(1)
    stored = proportion((winner != sample.p) & (winner != sample.q))
    return Measurement("third-class", {"latent": latent, "stored": stored})


def reaches_target(sample: Sample) -> Measurement:
    """C(x̂) = q for the stored image at α₁."""
    reached = proportion(sample.gather(lambda e: e.convincing_certificate.reached[:, 0]))
    p_q = sample.posterior_of_q(sample.gather(lambda e: e.convincing_certificate.posterior[:, 0]))
    return Measurement(
        "reaches-q",
        {"reached": reached, "median_p_q": float(p_q.median()), "sure": proportion(p_q > 0.99)},
        [share_votes(reached, limits("reaches-q")["share"])],
        {"smoothed_label": sample.smoothed_label},
    )


def alpha_1(sample: Sample) -> Measurement:
    """Compare α₁ = 4/5 + α₀/2 with α₀."""
    alpha_0 = sample.gather(lambda e: e.alpha_0[:, 0]).double()
    convincing = equations.convincing_alpha(alpha_0)
    beyond, (mean_0, mean_1) = proportion(convincing > alpha_0), means(alpha_0, convincing)
    return Measurement("alpha-1", {"beyond": beyond, "alpha_0": mean_0, "alpha_1": mean_1})


def which_alpha(sample: Sample) -> Measurement:
    """Compare h at α₀ with h at α₁."""
    at_0, at_1 = sample.gather(lambda e: e.tipping_point[:, 0] - e.x), sample.change
    ratio = at_0.flatten(1).norm(dim=1) / at_1.flatten(1).norm(dim=1)
    cosine, size = means(map_similarity(at_0, at_1), ratio)
    return Measurement("eq-4-alpha", {"cosine": cosine, "size": size})


def same_class() -> Measurement:
    """α₀ for p = q, which is 0/0 whatever the means."""
    mu, p = torch.eye(2, 3), torch.tensor([1])
    delta = equations.latent_direction(mu, p, p)
    alpha = float(equations.tipping_point_alpha(torch.ones_like(delta), delta, mu[p], mu[p]))
    return Measurement("p-is-q", {"alpha_is_nan": math.isnan(alpha)}, words={"alpha": str(alpha)})


def bits_per_dim() -> Measurement:
    """Correct Table 1 by the constant that IB-INN's evaluation leaves out."""
    printed, exact = {}, {}
    for row in (PUBLISHED["table_1"][name] for name in ("mnist", "fakemnist")):
        printed[row["name"]] = row["bits_per_dim"]
        # The same for both, because the pixels of both are scaled alike.
        missing = equations.paper_bits_per_dim(0.0, row["pixel_scale"])
        exact[row["name"]] = row["bits_per_dim"] - missing
    numbers = {"constant": -missing, "exact": exact}
    return Measurement("bits-per-dim", numbers, words={"printed": printed})
