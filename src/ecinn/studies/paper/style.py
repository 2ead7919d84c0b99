"""One look for all figures: letters, colours, and pages measured in inches."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
"""Letters in points: nothing is smaller than the first where the page is printed."""

# Okabe & Ito: apart from each other under every common colour blindness.
INK, MUTED, FRAME = "#1c2026", "#626a74", "#c4c9cf"
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
WARNING = VERMILION
"""For what did not come out as was asked."""
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK)

CLEAR: Mapping[str, Any] = MappingProxyType(
    {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
)
"""The `bbox` of words that stand over points and lines."""

SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        # Times, as the paper is set in, from the fonts that matplotlib brings along.
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
        # Pixels stay squares: each image is embedded as it is, and nothing smooths it.
        "image.interpolation": "none",
        "image.composite_image": False,
        "pdf.fonttype": 42,
        "savefig.dpi": DPI,
        "figure.dpi": DPI,
    }
)


@contextmanager
def styled() -> Iterator[None]:
    """What is drawn inside has this look; what was set before comes back after it."""
    settings: Any = dict(SETTINGS)  # the type of its keys is another in every matplotlib
    with mpl.rc_context(settings):
        yield


def page(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty page of at least that many inches; its axes measure inches from the top left.

    Its sides are whole numbers of printed pixels, so that an image's pixels can be.
    """
    width, height = (math.ceil(round(side * DPI, 3)) / DPI for side in (width, height))
    with styled():
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0), autoscale_on=False)
    return figure, axes


def whole_pixels(inches: float) -> float:
    """The nearest length that is a whole number of printed pixels."""
    return round(inches * DPI) / DPI


def enlarged(pixels: int, times: int) -> float:
    """Inches of so many image pixels when each is `times` printed pixels wide."""
    return pixels * times / DPI


def place(axes: Axes, array: Array, left: float, top: float, times: int) -> tuple[float, float]:
    """An image with its pixels as squares of `times` printed pixels; returns its right and bottom.

    It starts at a whole printed pixel, so that all squares are equally large on a screen too.
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


def write(axes: Axes, x: float, y: float, words: str, **look: Any) -> None:  # noqa: ANN401
    """Words on a page, small and centred below the point where nothing else is said."""
    chosen: dict[str, Any] = {"fontsize": SMALL, "ha": "center", "va": "top", "linespacing": 1.05}
    with styled():
        axes.text(x, y, words, zorder=8, **(chosen | look))


def width_of(words: str, size: float) -> float:
    """Inches that a line of words takes."""
    letters = FontProperties(family=SETTINGS["font.family"], math_fontfamily="stix")
    return float(TextPath((0, 0), words, size=size, prop=letters).get_extents().width) / 72


def share(probability: float) -> str:
    """A probability in few letters; never 1 for what is not certain.

    >>> share(0.25), share(0.9999), share(0.0002)
    ('.25', '>.99', '<.01')
    """
    if probability > 0.99:
        return ">.99"
    if probability < 0.01:
        return "<.01"
    return f"{probability:.2f}".removeprefix("0")


def pdf_bytes(figures: Figure | Sequence[Figure]) -> bytes:
    """A PDF of vectors, a page for every figure; the same figure gives the same bytes."""
    pages = [figures] if isinstance(figures, Figure) else figures
    buffer = io.BytesIO()
    # No date and no version: the file says only what is drawn.
    silent = dict.fromkeys(("CreationDate", "Creator", "Producer"))
    with styled(), PdfPages(buffer, metadata=silent) as document:
        for figure in pages:
            document.savefig(figure)
    return buffer.getvalue()


def png_bytes(figure: Figure) -> bytes:
    """A PNG for the screen."""
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
