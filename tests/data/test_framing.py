"""Framing: aspect ratios and ranges of values."""

import numpy as np
import pytest
from PIL import Image

from ecinn.data.framing import Framing, Intensity, bits_used
from ecinn.errors import InputError


@pytest.mark.parametrize("seed", range(5))
def test_values_are_scaled_linearly_and_clipped(seed: int) -> None:
    random = np.random.default_rng(seed)
    low, high = np.sort(random.normal(0, 1000, 2))
    values = random.uniform(low - 500, high + 500, (20, 30))
    expected = [
        [0 if v < low else 255 if v > high else round(255 * (v - low) / (high - low)) for v in row]
        for row in values.tolist()
    ]
    assert Intensity(low, high, "given").apply(values).tolist() == expected


def test_what_is_not_a_number_is_black() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 5.0])
    assert Intensity(0.0, 10.0, "").apply(values).tolist() == [0, 255, 0, 128]


@pytest.mark.parametrize(
    ("highest", "bits"), [(1, 8), (255, 8), (256, 9), (4095, 12), (4096, 13), (65535, 16)]
)
def test_the_fewest_bits_that_hold_the_highest_value(highest: int, bits: int) -> None:
    assert bits_used(float(highest)) == Intensity(0.0, 2.0**bits - 1, f"{bits} bits")


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (0, np.inf), (np.nan, 1)])
def test_a_range_is_finite_and_rises(low: float, high: float) -> None:
    with pytest.raises(InputError, match="LOW,HIGH"):
        Intensity(float(low), float(high), "given")


@pytest.mark.parametrize("source", [(40, 20), (20, 40)])
def test_other_aspect_ratios(source: tuple[int, int]) -> None:
    random = np.random.default_rng(1)
    picture = Image.fromarray(random.integers(1, 256, source[::-1], dtype=np.uint8))
    wide = source[0] > source[1]
    lanczos = Image.Resampling.LANCZOS
    cut = (10, 0, 30, 20) if wide else (0, 10, 20, 30)
    expected = {
        "stretch": picture.resize((10, 10), lanczos),
        "crop": picture.resize((10, 10), lanczos, box=cut),
    }
    small = np.asarray(picture.resize((10, 5) if wide else (5, 10), lanczos))
    padded = np.zeros((10, 10), np.uint8)
    padded[(slice(2, 7), slice(None)) if wide else (slice(None), slice(2, 7))] = small
    for fit, image in (expected | {"pad": padded}).items():
        resized, note = Framing(fit).resize(picture, (10, 10))
        assert np.array_equal(np.asarray(resized), np.asarray(image)), fit
        assert note.startswith({"stretch": "stretched", "crop": "cropped", "pad": "padded"}[fit])


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_the_same_aspect_ratio_is_only_resized(fit: str) -> None:
    picture = Image.new("L", (30, 30), 7)
    assert Framing(fit).resize(picture, (10, 10))[1] == "resized from 30×30 to 10×10"
    assert Framing(fit).resize(picture, (30, 30)) == (picture, "")
