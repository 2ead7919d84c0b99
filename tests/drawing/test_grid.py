"""Grids of images: everything has its place, and nothing overlaps."""

import dataclasses

import numpy as np
import pytest

from ecinn.drawing.grid import Grid, Panel, draw
from ecinn.drawing.pictures import WARNING, enlarge

COLOURS = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [200, 200, 0], [0, 200, 200]])


def solid(colour: int, side: int = 8) -> np.ndarray:
    return np.broadcast_to(COLOURS[colour], (side, side, 3)).astype(np.uint8)


@pytest.fixture
def grid() -> Grid:
    rows = ((Panel(solid(0)), Panel(solid(1))), (Panel(solid(2)), Panel(solid(3))))
    return Grid(rows, "Title", names=(("first", "remark"), ("second", "")))


def box(picture, colour: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of everything in that colour."""
    rows, columns = (np.asarray(picture) == COLOURS[colour]).all(2).nonzero()
    return columns.min(), rows.min(), columns.max(), rows.max()


def test_panels_stand_in_rows_and_columns_at_their_size(grid: Grid) -> None:
    picture = draw(grid, 40)
    a, b, c, d = (box(picture, colour) for colour in range(4))
    for left, top, right, bottom in (a, b, c, d):
        # The frame covers one pixel on every side.
        assert (right - left, bottom - top) == (37, 37)
    assert (a[1], c[1], a[0], b[0]) == (b[1], d[1], c[0], d[0])
    assert b[0] > a[2] + 1
    assert c[1] > a[3] + 1
    assert picture.width > b[2]
    assert picture.height > c[3]


def test_names_headings_and_a_caution_take_room_only_where_given(grid: Grid) -> None:
    whole = draw(grid, 40)
    bare = draw(dataclasses.replace(grid, names=()), 40)
    assert box(bare, 0)[0] < box(whole, 0)[0]
    headed = draw(dataclasses.replace(grid, headings=("one", "two")), 40)
    assert headed.height > whole.height
    assert box(headed, 0)[1] - box(whole, 0)[1] == headed.height - whole.height
    caution = dataclasses.replace(grid, caution="Take care. " * 20)
    careful = draw(caution, 40)
    assert careful.width == whole.width
    assert careful.height > whole.height
    untitled = draw(dataclasses.replace(grid, title=""), 40)
    assert untitled.height < whole.height


def test_long_captions_widen_columns_and_warnings_are_coloured(grid: Grid) -> None:
    (a, b), second = grid.rows
    long = dataclasses.replace(a, caption="a caption that is wider than its image")
    plain = draw(dataclasses.replace(grid, rows=((long, b), second)), 40)
    assert plain.width > draw(grid, 40).width
    warned = dataclasses.replace(grid, rows=((dataclasses.replace(long, warning=True), b), second))
    orange = (np.asarray(draw(warned, 40)) == WARNING).all(2)
    assert orange.any()
    assert not (np.asarray(plain) == WARNING).all(2).any()
    assert orange.nonzero()[0].min() > box(plain, 0)[3]


def test_small_images_keep_square_pixels_and_oblong_ones_their_shape() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    large = np.asarray(enlarge(pixels, 6))
    assert np.array_equal(large, pixels.repeat(3, 0).repeat(3, 1))
    oblong = np.asarray(enlarge(solid(4)[:4], 16))
    assert (oblong[4:12] == COLOURS[4]).all()
    assert (oblong[:4] == 255).all()
    assert (oblong[12:] == 255).all()
