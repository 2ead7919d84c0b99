"""What a digit looks like whatever it says: how thick, slanted, large and broad its strokes are.

Images are grey 8-bit images, light ink on black; a value k counts as k/255. Ink is where a
picture reaches half of its own brightest value, on a grid four times as fine, so that grey edges
count for what they cover. Where there is no ink, everything but the mass is nan.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

FINER = 4
"""Points per pixel and direction of the finer grid; even, so that odd widths come out right."""
_AT_ONCE = 32
"""Pictures; a distance takes height × width × height numbers of each."""

Images = UInt8[Tensor, "batch 1 height width"]
Grey = Float[Tensor, "batch height width"]
Ink = Bool[Tensor, "batch rows columns"]
PerImage = Float[Tensor, " batch"]


def ink_mass(images: Images) -> PerImage:
    """Σ v, in white pixels."""
    return _grey(images).sum((1, 2))


def slant(images: Images) -> PerImage:
    """arctan −Σ v(c − c̄)(r − r̄) / Σ v(r − r̄)², in degrees: 0 is upright, more leans to the right.

    The shear that columns c follow rows r with, which run downwards.
    """
    v, down, across = _centred(images)
    spread = (v * down.square()).sum((1, 2))
    together = (v * down * across).sum((1, 2))
    return torch.rad2deg(torch.atan(-together / spread))


def size(images: Images) -> PerImage:
    """√(Σ v‖x − x̄‖² / Σ v), in pixels: the radius of gyration."""
    v, down, across = _centred(images)
    squared = (v * (down.square() + across.square())).sum((1, 2))
    return (squared / v.sum((1, 2))).sqrt()


def box_height(images: Images) -> PerImage:
    """From the highest to the lowest ink, in pixels."""
    return _extent(ink(images).any(2))


def box_width(images: Images) -> PerImage:
    """From the leftmost to the rightmost ink, in pixels."""
    return _extent(ink(images).any(1))


def thickness(images: Images) -> PerImage:
    """4 · mean distance of the ink to its edge, in pixels: the width of a long stroke.

    Across a stroke of width t the distance to the edge is t/4 on average. Where strokes end or
    meet it differs a little; a disc counts two thirds of its diameter. One pixel, where it falls
    between two, cannot be told from two that are half as bright.
    """
    parts = [_thickness(part) for part in ink(images).split(_AT_ONCE)]
    return torch.cat(parts) if parts else images.new_zeros(0, dtype=torch.float64)


FEATURES: Mapping[str, Callable[[Images], PerImage]] = MappingProxyType(
    {
        "stroke thickness": thickness,
        "slant": slant,
        "size": size,
        "box height": box_height,
        "box width": box_width,
        "ink mass": ink_mass,
    }
)
"""By the name that tables call them."""


def ink(images: Images) -> Bool[Tensor, "batch fine_rows fine_columns"]:
    """v ≥ ½ max v, linearly in between pixels; what lies outside the picture is black."""
    grey = F.pad(_grey(images)[:, None], (1, 1, 1, 1))
    fine = F.interpolate(grey, scale_factor=FINER, mode="bilinear", align_corners=False)[:, 0]
    brightest = grey.flatten(1).amax(1)[:, None, None]
    return (fine >= brightest / 2) & (brightest > 0)


def _thickness(mask: Ink) -> PerImage:
    # Half a step, because the edge runs between the last point of ink and the first without.
    distance = (_distance_to_background(mask) - 0.5) / FINER
    return 4 * (distance * mask).sum((1, 2)) / mask.sum((1, 2))


def _distance_to_background(mask: Ink) -> Float[Tensor, "batch rows columns"]:
    """Euclidean, in steps of the grid: the nearest in the row, then over all rows, exactly."""
    far = float(mask.shape[1] + mask.shape[2])
    squared = torch.where(mask, far**2, 0.0).double()
    for _ in range(2):
        # Once for columns, and, transposed, once for rows.
        squared = _nearest(squared).transpose(1, 2)
    return squared.sqrt()


def _nearest(squared: Float[Tensor, "batch rows columns"]) -> Float[Tensor, "batch rows columns"]:
    """min_j (s_j + (i − j)²) of every column i of a row."""
    place = torch.arange(squared.shape[2], device=squared.device, dtype=squared.dtype)
    apart = (place[:, None] - place).square()
    columns = [(squared + apart[column]).amin(2) for column in range(len(place))]
    return torch.stack(columns, 2)


def _extent(filled: Bool[Tensor, "batch places"]) -> PerImage:
    """From the first to the last place that is filled, in pixels."""
    first = filled.int().argmax(1)
    last = filled.shape[1] - 1 - filled.flip(1).int().argmax(1)
    extent = (last - first + 1).double() / FINER
    return torch.where(filled.any(1), extent, torch.nan)


def _grey(images: Images) -> Grey:
    return images[:, 0].double() / 255


def _centred(
    images: Images,
) -> tuple[Grey, Float[Tensor, "batch height 1"], Float[Tensor, "batch 1 width"]]:
    """v, and how far every row and column is from the centre of the ink."""
    v = _grey(images)
    mass = v.sum((1, 2))[:, None]
    rows, columns = (torch.arange(n, device=v.device).double() for n in v.shape[1:])
    down = rows - (v.sum(2) * rows).sum(1, keepdim=True) / mass
    across = columns - (v.sum(1) * columns).sum(1, keepdim=True) / mass
    return v, down[:, :, None], across[:, None, :]
