"""Between 8-bit images and the model's pixels: a value k fills the bin [k, k+1)/256."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


def to_pixels(images: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The middle of every pixel's bin, in (0, 1)."""
    return (images.float() + 0.5) / 256


def to_uint8(pixels: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """The bin every pixel falls into; what lies outside [0, 1] is clamped."""
    return (pixels * 256).floor().clamp(0, 255).to(torch.uint8)


def clamped_share(
    pixels: Float[Tensor, "*batch channels height width"],
) -> Float[Tensor, "*batch"]:
    """Share of pixels outside [0, 1], which no 8-bit image can show."""
    outside = (pixels < 0) | (pixels > 1)
    return outside.float().mean(dim=(-3, -2, -1))


def dequantise(
    images: UInt8[Tensor, "*shape"], generator: torch.Generator, noise: float = 0.0
) -> Float[Tensor, "*shape"]:
    """Uniform in every pixel's bin, plus Gaussian noise of that standard deviation in [0, 1]."""
    shape, device = images.shape, images.device
    pixels = (images.float() + torch.rand(shape, generator=generator, device=device)) / 256
    if noise:
        pixels = pixels + noise * torch.randn(shape, generator=generator, device=device)
    return pixels
