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
    plane_basis,
    projected,
)


@pytest.fixture
def scene(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two classes in twelve dimensions; measured means far from the model's, as in reality."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mu, mu_bar = 2 * normal(2, 12), 3 * normal(2, 12)
    latents = tuple(mean + normal(n, 12) for mean, n in zip(mu_bar, (30, 40), strict=True))
    return {"mu": mu, "mu_bar": mu_bar, "latents": latents, "z": latents[0][3]}


@pytest.fixture
def projection(scene) -> Geometry:
    return geometry(scene["mu"], scene["mu_bar"], scene["latents"], scene["z"])


@pytest.fixture
def lift(scene) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the points of latent space with given coordinates in the plane."""
    p, q = scene["mu"]
    basis = plane_basis(q - p, scene["mu_bar"][1] - scene["mu_bar"][0])
    return lambda points: (p + q) / 2 + points @ basis


def posterior(z: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Bayes' rule with the densities written out."""
    density = torch.distributions.MultivariateNormal(mu, torch.eye(mu.shape[1]).double())
    likelihood = density.log_prob(z[..., None, :])
    return likelihood.softmax(-1)


def test_points_are_the_nearest_of_the_plane(scene, lift, projection) -> None:
    """Least squares over the vectors that span it, not over its axes."""
    spanning = torch.stack(
        [scene["mu_bar"][1] - scene["mu_bar"][0], scene["mu"][1] - scene["mu"][0]], 1
    )
    for latents, points in zip(scene["latents"], projection.points, strict=True):
        offset = (latents - scene["mu"].mean(0)).numpy()
        weights = np.linalg.lstsq(spanning.numpy(), offset.T, rcond=None)[0]
        nearest = scene["mu"].mean(0) + torch.from_numpy((spanning.numpy() @ weights).T)
        torch.testing.assert_close(lift(points), nearest)
        # Distances in the picture are distances between the projections.
        torch.testing.assert_close(torch.pdist(points), torch.pdist(nearest))


def test_the_drawn_boundary_is_where_both_classes_are_equally_likely(
    scene, lift, projection
) -> None:
    along = torch.stack([-projection.boundary_normal[1], projection.boundary_normal[0]])
    for step in (-3.0, 0.0, 0.7, 5.0):
        tie = posterior(lift(step * along), scene["mu"])
        torch.testing.assert_close(tie, torch.full((2,), 0.5).double())
    beside = posterior(lift(0.1 * projection.boundary_normal), scene["mu"])
    assert beside[1] > beside[0]


def test_every_latent_lies_on_its_true_side_of_the_line(scene, projection) -> None:
    """Not only those of the plane: what projecting leaves out does not matter to the classes."""
    for latents, points in zip(scene["latents"], projection.points, strict=True):
        towards_q = posterior(latents, scene["mu"])[:, 1] > 0.5
        assert torch.equal(points @ projection.boundary_normal > 0, towards_q)
    share = posterior(scene["latents"][0], scene["mu"])[:, 0] > 0.5
    assert projection.right_side(0) == pytest.approx(share.double().mean())
    share = posterior(scene["latents"][1], scene["mu"])[:, 1] > 0.5
    assert projection.right_side(1) == pytest.approx(share.double().mean())


def test_the_tipping_point_lies_on_the_boundary_and_on_the_line_through_z(
    scene, projection
) -> None:
    assert float(projection.tipping_point @ projection.boundary_normal) == pytest.approx(
        0, abs=1e-9
    )
    delta = scene["mu_bar"][1] - scene["mu_bar"][0]
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


def test_means_are_projected_orthogonally(scene, lift, projection) -> None:
    torch.testing.assert_close(lift(projection.model_means), scene["mu"])
    start, end = projection.measured_means
    delta = scene["mu_bar"][1] - scene["mu_bar"][0]
    torch.testing.assert_close(lift(end) - lift(start), delta)
    # What is missing of a measured mean is orthogonal to the plane.
    rest = scene["mu_bar"] - lift(projection.measured_means)
    for spanning in (delta, scene["mu"][1] - scene["mu"][0]):
        torch.testing.assert_close(rest @ spanning, 0 * rest[:, 0])


@pytest.mark.slow
def test_projection_of_real_digits(mnist) -> None:
    from ecinn.data.mnist import load_mnist

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
    assert np.allclose(blue @ projection.boundary_normal.numpy(), 0, atol=1e-6)
    assert np.allclose(orange[:, 1], float(projection.z[1]))
    words = {text.get_text() for axes in figure.axes for text in axes.texts}
    named = {"$z$", r"$\alpha_0$", r"$\alpha_1$", r"$\mu_p$", r"$\mu_q$", r"$\Delta$"}
    assert named | {r"$\bar{\mu}_p$", r"$\bar{\mu}_q$", "decision boundary"} <= words
    # Both scales are the same: what looks orthogonal is.
    axes = figure.axes[1]
    box = axes.get_window_extent()
    assert box.width / np.ptp(axes.get_xlim()) == pytest.approx(
        box.height / np.ptp(axes.get_ylim()), rel=0.02
    )


def test_the_caption_agrees_with_the_numbers(projection, generator, monkeypatch) -> None:
    """Of points on both sides of the line, of either class another share."""
    points = torch.randn((2, 40, 2), generator=generator, dtype=torch.float64)
    points[1] += projection.boundary_normal / projection.boundary_normal.norm()
    projection = dataclasses.replace(projection, points=tuple(points))
    monkeypatch.setattr(
        "ecinn.studies.paper.figures_method.projected", lambda *_: (projection, Figure(), 17)
    )
    made = figure_2(Context())
    numbers, words = made.data["figure-2"], made.captions["figure-2"]
    points = [np.array(each) for each in numbers["points"]]
    normal = np.array(numbers["boundary_normal"])
    right = [(points[0] @ normal <= 0).mean(), (points[1] @ normal > 0).mean()]
    assert numbers["on_their_side"] == pytest.approx(right)
    assert abs(right[0] - right[1]) > 0.01 < min(right) < max(right) < 0.99
    assert numbers["test_image"] == 17
    shares = [100 * share for share in numbers["on_their_side"]]
    assert f"({shares[0]:.1f} % of the 4s and {shares[1]:.1f} % of the 9s on the side" in words
    model, measured = (
        np.linalg.norm(np.diff(numbers[key], axis=0)) for key in ("model_means", "measured_means")
    )
    assert f"of the model are {model:.1f} apart and the measured ones {measured:.1f}," in words
    assert f"α₀ = {numbers['alpha_0']:.2f}, α₁ = {numbers['alpha_1']:.2f}." in words
    (z, tipping, convincing) = (
        np.array(numbers[key]) for key in ("z", "tipping_point", "convincing")
    )
    assert tipping @ normal == pytest.approx(0, abs=0.01)
    steps = [np.linalg.norm(each - z) for each in (tipping, convincing)]
    assert steps == pytest.approx(
        [numbers[key] * measured for key in ("alpha_0", "alpha_1")], rel=1e-3
    )
