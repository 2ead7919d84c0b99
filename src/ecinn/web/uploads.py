"""Read images of requests; decide by their first bytes and header whether to decode them."""

import base64
import binascii
import contextlib
import io
import itertools
import re
import struct
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from ecinn.data.photographs import Photograph, aspect, shrink
from ecinn.errors import EcinnError, InputError
from ecinn.model import Model

SMALL_SIDE = 1024
"""Images of twice this size or more are reduced first; models need 28 or 64 pixels."""
_COSTS = {"WEBP": 2}
"""Its decoder takes several times the memory of others, so that its pixels count twice."""
_OTHER_KINDS = (b"PK\x03\x04", b"PK\x05\x06", b"%PDF-", b"<svg", b"<html", b"<script", b"<?php")
"""Signatures of other formats, which must not follow the end of an image."""
MAX_SCANS = 64
"""Scans of a JPEG, each of which is a pass over all pixels; ten are usual."""
_MAX_SEGMENTS = 10_000
_MAX_FILLING = 1000
_MARKER = re.compile(rb"\xff([^\x00\xff])")
_NEXT_SEGMENT = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


class TooLargeError(EcinnError):
    """An input is larger than the service accepts."""


class WrongTypeError(EcinnError):
    """A file is not of an accepted image format."""


def decode_base64(text: str) -> bytes:
    """Decode base64, with or without the head of a data URL."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("an image must be base64 of its file") from None


def read_images(
    files: Sequence[bytes],
    model: Model,
    max_pixels: int,
    max_aspect: int = 20,
    names: Sequence[str] = (),
) -> list[Photograph]:
    """Decode image files for a model, after checking the headers of all.

    Args:
        names: of the files, for errors.
    """
    images, photographs = [], []
    name = iter(names)
    for data in files:
        with _named(next(name, "")):
            image = _open(data, max_pixels, max_aspect)
        images.append(image)
        max_pixels -= _cost(image)
    name = iter(names)
    for image in images:
        with _named(next(name, "")):
            photographs.append(model.photograph(_decode(image)))
    return photographs


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Begin errors with the name of the file."""
    try:
        yield
    except EcinnError as error:
        raise type(error)(f"{name}: {error}" if name else str(error)) from None


def _open(data: bytes, max_pixels: int, max_aspect: int) -> Image.Image:
    """Read the header only."""
    kind = _kind(data)
    try:
        with warnings.catch_warnings():
            # Replaced by the limit below, before anything is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=(kind,))
    except Image.DecompressionBombError:
        raise _too_large("too many", max_pixels) from None
    except Exception:  # a decoder given garbage may raise anything
        raise _damaged(kind) from None
    size = f"{image.width}×{image.height}"
    if 0 in image.size:
        raise InputError(f"an image has no pixels ({size})")
    if _cost(image) > max_pixels:
        raise _too_large(size, max_pixels)
    if aspect(image) > max_aspect:
        raise TooLargeError(
            f"an image is too narrow ({size} pixels; the limit is {max_aspect}:1): crop it"
        )
    return image


def _cost(image: Image.Image) -> int:
    """Return the number of pixels to decode."""
    return image.width * image.height * _COSTS.get(image.format or "", 1)


def _decode(image: Image.Image) -> Image.Image:
    """Decode an image and reduce it if it is large."""
    kind = image.format or "image"
    try:
        image.draft(None, (SMALL_SIDE, SMALL_SIDE))
        image.load()
        return shrink(image, SMALL_SIDE)
    except Exception:  # as above
        raise _damaged(kind) from None


def _too_large(size: str, most: int) -> TooLargeError:
    return TooLargeError(
        f"an image is too large ({size} pixels; {max(most, 0):,} are left for this request): "
        "make it smaller first"
    )


def _damaged(kind: str) -> InputError:
    return InputError(f"a {kind} file is damaged or incomplete: save it again")


def read_pixels(
    rows: list[Any], shape: tuple[int, int, int]
) -> UInt8[Tensor, "channels height width"]:
    """Convert rows of 8-bit values, or of triples of them, of the model's image size."""
    channels, height, width = shape
    expected = (height, width) if channels == 1 else (height, width, channels)
    values: list[Any] = [rows]
    for size in expected:
        if not all(type(part) is list and len(part) == size for part in values):
            raise InputError(f"pixels of this model are {'×'.join(map(str, expected))} values")
        values = list(itertools.chain.from_iterable(values))
    try:
        # Booleans are integers to Python, but not pixels.
        stored = bytes(values) if set(map(type, values)) == {int} else None
    except ValueError:
        stored = None
    if stored is None:
        raise InputError("pixels are whole numbers from 0 to 255")
    array = np.frombuffer(stored, np.uint8).reshape(height, width, channels)
    return torch.from_numpy(array.transpose(2, 0, 1).copy())


def _kind(data: bytes) -> str:
    """Return the format; refuse animations, and files of two formats at once."""
    animated = False
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        kind, animated = "PNG", any(name == b"acTL" for name, _ in _png_chunks(data))
        end = next((at for name, at in _png_chunks(data) if name == b"IEND"), len(data))
    elif data.startswith(b"\xff\xd8\xff"):
        kind, end = "JPEG", _jpeg_end(data)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        kind, end = "WEBP", 8 + int.from_bytes(data[4:8], "little")
        # The second bit of the extended header marks an animation.
        animated = data[12:16] == b"VP8X" and len(data) > 20 and bool(data[20] & 2)
    elif data.startswith(b"BM"):
        kind, end = "BMP", int.from_bytes(data[2:6], "little")
    else:
        raise WrongTypeError("images must be PNG, JPEG, WebP or BMP files")
    # Phones append data of their own to JPEGs; nothing may follow a PNG.
    rest = data[max(end, 0) :].lower()
    if any(mark.lower() in rest for mark in _OTHER_KINDS) or (kind == "PNG" and rest):
        raise WrongTypeError(f"the file is a {kind} and more: save the image alone")
    if animated:
        raise WrongTypeError("the image is animated: save one frame of it")
    return kind


def _jpeg_end(data: bytes) -> int:
    """Return the position after the end marker, or of the last scan if there is none."""
    at, scan, scans = 2, 2, 0
    for _ in range(_MAX_SEGMENTS):
        marker = _MARKER.search(data, at)
        if (len(data) if marker is None else marker.start()) > at + _MAX_FILLING:
            raise _damaged("JPEG")
        if marker is None:
            return scan
        kind, at = marker[1][0], marker.end()
        if kind == 0xD9:
            return at
        if kind == 0x01 or 0xD0 <= kind <= 0xD8:
            continue
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
        if kind == 0xDA:
            scans += 1
            if scans > MAX_SCANS:
                break
            scan = at
            following = _NEXT_SEGMENT.search(data, at)
            at = len(data) if following is None else following.start()
    raise TooLargeError("a JPEG has too many parts: save it again without progressive scans")


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the name and the end of every chunk."""
    at = 8
    while at + 12 <= len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        at += 12 + length
        yield name, at
