"""Features of handwriting: thickness, slant, size and extent of strokes, and ink mass.

Digits are grey 8-bit images, light ink on black; a value k counts as k/255. Ink is every point
at least half as bright as the image's maximum, on a grid four times as fine, so that grey edges
count for the area they cover. Without ink every feature but the mass is nan.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from ecinn.metrics.heatmaps import PerImage

FINER = 4
"""Points per pixel and direction of the finer grid; even, so that odd widths are exact."""
_AT_ONCE = 32
"""Digits per batch: distances take height × width × height numbers per image."""

Digits = UInt8[Tensor, "batch 1 height width"]
Grey = Float[Tensor, "batch height width"]


def ink_mass(images: Digits) -> PerImage:
    """Σ v, as a number of white pixels."""
    return _grey(images).sum((1, 2))


def slant(images: Digits) -> PerImage:
    """arctan −Σ v(c − c̄)(r − r̄) / Σ v(r − r̄)², in degrees: 0 is upright, positive leans right.

    The shear of columns c along rows r, which are counted downwards.
    """
    v, down, across = _centred(images)
    spread = (v * down.square()).sum((1, 2))
    together = (v * down * across).sum((1, 2))
    return torch.rad2deg(torch.atan(-together / spread))


def size(images: Digits) -> PerImage:
    """√(Σ v‖x − x̄‖² / Σ v), in pixels: the radius of gyration."""
    v, down, across = _centred(images)
    squared = (v * (down.square() + across.square())).sum((1, 2))
    return (squared / v.sum((1, 2))).sqrt()


def box_height(images: Digits) -> PerImage:
    """Distance from the highest to the lowest ink, in pixels."""
    return _extent(ink(images).any(2))


def box_width(images: Digits) -> PerImage:
    """Distance from the leftmost to the rightmost ink, in pixels."""
    return _extent(ink(images).any(1))


def thickness(images: Digits) -> PerImage:
    """4 · mean distance of the ink to its edge, in pixels: the width of a long stroke.

    Across a stroke of width t the distance to the edge is t/4 on average. It differs a little
    where strokes end or meet; a disc scores two thirds of its diameter. A one-pixel stroke that
    lies between two pixels looks the same as two pixels of half the brightness.
    """
    parts = [images.new_zeros(0, dtype=torch.float64)]
    for mask in ink(images).split(_AT_ONCE):
        # Half a step, because the edge runs between the last point of ink and the first without.
        distance = (_distance_to_background(mask) - 0.5) / FINER
        parts.append(4 * (distance * mask).sum((1, 2)) / mask.sum((1, 2)))
    return torch.cat(parts)


FEATURES: Mapping[str, Callable[[Digits], PerImage]] = MappingProxyType(
    {
        "stroke thickness": thickness,
        "slant": slant,
        "size": size,
        "box height": box_height,
        "box width": box_width,
        "ink mass": ink_mass,
    }
)
"""Every feature by its name in tables."""


def ink(images: Digits) -> Bool[Tensor, "batch fine_rows fine_columns"]:
    """v ≥ ½ max v, interpolated linearly between pixels; everything outside the image is black."""
    grey = F.pad(_grey(images)[:, None], (1, 1, 1, 1))
    fine = F.interpolate(grey, scale_factor=FINER, mode="bilinear", align_corners=False)[:, 0]
    brightest = grey.flatten(1).amax(1)[:, None, None]
    return (fine >= brightest / 2) & (brightest > 0)


def _distance_to_background(
    mask: Bool[Tensor, "batch rows columns"],
) -> Float[Tensor, "batch rows columns"]:
    """Exact Euclidean distance in steps of the grid: first within rows, then across them."""
    rows, columns = (torch.arange(n, device=mask.device).float() for n in mask.shape[1:])
    far = float(len(rows) + len(columns))
    before = torch.where(mask, -far, columns).cummax(2).values
    after = torch.where(mask, 2 * far, columns).flip(2).cummin(2).values.flip(2)
    squared = torch.minimum(columns - before, after - columns).clamp(max=far).square()
    # min_j (s_j + (i − j)²) of every row i: whole numbers, exact in single precision.
    across = [(squared + (i - rows).square()[:, None]).amin(1) for i in rows]
    return torch.stack(across, 2).transpose(1, 2).double().sqrt()


def _extent(filled: Bool[Tensor, "batch places"]) -> PerImage:
    """Distance from the first to the last true value, in pixels."""
    first = filled.int().argmax(1)
    last = filled.shape[1] - 1 - filled.flip(1).int().argmax(1)
    extent = (last - first + 1).double() / FINER
    return torch.where(filled.any(1), extent, torch.nan)


def _grey(images: Digits) -> Grey:
    return images[:, 0].double() / 255


def _centred(
    images: Digits,
) -> tuple[Grey, Float[Tensor, "batch height 1"], Float[Tensor, "batch 1 width"]]:
    """Return v and the distance of every row and column from the centre of the ink."""
    v = _grey(images)
    mass = v.sum((1, 2))[:, None]
    rows, columns = (torch.arange(n, device=v.device).double() for n in v.shape[1:])
    down = rows - (v.sum(2) * rows).sum(1, keepdim=True) / mass
    across = columns - (v.sum(1) * columns).sum(1, keepdim=True) / mass
    return v, down[:, :, None], across[:, None, :]
