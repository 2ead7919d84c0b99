"""Metrics of counterfactuals: one pure function each, one value per image where possible.

Images are stored 8-bit images; a value k counts as k/255. A counterfactual that a method failed
to find is read as class −1, which counts neither as q nor as a change.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from ecinn.errors import InputError
from ecinn.metrics.heatmaps import PerImage, area_under_curve
from ecinn.metrics.statistics import Interval, bootstrap, normal_interval
from ecinn.pixels import Images, Labels, StoredImages

_EPSILON = 1e-5  # Van Looveren & Klaise, Interpretable Counterfactual Explanations
_ROWS = 256
"""Images that are compared with all others at a time."""


@dataclass(frozen=True)
class TransitionCurves:
    """p(p) and p(q) while an image turns into its counterfactual, most changed pixels first."""

    p: Float[Tensor, "batch points"]
    q: Float[Tensor, "batch points"]

    @property
    def cout(self) -> PerImage:
        """COUT = AUPC_q − AUPC_p in [−1, 1], areas under the curves by the trapezoid rule."""
        return area_under_curve(self.q) - area_under_curve(self.p)


@dataclass(frozen=True)
class ConfidenceConsistency:
    """Agreement of the confidences of counterfactuals with those asked for, over all pairs."""

    correlation: Interval
    """Pearson's r; nan where either side is constant."""
    within: Interval
    """Share of pairs with |asked − obtained| ≤ 0.05."""
    mean_squared_error: Interval


def reached(read_as: Labels, q: Labels) -> Bool[Tensor, " batch"]:
    """C(x̂) = q."""
    return (read_as == q) & (read_as >= 0)


def class_changed(read_as: Labels, p: Labels) -> Bool[Tensor, " batch"]:
    """C(x̂) ≠ p, whatever the class is instead; the literature calls it target-class validity."""
    return (read_as != p) & (read_as >= 0)


def oracle_agrees(scores: Float[Tensor, "batch classes"], q: Labels) -> Bool[Tensor, " batch"]:
    """argmax_y s_y(x̂) = q, for logits or posteriors s of an independent classifier."""
    return scores.argmax(1) == q


def prefers_q(read_as: Labels, p: Labels, q: Labels) -> Bool[Tensor, " decided"]:
    """C(x̂) = q, of the images that are read as p or q; half of them at a perfect tipping point."""
    decided = (read_as == p) | (read_as == q)
    return read_as[decided] == q[decided]


def l1(original: StoredImages, counterfactual: StoredImages) -> PerImage:
    """‖x̂ − x‖₁."""
    return _change(original, counterfactual).abs().sum(1).double() / 255


def l2(original: StoredImages, counterfactual: StoredImages) -> PerImage:
    """‖x̂ − x‖₂."""
    return _change(original, counterfactual).square().sum(1).double().sqrt() / 255


def elastic_net(original: StoredImages, counterfactual: StoredImages) -> PerImage:
    """EN = ‖x̂ − x‖₁ + ‖x̂ − x‖₂."""
    return l1(original, counterfactual) + l2(original, counterfactual)


def im1(counterfactual: Images, by_q: Images, by_p: Images) -> PerImage:
    """IM1 = ‖c − AE_q(c)‖² / (‖c − AE_p(c)‖² + 10⁻⁵); below 1 where c is more like q than p."""
    to_q = _squared_norm(counterfactual.double() - by_q.double())
    return to_q / (_squared_norm(counterfactual.double() - by_p.double()) + _EPSILON)


def im2(counterfactual: Images, by_q: Images, by_all: Images) -> PerImage:
    """IM2 = ‖AE_q(c) − AE_all(c)‖² / (‖c‖₁ + 10⁻⁵).

    Real images do not score 0: below their score, smaller is not better. ‖c‖₁ depends on which
    pixel value is zero, so c must be in the autoencoders' units.
    """
    apart = _squared_norm(by_q.double() - by_all.double())
    return apart / (counterfactual.double().flatten(1).abs().sum(1) + _EPSILON)


def frechet_distance(
    features_a: Float[Tensor, "n_a features"], features_b: Float[Tensor, "n_b features"]
) -> Interval:
    """‖m_a − m_b‖² + tr(S_a + S_b − 2 (S_a S_b)^½) of means m and covariances S, in float64.

    With centred features A = √(n − 1) Q R, S = RᵀR, and tr (S_a S_b)^½ is the sum of the singular
    values of R_a R_bᵀ = U Σ Vᵀ: no covariance is formed and no root of a singular matrix is taken.

    The interval takes b as given, such as all real images. It is the delta method's: the distance
    changes with the weight of an image a by 2 (m_a − m_b)·(a − m_a) + ‖a − m_a‖² − ‖Σ^½ Uᵀ q‖²,
    with its row q of √(n − 1) Q, less the mean of all. It does not contain the bias of few images,
    by which even real ones are above 0, and which resampling would double.
    """
    n = len(features_a)
    if min(n, len(features_b)) < 2:
        raise InputError("a Fréchet distance needs at least two images on each side")
    (mean_a, rows, root_a), (mean_b, _, root_b) = map(_moments, (features_a, features_b))
    u, shared, _ = torch.linalg.svd(root_a @ root_b.T, full_matrices=False)
    spread = root_a.square().sum() + root_b.square().sum() - 2 * shared.sum()
    distance = float((mean_a - mean_b).square().sum() + spread.clamp(min=0))
    centred = features_a.double() - mean_a
    influence = 2 * centred @ (mean_a - mean_b) + centred.square().sum(1)
    influence -= (n - 1) * (rows @ u).square() @ shared
    half_width = normal_interval(influence).half_width
    return Interval(distance, max(distance - half_width, 0.0), distance + half_width, n)


def in_manifold(
    features: Float[Tensor, "n features"], real: Float[Tensor, "m features"], k: int = 3
) -> Bool[Tensor, " n"]:
    """‖f − r‖ ≤ NNₖ(r) for some real r, where NNₖ(r) is the distance to its kth neighbour.

    The share of true values is the precision of Kynkäänniemi et al. (2019): images that lie
    within the manifold that balls around the real images' features form.
    """
    features, real = features.double(), real.double()
    # Exact differences: by inner products, an image would be at a distance from itself.
    exact = "donot_use_mm_for_euclid_dist"
    radius = torch.cat(
        [
            # The nearest is the image itself.
            torch.cdist(rows, real, compute_mode=exact).kthvalue(k + 1, dim=1).values
            for rows in real.split(_ROWS)
        ]
    )
    inside = [
        (torch.cdist(rows, real, compute_mode=exact) <= radius).any(1)
        for rows in features.split(_ROWS)
    ]
    return torch.cat(inside)


def label_variation_score(
    before: Float[Tensor, "batch classes"], after: Float[Tensor, "batch classes"]
) -> PerImage:
    """Jensen–Shannon divergence of an oracle's posteriors of x and x̂, in [0, ln 2].

    Near 0 for labels that the counterfactual leaves unchanged.
    """
    pair = torch.stack([before, after]).double()
    middle, ends = (torch.special.entr(p).sum(-1) for p in (pair.mean(0), pair))
    divergence: PerImage = middle - ends.mean(0)
    return divergence.clamp(0, math.log(2))


def transition_curves(
    posterior: Callable[[Tensor], Tensor],
    original: StoredImages,
    counterfactual: StoredImages,
    p: Labels,
    q: Labels,
    steps: int = 50,
) -> TransitionCurves:
    """Posteriors of p and q while x becomes x̂ in equal steps (Khorram & Fuxin 2022).

    Pixels change in the order of |x̂ − x| summed over channels, largest first.

    Args:
        posterior: p(y|x) of 8-bit images, "batch classes"; called steps + 1 times.
    """
    batch, _, height, width = original.shape
    change = (counterfactual.int() - original.int()).abs().sum(1).flatten(1)
    rank = change.argsort(stable=True, dim=1, descending=True).argsort(1)
    rank = rank.reshape(batch, 1, height, width)
    pair = torch.stack([p, q], 1)
    points = []
    for step in range(steps + 1):
        replaced = rank < step * height * width // steps
        points.append(posterior(torch.where(replaced, counterfactual, original)).gather(1, pair))
    curves = torch.stack(points, -1)
    return TransitionCurves(curves[:, 0], curves[:, 1])


def diversity(
    counterfactuals: UInt8[Tensor, "n channels height width"],
    real: UInt8[Tensor, "m channels height width"],
) -> Interval:
    """Mean L2 distance between counterfactuals of a class, divided by that of its real images.

    0 if all are the same, 1 if they are as varied as real images. The interval takes these as
    given; every counterfactual is part of many pairs, so it is twice as wide as that of the mean
    of their distances to all others (Hoeffding's variance of a U-statistic, 1948).
    """
    ratio = normal_interval(_mean_distances(counterfactuals) / _mean_distances(real).mean())
    reach = 2 * ratio.half_width
    return Interval(ratio.mean, ratio.mean - reach, ratio.mean + reach, ratio.n)


def confidence_consistency(
    asked: Float[Tensor, "batch levels"],
    obtained: Float[Tensor, "batch levels"],
    counted: Bool[Tensor, "batch levels"],
    *,
    generator: torch.Generator,
) -> ConfidenceConsistency:
    """Pearson's r, the share within 0.05 and the mean squared error of obtained against asked.

    Over the pairs of image and level that are counted. Images are bootstrapped with all their
    levels, which are not independent of each other.
    """
    asked, obtained = asked.double(), obtained.double()
    error = obtained - asked
    a, b = asked - asked[counted].mean(), obtained - obtained[counted].mean()
    n, *sums = (
        torch.where(counted, values, 0.0).sum(1)
        for values in (torch.ones_like(a), a, b, a.square(), b.square(), a * b)
    )
    # Differences of 0.05 in decimal are inexact in binary.
    within = error.abs() <= 0.05 + 1e-9
    return ConfidenceConsistency(
        correlation=bootstrap(_correlation, n, *sums, generator=generator),
        within=mean_over_images(within.double(), counted, generator=generator),
        mean_squared_error=mean_over_images(error.square(), counted, generator=generator),
    )


def mean_over_images(
    values: Float[Tensor, "batch levels"],
    counted: Bool[Tensor, "batch levels"],
    *,
    generator: torch.Generator,
) -> Interval:
    """Mean of the counted values; images are bootstrapped with all their values."""
    total, n = torch.where(counted, values.double(), 0.0).sum(1), counted.double().sum(1)
    return bootstrap(lambda a, b: a.sum(-1) / b.sum(-1), total, n, generator=generator)


def share_inside(
    change: Images, mask: Bool[Tensor, "height width"] | Bool[Tensor, "batch height width"]
) -> PerImage:
    """Σ_inside δ² / Σ δ²; nan where nothing changed."""
    squared = change.double().square()
    inside = (squared * mask.unsqueeze(-3)).flatten(1).sum(1)
    return inside / squared.flatten(1).sum(1)


def _change(original: StoredImages, counterfactual: StoredImages) -> Int[Tensor, "batch dim"]:
    return (counterfactual.int() - original.int()).flatten(1)


def _squared_norm(values: Images) -> PerImage:
    return values.flatten(1).square().sum(1)


def _moments(
    features: Float[Tensor, "n features"],
) -> tuple[Float[Tensor, " features"], Float[Tensor, "n rank"], Float[Tensor, "rank features"]]:
    """Return the mean, Q and R, where RᵀR is the covariance."""
    features = features.double()
    mean = features.mean(0)
    rows, root = torch.linalg.qr((features - mean) / math.sqrt(len(features) - 1))
    return mean, rows, root


def _correlation(
    n: Tensor, a: Tensor, b: Tensor, aa: Tensor, bb: Tensor, ab: Tensor
) -> Float[Tensor, "*resamples"]:
    """Pearson's r from numbers of pairs and sums of values and of their products."""
    n, a, b, aa, bb, ab = (sums.sum(-1) for sums in (n, a, b, aa, bb, ab))
    return (n * ab - a * b) / ((n * aa - a.square()) * (n * bb - b.square())).sqrt()


def _mean_distances(images: StoredImages) -> PerImage:
    """L2 distance to all others. Exact: squares of 8-bit values are integers in float64."""
    flat = images.flatten(1).double()
    squared_norm = flat.square().sum(1)
    totals = []
    for some, norm in zip(flat.split(_ROWS), squared_norm.split(_ROWS), strict=True):
        squared = norm[:, None] + squared_norm - 2 * some @ flat.T
        totals.append(squared.sqrt().sum(1))
    return torch.cat(totals) / (255 * (len(flat) - 1))
