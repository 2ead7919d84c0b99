"""Heatmaps as pictures: outliers do not whiten them, images stay visible, words are there."""

import numpy as np
import pytest
import torch
from PIL import ImageDraw
from torch import Tensor

from ecinn.drawing.heatmaps import HeatmapColumn, colour_bar, heatmap_sheet, overlay_array
from ecinn.drawing.pictures import ADDED, REMOVED, heatmap_array, image_array, robust_limit

SIGNS = ("darker", "lighter")


def column(maps: Tensor, **more) -> HeatmapColumn:
    return HeatmapColumn("ECINN", maps, SIGNS, **more)


def sheet(images: Tensor, columns, **more) -> np.ndarray:
    classes = [("3", "8")] * len(images)
    return np.asarray(heatmap_sheet(images, images, columns, classes, **more)).astype(int)


@pytest.fixture
def images(generator) -> Tensor:
    return torch.randint(256, (2, 1, 12, 12), generator=generator, dtype=torch.uint8)


@pytest.fixture
def maps(generator) -> Tensor:
    return torch.randn((2, 1, 12, 12), generator=generator)


def test_limit_is_a_percentile_of_the_absolute_channel_mean() -> None:
    values = torch.arange(-100.0, 101.0).reshape(1, 3, 67)
    assert robust_limit(values, 100.0) == 100
    # Of |−100 … 100| every value but 0 is there twice: the median is 50.
    assert robust_limit(values, 50.0) == 50
    colours = torch.cat([values, -values, 3 * values])
    assert robust_limit(colours, 50.0) == 50
    random = torch.randn(3, 7, 9, generator=torch.Generator().manual_seed(0))
    for percentile in (0.1, 37.3, 99.5):
        numpy = np.percentile(random.double().mean(0).abs().numpy(), percentile)
        assert robust_limit(random, percentile) == pytest.approx(numpy, rel=1e-12)


def test_one_pixel_does_not_whiten_the_map(maps) -> None:
    calm = maps[0].clone()
    wild = calm.clone()
    wild[0, 0, 0] = 1e4
    assert heatmap_array(wild)[1:].min() > 250
    assert heatmap_array(wild, robust_limit(wild, 99.0))[1:].min() < 120
    assert robust_limit(wild, 99.0) < 1.5 * robust_limit(calm, 99.0)


def test_an_empty_map_and_one_of_a_single_pixel_have_a_limit() -> None:
    assert robust_limit(torch.zeros(1, 40, 40)) == 1
    lonely = torch.zeros(1, 40, 40)
    lonely[0, 3, 3] = -2.0
    assert robust_limit(lonely) == 2


def test_overlay_is_the_image_where_the_map_is_zero_and_colour_where_it_is_strong() -> None:
    image = torch.tensor([[[0, 0, 0, 128, 255, 255, 255]]], dtype=torch.uint8)
    heatmap = torch.tensor([[[-1.0, 0, 1, 0, -1, 0, 1]]])
    colours = overlay_array(image, heatmap, 1.0)[0].astype(int)
    bare = colours[[1, 3, 5]]
    assert (bare == bare[:, :1]).all()
    assert bare[0, 0] < bare[1, 0] < bare[2, 0] == 255
    for place in (0, 4):
        np.testing.assert_allclose(colours[place], REMOVED, atol=1)
    for place in (2, 6):
        np.testing.assert_allclose(colours[place], ADDED, atol=1)


def test_an_overlay_of_a_grey_image_is_that_of_its_three_equal_channels(generator) -> None:
    image = torch.randint(0, 256, (1, 9, 7), generator=generator, dtype=torch.uint8)
    heatmap = torch.randn(1, 9, 7, generator=generator)
    colour = overlay_array(image.expand(3, 9, 7), heatmap.expand(3, 9, 7), 1.5)
    assert np.abs(overlay_array(image, heatmap, 1.5).astype(int) - colour).max() <= 1


def test_colour_bar_is_white_in_the_middle_and_has_its_words() -> None:
    bar = np.asarray(colour_bar(SIGNS, width=101, height=15)).astype(int)
    line = bar[bar.shape[0] // 2 + 3]
    blue = np.abs(line - REMOVED).sum(1).argmin()
    red = np.abs(line - ADDED).sum(1).argmin()
    assert blue < red
    assert (line[(blue + red) // 2] > 245).all()
    assert bar[:, :blue].min() < 100
    assert bar[:, red + 3 :].min() < 100


def test_sheet_has_a_row_per_image_and_a_column_per_method(images, maps) -> None:
    one = sheet(images[:1], [column(maps[:1])], tile=60)
    two = sheet(images, [column(maps)], tile=60)
    wide = sheet(images, [column(maps)] * 5, tile=60)
    assert two.shape[0] >= one.shape[0] + 60
    assert wide.shape[1] >= 7 * 60
    assert wide.shape[0] == two.shape[0]
    assert (two != 255).any()


def test_sheet_shows_every_map_on_its_own_scale(images, maps) -> None:
    """Two methods that differ in their unit alone look the same."""
    small = sheet(images, [column(maps)])
    assert np.array_equal(small, sheet(images, [column(1000 * maps)]))
    assert not np.array_equal(small, sheet(images, [column(-maps)]))


def test_remarks_warnings_and_long_names_are_drawn(images, maps) -> None:
    plain = sheet(images, [column(maps)])
    remark = sheet(images, [column(maps, remarks=("3 % off", "300 % off"))])
    warned = sheet(
        images, [column(maps, remarks=("3 % off", "300 % off"), warnings=(False, True))]
    )
    assert not np.array_equal(plain, remark)
    changed = (remark != warned).any(2).nonzero()[0]
    assert changed.min() > plain.shape[0] / 2 - 30
    title = sheet(images, [column(maps)], title="Why is this 3, and not 8? " * 3)
    assert title.shape[1] > plain.shape[1]
    long = [HeatmapColumn("Integrated Gradients of it", maps, SIGNS)]
    assert sheet(images, long).shape[1] == plain.shape[1]


def test_colour_images_and_no_columns(generator) -> None:
    images = torch.randint(256, (1, 3, 200, 100), generator=generator, dtype=torch.uint8)
    maps = torch.randn(images.shape, generator=generator)
    assert sheet(images, [column(maps)]).ndim == 3
    assert sheet(images, []).ndim == 3


def place_of(tile: np.ndarray, whole: np.ndarray) -> tuple[int, int]:
    """Return the row and column of pixels at which a picture without its frame is in a sheet."""
    inner = tile[1:-1, 1:-1]
    height, width = inner.shape[:2]
    (rows, columns) = (whole[: -height + 1, : -width + 1] == inner[0, 0]).all(2).nonzero()
    matches = [
        (int(row), int(column))
        for row, column in zip(rows, columns, strict=True)
        if np.array_equal(whole[row : row + height, column : column + width], inner)
    ]
    assert len(matches) == 1
    return matches[0]


def test_every_picture_is_in_its_place_and_scaled_by_the_percentile(
    images, maps, generator
) -> None:
    others = torch.randint(256, images.shape, generator=generator, dtype=torch.uint8)
    columns = [column(maps), column(maps.flip(3).square())]
    classes = [("3", "8"), ("5", "1")]
    whole, places = np.asarray(heatmap_sheet(images, others, columns, classes, tile=36)), []
    for row in range(2):
        pictures = [image_array(images[row]), image_array(others[row])]
        for method in columns:
            heatmap = method.maps[row]
            limit = float(np.percentile(heatmap.double().abs().numpy(), 99.5))
            pictures.append(heatmap_array(heatmap, limit))
        enlarged = [picture.repeat(3, 0).repeat(3, 1) for picture in pictures]
        places.append([place_of(picture, whole) for picture in enlarged])
    for row in places:
        assert len({top for top, _ in row}) == 1
        assert [left for _, left in row] == sorted(left for _, left in places[0])
    assert places[0][0][0] + 36 < places[1][0][0]


def test_an_overlay_has_full_colour_from_the_limit_on(images, maps) -> None:
    image, heatmap = images[0], maps[0]
    largest = float(heatmap.abs().max())
    faint = overlay_array(image, heatmap, 50 * largest).astype(int)
    # Nearly bare: grey everywhere.
    assert np.ptp(faint, axis=2).max() < 10
    full = overlay_array(image, heatmap, float(heatmap.abs().min())).astype(int)
    expected = np.where((heatmap[0] > 0).numpy()[..., None], ADDED, REMOVED)
    np.testing.assert_allclose(full, expected, atol=1)
    assert np.array_equal(faint, overlay_array(image, 3 * heatmap, 150 * largest))


def test_words_stand_next_to_their_images(images, maps, monkeypatch) -> None:
    written: dict[str, tuple[float, float]] = {}
    bare = ImageDraw.ImageDraw.text

    def text(self, xy, words, *look, **more) -> None:
        written[words] = xy
        bare(self, xy, words, *look, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    remarks = column(maps, remarks=("3 % off", "300 % off"))
    classes = [("three", "eight"), ("five", "one")]
    heatmap_sheet(images, images, [remarks], classes, tile=60)
    (three, eight), (five, one) = ((written[p], written[q]) for p, q in classes)
    first, second = (written[words] for words in remarks.remarks)
    assert three[0] == five[0] < eight[0] == one[0] < first[0] == second[0]
    assert three[1] == eight[1] == first[1] < five[1] == one[1] == second[1]
    assert any("at its 99.5th percentile" in words for words in written)
    written.clear()
    colour_bar(("less", "more"))
    assert written["less"][0] < written["more"][0]
