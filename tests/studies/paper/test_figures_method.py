"""The projection of Figure 2, checked in latent space by other routes than its own."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from ecinn.drawing import pictures
from ecinn.studies.paper import style
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.figures_method import (
    Geometry,
    figure_2,
    geometry,
    projected,
)


@pytest.fixture
def scene(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two classes in twelve dimensions, with another variance in each, rotated."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mu, turn = 2 * normal(2, 12), torch.linalg.qr(normal(12, 12)).Q
    spread = torch.linspace(0.5, 2.5, 12).double()
    latents = tuple(
        mean + spread * normal(n, 12) @ turn for mean, n in zip(mu, (30, 40), strict=True)
    )
    return {"mu": mu, "latents": latents, "z": latents[0][3]}


@pytest.fixture
def projection(scene) -> Geometry:
    return geometry(scene["mu"], scene["latents"], scene["z"])


@pytest.fixture
def axes(scene) -> np.ndarray:
    """Δ/‖Δ‖, and the top eigenvector of the scatter around the means with Δ projected out."""
    mu = scene["mu"].numpy()
    delta = mu[1] - mu[0]
    without_delta = np.eye(12) - np.outer(delta, delta) / (delta @ delta)
    scatter = sum(
        np.outer(one - mean, one - mean)
        for latents, mean in zip(scene["latents"], mu, strict=True)
        for one in latents.numpy()
    )
    up = np.linalg.eigh(without_delta @ scatter @ without_delta)[1][:, -1]
    up *= np.sign(up @ (scene["z"].numpy() - mu.mean(0)))
    return np.stack([delta / np.linalg.norm(delta), up])


@pytest.fixture
def lift(scene, axes) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the points of latent space with given coordinates in the plane."""
    return lambda points: scene["mu"].mean(0) + points @ torch.from_numpy(axes)


def posterior(z: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Bayes' rule with the densities written out."""
    density = torch.distributions.MultivariateNormal(mu, torch.eye(mu.shape[1]).double())
    likelihood = density.log_prob(z[..., None, :])
    return likelihood.softmax(-1)


def test_points_are_the_nearest_of_the_plane(scene, axes, lift, projection) -> None:
    """Least squares over two vectors that span it."""
    spanning = np.stack([axes[0] + 0.3 * axes[1], axes[1] - 2 * axes[0]], 1)
    for latents, points in zip(scene["latents"], projection.points, strict=True):
        offset = (latents - scene["mu"].mean(0)).numpy()
        weights = np.linalg.lstsq(spanning, offset.T, rcond=None)[0]
        nearest = scene["mu"].mean(0) + torch.from_numpy((spanning @ weights).T)
        torch.testing.assert_close(lift(points), nearest)
        # Distances in the picture are distances between the projections.
        torch.testing.assert_close(torch.pdist(points), torch.pdist(nearest))


def test_no_other_direction_shows_more_of_the_deviations(
    scene, projection, generator: torch.Generator
) -> None:
    """Among directions orthogonal to Δ, from the means of the classes and not of all latents."""
    mu, (_, level) = scene["mu"], projection.means.unbind(1)
    torch.testing.assert_close(level, torch.zeros(2).double(), atol=1e-12, rtol=0)
    shown = torch.cat(projection.points)[:, 1].square().sum()
    delta = (mu[1] - mu[0]) / (mu[1] - mu[0]).norm()
    others = torch.randn((5000, 12), generator=generator, dtype=torch.float64)
    others -= (others @ delta)[:, None] * delta
    others /= others.norm(dim=1, keepdim=True)
    deviations = torch.cat([z - mean for z, mean in zip(scene["latents"], mu, strict=True)])
    found = (deviations @ others.T).square().sum(0)
    assert 0.5 * shown < found.max() <= shown


def test_z_lies_above_delta(scene) -> None:
    for z in scene["latents"][0]:
        projection = geometry(scene["mu"], scene["latents"], z)
        assert projection.z[1] > 0
        assert projection.means[0, 0] < 0 < projection.means[1, 0]


def test_the_drawn_boundary_is_where_both_classes_are_equally_likely(scene, lift) -> None:
    for level in (-3.0, 0.0, 0.7, 5.0):
        tie = posterior(lift(torch.tensor([0.0, level]).double()), scene["mu"])
        torch.testing.assert_close(tie, torch.full((2,), 0.5).double())
        beside = posterior(lift(torch.tensor([0.1, level]).double()), scene["mu"])
        assert beside[1] > beside[0]


def test_every_latent_lies_on_its_true_side_of_the_line(scene, generator) -> None:
    """Not only those of the plane: what projecting leaves out does not matter to the classes."""
    # Wide classes overlap, so that some latents of either lie on the other side.
    noise = 8 * torch.randn((2, 50, 12), generator=generator, dtype=torch.float64)
    latents = tuple(scene["mu"][:, None] + noise)
    projection = geometry(scene["mu"], latents, scene["z"])
    for side in (0, 1):
        towards_q = posterior(latents[side], scene["mu"])[:, 1] > 0.5
        assert torch.equal(projection.points[side][:, 0] > 0, towards_q)
        share = (posterior(latents[side], scene["mu"])[:, side] > 0.5).double().mean()
        assert 0.5 < share < 1
        assert projection.right_side(side) == pytest.approx(share)


def test_the_tipping_point_lies_on_the_boundary_and_on_the_line_through_z(
    scene, projection
) -> None:
    assert float(projection.tipping_point[0]) == pytest.approx(0, abs=1e-9)
    delta = scene["mu"][1] - scene["mu"][0]
    torch.testing.assert_close(
        posterior(scene["z"] + projection.alpha_0 * delta, scene["mu"]),
        torch.full((2,), 0.5).double(),
    )
    # The line is level, and α counts lengths of Δ along it.
    for point, alpha in (
        (projection.tipping_point, projection.alpha_0),
        (projection.convincing, projection.alpha_1),
    ):
        assert float(point[1]) == pytest.approx(float(projection.z[1]))
        assert float(point[0] - projection.z[0]) == pytest.approx(alpha * float(delta.norm()))
    assert projection.alpha_1 == pytest.approx(0.8 + projection.alpha_0 / 2)


def test_both_means_lie_in_the_plane(scene, lift, projection) -> None:
    torch.testing.assert_close(lift(projection.means), scene["mu"])


@pytest.mark.slow
def test_projection_of_real_digits(mnist, monkeypatch) -> None:
    from ecinn.data.mnist import load_mnist

    monkeypatch.setattr("ecinn.studies.paper.figures_method.POINTS", 120)
    data = load_mnist("test")
    projection, figure, place = projected(mnist, data, 4, 9, torch.Generator().manual_seed(1))
    assert int(data.labels[place]) == 4
    assert projection.right_side(0) > 0.97
    assert projection.right_side(1) > 0.97
    explanation = mnist.explain(data.images[place], 9, check=False)
    assert projection.alpha_0 == pytest.approx(float(explanation.alpha_0), abs=1e-3)
    stored = (explanation.stored_tipping_point, explanation.stored_convincing)
    images = (data.images[place], *(each[0, 0] for each in stored))
    for drawn, image in zip(figure.axes[0].images, images, strict=True):
        assert np.array_equal(drawn.get_array(), pictures.image_array(image))
    blue, orange = (
        np.concatenate(
            [
                np.stack(line.get_data(), 1)
                for line in figure.axes[1].lines
                if line.get_color() == c
            ]
        )
        for c in (style.BLUE, style.ORANGE)
    )
    # The line and the tipping point on it; z and the level line through it.
    assert len(blue) == len(orange) == 3
    assert np.allclose(blue[:, 0], 0, atol=1e-6)
    assert np.allclose(orange[:, 1], float(projection.z[1]))
    words = {text.get_text() for axes in figure.axes for text in axes.texts}
    named = {"$z$", r"$\alpha_0$", r"$\alpha_1$", r"$\mu_p$", r"$\mu_q$", r"$\Delta$"}
    assert named | {"decision boundary", "test images of 4", "test images of 9"} <= words
    # Both scales are the same: what looks orthogonal is.
    axes = figure.axes[1]
    box = axes.get_window_extent()
    assert box.width / np.ptp(axes.get_xlim()) == pytest.approx(
        box.height / np.ptp(axes.get_ylim()), rel=0.02
    )


def test_the_caption_agrees_with_the_numbers(projection, generator, monkeypatch) -> None:
    """Of points on both sides of the line, of either class another share."""
    points = torch.randn((2, 40, 2), generator=generator, dtype=torch.float64)
    points[1, :, 0] += 1
    projection = dataclasses.replace(projection, points=tuple(points))
    monkeypatch.setattr(
        "ecinn.studies.paper.figures_method.projected", lambda *_: (projection, Figure(), 17)
    )
    made = figure_2(Context())
    numbers, words = made.data["figure-2"], made.captions["figure-2"]
    points = [np.array(each) for each in numbers["points"]]
    right = [(points[0][:, 0] <= 0).mean(), (points[1][:, 0] > 0).mean()]
    assert numbers["on_their_side"] == pytest.approx(right)
    assert abs(right[0] - right[1]) > 0.01 < min(right) < max(right) < 0.99
    assert numbers["test_image"] == 17
    shares = [100 * share for share in numbers["on_their_side"]]
    assert f"({shares[0]:.1f} % of the 4s and {shares[1]:.1f} % of the 9s on the side" in words
    apart = np.linalg.norm(np.diff(numbers["means"], axis=0))
    assert f"the means are {apart:.1f} apart." in words
    assert f"α₀ = {numbers['alpha_0']:.2f}, α₁ = {numbers['alpha_1']:.2f}." in words
    (z, tipping, convincing) = (
        np.array(numbers[key]) for key in ("z", "tipping_point", "convincing")
    )
    assert tipping[0] == pytest.approx(0, abs=1e-4)
    steps = [np.linalg.norm(each - z) for each in (tipping, convincing)]
    assert steps == pytest.approx(
        [numbers[key] * apart for key in ("alpha_0", "alpha_1")], rel=1e-3
    )
