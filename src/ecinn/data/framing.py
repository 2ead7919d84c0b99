"""Convert pictures of any size and bit depth to 8-bit images; the settings are in the recipe."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image, ImageOps

from ecinn.errors import InputError

Fit = Literal["crop", "pad", "stretch"]


@dataclass(frozen=True)
class Intensity:
    """(v − low) / (high − low) · 255: raw values as 8-bit values; outside they are clipped."""

    low: float
    high: float
    origin: str
    """Origin of the range, such as "12 bits", "DICOM window" or "given"."""

    def __post_init__(self) -> None:
        """Check that the range is one."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InputError(
                f"black must be a smaller value than white, not {self.low:g} and {self.high:g}: "
                "give the window as LOW,HIGH"
            )

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} ({self.origin})"

    def apply(self, values: Num[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
        """Scale raw values; what is not a number becomes black."""
        scaled = (values.astype(np.float64) - self.low) / (self.high - self.low)
        return (np.clip(np.nan_to_num(scaled, nan=0.0), 0, 1) * 255).round().astype(np.uint8)


def bits_used(highest: float) -> Intensity:
    """Take the fewest bits that hold the highest value, and at least 8, as black to white.

    >>> bits_used(3071.0).high
    4095.0
    """
    bits = max(8, int(highest).bit_length())
    return Intensity(0.0, float(2**bits - 1), f"{bits} bits")


@dataclass(frozen=True)
class Framing:
    """Settings that fit a picture into the model's image, the same in training and afterwards."""

    fit: Fit = "stretch"
    """Crop about the centre, pad with black, or stretch other aspect ratios."""
    intensity: Intensity | None = None
    """Range of pictures with more than 8 bits; None: training had none, or each DICOM file has
    its own window."""

    def __str__(self) -> str:
        values = (
            "" if self.intensity is None else f"; values of {self.intensity} are black to white"
        )
        return f"{self.fit} if they are not square{values}"

    def resize(self, picture: Image.Image, size: tuple[int, int]) -> tuple[Image.Image, str]:
        """Fit a picture into width × height; also return what was done, "" for nothing."""
        if picture.size == size:
            return picture, ""
        change = f"resized from {picture.width}×{picture.height} to {size[0]}×{size[1]}"
        if picture.width * size[1] == picture.height * size[0]:
            return picture.resize(size, Image.Resampling.LANCZOS), change
        if self.fit == "crop":
            return ImageOps.fit(picture, size, Image.Resampling.LANCZOS), f"cropped and {change}"
        if self.fit == "pad":
            return ImageOps.pad(picture, size, Image.Resampling.LANCZOS), f"padded and {change}"
        stretched = picture.resize(size, Image.Resampling.LANCZOS)
        return stretched, change.replace("resized", "stretched")
