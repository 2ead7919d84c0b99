"""Any image file people have, made into what a model reads; says what it had to do."""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ecinn.errors import InputError

MAX_PIXELS = 64_000_000
"""Larger files are refused before they are decoded: four bytes a pixel must fit in memory."""
DIGIT_BOX = 20
"""MNIST's digits fill a box of 20 of the 28 pixels."""


@dataclass(frozen=True)
class Photograph:
    """A picture as the model reads it, and what was done to it."""

    image: UInt8[Tensor, "channels height width"]
    notes: tuple[str, ...]


def read_photograph(
    source: Any,  # noqa: ANN401
    shape: tuple[int, int, int],
    *,
    digit: bool,
) -> Photograph:
    """Read a file of any size, colour and orientation.

    Args:
        shape: channels, height and width that the model reads.
        digit: frame it as MNIST does: light ink on black, cropped, centred by its mass.
    """
    if isinstance(source, Image.Image):
        return fit_photograph(source, shape, digit=digit)
    if isinstance(source, str | Path):
        return fit_photograph(_open(Path(source)), shape, digit=digit)
    try:
        picture = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        picture.load()
    except (OSError, ValueError):
        raise InputError("these bytes are not an image that can be read (PNG, JPEG, …)") from None
    return fit_photograph(picture, shape, digit=digit)


def fit_photograph(
    picture: Image.Image, shape: tuple[int, int, int], *, digit: bool
) -> Photograph:
    """Upright, opaque, in the model's colours and size."""
    channels, height, width = shape
    notes: list[str] = []
    upright = ImageOps.exif_transpose(picture)
    if upright.size != picture.size or upright.tobytes() != picture.tobytes():
        notes.append("turned upright as its EXIF data says")
    flat = _flatten(upright, notes)
    if channels == 1:
        if flat.mode == "RGB":
            notes.append("colour turned to grey")
        flat = flat.convert("L")
    else:
        if flat.mode == "L":
            notes.append("grey, where the model knows colours")
        flat = flat.convert("RGB")
    if digit:
        flat = _frame_digit(flat, (width, height), notes)
    elif flat.size != (width, height):
        stretched = "" if flat.width * height == flat.height * width else ", stretched"
        notes.append(f"resized from {flat.width}×{flat.height} to {width}×{height}{stretched}")
        flat = flat.resize((width, height), Image.Resampling.LANCZOS)
    array = np.array(flat, dtype=np.uint8).reshape(height, width, channels)
    return Photograph(torch.from_numpy(array.transpose(2, 0, 1).copy()), tuple(notes))


def _open(path: Path) -> Image.Image:
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if path.is_dir():
        raise InputError(f"{path} is a folder: name the image files in it")
    try:
        # Opened here, so that it is closed whatever becomes of it.
        with path.open("rb") as file, warnings.catch_warnings():
            # Our own limit speaks below, before anything is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(file)
            if 0 in picture.size:
                raise InputError(f"{path} has no pixels ({picture.width}×{picture.height})")
            if picture.width * picture.height > MAX_PIXELS:
                raise _too_large(path, f"{picture.width}×{picture.height}")
            picture.load()
    except Image.DecompressionBombError:
        raise _too_large(path, "far too many") from None
    except UnidentifiedImageError:
        raise InputError(f"{path} is not an image that can be read (PNG, JPEG, …)") from None
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise InputError(f"{path} is damaged or cut off ({error}): save it again") from None
    return picture


def _too_large(path: Path, size: str) -> InputError:
    return InputError(
        f"{path} is too large ({size} pixels, the limit is {MAX_PIXELS // 1_000_000} million): "
        "make it smaller first"
    )


def _flatten(picture: Image.Image, notes: list[str]) -> Image.Image:
    """As "L" or "RGB": palettes looked up, 16 bits scaled to 8, transparency on white."""
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        values = np.asarray(picture, dtype=np.float64)
        # Floating-point images are taken in their own range; 16-bit ones by their format's.
        top = values.max() if picture.mode == "F" else 65535.0 if values.max() > 255 else 255.0
        scaled = np.clip(values / (top or 1.0), 0, 1) * 255
        return Image.fromarray(scaled.round().astype(np.uint8))
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        if rgba.getchannel("A").getextrema() != (255, 255):
            notes.append("transparency laid on white")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, rgba)
    grey = picture.mode in ("L", "1", "LA")
    return picture.convert("L" if grey else "RGB")


def _frame_digit(picture: Image.Image, size: tuple[int, int], notes: list[str]) -> Image.Image:
    """Light ink on black; a picture of another size is cropped to the ink and centred."""
    values = np.asarray(picture, dtype=np.float64)
    border = np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]])
    if np.median(border) > 127:
        values = 255 - values
        notes.append("inverted: dark on light became light on dark")
    if np.ptp(values) == 0:
        notes.append("no ink: one even shade")
    if picture.size == size:
        return Image.fromarray(values.astype(np.uint8))
    notes.append(f"cropped to the ink of {picture.width}×{picture.height} and centred")
    # Paper is never quite even: what is darker than a third of the brightest ink is ground.
    ground = np.median(values)
    ink = np.clip(values - ground, 0, None)
    peak = np.percentile(ink, 99.9) or ink.max()
    ink = np.clip(ink / (peak or 1.0), 0, 1)
    ink[ink < 1 / 3] = 0
    rows, columns = np.nonzero(ink.any(1))[0], np.nonzero(ink.any(0))[0]
    if not len(rows):
        return Image.new("L", size)
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return _centre(Image.fromarray((ink * 255).round().astype(np.uint8)), size)


def _centre(ink: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale the ink into the digit box and put its centre of mass in the middle."""
    box = DIGIT_BOX * min(size) / 28
    factor = box / max(ink.size)
    scaled = (max(1, round(ink.width * factor)), max(1, round(ink.height * factor)))
    small = ink.resize(scaled, Image.Resampling.LANCZOS)
    mass: NDArray[np.float64] = np.asarray(small, dtype=np.float64)
    total = mass.sum() or 1.0
    centre_y = (mass.sum(1) * np.arange(mass.shape[0])).sum() / total
    centre_x = (mass.sum(0) * np.arange(mass.shape[1])).sum() / total
    left = round((size[0] - 1) / 2 - centre_x)
    top = round((size[1] - 1) / 2 - centre_y)
    left = min(max(left, 0), size[0] - small.width)
    top = min(max(top, 0), size[1] - small.height)
    framed = Image.new("L", size)
    framed.paste(small, (left, top))
    return framed
