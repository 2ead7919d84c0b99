"""8-bit values and pixels of [0, 1]."""

import numpy as np
import pytest
import torch

from ecinn.errors import InputError
from ecinn.pixels import clamped_share, dequantise, pixels_of, to_pixels, to_uint8

ALL = torch.arange(256, dtype=torch.uint8)


def test_every_value_survives_both_ways() -> None:
    assert torch.equal(to_uint8(to_pixels(ALL)), ALL)


def test_a_pixel_is_the_middle_of_its_bin() -> None:
    torch.testing.assert_close(to_pixels(ALL), torch.linspace(0.5, 255.5, 256) / 256)


def test_dequantised_values_stay_in_their_bin_and_fill_it(generator: torch.Generator) -> None:
    many = ALL.repeat(200, 1)
    pixels = dequantise(many, generator)
    assert torch.equal(to_uint8(pixels), many)
    within = pixels * 256 - many
    assert abs(within.mean().item() - 0.5) < 0.01
    assert abs(within.var().item() - 1 / 12) < 0.002


def test_noise_has_the_deviation_asked_for(generator: torch.Generator) -> None:
    grey = torch.full((40_000,), 128, dtype=torch.uint8)
    spread = dequantise(grey, generator, noise=0.05).std().item()
    assert abs(spread - (0.05**2 + 1 / 12 / 256**2) ** 0.5) < 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_divided_by_255_are_the_8_bit_images_that_they_were(dtype) -> None:
    """Others stay as they are: middles of bins, counterfactuals, noise."""
    images = ALL.reshape(4, 1, 8, 8)
    given = images.to(dtype) / 255
    assert torch.equal(pixels_of(given, (1, 8, 8)), to_pixels(images))
    assert torch.equal(pixels_of(given.numpy(), (1, 8, 8)), to_pixels(images))
    mixed = given.clone()
    mixed[1, 0, 3, 5] += 0.002
    read = pixels_of(mixed, (1, 8, 8))
    assert torch.equal(read[[0, 2, 3]], to_pixels(images)[[0, 2, 3]])
    assert torch.equal(read[1], mixed[1].float())
    middles = to_pixels(images).to(dtype)
    assert torch.equal(pixels_of(middles, (1, 8, 8)), middles.float())
    outside = given + 0.2
    outside[:, 0, 0, 0] = 261 / 255  # a multiple that no 8-bit image has
    assert torch.equal(pixels_of(outside, (1, 8, 8)), outside.float())


def test_what_lies_outside_is_clamped_and_counted() -> None:
    pixels = torch.tensor([[-0.1, 0.0, 0.5, 1.0, 1.2, 3.0, 0.2, 0.3]]).reshape(1, 2, 2, 2)
    assert to_uint8(pixels).flatten().tolist() == [0, 0, 128, 255, 255, 255, 51, 76]
    assert clamped_share(pixels).tolist() == [3 / 8]


def test_arrays_of_any_layout_and_byte_order_are_read() -> None:
    array = np.arange(2 * 4 * 4).reshape(2, 4, 4) / 32
    expected = torch.tensor(array).float()[:, None]
    for given in (array, array.astype(">f4"), array[:, ::-1][:, ::-1], np.asfortranarray(array)):
        assert torch.equal(pixels_of(given, (1, 4, 4)), expected)
    flipped = pixels_of((255 * array).astype(np.uint8)[:, ::-1], (1, 4, 4))
    assert torch.equal(flipped, to_pixels((255 * expected).to(torch.uint8)).flip(2))


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 2.0), (0.0, 255.0), (-0.42, 2.8)])
def test_normalised_pixels_are_refused(low: float, high: float) -> None:
    with pytest.raises(InputError, match=r"lie in \[0, 1\], without normalisation"):
        pixels_of(torch.linspace(low, high, 16).reshape(1, 1, 4, 4), (1, 4, 4))
    with pytest.raises(InputError, match="lie in"):
        pixels_of(torch.full((1, 1, 4, 4), torch.nan), (1, 4, 4))
    slightly = torch.linspace(-0.3, 1.3, 16).reshape(1, 1, 4, 4)
    assert torch.equal(pixels_of(slightly, (1, 4, 4)), slightly)
