"""Draw heatmaps: over their images, side by side, with a colour bar; knows no networks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from ecinn.drawing.grid import Grid, Panel, draw
from ecinn.drawing.pictures import (
    FRAME,
    INK,
    MUTED,
    PAPER,
    PERCENTILE,
    Array,
    font,
    heatmap_array,
    image_array,
    robust_limit,
)
from ecinn.errors import InputError

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
) -> Array:
    """Lay a map over its image: pale grey where the map is zero, coloured where it is strong.

    Args:
        limit: the value drawn in full colour; by default `robust_limit` of the map.
    """
    limit = limit or robust_limit(heatmap)
    values = heatmap.detach().float().mean(0).cpu().numpy()[..., None]
    bare = 1 - np.clip(np.abs(values) / limit, 0, 1)
    grey = np.asarray(Image.fromarray(image_array(image)).convert("L"), float)[..., None]
    # Pale, because both colours are dark and would be lost on black.
    shade = 0.4 * (255 - grey)
    mixed: Array = (heatmap_array(heatmap, limit) - bare * shade).round().astype(np.uint8)
    return mixed


def colour_bar(
    signs: Signs, width: int = 144, height: int = 14, words: int | None = None
) -> Image.Image:
    """Draw the scale from blue over white to red, with a word at each end.

    Args:
        words: width reserved for the first word, so that stacked bars line up.
    """
    letters, gap = font(height), height // 2
    low, high = (int(letters.getlength(word)) + 1 for word in signs)
    left = max(low, words or 0) + gap
    canvas = Image.new("RGB", (left + width + gap + high, int(1.7 * height)), PAPER)
    middle = canvas.height // 2
    top = middle - height // 2
    ramp = torch.linspace(-1, 1, width).expand(1, height, width)
    canvas.paste(Image.fromarray(heatmap_array(ramp, 1.0)), (left, top))
    pen = ImageDraw.Draw(canvas)
    pen.rectangle((left, top, left + width - 1, top + height - 1), outline=FRAME)
    pen.text((left - gap, middle), signs[0], INK, letters, anchor="rm")
    pen.text((left + width + gap, middle), signs[1], INK, letters, anchor="lm")
    return canvas


def heatmap_sheet(
    images: UInt8[Tensor, "batch channels height width"],
    counterfactuals: UInt8[Tensor, "batch channels height width"],
    columns: Sequence[HeatmapColumn],
    classes: Sequence[tuple[str, str]],
    *,
    title: str = "",
    percentile: float = PERCENTILE,
    overlay: bool = False,
    tile: int = 112,
) -> Image.Image:
    """Draw a row per image: image, counterfactual, and every method's map on its own scale.

    Args:
        classes: names of p and q of every image.
        overlay: draw the maps over the images.
        tile: side of a drawn image, in pixels.
    """
    _check(images, counterfactuals, columns, classes)

    def drawn(row: int, column: HeatmapColumn) -> Array:
        limit = robust_limit(column.maps[row], percentile)
        if overlay:
            return overlay_array(images[row], column.maps[row], limit)
        return heatmap_array(column.maps[row], limit)

    def panels(row: int) -> tuple[Panel, ...]:
        p, q = classes[row]
        maps = []
        for column in columns:
            remark = column.remarks[row] if column.remarks else ""
            warning = bool(column.warnings and column.warnings[row])
            maps.append(Panel(drawn(row, column), remark, warning))
        images_of_row = (image_array(images[row]), image_array(counterfactuals[row]))
        return (Panel(images_of_row[0], p), Panel(images_of_row[1], q), *maps)

    grid = Grid(
        tuple(panels(row) for row in range(len(images))),
        title,
        headings=("image", "counterfactual", *(column.name for column in columns)),
    )
    return _with_legend(draw(grid, tile), columns, percentile)


def _with_legend(
    body: Image.Image,
    columns: Sequence[HeatmapColumn],
    percentile: float,
    margin: int = 18,
    line: int = 18,
) -> Image.Image:
    """Add a colour bar for each group of columns whose colours mean the same."""
    named: dict[Signs, list[str]] = {}
    for column in columns:
        named.setdefault(column.signs, []).append(column.name)
    small = font(int(0.72 * line))
    words = int(max([small.getlength(low) for low, _ in named], default=0)) + 1
    bars = [
        (f"{', '.join(names)}:", colour_bar(signs, 8 * line, int(0.72 * line), words))
        for signs, names in named.items()
    ]
    note = (
        f"Each map has its own scale: full colour at its {percentile:g}th percentile and beyond; "
        "zero has none."
    )
    indent = int(max([small.getlength(names) for names, _ in bars], default=0)) + line
    widths = [indent + bar.width for _, bar in bars] + [int(small.getlength(note))]
    height = body.height + int(1.6 * line) * (len(bars) + 1) + margin
    whole = Image.new("RGB", (max(body.width, 2 * margin + max(widths)), height), PAPER)
    whole.paste(body, (0, 0))
    pen = ImageDraw.Draw(whole)
    top = body.height
    for names, bar in bars:
        pen.text((margin, top + bar.height // 2), names, MUTED, small, anchor="lm")
        whole.paste(bar, (margin + indent, top))
        top += int(1.6 * line)
    pen.text((margin, top), note, MUTED, small)
    return whole


def _check(
    images: Tensor,
    counterfactuals: Tensor,
    columns: Sequence[HeatmapColumn],
    classes: Sequence[tuple[str, str]],
) -> None:
    rows = len(images)
    if counterfactuals.shape != images.shape or len(classes) != rows:
        raise InputError(f"{rows} images need as many counterfactuals of their shape, and classes")
    for column in columns:
        if len(column.maps) != rows or column.maps.shape[-2:] != images.shape[-2:]:
            raise InputError(f"{column.name}: one map of every image, of its height and width")
        if len(column.remarks) not in (0, rows) or len(column.warnings) not in (0, rows):
            raise InputError(f"{column.name}: a remark for every image, or none")
