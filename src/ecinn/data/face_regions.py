"""Masks of mouth, eyes, cheeks and background in aligned faces of any size."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool
from torch import Tensor

from ecinn.errors import InputError


@dataclass(frozen=True)
class Box:
    """Edges as fractions of the height (top, bottom) and of the width (left, right)."""

    top: float
    left: float
    bottom: float
    right: float


FACE_REGIONS: Mapping[str, tuple[Box, ...]] = MappingProxyType(
    {
        "mouth": (Box(0.72, 0.33, 0.90, 0.67),),
        "eyes": (Box(0.45, 0.26, 0.57, 0.46), Box(0.45, 0.54, 0.57, 0.74)),
        "cheeks": (Box(0.58, 0.22, 0.72, 0.40), Box(0.58, 0.60, 0.72, 0.78)),
    }
)
"""Drawn by hand on the mean of CelebA's aligned faces in the square of `CELEBA_CROP`.

Faces in profile leave the boxes a little; CelebA-HQ is aligned similarly, but not identically.
"""

FACE = Box(0.19, 0.19, 0.99, 0.81)
"""Box around the oval from the hairline to the chin."""

REGION_NAMES = (*FACE_REGIONS, "face", "background")


def region_mask(name: str, height: int, width: int) -> Bool[Tensor, "height width"]:
    """Select the pixels whose centres lie in the region; "background" is all outside the face."""
    if name not in REGION_NAMES:
        raise InputError(f"there is no region {name!r}; choose one of {', '.join(REGION_NAMES)}")
    # (i + ½) / n for every pixel i of n.
    centres = [(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in (height, width)]
    row, column = centres[0][:, None], centres[1]
    if name in FACE_REGIONS:
        mask = torch.zeros(height, width, dtype=torch.bool)
        for box in FACE_REGIONS[name]:
            inside = (row >= box.top) & (row < box.bottom)
            mask |= inside & (column >= box.left) & (column < box.right)
        return mask
    # An oval: (y/½height)² + (x/½width)² < 1, measured from the centre of the box.
    vertical = (2 * row - FACE.top - FACE.bottom) / (FACE.bottom - FACE.top)
    horizontal = (2 * column - FACE.left - FACE.right) / (FACE.right - FACE.left)
    face = vertical.square() + horizontal.square() < 1
    return face if name == "face" else ~face
