"""Draw images, curves and films from arrays, numbers and names; knows no networks."""

import base64
import io
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

INK = (28, 32, 38)
MUTED = (98, 106, 116)
WARNING = (168, 66, 0)
FRAME = (205, 210, 216)
OTHERS = (176, 182, 190)
PAPER = (255, 255, 255)
TILE = 112
"""Side of an image in a sheet: four times that of a digit."""
ADDED = np.array([178, 24, 43])
"""Red: lighter."""
REMOVED = np.array([33, 102, 172])
"""Blue: darker. The pair is safe for all common forms of colour blindness."""

PERCENTILE = 99.5
"""Percentile of a map drawn in full colour: all but four pixels of a digit, twenty of a face."""

SMALL = 3 * 32 * 32
"""Largest number of values that are compressed without a row filter: a digit in colour."""

Array = NDArray[np.uint8]


def image_array(pixels: Tensor) -> Array:
    """Convert an 8-bit (channels, height, width) tensor to height × width × 3."""
    array = pixels.detach().cpu().numpy()
    return np.ascontiguousarray(np.broadcast_to(array.transpose(1, 2, 0), (*array.shape[1:], 3)))


def heatmap_array(heatmap: Tensor, limit: float | None = None) -> Array:
    """Colour a signed (channels, height, width) map on a symmetric scale with white at zero.

    Args:
        limit: the value drawn in full colour; by default the largest of the map.
    """
    values = heatmap.detach().float().mean(0).cpu().numpy()
    limit = limit or float(np.abs(values).max()) or 1.0
    strength = np.minimum(np.abs(values) / limit, 1)[..., None]
    towards = np.where(values[..., None] > 0, ADDED - 255, REMOVED - 255)
    coloured: Array = (255 + strength * towards).round().astype(np.uint8)
    return coloured


def robust_limit(heatmap: Tensor, percentile: float = PERCENTILE) -> float:
    """Return a percentile of |mean over channels|, so that a few extreme pixels do not dominate.

    The mean over channels is drawn. It hides changes of hue, which the counterfactual shows.
    """
    values = heatmap.detach().double().mean(0).abs().cpu().numpy()
    # A map that is zero nearly everywhere has a percentile of 0: use its largest value.
    return float(np.percentile(values, percentile)) or float(values.max()) or 1.0


def to_image(array: Array) -> Image.Image:
    """Convert an array to a picture, greyscale if all three channels agree."""
    grey = bool((array == array[..., :1]).all())
    return Image.fromarray(np.ascontiguousarray(array[..., 0]) if grey else array)


def png_bytes(picture: Image.Image) -> bytes:
    """Encode a picture as PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def figure_png(figure: Any) -> bytes:  # noqa: ANN401
    """Encode a figure of matplotlib as PNG, without matplotlib's version."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def data_url(array: Array) -> str:
    """Encode an image as the URL of a PNG, for HTML and JSON."""
    return f"data:image/png;base64,{base64.b64encode(quick_png(array)).decode()}"


def quick_png(array: Array) -> bytes:
    """Encode an image of height × width × 3 as PNG, greyscale if all three channels agree.

    Four times as fast as Pillow for digits. Photographs compress better as differences of rows.
    """
    grey = bool((array == array[..., :1]).all())
    rows = array[..., : 1 if grey else 3].reshape(len(array), -1)
    filtered = np.zeros((len(rows), 1 + rows.shape[1]), np.uint8)
    filtered[:, 1:] = rows
    if rows.size > SMALL:
        filtered[:, 0] = 2  # the filter "up" of every row
        filtered[1:, 1:] -= rows[:-1]
    head = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 8, 0 if grey else 2, 0, 0, 0)
    data = zlib.compress(filtered.tobytes(), 3)
    chunks = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + (named := name + content)
        + struct.pack(">I", zlib.crc32(named))
        for name, content in chunks
    )


def webp_bytes(picture: Image.Image, quality: int = 90) -> bytes:
    """Encode a picture as WebP: about a fifth of the size of a PNG for photographs."""
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=quality, method=6)
    return buffer.getvalue()


def percent(share: float) -> str:
    """Format a probability, without rounding up to 100 % or down to 0 %."""
    if share > 0.9995:
        return "> 99.9 %"
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def below_each_other(pictures: Sequence[Image.Image]) -> Image.Image:
    """Stack pictures vertically."""
    size = (max(p.width for p in pictures), sum(p.height for p in pictures))
    whole = Image.new("RGB", size, PAPER)
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    return whole


def tile_for(side: int) -> int:
    """Return a multiple of an image's side that is large enough to see."""
    return side * max(1, math.ceil(TILE / side))


@dataclass(frozen=True)
class Curves:
    """Probabilities of all classes over α, two of them highlighted."""

    title: str
    x: NDArray[np.floating]
    y: NDArray[np.floating]
    """One row per curve, between 0 and 1."""
    names: tuple[str, ...]
    first: int
    second: int


def draw_curves(
    curves: Curves, marked: int | None = None, size: tuple[int, int] = (448, 240)
) -> Image.Image:
    """Plot the curves over α: the two classes in colour, the others in grey."""
    # Drawn at twice the size, because Pillow does not anti-alias lines.
    width, height = 2 * size[0], 2 * size[1]
    small = font(26)
    left, right, top, bottom = 88, width - 36, 68, height - 68
    canvas = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(canvas)
    low, span = float(curves.x.min()), float(np.ptp(curves.x)) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * (x - low) / span, bottom + (top - bottom) * y

    for share in (0.0, 0.5, 1.0):
        across = place(low, share)[1]
        pen.line((left, across, right, across), FRAME, 2)
        pen.text((left - 12, across), f"{100 * share:.0f} %", MUTED, small, anchor="rm")
    others = [k for k in range(len(curves.names)) if k not in (curves.first, curves.second)]
    for k in (*others, curves.first, curves.second):
        points = [place(float(x), float(y)) for x, y in zip(curves.x, curves.y[k], strict=True)]
        colour = {curves.first: tuple(REMOVED), curves.second: tuple(ADDED)}.get(k, OTHERS)
        pen.line(points, colour, 6 if k not in others else 4, joint="curve")
    start = float(left)
    named = [(curves.names[curves.first], REMOVED), (curves.names[curves.second], ADDED)]
    for name, ink in [*named, ("others", np.array(OTHERS))][: 3 if others else 2]:
        pen.line((start, 34, start + 36, 34), tuple(ink), 6)
        pen.text((start + 48, 34), name, INK, small, anchor="lm")
        start += 100 + small.getlength(name)
    for x in (curves.x[0], curves.x[-1]):
        pen.text((place(float(x), 0.0)[0], bottom + 12), f"{x:.2f}", MUTED, small, anchor="ma")
    pen.text(((left + right) / 2, bottom + 12), "alpha", MUTED, small, anchor="ma")
    if marked is not None:
        across = place(float(curves.x[marked]), 0.0)[0]
        pen.line((across, top, across, bottom), INK, 3)
    return canvas.resize(size, Image.Resampling.LANCZOS)


def film_frame(array: Array, curves: Curves, step: int) -> Image.Image:
    """Draw one frame: the image above the plot, with a mark at the current step."""
    plot = draw_curves(curves, step)
    side = 280
    canvas = Image.new("RGB", (plot.width, side + 24 + plot.height), PAPER)
    canvas.paste(enlarge(array, side), ((plot.width - side) // 2, 12))
    canvas.paste(plot, (0, side + 24))
    return canvas


def film_bytes(frames: Sequence[Image.Image], kind: str, seconds: float = 2.5) -> bytes:
    """Encode the frames, forwards and backwards, as an endless GIF or WebP."""
    buffer = io.BytesIO()
    forth_and_back = [*frames, *frames[-2:0:-1]]
    duration = max(20, round(1000 * seconds / len(frames)))
    durations = [duration] * len(forth_and_back)
    durations[0] = durations[len(frames) - 1] = 900  # pause at both ends
    first, *others = forth_and_back
    first.save(buffer, kind, save_all=True, append_images=others, duration=durations, loop=0)
    return buffer.getvalue()


def enlarge(array: Array, tile: int) -> Image.Image:
    """Fit an image into a square: small ones keep sharp pixels, larger ones are resampled."""
    image = Image.fromarray(array)
    longest = max(image.size)
    method = Image.Resampling.NEAREST if longest <= tile else Image.Resampling.LANCZOS
    width, height = (max(1, round(side * tile / longest)) for side in image.size)
    square = Image.new("RGB", (tile, tile), PAPER)
    square.paste(
        image.resize((width, height), method), ((tile - width) // 2, (tile - height) // 2)
    )
    return square


def font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font of all pictures."""
    loaded = ImageFont.load_default(size)
    assert isinstance(loaded, ImageFont.FreeTypeFont)  # Pillow bundles one with FreeType
    return loaded
