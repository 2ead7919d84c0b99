"""Random small changes that keep the label, on whole batches of 8-bit images."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

Images = UInt8[Tensor, "batch channels height width"]


@dataclass(frozen=True)
class Augmentation:
    """Largest change of each kind; every image draws its own, uniformly."""

    shift: float = 0.0
    """Pixels, in both directions."""
    whole_pixels: bool = False
    """Shift by whole pixels only, so that nothing is blurred by resampling."""
    rotate: float = 0.0
    """Degrees."""
    scale: float = 0.0
    """Factor e^±scale, drawn for each axis."""
    shear: float = 0.0
    flip: bool = False
    """Mirror half of the images."""
    share: float = 1.0
    """Share of the images that are moved, turned or scaled at all; mirroring is apart."""


def augment(images: Images, settings: Augmentation, generator: torch.Generator) -> Images:
    """Each image under its own random affine map, resampled and rounded to 8 bits."""
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
    # Reflected at the edge: black for digits, more of the background for photographs.
    warped = F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)
    return warped.round().clamp(0, 255).to(torch.uint8)


def _affine_matrices(signed: Tensor, settings: Augmentation, height: int, width: int) -> Tensor:
    """One 2×3 matrix per image in the [−1, 1] coordinates of `affine_grid`."""
    angle = math.radians(settings.rotate) * signed[:, 0]
    scale_x, scale_y = (settings.scale * signed[:, 1:3]).exp().unbind(1)
    shear = settings.shear * signed[:, 3]
    shift = settings.shift * signed[:, 4:6]
    if settings.whole_pixels:
        # Every whole number of the range as often as every other.
        shift = (
            ((2 * settings.shift + 1) / 2 * signed[:, 4:6])
            .round()
            .clamp(-settings.shift, settings.shift)
        )
    shift_x, shift_y = 2 * shift[:, 0] / width, 2 * shift[:, 1] / height
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([cos * scale_x, (shear * cos - sin) * scale_y, shift_x], 1)
    row_y = torch.stack([sin * scale_x, (shear * sin + cos) * scale_y, shift_y], 1)
    return torch.stack([row_x, row_y], 1)
