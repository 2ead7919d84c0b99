"""Metrics of heatmaps: deletion and insertion, localisation, noise, similarity.

Images are signed. For a map that is zero everywhere every metric is 0, except the AUC, which is ½.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn.errors import InputError
from ecinn.pixels import Images

Importance = Float[Tensor, "batch height width"]
Region = Bool[Tensor, "height width"] | Bool[Tensor, "batch height width"]
PerImage = Float[Tensor, " batch"]

STEPS = 10
"""Points of a replacement curve after the first: network evaluations per image and order."""
_ROUNDING = 1e-12
"""Relative rounding error in float64: a constant map minus its mean stays below it."""


def importance(maps: Images) -> Importance:
    """Σ_c |h_c|, because colour changes of equal brightness cancel in |Σ_c h_c|."""
    if not bool(maps.isfinite().all()):
        raise InputError("a heatmap holds values that are not finite: leave out such images")
    return maps.abs().sum(1)


@torch.no_grad()
def replacement_curve(
    score: Callable[[Tensor], Tensor],
    x: Images,
    replacement: Images,
    importance: Importance,
    *,
    insertion: bool,
    generator: torch.Generator,
    steps: int = STEPS,
    ends: tuple[PerImage, PerImage] | None = None,
) -> Float[Tensor, "batch {steps}+1"]:
    """Scores while pixels are replaced in equal steps, the most important first.

    A pixel changes in all its channels. After the last step every pixel has changed.

    Args:
        score: one number per image; called with the batch, once per point that is not in `ends`.
        replacement: the images that deletion ends with: blur, noise, or the counterfactual.
        insertion: start from the replacement and restore x, instead of deleting from x.
        generator: draws the order of equally important pixels.
        ends: scores of x and of the replacement if known; they do not depend on the order.
    """
    known = ends or (score(x), score(replacement))
    rank = _replacement_order(importance, generator).unsqueeze(1)
    pixels = importance.shape[1] * importance.shape[2]
    start, end = (replacement, x) if insertion else (x, replacement)
    first, last = reversed(known) if insertion else known
    between = [
        score(torch.where(rank < step * pixels // steps, end, start)) for step in range(1, steps)
    ]
    return torch.stack([first, *between, last], 1)


def area_under_curve(curve: Float[Tensor, "batch points"]) -> PerImage:
    """∫₀¹ of equally spaced points, by the trapezoid rule."""
    return torch.trapezoid(curve, dim=1) / (curve.shape[1] - 1)


def blurred(x: Images, sigma: float) -> Images:
    """Gaussian blur with mirrored edges, which keeps the mean; σ in parts of the shorter side."""
    down, across = (_blur_matrix(n, sigma * min(x.shape[2:])).to(x) for n in x.shape[2:])
    return down @ x @ across.T


def noise_like(x: Images, generator: torch.Generator) -> Images:
    """Uniform noise in [0, 1), drawn on the generator's device: the same for every device of x."""
    return torch.rand(x.shape, generator=generator, device=generator.device, dtype=x.dtype).to(x)


def share_inside(importance: Importance, mask: Region) -> PerImage:
    """Σ_inside s / Σ s of importances; `counterfactuals.share_inside` takes squares."""
    total = importance.double().flatten(1).sum(1)
    return _ratio((importance.double() * mask).flatten(1).sum(1), total)


def relative_density(importance: Importance, mask: Region) -> PerImage:
    """Share inside divided by the region's share of the image: 1 is chance."""
    area = mask.expand_as(importance).flatten(1).double().mean(1)
    return share_inside(importance, mask) / area


def pointing_game(importance: Importance, mask: Region) -> Bool[Tensor, " batch"]:
    """True where the maximum lies inside; with ties, where all maxima do."""
    highest = importance.amax((1, 2), keepdim=True)
    outside = (importance == highest) & ~mask
    return ~outside.flatten(1).any(1) & (highest > 0).flatten()


def localisation_auc(importance: Importance, mask: Region) -> PerImage:
    """P(s_inside > s_outside) + ½ P(equal): ROC AUC of importance as a detector of the region."""
    inside = mask.expand_as(importance).flatten(1)
    n_inside, n_outside = inside.sum(1).double(), (~inside).sum(1).double()
    ranks = (_mean_ranks(importance.flatten(1)) * inside).sum(1)
    return (ranks - n_inside * (n_inside + 1) / 2) / (n_inside * n_outside)


def total_variation(maps: Images) -> PerImage:
    """Σ |h_i − h_j| over neighbours i, j, divided by Σ |h_i|; both sums include channels.

    From 0 (constant) to 4 (alternating signs, or isolated pixels); 2√2 for Gaussian noise.
    """
    values = maps.double()
    down, across = values.diff(dim=2), values.diff(dim=3)
    variation = down.abs().flatten(1).sum(1) + across.abs().flatten(1).sum(1)
    return _ratio(variation, values.abs().flatten(1).sum(1))


def spatial_coherence(maps: Images) -> PerImage:
    """Moran's I: mean of d_i d_j over 4-neighbours / mean of d², where d = h − mean(h).

    Near 1 for smooth maps, −1/(pixels − 1) on average for noise, −1 for alternating signs.
    Channels are centred one by one, and both means include all channels.
    """
    d = _centred(maps, (2, 3))
    pairs = ((d[:, :, 1:], d[:, :, :-1]), (d[..., 1:], d[..., :-1]))
    products = torch.cat([(a * b).sum(1).flatten(1) for a, b in pairs], 1)
    pixels, neighbours = d.shape[2] * d.shape[3], max(products.shape[1], 1)
    return _ratio(products.sum(1) * pixels, d.square().flatten(1).sum(1) * neighbours)


def high_frequency_share(maps: Images) -> PerImage:
    """Share of the spectral power above half of Nyquist, ¼ cycle per pixel in any direction.

    The mean is left out, so that maps of one sign are comparable with signed ones. White noise
    scores the share of frequencies in that band, about 1 − π/16.
    """
    power = torch.fft.fft2(_centred(maps, (2, 3))).abs().square().sum(1)
    terms = [torch.arange(n, device=maps.device) for n in maps.shape[2:]]
    # Absolute frequency of every term, in cycles per pixel.
    down, across = ((torch.minimum(k, len(k) - k).double() / len(k)).square() for k in terms)
    high = down[:, None] + across > 1 / 16
    return _ratio((power * high).flatten(1).sum(1), power.flatten(1).sum(1))


def map_similarity(a: Images, b: Images) -> PerImage:
    """cos(a, b): 1 where equal up to scale, −1 where equal up to scale and sign.

    Not Pearson's r: zero means that a pixel does not matter, so maps must not be centred.
    """
    return _cosine(a.double().flatten(1), b.double().flatten(1))


def rank_similarity(a: Importance, b: Importance) -> PerImage:
    """Spearman's ρ of two importances, with mean ranks for ties; 0 where either is constant."""
    return _cosine(*(_centred(_mean_ranks(s.flatten(1)), (1,)) for s in (a, b)))


def regions_by_change(
    mean_map: Float[Tensor, "height width"], grid: tuple[int, int]
) -> Float[Tensor, "rows columns"]:
    """Mean of every cell of a coarse grid; sizes differ by a pixel if cells do not fit exactly."""
    rows, columns = grid
    cells = [strip.tensor_split(columns, dim=1) for strip in mean_map.tensor_split(rows)]
    return torch.stack([torch.stack([cell.mean() for cell in strip]) for strip in cells])


def _replacement_order(
    importance: Importance, generator: torch.Generator
) -> Int[Tensor, "batch height width"]:
    """Rank 0 for the most important pixel of every image; ties are broken at random."""
    values = importance.flatten(1)
    lots = torch.rand(values.shape, generator=generator, device=generator.device)
    shuffle = lots.argsort(1).to(values.device)
    shuffled = values.gather(1, shuffle).argsort(dim=1, descending=True, stable=True)
    return shuffle.gather(1, shuffled).argsort(1).reshape(importance.shape)


def _blur_matrix(n: int, sigma: float) -> Float[Tensor, "n n"]:
    """Row i holds the weights of all pixels for pixel i, up to 4σ away."""
    reach = math.ceil(4 * sigma)
    offset = torch.arange(-reach, reach + 1)
    weight = (-0.5 * (offset.double() / sigma).square()).exp()
    place = (torch.arange(n)[:, None] + offset) % (2 * n)
    place = torch.minimum(place, 2 * n - 1 - place)
    matrix = torch.zeros(n, n, dtype=torch.float64)
    return matrix.scatter_add(1, place, (weight / weight.sum()).expand(n, -1))


def _ratio(part: PerImage, whole: PerImage) -> PerImage:
    """part / whole, or 0 where both are 0."""
    return torch.where(whole == 0, 0.0, part / whole)


def _centred(values: Float[Tensor, "*shape"], dims: tuple[int, ...]) -> Float[Tensor, "*shape"]:
    """Subtract the mean over these dimensions in float64; rounding errors become exactly 0."""
    values = values.double()
    d = values - values.mean(dims, keepdim=True)
    return d.masked_fill(d.abs() <= _ROUNDING * values.abs().amax(dims, keepdim=True), 0.0)


def _cosine(a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"]) -> PerImage:
    return _ratio((a * b).sum(1), a.norm(dim=1) * b.norm(dim=1))


def _mean_ranks(values: Float[Tensor, "batch n"]) -> Float[Tensor, "batch n"]:
    """Ranks from 1, smallest first; equal values share the mean of their ranks."""
    values = values.contiguous()
    ordered = values.sort(1).values
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to + 1).double() / 2
