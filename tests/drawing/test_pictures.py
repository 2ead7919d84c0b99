"""Pictures: zero is white, the scale symmetric, colours survive."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image

from ecinn.drawing.grid import Grid, Panel, draw
from ecinn.drawing.pictures import (
    WARNING,
    heatmap_array,
    image_array,
    percent,
    png_bytes,
    quick_png,
    to_image,
)


def test_zero_is_white_and_signs_mirror() -> None:
    heatmap = torch.tensor([[[0.0, 0.5, -0.5, 1.0, -1.0]]])
    colours = heatmap_array(heatmap)[0].astype(int)
    assert colours[0].tolist() == [255, 255, 255]
    red, blue = colours[1], colours[2]
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    # Half the value is half the way from white to full colour, for both signs.
    np.testing.assert_allclose(255 - colours[1], (255 - colours[3]) / 2, atol=1)
    np.testing.assert_allclose(255 - colours[2], (255 - colours[4]) / 2, atol=1)


def test_limit_makes_maps_comparable_and_an_empty_map_is_white() -> None:
    weak = heatmap_array(torch.full((1, 1, 1), 0.1), limit=1.0)
    strong = heatmap_array(torch.full((1, 1, 1), 0.1))
    assert weak.min() > strong.min()
    assert heatmap_array(torch.zeros(1, 2, 2)).min() == 255


def test_images_keep_their_values() -> None:
    grey = torch.arange(6, dtype=torch.uint8).reshape(1, 2, 3)
    picture = Image.open(io.BytesIO(png_bytes(to_image(image_array(grey)))))
    assert picture.mode == "L"
    assert np.array_equal(np.asarray(picture), grey[0].numpy())
    colour = torch.arange(18, dtype=torch.uint8).reshape(3, 2, 3)
    picture = Image.open(io.BytesIO(png_bytes(to_image(image_array(colour)))))
    assert np.array_equal(np.asarray(picture), colour.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("size", [(28, 28), (1, 3), (64, 64), (70, 50)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_quick_png_is_read_as_its_image(size: tuple[int, int], channels: int) -> None:
    values = np.random.default_rng(0).integers(0, 256, (*size, channels), dtype=np.uint8)
    array = np.ascontiguousarray(np.broadcast_to(values, (*size, 3)))
    with Image.open(io.BytesIO(quick_png(array))) as read:
        assert read.mode == ("L" if channels == 1 else "RGB")
        np.testing.assert_array_equal(np.asarray(read.convert("RGB")), array)


def test_a_long_caution_is_broken_and_makes_the_sheet_higher_not_wider() -> None:
    panel = Panel(np.zeros((8, 8, 3), np.uint8), "to 8")
    sheet = Grid(((panel,),), "Why?", names=(("input", "3"),))
    words = "Caution: out of the distribution of the training images, for several reasons."
    bare, warned = draw(sheet), draw(dataclasses.replace(sheet, caution=words))
    assert warned.width == bare.width
    assert warned.height > bare.height
    # Everything below has only moved down.
    rest = bare.crop((0, 54, bare.width, bare.height))
    below = warned.crop((0, warned.height - rest.height, warned.width, warned.height))
    assert below.tobytes() == rest.tobytes()
    lines = np.abs(np.asarray(warned, int) - np.array(WARNING)).sum(2).min(1) == 0
    assert int((np.diff(lines.astype(int)) == 1).sum()) >= 2


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "0.0 %"),
        (1e-6, "< 0.1 %"),
        (0.0006, "0.1 %"),
        (0.5, "50.0 %"),
        (0.9994, "99.9 %"),
        (0.99951, "> 99.9 %"),
        (1.0, "> 99.9 %"),
    ],
)
def test_percentages_are_not_rounded_to_certainty(share: float, words: str) -> None:
    assert percent(share) == words
