"""Pictures of requests: told from their first bytes and header whether to decode them at all."""

import base64
import binascii
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

from ecinn.data.photographs import Photograph
from ecinn.errors import EcinnError, InputError
from ecinn.model import Model

SMALL_SIDE = 1024
"""Larger pictures are made smaller first: models read 28 or 64 pixels."""
_KINDS = "PNG, JPEG, WebP or BMP"
_OTHER_KINDS = (b"PK\x03\x04", b"PK\x05\x06", b"%PDF-", b"<svg", b"<html", b"<script", b"<?php")
"""What a file is too that has this after the picture's end."""
MOST_SCANS = 64
"""Of a JPEG: each is a pass over all pixels, however few bytes it has; ten are usual."""
_MOST_SEGMENTS = 10_000
_MOST_FILLING = 1000
_MARKER = re.compile(rb"\xff([^\x00\xff])")
_NEXT_SEGMENT = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


class TooLargeError(EcinnError):
    """More than this service decodes."""


class WrongTypeError(EcinnError):
    """Not a picture of a kind that is read."""


def decode_base64(text: str) -> bytes:
    """The bytes of base64, with or without a data URL's head."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("a picture is given as base64 of its file") from None


def read_pictures(files: Sequence[bytes], model: Model, most_pixels: int) -> list[Photograph]:
    """Files as the model reads them; none is decoded before the headers of all were checked."""
    pictures = []
    for data in files:
        picture = _open(data, most_pixels)
        pictures.append(picture)
        most_pixels -= picture.width * picture.height
    return [model.photograph(_decode(picture)) for picture in pictures]


def _open(data: bytes, most_pixels: int) -> Image.Image:
    """Its header alone."""
    kind = _kind(data)
    if _animated(data, kind):
        raise WrongTypeError("an animated picture was given: save one frame of it")
    try:
        with warnings.catch_warnings():
            # Our own limit speaks below, before anything is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=(kind,))
    except Image.DecompressionBombError:
        raise TooLargeError(_too_large("far too many", most_pixels)) from None
    except Exception:  # a decoder given garbage may raise anything
        raise _damaged(kind) from None
    _check_size(picture.width, picture.height, most_pixels)
    return picture


def _decode(picture: Image.Image) -> Image.Image:
    kind = picture.format or "picture"
    try:
        picture.draft(None, (SMALL_SIDE, SMALL_SIDE))
        picture.load()
        return _smaller(picture)
    except Exception:  # as above
        raise _damaged(kind) from None


def _damaged(kind: str) -> InputError:
    return InputError(f"a {kind} file is damaged or cut off: save it again")


def read_pixels(
    rows: list[Any], shape: tuple[int, int, int]
) -> UInt8[Tensor, "channels height width"]:
    """Rows of 8-bit values, or of three of them, at the model's own size."""
    channels, height, width = shape
    wanted = (height, width) if channels == 1 else (height, width, channels)
    values: list[Any] = [rows]
    for size in wanted:
        if not all(type(part) is list and len(part) == size for part in values):
            raise InputError(f"pixels of this model are {_times(wanted)} values")
        values = list(itertools.chain.from_iterable(values))
    try:
        # True is a number to Python, but no pixel.
        stored = bytes(values) if set(map(type, values)) == {int} else None
    except ValueError:
        stored = None
    if stored is None:
        raise InputError("pixels are whole numbers from 0 to 255")
    array = np.frombuffer(stored, np.uint8).reshape(height, width, channels)
    return torch.from_numpy(array.transpose(2, 0, 1).copy())


def _times(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def _kind(data: bytes) -> str:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        kind, end = "PNG", _png_end(data)
    elif data.startswith(b"\xff\xd8\xff"):
        kind, end = "JPEG", _jpeg_end(data)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        kind, end = "WEBP", 8 + int.from_bytes(data[4:8], "little")
    elif data.startswith(b"BM"):
        kind, end = "BMP", int.from_bytes(data[2:6], "little")
    else:
        raise WrongTypeError(f"pictures are {_KINDS} files")
    # Phones put things of their own behind a JPEG; nothing belongs behind the others.
    rest = data[max(end, 0) :]
    also = any(mark in rest.lower() for mark in (kind.lower() for kind in _OTHER_KINDS))
    if also or (kind == "PNG" and rest):
        raise WrongTypeError(f"a file that is a {kind} and more was given: save the picture alone")
    return kind


def _jpeg_end(data: bytes) -> int:
    """Behind the end marker a decoder comes to; where the last scan begins if there is none."""
    at, scan, scans = 2, 2, 0
    for _ in range(_MOST_SEGMENTS):
        marker = _MARKER.search(data, at)
        if (len(data) if marker is None else marker.start()) > at + _MOST_FILLING:
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
            if scans > MOST_SCANS:
                break
            scan = at
            following = _NEXT_SEGMENT.search(data, at)
            at = len(data) if following is None else following.start()
    raise TooLargeError("a JPEG has far too many parts: save it again without progressive scans")


def _png_end(data: bytes) -> int:
    return next((at for name, at in _png_chunks(data) if name == b"IEND"), len(data))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Name of every chunk and where it ends."""
    at = 8
    while at + 12 <= len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        at += 12 + length
        yield name, at


def _animated(data: bytes, kind: str) -> bool:
    if kind == "PNG":
        return any(name == b"acTL" for name, _ in _png_chunks(data))
    # In WebP's extended header the second bit says so.
    return kind == "WEBP" and data[12:16] == b"VP8X" and len(data) > 20 and bool(data[20] & 2)


def _check_size(width: int, height: int, most: int) -> None:
    if 0 in (width, height):
        raise InputError(f"a picture has no pixels ({width}×{height})")
    if width * height > most:
        raise TooLargeError(_too_large(f"{width}×{height}", most))


def _too_large(size: str, most: int) -> str:
    return (
        f"a picture is too large ({size} pixels; {max(most, 0):,} are left of what a request may "
        "have): make it smaller first"
    )


def _smaller(picture: Image.Image) -> Image.Image:
    factor = max(picture.size) // SMALL_SIDE
    fits = factor < 2 or picture.mode not in ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr")
    if fits or min(picture.size) < factor:
        return picture
    return picture.reduce(factor)
