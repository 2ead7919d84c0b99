"""Turn any image people have into what a model reads, and note every change made to it."""

import io
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ecinn.data.dicom import is_dicom, read_dicom
from ecinn.data.face_crop import FaceCrop
from ecinn.data.framing import Framing, Intensity
from ecinn.errors import InputError

Source = str | Path | bytes | io.IOBase | Image.Image
"""A path, the contents of an image file, a file opened in binary mode, or a Pillow image."""
MAX_PIXELS = 64_000_000
"""Larger images are refused before they are decoded: four bytes a pixel must fit in memory.

The environment variable ECINN_MAX_PIXELS replaces it.
"""
MAX_ASPECT = 100
"""Images with a larger ratio of their sides are refused before they are decoded: no model reads
lines. The environment variable ECINN_MAX_ASPECT replaces it."""
LARGE_SIDE = 2048
"""Images of twice this size or more are reduced before anything is computed with their values."""
STRIP_PIXELS = 1_000_000
"""Pixels that are converted at once when an image is reduced."""
DIGIT_BOX = 20
"""MNIST's digits fill a box of 20 of the 28 pixels."""
# Cautions about digits, chosen on MNIST's training digits: 0.7 % of them get one.
LOW_CONTRAST = 100
"""Ink that differs less from the background, of 255 levels, is faint."""
SECOND_STROKE = 0.1
"""A second connected piece with a larger share of the ink may be a second digit."""
BORDER_INK = 0.05
"""Ink on a larger share of the border is a shadow, an edge of the paper or a cut digit."""


@dataclass(frozen=True)
class Picture:
    """A decoded picture, before its values become 8-bit values."""

    image: Image.Image
    window: Intensity | None = None
    """A DICOM file's own."""
    inverted: bool = False
    """Small values are white, as in DICOM's MONOCHROME1."""

    @property
    def deep(self) -> bool:
        """Return whether it has more than 8 bits: 16 bits, integers or floats."""
        return self.image.mode in ("I", "F") or self.image.mode.startswith("I;16")


@dataclass(frozen=True)
class Photograph:
    """An image as the model reads it, and the changes made to it."""

    image: UInt8[Tensor, "channels height width"]
    notes: tuple[str, ...]


def read_photograph(
    source: Source,
    shape: tuple[int, int, int],
    *,
    digit: bool,
    crop: FaceCrop | None = None,
    framing: Framing | None = None,
) -> Photograph:
    """Convert an image of any size, mode and orientation to the model's shape.

    Args:
        shape: channels, height and width that the model reads.
        digit: frame it like MNIST: a light digit on black, cropped, centred by its mass.
        crop: frame it like the faces of training.
        framing: fit and scale it like the pictures of training; None stretches other aspect
            ratios and knows 8-bit values only.
    """
    channels, height, width = shape
    notes: list[str] = []
    framing = framing or Framing()
    flat = _flatten(open_picture(source, notes), framing.intensity, notes)
    if channels == 1 and flat.mode == "RGB":
        notes.append("converted from colour to grey")
    if channels == 3 and flat.mode == "L":
        notes.append("the image is grey, but the model was trained on colour images")
    flat = flat.convert("L" if channels == 1 else "RGB")
    if digit:
        whole = flat
        flat = _frame_digit(flat, (width, height), notes)
        notes += _digit_cautions(whole, flat)
    elif crop is not None:
        flat, note = crop.fit(flat, (height, width))
        notes += [note] if note else []
    else:
        flat, note = framing.resize(flat, (width, height))
        notes += [note] if note else []
    array = np.array(flat, dtype=np.uint8).reshape(height, width, channels)
    return Photograph(torch.from_numpy(array.transpose(2, 0, 1).copy()), tuple(notes))


def open_picture(source: object, notes: list[str]) -> Picture:
    """Decode the first frame and turn it upright, unless it has no pixels or too many."""
    if isinstance(source, str | Path) and Path(source).is_fifo():
        raise InputError(f"{source} is a pipe: name an image file")  # it may never end
    if is_dicom(source):
        file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
        return Picture(*read_dicom(file, notes))
    name = str(source) if isinstance(source, str | Path) else "the image"
    max_pixels = _limit("ECINN_MAX_PIXELS", MAX_PIXELS)
    limit = f"the limit is {max_pixels / 1_000_000:g} million): make it smaller first"
    try:
        with _read_header(source) as picture:
            size = f"{picture.width}×{picture.height}"
            if 0 in picture.size:
                raise InputError(f"{name} has no pixels ({size}): choose another file")
            if picture.width * picture.height > max_pixels:
                raise InputError(f"{name} is too large ({size} pixels, {limit}")
            if aspect(picture) > (longest := _limit("ECINN_MAX_ASPECT", MAX_ASPECT)):
                raise InputError(
                    f"{name} is too narrow ({size} pixels, the limit is {longest}:1): crop it"
                )
            stored = [str(tile[-1]) for tile in getattr(picture, "tile", ())]
            if any("RGB" in mode and "16" in mode for mode in stored):
                notes.append("only the upper 8 of 16 bits a colour were used")
            picture.load()
            # A Pillow image is at the frame that the caller chose; phones store previews as MPO.
            single = picture is source or picture.format == "MPO"
            upright = ImageOps.exif_transpose(picture)
            rotated = picture.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
            if not single and (frames := getattr(picture, "n_frames", 1)) > 1:
                notes.append(f"only the first of {frames} frames was used")
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder: name the image files in it") from None
    except Image.DecompressionBombError:
        raise InputError(f"{name} is too large (far too many pixels, {limit}") from None
    except UnidentifiedImageError:
        raise InputError(f"{name} is empty or not an image: give a PNG, JPEG or similar") from None
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        # Errors of the operating system have a number, those of decoders have none.
        system = getattr(error, "errno", None) is not None
        problem = "cannot be read" if system else "is damaged or incomplete"
        raise InputError(f"{name} {problem} ({error}): save it again") from None
    if rotated:
        notes.append("rotated upright according to its EXIF data")
    small = shrink(upright, LARGE_SIDE)
    if small is not upright:
        after = f"{small.width}×{small.height}"
        notes.append(f"reduced from {upright.width}×{upright.height} to {after}")
    return Picture(small)


def _limit(variable: str, default: int) -> int:
    """Return a limit of the environment, or the default."""
    given = os.environ.get(variable, "")
    if given and not (given.isdecimal() and int(given)):
        raise InputError(f"{variable} is a whole number above 0, not {given!r}")
    return int(given or default)


def aspect(picture: Image.Image) -> float:
    """Return the longer side in multiples of the shorter one."""
    return max(picture.size) / max(min(picture.size), 1)


def shrink(picture: Image.Image, side: int) -> Image.Image:
    """Average blocks of pixels until the longer side is less than twice the given one.

    The picture is converted in strips, so that no second one of its size is made. Modes of which
    no average can be taken become others: palettes are looked up, 16 bits become integers.
    """
    factor = max(picture.size) // side
    if factor < 2:
        return picture
    mode = {"1": "L", "P": "RGB", "PA": "RGBA"}.get(picture.mode, picture.mode)
    if picture.has_transparency_data:
        mode = "LA" if mode in ("L", "LA") else "RGBA"
    if mode.startswith("I;16"):
        mode = "I"
    width, height = picture.size
    small = Image.new(mode, (-(-width // factor), -(-height // factor)))
    small.info = {name: value for name, value in picture.info.items() if name != "transparency"}
    rows = factor * max(1, STRIP_PIXELS // (width * factor))
    for top in range(0, height, rows):
        strip = picture.crop((0, top, width, min(top + rows, height)))
        converted = strip if strip.mode == mode else strip.convert(mode)
        small.paste(converted.reduce(factor), (0, top // factor))
    return small


def _read_header(source: object) -> AbstractContextManager[Image.Image]:
    """Open an image without decoding it; it closes its file unless the caller opened it."""
    if isinstance(source, Image.Image):
        return nullcontext(source)
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    if not isinstance(file, str | Path):
        content = file.read(0) if hasattr(file, "read") else file
        if not isinstance(content, bytes):
            kinds = "a path, bytes, a file opened in binary mode, a Pillow image or an array"
            raise InputError(f"an image is {kinds}, not {type(content).__name__}")
    with warnings.catch_warnings():
        # Pillow warns at a limit of its own; ours is checked before decoding.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(file)


def _flatten(source: Picture, intensity: Intensity | None, notes: list[str]) -> Image.Image:
    """Convert to "L" or "RGB": palettes looked up, values scaled to 8 bits, white behind."""
    picture = source.image
    if source.deep:
        values = np.asarray(picture, dtype=np.float64)
        scaled = _range(values, picture.mode, intensity or source.window, notes).apply(values)
        if missing := int(np.isnan(values).sum()):
            notes.append(f"pixels without a value (NaN) were read as 0: {missing:,}")
        if source.inverted:
            notes.append("inverted: in this file small values are white")
        return Image.fromarray(255 - scaled if source.inverted else scaled)
    if intensity is not None:
        notes.append(
            f"the image has 8 bits, but the model was trained on values of {intensity}: "
            "its 0 to 255 were taken as they are"
        )
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        if rgba.getchannel("A").getextrema() != (255, 255):
            notes.append("transparent areas became white")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, rgba)
    return picture.convert("L" if picture.mode in ("L", "1", "LA") else "RGB")


def _range(
    values: Float[np.ndarray, "height width"],
    mode: str,
    known: Intensity | None,
    notes: list[str],
) -> Intensity:
    """Return the values that become black and white, and note which, and why."""
    if known is not None:
        notes.append(f"values of {known} became black to white")
        return known
    finite = values[np.isfinite(values)]
    highest = float(finite.max()) if finite.size else 0.0
    # Floating-point images are scaled by their maximum, 16-bit images by their format's.
    top = (highest if highest > 0 else 1.0) if mode == "F" else 65535.0 if highest > 255 else 255.0
    origin = "its brightest pixel" if mode == "F" else f"{8 if top == 255 else 16} bits"
    chosen = Intensity(0.0, top, origin)
    advice = "" if highest == top else ": if another value is white, save it with 8 bits first"
    notes.append(
        f"values of {chosen} became black to white, as the model was trained on 8 bits{advice}"
    )
    return chosen


def _frame_digit(picture: Image.Image, size: tuple[int, int], notes: list[str]) -> Image.Image:
    """Make the digit light on black; crop to it and centre it unless the size is right."""
    values = np.asarray(picture, dtype=np.float64)
    border = np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]])
    if np.median(border) > 127:
        values = 255 - values
        notes.append("inverted: the background was lighter than the digit")
    if np.ptp(values) == 0:
        notes.append("blank: all pixels have the same value")
    if picture.size == size:
        return Image.fromarray(values.astype(np.uint8))
    notes.append(f"cropped from {picture.width}×{picture.height} to the digit and centred")
    # Paper is never quite even: whatever is below a third of the brightest ink is background.
    ink = np.clip(values - np.median(values), 0, None)
    peak = np.percentile(ink, 99.9) or ink.max()
    ink = np.clip(ink / (peak or 1.0), 0, 1)
    ink[ink < 1 / 3] = 0
    rows, columns = np.nonzero(ink.any(1))[0], np.nonzero(ink.any(0))[0]
    if not len(rows):
        return Image.new("L", size)
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return _centre(Image.fromarray((ink * 255).round().astype(np.uint8)), size)


def _digit_cautions(picture: Image.Image, framed: Image.Image) -> list[str]:
    """Note what makes digits be misread: faint ink, shadows, several pieces."""
    values, ink = np.asarray(picture, dtype=np.float64), np.asarray(framed)
    if np.ptp(values) == 0:
        return []
    cautions = []
    difference = np.abs(values - np.median(values))
    peak = np.percentile(difference, 99.9)
    if peak < LOW_CONTRAST:
        cautions.append(f"low contrast: ink and background differ by {peak:.0f} of 255 levels")
    border = np.concatenate([difference[0], difference[-1], difference[:, 0], difference[:, -1]])
    if (border > peak / 3).mean() > BORDER_INK:
        cautions.append("ink or a shadow touches the border: is the whole digit in the picture?")
    shares = _pieces(ink > max(int(ink.max()), 1) / 4)
    if sum(share > SECOND_STROKE for share in shares) > 1:
        cautions.append("several separate strokes: the model knows pictures of one digit")
    return cautions


def _pieces(ink: Bool[np.ndarray, "height width"]) -> list[float]:
    """Return the share of every connected piece, diagonal neighbours included."""
    height, width = ink.shape
    numbers = np.where(ink, np.arange(1, ink.size + 1).reshape(ink.shape), 0)
    while True:
        padded = np.pad(numbers, 1)
        shifts = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
        spread = np.where(ink, np.max(shifts, axis=0), 0)
        if np.array_equal(spread, numbers):
            return [float(n) / max(ink.sum(), 1) for n in np.bincount(numbers[ink]) if n]
        numbers = spread


def _centre(ink: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale the ink into the digit box and move its centre of mass to the middle."""
    factor = DIGIT_BOX * min(size) / 28 / max(ink.size)
    scaled = (max(1, round(ink.width * factor)), max(1, round(ink.height * factor)))
    small = ink.resize(scaled, Image.Resampling.LANCZOS)
    mass = np.asarray(small, dtype=np.float64)
    total = mass.sum() or 1.0
    centre_x = (mass.sum(0) * np.arange(mass.shape[1])).sum() / total
    centre_y = (mass.sum(1) * np.arange(mass.shape[0])).sum() / total
    left = min(max(round((size[0] - 1) / 2 - centre_x), 0), size[0] - small.width)
    top = min(max(round((size[1] - 1) / 2 - centre_y), 0), size[1] - small.height)
    framed = Image.new("L", size)
    framed.paste(small, (left, top))
    return framed


def image_suffixes() -> frozenset[str]:
    """Return the suffixes of all files that can be read as pictures."""
    Image.init()
    kinds = Image.registered_extensions().items()
    return frozenset({suffix for suffix, kind in kinds if kind in Image.OPEN} | {".dcm"})


def image_files(folder: Path) -> list[Path]:
    """List all image files in a folder, by name."""
    suffixes = image_suffixes()
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)
    if not files:
        raise InputError(f"{folder} holds no image files (PNG, JPEG, …)")
    return files
