"""A table of images: a row per kind of picture, a column per target or input."""

from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ecinn.drawing.pictures import Array
from ecinn.studies.paper import style

_GAP, _WIDE_GAP, _LEAST_GAP = 0.045, 0.07, 0.01
_MAGNIFIED_GAP = 0.02
_LINE = style.SMALL * 1.12 / 72
_HEADING = 0.16
_MARGIN = 0.03


@dataclass(frozen=True)
class Panel:
    """An image, what is written below it, and what of it is shown magnified to its left."""

    array: Array
    caption: str = ""
    warning: bool = False
    magnified: Array | None = None


@dataclass(frozen=True)
class Grid:
    """Panels by row and column; a row's names stand to its left, a column's above it."""

    rows: tuple[tuple[Panel, ...], ...]
    names: tuple[str, ...] = ()
    headings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = field(default=())
    """Small words below the name of each row."""


def draw(grid: Grid, times: int = 3, width: float | None = None) -> Figure:
    """The grid as a figure of its own, as wide as it needs to be or as given.

    Args:
        times: printed pixels, 300 to the inch, for each pixel of an image.
    """
    needed, height = _size(grid, times)
    figure, axes = style.page(width or needed, height)
    left = ((width or needed) - needed) / 2
    _draw_into(axes, grid, times, left, 0.0)
    return figure


def draw_all(grids: tuple[Grid, ...], title: str, times: int = 3) -> Figure:
    """Grids below each other under a title, as one page of a book."""
    sizes = [_size(grid, times) for grid in grids]
    top, between = 0.42, 0.12
    width = max(style.TEXT, *(size[0] for size in sizes))
    height = top + sum(size[1] + between for size in sizes)
    figure, axes = style.page(width, height)
    style.write(axes, width / 2, 0.16, title, fontsize=style.LARGE)
    for grid, (needed, tall) in zip(grids, sizes, strict=True):
        _draw_into(axes, grid, times, (width - needed) / 2, top)
        top += tall + between
    return figure


def _names_width(grid: Grid) -> float:
    lines = [(line, style.NORMAL) for name in grid.names for line in name.splitlines()]
    lines += [(line, style.SMALL) for name in grid.remarks for line in name.splitlines()]
    widths = [style.width_of(line, size) for line, size in lines]
    return max(widths) + 0.07 if widths else 0.0


def _panel_size(panel: Panel, times: int) -> tuple[float, float]:
    """Width and height of the image with what is magnified of it."""
    height, width = panel.array.shape[:2]
    side = 0.0
    if panel.magnified is not None:
        strip_height, strip_width = panel.magnified.shape[:2]
        side = style.enlarged(strip_width, _magnification(panel, times)) + _MAGNIFIED_GAP
        assert strip_height <= height
    return side + style.enlarged(width, times), style.enlarged(height, times)


def _magnification(panel: Panel, times: int) -> int:
    assert panel.magnified is not None
    return int(panel.array.shape[0] * times // panel.magnified.shape[0])


def _pitch(grid: Grid, times: int) -> float:
    return _widest(grid, times) + _between(grid, times)


def _widest(grid: Grid, times: int) -> float:
    return max(_panel_size(panel, times)[0] for row in grid.rows for panel in row)


def _between(grid: Grid, times: int) -> float:
    """Of two columns; less where they would not fit on the page otherwise."""
    # More where a strip has to be seen as belonging to the image on its right.
    magnified = any(panel.magnified is not None for row in grid.rows for panel in row)
    usual = _WIDE_GAP if magnified else _GAP
    columns = max(len(row) for row in grid.rows)
    left_over = style.TEXT - 2 * _MARGIN - _names_width(grid) - columns * _widest(grid, times)
    return min(usual, max(_LEAST_GAP, left_over / max(1, columns - 1)))


def _row_heights(grid: Grid, times: int) -> list[float]:
    heights = []
    for row in grid.rows:
        lines = max(len(panel.caption.splitlines()) for panel in row)
        tallest = max(_panel_size(panel, times)[1] for panel in row)
        heights.append(tallest + lines * _LINE + (0.03 if lines else 0.0) + _GAP)
    return heights


def _size(grid: Grid, times: int) -> tuple[float, float]:
    columns = max(len(row) for row in grid.rows)
    width = _names_width(grid) + columns * _pitch(grid, times) - _between(grid, times)
    height = sum(_row_heights(grid, times)) - _GAP + (_HEADING if grid.headings else 0.0)
    return width + 2 * _MARGIN, height + 2 * _MARGIN


def _draw_into(axes: Axes, grid: Grid, times: int, left: float, top: float) -> None:
    left, top = left + _MARGIN, top + _MARGIN
    start, pitch = left + _names_width(grid), _pitch(grid, times)
    for number, heading in enumerate(grid.headings):
        middle = start + number * pitch + (pitch - _between(grid, times)) / 2
        look = {"fontsize": style.NORMAL, "va": "baseline"}
        style.write(axes, middle, top + style.NORMAL / 72, heading, **look)
    top += _HEADING if grid.headings else 0.0
    for number, (row, height) in enumerate(zip(grid.rows, _row_heights(grid, times), strict=True)):
        middle = top + max(_panel_size(panel, times)[1] for panel in row) / 2
        remark = grid.remarks[number] if grid.remarks else ""
        if grid.names:
            below = _LINE * len(remark.splitlines()) / 2
            look = {"ha": "left", "fontsize": style.NORMAL, "va": "center"}
            style.write(axes, left, middle - below, grid.names[number], **look)
            remark_top = middle - below + 0.055
            style.write(axes, left, remark_top, remark, ha="left", color=style.MUTED)
        for column, panel in enumerate(row):
            _draw_panel(axes, panel, times, start + column * pitch, top)
        top += height


def _draw_panel(axes: Axes, panel: Panel, times: int, left: float, top: float) -> None:
    width, _ = _panel_size(panel, times)
    image_left = left + width - style.enlarged(panel.array.shape[1], times)
    _, bottom = style.place(axes, panel.array, image_left, top, times)
    if panel.magnified is not None:
        style.place(axes, panel.magnified, left, top, _magnification(panel, times))
    colour = style.WARNING if panel.warning else style.INK
    middle = image_left + style.enlarged(panel.array.shape[1], times) / 2
    style.write(axes, middle, bottom + 0.02, panel.caption, color=colour)
