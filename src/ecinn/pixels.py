"""Convert between 8-bit images and the model's pixels: a value k fills the bin [k, k+1)/256."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

Images = Float[Tensor, "batch channels height width"]
"""Pixels as networks see them, in [0, 1]."""
StoredImages = UInt8[Tensor, "batch channels height width"]
"""8-bit images, as files hold them."""
Labels = Int[Tensor, " batch"]
"""A class for every image."""


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
