"""Draw heatmaps: over their images, side by side, with a colour bar; knows no networks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from ecinn.drawing import pictures
from ecinn.drawing.grid import Grid, Panel, draw

Signs = tuple[str, str]
"""The meanings of blue and of red."""


@dataclass(frozen=True)
class HeatmapColumn:
    """The maps of one method for all images."""

    name: str
    maps: Float[Tensor, "batch channels height width"]
    signs: Signs
    remarks: tuple[str, ...] = ()
    """Captions below the maps."""
    warnings: tuple[bool, ...] = ()
    """Captions that are warnings."""


def overlay_array(
    image: UInt8[Tensor, "channels height width"],
    heatmap: Float[Tensor, "channels height width"],
    limit: float | None = None,
) -> pictures.Array:
    """Lay a map over its image: pale grey where the map is zero, coloured where it is strong.

    Args:
        limit: the value drawn in full colour; by default `robust_limit` of the map.
    """
    limit = limit or pictures.robust_limit(heatmap)
    values = heatmap.detach().float().mean(0).cpu().numpy()[..., None]
    bare = 1 - np.clip(np.abs(values) / limit, 0, 1)
    if len(image) == 1:
        grey = image[0].cpu().numpy()[..., None].astype(float)
    else:
        luminance = Image.fromarray(pictures.image_array(image)).convert("L")
        grey = np.asarray(luminance, float)[..., None]
    # Pale, because both colours are dark and would be lost on black.
    shade = 0.4 * (255 - grey)
    mixed = pictures.heatmap_array(heatmap, limit) - bare * shade
    overlay: pictures.Array = mixed.round().astype(np.uint8)
    return overlay


def colour_bar(signs: Signs, width: int = 144, height: int = 14, words: int = 0) -> Image.Image:
    """Draw the scale from blue over white to red, with a word at each end.

    Args:
        words: width reserved for the first word, so that stacked bars line up.
    """
    letters, gap = pictures.font(height), height // 2
    low, high = (int(letters.getlength(word)) + 1 for word in signs)
    left = max(low, words) + gap
    canvas = Image.new("RGB", (left + width + gap + high, int(1.7 * height)), pictures.PAPER)
    middle = canvas.height // 2
    top = middle - height // 2
    ramp = torch.linspace(-1, 1, width).expand(1, height, width)
    canvas.paste(Image.fromarray(pictures.heatmap_array(ramp, 1.0)), (left, top))
    pen = ImageDraw.Draw(canvas)
    pen.rectangle((left, top, left + width - 1, top + height - 1), outline=pictures.FRAME)
    pen.text((left - gap, middle), signs[0], pictures.INK, letters, anchor="rm")
    pen.text((left + width + gap, middle), signs[1], pictures.INK, letters, anchor="lm")
    return canvas


def heatmap_sheet(
    images: UInt8[Tensor, "batch channels height width"],
    counterfactuals: UInt8[Tensor, "batch channels height width"],
    columns: Sequence[HeatmapColumn],
    classes: Sequence[tuple[str, str]],
    *,
    title: str = "",
    tile: int = pictures.TILE,
) -> Image.Image:
    """Draw a row per image: image, counterfactual, and every method's map on its own scale.

    Args:
        classes: names of p and q of every image.
        tile: side of a drawn image, in pixels.
    """
    rows = []
    for row, (p, q) in enumerate(classes):
        shown = ((images[row], p), (counterfactuals[row], q))
        panels = [Panel(pictures.image_array(image), name) for image, name in shown]
        for column in columns:
            limit = pictures.robust_limit(column.maps[row])
            array = pictures.heatmap_array(column.maps[row], limit)
            remark = column.remarks[row] if column.remarks else ""
            panels.append(Panel(array, remark, bool(column.warnings and column.warnings[row])))
        rows.append(tuple(panels))
    headings = ("image", "counterfactual", *(column.name for column in columns))
    return _with_legend(draw(Grid(tuple(rows), title, headings=headings), tile), columns)


def _with_legend(body: Image.Image, columns: Sequence[HeatmapColumn]) -> Image.Image:
    """Add a colour bar for each group of columns whose colours mean the same."""
    margin, line, letters = 18, 18, 12
    named: dict[Signs, list[str]] = {}
    for column in columns:
        named.setdefault(column.signs, []).append(column.name)
    small = pictures.font(letters)
    words = int(max([small.getlength(low) for low, _ in named], default=0)) + 1
    bars = [
        (f"{', '.join(names)}:", colour_bar(signs, 8 * line, letters, words))
        for signs, names in named.items()
    ]
    full = f"full colour at its {pictures.PERCENTILE:g}th percentile and beyond"
    note = f"Each map has its own scale: {full}; zero has none."
    indent = int(max([small.getlength(names) for names, _ in bars], default=0)) + line
    widths = [indent + bar.width for _, bar in bars] + [int(small.getlength(note))]
    pitch = int(1.6 * line)
    height = body.height + pitch * (len(bars) + 1) + margin
    whole = Image.new("RGB", (max(body.width, 2 * margin + max(widths)), height), pictures.PAPER)
    whole.paste(body, (0, 0))
    pen = ImageDraw.Draw(whole)
    for number, (names, bar) in enumerate(bars):
        top = body.height + number * pitch
        pen.text((margin, top + bar.height // 2), names, pictures.MUTED, small, anchor="lm")
        whole.paste(bar, (margin + indent, top))
    pen.text((margin, body.height + len(bars) * pitch), note, pictures.MUTED, small)
    return whole
