"""Grids of images with row names, column headings and captions, as one picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from ecinn.drawing import pictures

_LINE = 18
_MARGIN = 18
_NAMES_WIDTH = 134
"""Least width of the row names, so that similar grids line up."""


@dataclass(frozen=True)
class Panel:
    """One image and the caption below it."""

    array: pictures.Array
    caption: str = ""
    warning: bool = False
    """Print the caption in the warning colour."""


@dataclass(frozen=True)
class Grid:
    """Rows of panels under a title."""

    rows: tuple[tuple[Panel, ...], ...]
    title: str = ""
    caution: str = ""
    """A sentence below the title, in the warning colour."""
    names: tuple[tuple[str, str], ...] = ()
    """A name and a remark to the left of each row."""
    headings: tuple[str, ...] = ()
    """Above each column."""


def draw(grid: Grid, tile: int = pictures.TILE) -> Image.Image:
    """Draw the grid with every image enlarged to a square of `tile` pixels.

    Letters keep their size: a larger tile shows more of the image, not larger words.
    """
    gap = tile // 10
    small, normal, large = (pictures.font(size) for size in (12, 15, 18))
    captions = [panel.caption for row in grid.rows for panel in row]
    lines = max((caption.count("\n") + 1 for caption in captions), default=1)
    remarks = _widest([remark for _, remark in grid.names], small)
    names_width = max(_NAMES_WIDTH, remarks + gap) if grid.names else 0
    column_width = max(tile, _widest(captions, small))
    pitch_x, pitch_y = column_width + gap, tile + int(1.2 * _LINE) + (lines - 1) * 15 + gap
    columns = max((len(row) for row in grid.rows), default=0)
    inside = max(
        names_width + columns * pitch_x - gap, int(large.getlength(grid.title)) + bool(grid.title)
    )
    caution = _wrapped(grid.caution, small, inside)
    headings = ["\n".join(_wrapped(heading, small, column_width)) for heading in grid.headings]
    header = 36 + _LINE * len(caution) if grid.title or caution else 0
    header += 15 * max((heading.count("\n") + 1 for heading in headings), default=0)
    height = 2 * _MARGIN + header + len(grid.rows) * pitch_y - gap
    canvas = Image.new("RGB", (2 * _MARGIN + inside, height), pictures.PAPER)
    pen = ImageDraw.Draw(canvas)
    pen.text((_MARGIN, _MARGIN), grid.title, pictures.INK, large)
    for number, words in enumerate(caution):
        pen.text((_MARGIN, _MARGIN + (1.5 + number) * _LINE), words, pictures.WARNING, small)
    tops = [_MARGIN + header + row * pitch_y for row in range(len(grid.rows))]
    lefts = [
        _MARGIN + names_width + column * pitch_x + (column_width - tile) // 2
        for column in range(columns)
    ]
    for top, (name, remark) in zip(tops, grid.names, strict=False):
        pen.text((_MARGIN, top + tile // 2 - _LINE), name, pictures.INK, normal)
        pen.multiline_text((_MARGIN, top + tile // 2 + 2), remark, pictures.MUTED, small)
    for left, heading in zip(lefts, headings, strict=False):
        at = (left + tile // 2, _MARGIN + header - 4)
        pen.multiline_text(at, heading, pictures.INK, small, anchor="md", align="center")
    for top, row in zip(tops, grid.rows, strict=True):
        for left, panel in zip(lefts, row, strict=False):
            canvas.paste(pictures.enlarge(panel.array, tile), (left, top))
            pen.rectangle((left, top, left + tile - 1, top + tile - 1), outline=pictures.FRAME)
            colour = pictures.WARNING if panel.warning else pictures.INK
            at = (left + tile // 2, top + tile + 4)
            pen.multiline_text(at, panel.caption, colour, small, anchor="ma", align="center")
    return canvas


def _widest(texts: Sequence[str], letters: ImageFont.FreeTypeFont) -> int:
    lines = [line for text in texts for line in text.splitlines()]
    return int(max((letters.getlength(line) for line in lines), default=0.0))


def _wrapped(text: str, letters: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break a sentence into lines that fit; a single word is never broken."""
    lines: list[str] = []
    for word in text.split():
        if lines and letters.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
