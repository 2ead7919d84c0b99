"""Strokes of known thickness, slant, size and box; distances by scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from ecinn.data.mnist import load_mnist
from ecinn.metrics import strokes

FINE = 8


def draw(inside, size: int = 40) -> Tensor:
    """Grey values are the share of a pixel that is covered, by 8 × 8 points in each."""
    axis = (np.arange(size * FINE) + 0.5) / FINE
    down, across = np.meshgrid(axis, axis, indexing="ij")
    covered = inside(down, across).astype(float)
    share = covered.reshape(size, FINE, size, FINE).mean((1, 3))
    return torch.from_numpy(np.round(255 * share).astype(np.uint8))[None, None]


def stroke(width: float, length: float, angle: float = 0.0) -> Tensor:
    """A bar that is turned to the right by an angle in degrees."""
    turn = math.radians(angle)

    def inside(down: np.ndarray, across: np.ndarray) -> np.ndarray:
        up, right = 20 - down, across - 20
        along = up * math.cos(turn) + right * math.sin(turn)
        aside = right * math.cos(turn) - up * math.sin(turn)
        return (abs(along) < length / 2) & (abs(aside) < width / 2)

    return draw(inside)


def sheared(width: float, length: float, angle: float) -> Tensor:
    """An upright bar whose rows are pushed sideways."""

    def inside(down: np.ndarray, across: np.ndarray) -> np.ndarray:
        up = 20 - down
        return (abs(up) < length / 2) & (
            abs(across - 20 - up * math.tan(math.radians(angle))) < width / 2
        )

    return draw(inside)


@pytest.mark.parametrize("width", [2.0, 3.0, 4.5, 6.0])
@pytest.mark.parametrize("angle", [0.0, 20.0, 45.0, 90.0])
def test_thickness_is_the_width_of_a_long_stroke_in_any_direction(width, angle) -> None:
    # Near the two ends the edge is nearer: less by width / (3 · length) of it.
    expected = width * (1 - width / 3 / 36)
    assert strokes.thickness(stroke(width, 36.0, angle)).item() == pytest.approx(expected, abs=0.3)


def test_thickness_counts_grey_edges() -> None:
    """Bars of 3 pixels, shifted by parts of one."""
    for shift in (0.0, 0.25, 0.5):
        bar = draw(lambda down, across, at=20 + shift: (abs(across - at) < 1.5) & (down > 0))
        assert strokes.thickness(bar).item() == pytest.approx(3.0, abs=0.15)


def test_thickness_is_four_mean_distances_that_scipy_measures(generator) -> None:
    images = load_mnist("test").images[:40]
    grey = images[:, 0].double().numpy() / 255
    for picture, measured in zip(grey, strokes.thickness(images), strict=True):
        padded = np.pad(picture, 1)
        fine = np.arange((picture.shape[0] + 2) * 4) / 4 + 0.125 - 0.5
        rows, columns = np.meshgrid(fine, fine, indexing="ij")
        # Beyond the outermost pixels all is black.
        between = ndimage.map_coordinates(padded, [rows, columns], order=1, mode="nearest")
        mask = between >= picture.max() / 2 - 1e-9
        expected = 4 * (ndimage.distance_transform_edt(mask)[mask] - 0.5).mean() / 4
        assert measured.item() == pytest.approx(expected, rel=0.02)


def test_a_disc_counts_two_thirds_of_its_diameter() -> None:
    disc = draw(lambda down, across: np.hypot(down - 20, across - 20) < 9)
    assert strokes.thickness(disc).item() == pytest.approx(12, rel=0.03)


@pytest.mark.parametrize("angle", [-35.0, -10.0, 0.0, 15.0, 40.0])
def test_slant_is_the_angle_of_the_shear_and_positive_to_the_right(angle) -> None:
    assert strokes.slant(sheared(4.0, 20.0, angle)).item() == pytest.approx(angle, abs=0.5)


def test_slant_of_an_ellipse_is_that_of_its_covariance(generator) -> None:
    """tan = −Σ₁₂ / Σ₂₂ of points drawn with the grey values as probabilities."""
    ellipse = draw(lambda down, across: np.hypot((down + across - 40) / 25, (across - 20) / 8) < 1)
    v = ellipse[0, 0].double().flatten()
    drawn = torch.multinomial(v, 200_000, replacement=True, generator=generator)
    covariance = torch.cov(torch.stack([drawn // 40, drawn % 40]).double())
    expected = math.degrees(math.atan(-covariance[0, 1] / covariance[0, 0]))
    assert strokes.slant(ellipse).item() == pytest.approx(expected, abs=0.5)
    spread = math.sqrt(covariance[0, 0] + covariance[1, 1])
    assert strokes.size(ellipse).item() == pytest.approx(spread, rel=0.01)


def test_size_of_a_disc_and_of_a_bar() -> None:
    """R/√2, and √((h² + w²)/12)."""
    disc = draw(lambda down, across: np.hypot(down - 20, across - 20) < 12)
    assert strokes.size(disc).item() == pytest.approx(12 / math.sqrt(2), rel=0.01)
    assert strokes.size(stroke(5.0, 24.0)).item() == pytest.approx(
        math.hypot(24, 5) / math.sqrt(12), rel=0.01
    )


@pytest.mark.parametrize(("height", "width"), [(10.0, 4.0), (22.0, 2.0), (6.0, 16.0)])
def test_box_has_the_size_of_the_drawn_bar(height, width) -> None:
    bar = draw(lambda down, across: (abs(down - 15) < height / 2) & (abs(across - 22) < width / 2))
    assert strokes.box_height(bar).item() == pytest.approx(height)
    assert strokes.box_width(bar).item() == pytest.approx(width)
    assert strokes.ink_mass(bar).item() == pytest.approx(height * width, rel=0.01)


def test_place_and_brightness_do_not_matter(generator) -> None:
    """Only the mass depends on the brightness."""
    images = torch.zeros((2, 1, 40, 40), dtype=torch.uint8)
    images[0, 0, 4:32, 4:32] = load_mnist("test").images[5, 0] // 2 * 2
    images[1, 0, 9:37, 2:30] = images[0, 0, 4:32, 4:32] // 2
    for name, measure in strokes.FEATURES.items():
        whole, half = measure(images).tolist()
        expected = whole / 2 if name == "ink mass" else whole
        assert half == pytest.approx(expected, rel=1e-6), name


def test_a_batch_is_measured_as_its_images_are() -> None:
    images = load_mnist("test").images[:70]
    for measure in strokes.FEATURES.values():
        alone = torch.cat([measure(image[None]) for image in images])
        torch.testing.assert_close(measure(images), alone)


def test_a_black_picture_has_no_strokes() -> None:
    black = torch.zeros((1, 1, 28, 28), dtype=torch.uint8)
    for name, measure in strokes.FEATURES.items():
        value = measure(black).item()
        assert value == 0 if name == "ink mass" else math.isnan(value), name
