"""Random changes of 8-bit images: small ones that keep the label, large ones that do not fit."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ecinn.pixels import StoredImages

MISPLACED_SHIFT = 0.3
"""Shift of a misplaced image as a fraction of its side: a face is no longer in the middle."""


@dataclass(frozen=True)
class Augmentation:
    """Largest change of each kind; the change of every image is drawn uniformly."""

    shift: float = 0.0
    """Pixels, in both directions."""
    whole_pixels: bool = False
    """Shift by whole pixels only, so that resampling blurs nothing."""
    rotate: float = 0.0
    """Degrees."""
    scale: float = 0.0
    """Factor e^±scale, drawn separately for each axis."""
    shear: float = 0.0
    flip: bool = False
    """Mirror half of the images."""
    share: float = 1.0
    """Fraction of the images that are shifted, rotated or scaled; `flip` ignores it."""


def augment(
    images: StoredImages, settings: Augmentation, generator: torch.Generator
) -> StoredImages:
    """Apply a random affine map to every image, resample and round to 8 bits."""
    if settings == Augmentation(share=settings.share):
        return images
    count, _, height, width = images.shape
    draws = torch.rand((count, 8), generator=generator, device=images.device)
    signed = 2 * draws - 1
    matrix = _affine_matrices(signed, settings, height, width)
    identity = torch.eye(2, 3, device=images.device).expand_as(matrix)
    matrix = torch.where(draws[:, 6, None, None] < settings.share, matrix, identity)
    if settings.flip:
        mirror = torch.where(draws[:, 7] < 0.5, -1.0, 1.0)
        matrix = matrix * torch.stack([mirror, mirror.new_ones(count)], 1)[:, :, None]
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    # Reflection at the edge gives black for digits and more background for photographs.
    warped = F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)
    return warped.round().clamp(0, 255).to(torch.uint8)


def _affine_matrices(signed: Tensor, settings: Augmentation, height: int, width: int) -> Tensor:
    """Return one 2×3 matrix per image, in the [−1, 1] coordinates of `affine_grid`."""
    angle = math.radians(settings.rotate) * signed[:, 0]
    scale_x, scale_y = (settings.scale * signed[:, 1:3]).exp().unbind(1)
    shear = settings.shear * signed[:, 3]
    limit = settings.shift
    shift = limit * signed[:, 4:6]
    if settings.whole_pixels:
        # All whole numbers of the range are equally likely.
        shift = ((2 * limit + 1) / 2 * signed[:, 4:6]).round().clamp(-limit, limit)
    shift_x, shift_y = 2 * shift[:, 0] / width, 2 * shift[:, 1] / height
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([cos * scale_x, (shear * cos - sin) * scale_y, shift_x], 1)
    row_y = torch.stack([sin * scale_x, (shear * sin + cos) * scale_y, shift_y], 1)
    return torch.stack([row_x, row_y], 1)


def misplace(images: StoredImages, generator: torch.Generator) -> StoredImages:
    """Turn every image upside down or sideways, shift it far, or invert it, at random.

    No training image looks like this: out-of-distribution detectors learn from the result.
    """
    height, width = images.shape[-2:]
    variants = [images.flip(2), 255 - images]
    if height == width:
        variants += [images.rot90(turns, (2, 3)) for turns in (1, 3)]
    for axis, side in ((2, height), (3, width)):
        for sign in (-1, 1):
            variants.append(_shift(images, axis, sign * round(MISPLACED_SHIFT * side)))
    choice = torch.randint(len(variants), (len(images),), generator=generator)
    misplaced = images.clone()
    for number, variant in enumerate(variants):
        rows = (choice == number).to(images.device)
        misplaced[rows] = variant[rows]
    return misplaced


def _shift(images: StoredImages, axis: int, pixels: int) -> StoredImages:
    """Move images along an axis and fill the gap with the mirrored edge."""
    side = images.shape[axis]
    source = (torch.arange(side, device=images.device) - pixels) % (2 * side)
    return images.index_select(axis, torch.minimum(source, 2 * side - 1 - source))
