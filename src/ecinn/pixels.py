"""Convert between 8-bit images and the model's pixels: a value k fills the bin [k, k+1)/256."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ecinn.errors import InputError

Images = Float[Tensor, "batch channels height width"]
"""Pixels as networks see them, in [0, 1]."""
StoredImages = UInt8[Tensor, "batch channels height width"]
"""8-bit images, as files hold them."""
BEYOND = (-0.5, 1.5)
"""Range of float pixels that are read: counterfactuals before rounding may leave [0, 1]."""
K_255 = 1e-3
"""Tolerance within which 255 x counts as a whole number."""
Labels = Int[Tensor, " batch"]
"""A class for every image."""


@dataclass(frozen=True)
class Inputs:
    """Images as the classifier reads them, with their files and what was done to read them."""

    pixels: Images
    sources: tuple[str | None, ...]
    remarks: tuple[tuple[str, ...], ...]

    @classmethod
    def joined(cls, parts: Sequence["Inputs"]) -> "Inputs":
        """Concatenate several."""
        return cls(
            torch.cat([part.pixels for part in parts]),
            tuple(source for part in parts for source in part.sources),
            tuple(remarks for part in parts for remarks in part.remarks),
        )


def to_pixels(images: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the middle of every pixel's bin, in (0, 1)."""
    return (images.float() + 0.5) / 256


def to_uint8(pixels: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Return the bin that every pixel falls into; values outside [0, 1] are clamped."""
    return (pixels * 256).floor().clamp(0, 255).to(torch.uint8)


def clamped_share(
    pixels: Float[Tensor, "*batch channels height width"],
) -> Float[Tensor, "*batch"]:
    """Share of pixels outside [0, 1], which 8-bit images cannot represent."""
    outside = (pixels < 0) | (pixels > 1)
    return outside.float().mean(dim=(-3, -2, -1))


def dequantise(
    images: UInt8[Tensor, "*shape"], generator: torch.Generator, noise: float = 0.0
) -> Float[Tensor, "*shape"]:
    """Sample uniformly in every pixel's bin, and add Gaussian noise of that standard deviation."""
    shape, device = images.shape, images.device
    pixels = (images.float() + torch.rand(shape, generator=generator, device=device)) / 256
    if noise:
        pixels = pixels + noise * torch.randn(shape, generator=generator, device=device)
    return pixels


def _in_bins(images: Float[Tensor, "batch channels height width"]) -> Images:
    """Move images whose values are all k/255 to the middles of their bins."""
    levels = (255 * images).round().clamp(0, 255)
    stored = ((255 * images - levels).abs() < K_255).flatten(1).all(1)
    middle = to_pixels(levels.to(torch.uint8))
    return torch.where(stored[:, None, None, None], middle, images.float())


def pixels_of(given: Tensor | np.ndarray, shape: tuple[int, int, int]) -> Images:
    """Return the pixels of 8-bit images, or of floats that are pixels of [0, 1] already.

    Floats that are all multiples of 1/255 are taken for 8-bit images divided by 255.

    Args:
        shape: channels, height and width that every image must have.
    """
    if isinstance(given, np.ndarray):  # views and other byte orders are copied
        given = np.ascontiguousarray(given, given.dtype.newbyteorder("="))
    try:
        images = torch.as_tensor(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"pixels are uint8, or floats of [0, 1], not {given.dtype}") from error
    last = (*shape[1:], shape[0])
    if isinstance(given, np.ndarray) and shape[0] > 1 and tuple(images.shape[-3:]) == last:
        images = images.movedim(-1, -3)
    if shape[0] == 1 and images.shape[-2:] == shape[1:] and images.ndim in (2, 3):
        images = images.reshape(-1, *shape)
    elif images.ndim == 3:
        images = images[None]
    if images.ndim != 4 or images.shape[1:] != shape or not len(images):
        raise InputError(
            f"images are of shape (n, {', '.join(map(str, shape))}), not {tuple(images.shape)}"
            ": resize them, or give files, which are resized"
        )
    if images.dtype == torch.uint8:
        return to_pixels(images)
    if not images.is_floating_point():
        raise InputError(f"pixels are uint8, or floats of [0, 1], not {images.dtype}")
    low, high = BEYOND
    if not bool(((images >= low) & (images <= high)).all()):
        raise InputError(
            "float pixels lie in [0, 1], without normalisation; give uint8 for values up to 255"
        )
    return _in_bins(images)
