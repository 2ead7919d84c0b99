"""Draw figures with one look: fonts, colours, pages in inches, and grids of images."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

from ecinn.drawing.pictures import Array
from ecinn.drawing.words import read_toml

COLUMN, TEXT = 3.25, 6.875
"""Widths in inches of a column and of the whole page in the paper (ICCV's two columns)."""
SETTINGS: Any = read_toml(Path(__file__).with_name("style.toml"))
DPI = int(SETTINGS["figure.dpi"])
SMALL, NORMAL, LARGE = (
    float(SETTINGS[key]) for key in ("legend.fontsize", "font.size", "axes.titlesize")
)
"""Font sizes in points; the first is the smallest on a printed page."""

INK, MUTED, FRAME = SETTINGS["text.color"], SETTINGS["xtick.color"], "#c4c9cf"
# Okabe and Ito: distinguishable with every common colour blindness.
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
WARNING = VERMILION
"""The colour of outcomes that were not asked for."""


@contextmanager
def styled() -> Iterator[None]:
    """Apply this look to everything drawn inside, and restore the settings afterwards."""
    with mpl.rc_context(SETTINGS):
        yield


def page(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty page of at least this size; its axes measure inches from the top left.

    Its sides are whole numbers of printed pixels, so that the pixels of an image can be, too.
    """
    width, height = (math.ceil(round(side * DPI, 3)) / DPI for side in (width, height))
    with styled():
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0), autoscale_on=False)
    return figure, axes


def whole_pixels(inches: float) -> float:
    """Round a length to a whole number of printed pixels."""
    return round(inches * DPI) / DPI


def enlarged(pixels: int, times: int) -> float:
    """Convert image pixels to inches when each is `times` printed pixels wide."""
    return pixels * times / DPI


def place(axes: Axes, array: Array, left: float, top: float, times: int) -> tuple[float, float]:
    """Draw an image with pixels of `times` printed pixels; return its right and bottom edge.

    It starts at a whole printed pixel, so that all squares have the same size on a screen, too.
    """
    height, width = array.shape[:2]
    left, top = whole_pixels(left), whole_pixels(top)
    right, bottom = left + enlarged(width, times), top + enlarged(height, times)
    extent = (left, right, bottom, top)
    with styled():
        axes.imshow(array, extent=extent, aspect="auto", interpolation_stage="data", zorder=2)
    look: dict[str, Any] = {"fill": False, "edgecolor": FRAME, "linewidth": 0.4, "zorder": 3}
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, **look))
    return right, bottom


def write(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:  # noqa: ANN401
    """Write text on a page, by default small and centred below the point."""
    default: dict[str, Any] = {"fontsize": SMALL, "ha": "center", "va": "top", "linespacing": 1.05}
    with styled():
        axes.text(x, y, text, zorder=8, **(default | look))


def text_width(text: str, size: float) -> float:
    """Measure the width of a line of text, in inches."""
    font = FontProperties(family=SETTINGS["font.family"], math_fontfamily="stix")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) / 72


def share(probability: float) -> str:
    """Format a probability in few characters; never as 1 if it is not certain.

    >>> share(0.25), share(0.9999), share(0.0002)
    ('.25', '>.99', '<.01')
    """
    if probability > 0.99:
        return ">.99"
    if probability < 0.01:
        return "<.01"
    return f"{probability:.2f}".removeprefix("0")


def pdf_bytes(figures: Figure | Sequence[Figure]) -> bytes:
    """Write a vector PDF with a page per figure; the same figures give the same bytes."""
    pages = [figures] if isinstance(figures, Figure) else figures
    buffer = io.BytesIO()
    # Without date and version the bytes depend only on the drawing.
    silent = dict.fromkeys(("CreationDate", "Creator", "Producer"))
    with styled(), PdfPages(buffer, metadata=silent) as document:
        for figure in pages:
            document.savefig(figure)
    return buffer.getvalue()


def png_bytes(figure: Figure) -> bytes:
    """Write a PNG for the screen."""
    buffer = io.BytesIO()
    look: dict[str, Any] = {"metadata": {"Software": None}, "pil_kwargs": {"optimize": True}}
    with styled():
        figure.savefig(buffer, format="png", dpi=DPI, **look)
    return buffer.getvalue()


_GAP, _WIDE_GAP, _LEAST_GAP = 0.045, 0.07, 0.01
_MAGNIFIED_GAP = 0.02
_LINE = SMALL * 1.12 / 72
_HEADING = 0.16
_MARGIN = 0.03


@dataclass(frozen=True)
class Panel:
    """An image with a caption below it and, to its left, a magnified part of it."""

    array: Array
    caption: str = ""
    warning: bool = False
    magnified: Array | None = None

    def magnification(self, times: int) -> int:
        """Printed pixels per magnified pixel, so that the part is as tall as the image."""
        assert self.magnified is not None
        return int(self.array.shape[0] * times // self.magnified.shape[0])

    def size(self, times: int) -> tuple[float, float]:
        """Width and height of the image together with its magnified part."""
        height, width = self.array.shape[:2]
        side = 0.0
        if self.magnified is not None:
            side = enlarged(self.magnified.shape[1], self.magnification(times)) + _MAGNIFIED_GAP
        return side + enlarged(width, times), enlarged(height, times)

    def draw(self, axes: Axes, times: int, left: float, top: float) -> None:
        """Draw it with its top left corner at this point."""
        width = enlarged(self.array.shape[1], times)
        image_left = left + self.size(times)[0] - width
        _, bottom = place(axes, self.array, image_left, top, times)
        if self.magnified is not None:
            place(axes, self.magnified, left, top, self.magnification(times))
        colour = WARNING if self.warning else INK
        write(axes, image_left + width / 2, bottom + 0.02, self.caption, color=colour)


@dataclass(frozen=True)
class Grid:
    """Panels in rows and columns, with names to the left of rows and headings above columns."""

    rows: tuple[tuple[Panel, ...], ...]
    names: tuple[str, ...] = ()
    headings: tuple[str, ...] = ()


def draw_grid(grid: Grid, times: int = 3) -> Figure:
    """Draw a grid as a figure, with `times` printed pixels per pixel of an image."""
    width, height, draw = _lay_out(grid, times)
    figure, axes = page(width, height)
    draw(axes, 0.0, 0.0)
    return figure


def draw_grids(grids: Sequence[Grid], title: str, times: int = 3) -> Figure:
    """Draw grids below each other under a title, as one page of a book."""
    layouts = [_lay_out(grid, times) for grid in grids]
    top, between = 0.42, 0.12
    page_width = max(TEXT, *(width for width, _, _ in layouts))
    figure, axes = page(page_width, top + sum(height + between for _, height, _ in layouts))
    write(axes, page_width / 2, 0.16, title, fontsize=LARGE)
    for width, height, draw in layouts:
        draw(axes, (page_width - width) / 2, top)
        top += height + between
    return figure


def _lay_out(grid: Grid, times: int) -> tuple[float, float, Callable[[Axes, float, float], None]]:
    """Return width and height in inches, and a function that draws the grid at a point."""
    panels = [panel for row in grid.rows for panel in row]
    lines = [line for name in grid.names for line in name.splitlines()]
    names_width = max(text_width(line, NORMAL) for line in lines) + 0.07 if lines else 0.0
    panel_width = max(panel.size(times)[0] for panel in panels)
    columns = max(len(row) for row in grid.rows)
    # A wider gap shows that a magnified strip belongs to the image on its right. Gaps shrink
    # where the columns would not fit on the page otherwise.
    usual = _GAP if all(panel.magnified is None for panel in panels) else _WIDE_GAP
    left_over = TEXT - 2 * _MARGIN - names_width - columns * panel_width
    gap = min(usual, max(_LEAST_GAP, left_over / max(1, columns - 1)))
    pitch, heading_height = panel_width + gap, _HEADING if grid.headings else 0.0
    image_heights = [max(panel.size(times)[1] for panel in row) for row in grid.rows]
    row_heights = []
    for row, images in zip(grid.rows, image_heights, strict=True):
        caption = max(len(panel.caption.splitlines()) for panel in row)
        row_heights.append(images + caption * _LINE + (0.03 if caption else 0.0) + _GAP)
    width = names_width + (columns * pitch - gap) + 2 * _MARGIN
    height = sum(row_heights) - _GAP + heading_height + 2 * _MARGIN

    def draw(axes: Axes, left: float, top: float) -> None:
        left, top = left + _MARGIN, top + _MARGIN
        start = left + names_width
        for number, heading in enumerate(grid.headings):
            middle = start + number * pitch + panel_width / 2
            write(axes, middle, top + NORMAL / 72, heading, fontsize=NORMAL, va="baseline")
        top += heading_height
        for number, row in enumerate(grid.rows):
            if grid.names:
                middle = top + image_heights[number] / 2
                look = {"ha": "left", "fontsize": NORMAL, "va": "center"}
                write(axes, left, middle, grid.names[number], **look)
            for column, panel in enumerate(row):
                panel.draw(axes, times, start + column * pitch, top)
            top += row_heights[number]

    return width, height, draw
