"""Draw figures with one look: fonts, colours, pages in inches, and grids of images."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

from ecinn.drawing.pictures import Array

COLUMN, TEXT = 3.25, 6.875
"""Widths in inches of a column and of the whole page in the paper (ICCV's two columns)."""
DPI = 300
SMALL, NORMAL, LARGE = 6.0, 7.0, 8.0
"""Font sizes in points; the first is the smallest on a printed page."""

# Okabe and Ito: distinguishable with every common colour blindness.
INK, MUTED, FRAME = "#1c2026", "#626a74", "#c4c9cf"
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
WARNING = VERMILION
"""The colour of outcomes that were not asked for."""

CLEAR: Mapping[str, Any] = MappingProxyType(
    {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
)
"""The `bbox` of text over points and lines."""

SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        # Times, like the paper, from the fonts that come with matplotlib.
        "font.family": ["STIXGeneral"],
        "mathtext.fontset": "stix",
        "font.size": NORMAL,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.labelsize": NORMAL,
        "axes.titlesize": LARGE,
        "axes.linewidth": 0.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "xtick.major.width": 0.5,
        "ytick.major.width": 0.5,
        "xtick.major.size": 2.0,
        "ytick.major.size": 2.0,
        "lines.linewidth": 1.0,
        "lines.markersize": 4.0,
        "legend.fontsize": SMALL,
        "legend.frameon": False,
        # Pixels stay squares: every image is embedded as it is and never smoothed.
        "image.interpolation": "none",
        "image.composite_image": False,
        "pdf.fonttype": 42,
        "savefig.dpi": DPI,
        "figure.dpi": DPI,
    }
)


@contextmanager
def styled() -> Iterator[None]:
    """Apply this look to everything drawn inside, and restore the settings afterwards."""
    settings: Any = dict(SETTINGS)  # the type of its keys differs between versions of matplotlib
    with mpl.rc_context(settings):
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
    with styled():
        axes.imshow(
            array,
            extent=(left, right, bottom, top),
            aspect="auto",
            interpolation="none",
            interpolation_stage="data",
            zorder=2,
        )
    box = Rectangle(
        (left, top), right - left, bottom - top, fill=False, edgecolor=FRAME, linewidth=0.4
    )
    axes.add_patch(box).set_zorder(3)
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
    with styled():
        figure.savefig(
            buffer,
            format="png",
            dpi=DPI,
            metadata={"Software": None},
            pil_kwargs={"optimize": True},
        )
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
    """Draw a grid as a figure, as wide as it needs to be.

    Args:
        times: printed pixels, 300 to the inch, per pixel of an image.
    """
    layout = _Layout(grid, times)
    figure, axes = page(layout.width, layout.height)
    layout.draw(axes, 0.0, 0.0)
    return figure


def draw_grids(grids: Sequence[Grid], title: str, times: int = 3) -> Figure:
    """Draw grids below each other under a title, as one page of a book."""
    layouts = [_Layout(grid, times) for grid in grids]
    top, between = 0.42, 0.12
    width = max(TEXT, *(layout.width for layout in layouts))
    height = top + sum(layout.height + between for layout in layouts)
    figure, axes = page(width, height)
    write(axes, width / 2, 0.16, title, fontsize=LARGE)
    for layout in layouts:
        layout.draw(axes, (width - layout.width) / 2, top)
        top += layout.height + between
    return figure


@dataclass(frozen=True)
class _Layout:
    """The sizes of a grid on a page, in inches."""

    grid: Grid
    times: int

    @cached_property
    def names_width(self) -> float:
        lines = [line for name in self.grid.names for line in name.splitlines()]
        return max(text_width(line, NORMAL) for line in lines) + 0.07 if lines else 0.0

    @cached_property
    def panel_width(self) -> float:
        return max(panel.size(self.times)[0] for row in self.grid.rows for panel in row)

    @cached_property
    def columns(self) -> int:
        return max(len(row) for row in self.grid.rows)

    @cached_property
    def gap(self) -> float:
        """Space between two columns; smaller where they would not fit on the page otherwise."""
        # A wider gap shows that a magnified strip belongs to the image on its right.
        magnified = any(panel.magnified is not None for row in self.grid.rows for panel in row)
        usual = _WIDE_GAP if magnified else _GAP
        left_over = TEXT - 2 * _MARGIN - self.names_width - self.columns * self.panel_width
        return min(usual, max(_LEAST_GAP, left_over / max(1, self.columns - 1)))

    @cached_property
    def row_heights(self) -> list[tuple[float, float]]:
        """Height of the images of every row, and of the whole row."""
        heights = []
        for row in self.grid.rows:
            lines = max(len(panel.caption.splitlines()) for panel in row)
            images = max(panel.size(self.times)[1] for panel in row)
            heights.append((images, images + lines * _LINE + (0.03 if lines else 0.0) + _GAP))
        return heights

    @property
    def width(self) -> float:
        columns = self.columns * (self.panel_width + self.gap) - self.gap
        return self.names_width + columns + 2 * _MARGIN

    @property
    def height(self) -> float:
        headings = _HEADING if self.grid.headings else 0.0
        return sum(height for _, height in self.row_heights) - _GAP + headings + 2 * _MARGIN

    def draw(self, axes: Axes, left: float, top: float) -> None:
        """Draw the grid with its top left corner at this point."""
        left, top = left + _MARGIN, top + _MARGIN
        start, pitch = left + self.names_width, self.panel_width + self.gap
        for number, heading in enumerate(self.grid.headings):
            middle = start + number * pitch + self.panel_width / 2
            look = {"fontsize": NORMAL, "va": "baseline"}
            write(axes, middle, top + NORMAL / 72, heading, **look)
        top += _HEADING if self.grid.headings else 0.0
        for number, (row, heights) in enumerate(
            zip(self.grid.rows, self.row_heights, strict=True)
        ):
            if self.grid.names:
                look = {"ha": "left", "fontsize": NORMAL, "va": "center"}
                write(axes, left, top + heights[0] / 2, self.grid.names[number], **look)
            for column, panel in enumerate(row):
                panel.draw(axes, self.times, start + column * pitch, top)
            top += heights[1]
