"""How good heatmaps are: where they point, how noisy they are, how much alike two of them are.

Maps are signed. Where a map is zero everywhere, every measure is 0, except that the AUC is ½.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ecinn.errors import InputError

Maps = Float[Tensor, "batch channels height width"]
Importance = Float[Tensor, "batch height width"]
Region = Bool[Tensor, "height width"] | Bool[Tensor, "batch height width"]
PerImage = Float[Tensor, " batch"]

_ROUNDING = 1e-12  # of the largest value in float64: a constant map minus its mean is below it


def importance(maps: Maps) -> Importance:
    """Σ_c |h_c|: a change of colour that keeps the brightness cancels in |Σ_c h_c|."""
    if not bool(maps.isfinite().all()):
        raise InputError("a heatmap holds values that are not finite: leave such images out")
    return maps.abs().sum(1)


def share_inside(importance: Importance, mask: Region) -> PerImage:
    """Σ_inside s / Σ s of the importance itself; `counterfactuals.share_inside` is of squares."""
    total = importance.double().flatten(1).sum(1)
    return _ratio((importance.double() * mask).flatten(1).sum(1), total)


def relative_density(importance: Importance, mask: Region) -> PerImage:
    """The share inside over the region's share of the picture: 1 is chance."""
    area = mask.expand_as(importance).flatten(1).double().mean(1)
    if not bool((area > 0).all()):
        raise InputError("a density needs a region: here is one without a pixel")
    return share_inside(importance, mask) / area


def pointing_game(importance: Importance, mask: Region) -> Bool[Tensor, " batch"]:
    """Whether the maximum lies inside; where it is taken more than once, all of it."""
    highest = importance.amax((1, 2), keepdim=True)
    outside = (importance == highest) & ~mask
    return ~outside.flatten(1).any(1) & (highest > 0).flatten()


def localisation_auc(importance: Importance, mask: Region) -> PerImage:
    """P(s_inside > s_outside) + ½ P(equal): ROC AUC of importance as a detector of the region."""
    inside = mask.expand_as(importance).flatten(1)
    n_inside, n_outside = inside.sum(1).double(), (~inside).sum(1).double()
    if not bool((n_inside * n_outside > 0).all()):
        raise InputError("an AUC needs a region with pixels inside and outside")
    ranks = (_ranks(importance.flatten(1)) * inside).sum(1)
    return (ranks - n_inside * (n_inside + 1) / 2) / (n_inside * n_outside)


def total_variation(maps: Maps) -> PerImage:
    """Σ |h_i − h_j| over neighbours i, j, over Σ |h_i|; channels are summed over in both.

    From 0 (constant) to 4 (alternating signs, or pixels on their own); 2√2 for Gaussian noise.
    """
    values = maps.double()
    down, across = values.diff(dim=2), values.diff(dim=3)
    variation = down.abs().flatten(1).sum(1) + across.abs().flatten(1).sum(1)
    return _ratio(variation, values.abs().flatten(1).sum(1))


def spatial_coherence(maps: Maps) -> PerImage:
    """Moran's I: mean of d_i d_j over 4-neighbours over mean of d², where d = h − its mean.

    Near 1 where smooth, −1/(pixels − 1) on average for noise, −1 for alternating signs.
    Channels are centred one by one, then summed over above and below: colours cancel nothing.
    """
    d = _centred(maps, (2, 3))
    down = (d[:, :, 1:] * d[:, :, :-1]).sum(1).flatten(1)
    across = (d[:, :, :, 1:] * d[:, :, :, :-1]).sum(1).flatten(1)
    products = torch.cat([down, across], 1)
    pixels, neighbours = d.shape[2] * d.shape[3], max(products.shape[1], 1)
    return _ratio(products.sum(1) * pixels, d.square().flatten(1).sum(1) * neighbours)


def high_frequency_share(maps: Maps) -> PerImage:
    """Share of the spectral power above half of Nyquist, ¼ cycle per pixel in any direction.

    Without the mean's, so that maps of one sign count like signed ones; channels are summed over
    in both. White noise has the share of frequencies that lie there, about 1 − π/16.
    """
    height, width = maps.shape[2:]
    power = torch.fft.fft2(_centred(maps, (2, 3))).abs().square().sum(1)
    down, across = (_frequencies(n, maps.device).square() for n in (height, width))
    high = down[:, None] + across > 1 / 16
    return _ratio((power * high).flatten(1).sum(1), power.flatten(1).sum(1))


def map_similarity(a: Maps, b: Maps) -> PerImage:
    """cos(a, b): 1 where equal up to scale, −1 where up to scale and sign.

    Not Pearson's: zero says that a pixel does not matter, so a shifted map is another map.
    """
    return _cosine(a.double().flatten(1), b.double().flatten(1))


def rank_similarity(a: Importance, b: Importance) -> PerImage:
    """Spearman's ρ of two importances, with mean ranks for ties; 0 where either is constant."""
    return _cosine(*(_centred(_ranks(each.flatten(1)), (1,)) for each in (a, b)))


def regions_by_change(
    mean_map: Float[Tensor, "height width"], grid: tuple[int, int]
) -> Float[Tensor, "rows columns"]:
    """The mean of every cell of a coarse grid.

    Args:
        mean_map: importance, averaged over images.
        grid: rows and columns; cells differ by a pixel where they do not divide the picture.
    """
    rows, columns = grid
    height, width = mean_map.shape
    if not (1 <= rows <= height and 1 <= columns <= width):
        raise InputError(f"a map of {height} × {width} has no grid of {rows} × {columns} cells")
    cells = [strip.tensor_split(columns, dim=1) for strip in mean_map.tensor_split(rows)]
    return torch.stack([torch.stack([cell.mean() for cell in strip]) for strip in cells])


def _ratio(part: PerImage, whole: PerImage) -> PerImage:
    """Part over whole; 0 where there is nothing of either."""
    return torch.where(whole == 0, 0.0, part / whole)


def _centred(values: Float[Tensor, "*shape"], dims: tuple[int, ...]) -> Float[Tensor, "*shape"]:
    """Minus the mean over these dimensions, in float64; exactly 0 where that is rounding."""
    values = values.double()
    d = values - values.mean(dims, keepdim=True)
    return d.masked_fill(d.abs() <= _ROUNDING * values.abs().amax(dims, keepdim=True), 0.0)


def _cosine(a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"]) -> PerImage:
    return _ratio((a * b).sum(1), a.norm(dim=1) * b.norm(dim=1))


def _ranks(values: Float[Tensor, "batch n"]) -> Float[Tensor, "batch n"]:
    """From 1, smallest first; equal values share the mean of their ranks."""
    values = values.contiguous()
    ordered = values.sort(1).values
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to + 1).double() / 2


def _frequencies(n: int, device: torch.device) -> Float[Tensor, " n"]:
    """Cycles per pixel of every term of a Fourier transform, without sign."""
    k = torch.arange(n, device=device)
    return torch.minimum(k, n - k).double() / n
