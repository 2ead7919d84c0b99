"""Make Figures 1 and 2: the method on one face, and its latent geometry with real digits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

from ecinn import equations
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.explanation.result import Explanation
from ecinn.model import Model
from ecinn.pixels import to_uint8
from ecinn.studies.benchmark.quality import draw_of_class
from ecinn.studies.paper import style
from ecinn.studies.paper.artefact import Context, Made
from ecinn.studies.paper.explained import Shown, draw, explain_each
from ecinn.studies.paper.style import share

FULL_COLOUR = 2.0
"""A latent with full colour; under the model its standard deviation around its mean is 1."""
_FACE, _LATENT = 3, 1
"""Printed pixels per pixel of a face, and per latent."""
P, Q = 4, 9
"""The digits of Figure 2."""
POINTS = 400
"""Test images of either class."""

Point = Float[Tensor, " 2"]
Points = Float[Tensor, "_ 2"]


def latent_picture(latent: Float[Tensor, " dim"], limit: float = FULL_COLOUR) -> pictures.Array:
    """Arrange all latents row by row as signed colours, the lowest frequencies first."""
    dim = len(latent)
    height = max(side for side in range(1, math.isqrt(dim) + 1) if dim % side == 0)
    return pictures.heatmap_array(latent.reshape(1, height, dim // height), limit)


def pipelines(context: Context, n: int, generator: torch.Generator) -> tuple[list[Figure], Shown]:
    """Draw n random women whom the model reads as without makeup, each into makeup."""
    model, data = tested = context.tested("celeba-makeup")
    assert data.attributes is not None
    women = data.attributes[:, ATTRIBUTES.index("Male")] == 0
    places = draw([tested], women & (data.labels == 0), n, generator)
    shown = explain_each(tested, places, 1)
    explanation = shown.explanation
    z = model.encode(data.images[places]).cpu()
    delta = equations.latent_direction(model.mu_bar, explanation.p, explanation.q[:, 0])
    changes = (explanation.alpha_1[:, :1] * delta).cpu()
    figures = [draw_pipeline(explanation, image, z[image], changes[image]) for image in range(n)]
    return figures, shown


def figure_1(context: Context) -> Made:
    """The method on a face."""
    figures, shown = pipelines(context, 1, context.generator(1))
    return Made.single("figure-1", figures[0], shown.numbers())


def draw_pipeline(
    explanation: Explanation, image: int, z: Float[Tensor, " dim"], change: Float[Tensor, " dim"]
) -> Figure:
    """Draw x, then z, α₁Δ and their sum below each other, then x̂ and h of the first target."""
    e, pair = explanation, (image, 0)
    faces = [
        pictures.image_array(to_uint8(e.x[image])),
        pictures.image_array(e.stored_convincing[pair]),
        pictures.heatmap_array(e.heatmap[pair], pictures.robust_limit(e.heatmap[pair])),
    ]
    latents = [latent_picture(latent) for latent in (z, change, z + change)]
    side = style.enlarged(faces[0].shape[1], _FACE)
    tall, wide = (style.enlarged(pixels, _LATENT) for pixels in latents[0].shape[:2])
    between, name, margin = 0.16, 0.13, 0.04
    height = 3 * tall + 3 * name + 2 * between + margin
    arrow = (style.COLUMN - 2 * margin - 3 * side - wide - 0.07) / 2
    figure, page = style.page(style.COLUMN, height)

    left, middle = margin + side + arrow, height / 2 - 0.08
    top, centres = 0.0, []
    sums = ("$z$", r"$\alpha_1\Delta$", r"$z+\alpha_1\Delta$")
    for array, symbol in zip(latents, sums, strict=True):
        style.write(page, left + wide / 2, top + 0.01, symbol, fontsize=style.NORMAL)
        _, bottom = style.place(page, array, left, top + name, _LATENT)
        centres.append((top + name + bottom) / 2)
        top = bottom + between
    for sign, above in (("+", 0), ("=", 1)):
        down = (centres[above] + centres[above + 1] - name) / 2
        style.write(page, left + wide / 2, down, sign, va="center", fontsize=style.LARGE)

    lefts = (margin, left + wide + arrow, left + wide + arrow + side + 0.07)
    certificate = e.convincing_certificate
    p, winner = int(e.p[image]), int(certificate.winner[pair])
    below = (
        f"{e.class_names[p]}\n{share(float(e.posterior[image, p]))}",
        f"{e.class_names[winner]}\n{share(float(certificate.verdict[pair][winner]))}",
        "red: brighter\nblue: darker",
    )
    look: dict[str, Any] = {"va": "bottom", "fontsize": style.NORMAL}
    for start, array, symbol, text in zip(
        lefts, faces, ("$x$", r"$\hat{x}$", "$h$"), below, strict=True
    ):
        style.write(page, start + side / 2, middle - side / 2 - 0.03, symbol, **look)
        _, bottom = style.place(page, array, start, middle - side / 2, _FACE)
        style.write(page, start + side / 2, bottom + 0.03, text)
    _arrow(page, (margin + side, middle), (left, centres[0]), "$f$")
    _arrow(page, (left + wide, centres[2]), (lefts[1], middle), "$f^{-1}$")
    return figure


def _arrow(page: Axes, start: tuple[float, float], end: tuple[float, float], name: str) -> None:
    look: dict[str, Any] = {
        "arrowstyle": "-|>", "color": style.GREEN, "linewidth": 1.0, "mutation_scale": 7,
        "shrinkA": 2, "shrinkB": 2,
    }  # fmt: skip
    page.annotate("", end, start, arrowprops=look)
    middle = (start[0] + end[0]) / 2 - 0.05, (start[1] + end[1]) / 2 - 0.04
    look = {"ha": "right", "va": "center", "fontsize": style.LARGE, "color": style.GREEN}
    style.write(page, *middle, name, **look)


def plane_basis(
    delta: Float[Tensor, " dim"], offsets: Float[Tensor, "_ dim"]
) -> Float[Tensor, "2 dim"]:
    """Orthonormal basis: Δ/‖Δ‖, and the leading principal component of the latents without Δ.

    Δ is the normal of the decision boundary. Because it lies in the plane, the boundary appears
    as a line, and an orthogonal projection onto the plane keeps every latent on its side of it.

    Args:
        offsets: latents of both classes minus the midpoint of the means. Without Δ, these are
            deviations from the mean of the class.
    """
    along = delta / delta.norm()
    rest = offsets - (offsets @ along)[:, None] * along
    return torch.stack([along, torch.linalg.svd(rest, full_matrices=False).Vh[0]])


@dataclass(frozen=True)
class Geometry:
    """Points of the figure, in the coordinates of the plane; the boundary is where the first is 0.

    The origin is the midpoint of the means.
    """

    points: tuple[Points, Points]
    """Test images of p and of q."""
    means: Points
    """μ_p and μ_q."""
    z: Point
    tipping_point: Point
    convincing: Point
    alpha_0: float
    alpha_1: float

    def right_side(self, side: int) -> float:
        """Share of the points of a class that lie on its side of the boundary."""
        towards_q = self.points[side][:, 0] > 0
        return float((towards_q == bool(side)).double().mean())

    def numbers(self) -> dict[str, Any]:
        """Return all numbers for the JSON file."""

        def rounded(values: Tensor) -> Any:  # noqa: ANN401
            return (values.double() * 1e4).round().div(1e4).tolist()

        return {
            name: rounded(value) if isinstance(value, Tensor) else round(value, 6)
            for name, value in vars(self).items()
            if name != "points"
        } | {"points": [rounded(points) for points in self.points]}


def geometry(
    mu: Float[Tensor, "2 dim"],
    latents: tuple[Float[Tensor, "some dim"], Float[Tensor, "others dim"]],
    z: Float[Tensor, " dim"],
) -> Geometry:
    """Project the latents of two classes, p first; z belongs to p, moves to q and lies above Δ."""
    delta, middle = mu[1] - mu[0], mu.mean(0)
    basis = plane_basis(delta, torch.cat(latents) - middle)
    if basis[1] @ (z - middle) < 0:
        basis = torch.stack([basis[0], -basis[1]])
    alpha_0 = equations.tipping_point_alpha(z, delta, mu[0], mu[1])
    alpha_1 = equations.convincing_alpha(alpha_0)

    def project(z: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch 2"]:
        return (z - middle) @ basis.T

    return Geometry(
        points=(project(latents[0]), project(latents[1])),
        means=project(mu),
        z=project(z),
        tipping_point=project(z + alpha_0 * delta),
        convincing=project(z + alpha_1 * delta),
        alpha_0=float(alpha_0),
        alpha_1=float(alpha_1),
    )


def projected(
    model: Model, data: Dataset, p: int, q: int, generator: torch.Generator
) -> tuple[Geometry, Figure, int]:
    """Project random test images of p and q, and explain a correctly classified one of p.

    Returns:
        The projection, its drawing, and the position of the explained image in the test set.
    """
    place = int(draw([(model, data)], data.labels == p, 1, generator))
    latents = []
    for label in (p, q):
        drawn = draw_of_class(data.labels, label, POINTS, generator)
        parts = [model.encode(part) for part in data.images[drawn].split(100)]
        latents.append(torch.cat(parts).cpu().double())
    z = model.encode(data.images[place]).cpu()[0].double()
    result = geometry(model.mu[[p, q]].cpu().double(), (latents[0], latents[1]), z)
    e = model.explain(data.images[place], q, confidence="alpha_1")
    images = (to_uint8(e.x[0]), e.stored_tipping_point[0, 0], e.stored_convincing[0, 0])
    arrays = [pictures.image_array(image) for image in images]
    return result, draw_geometry(result, arrays, data.class_names[p], data.class_names[q]), place


def figure_2(context: Context) -> Made:
    """The latent geometry of two digits."""
    model, data = context.tested("mnist")
    result, figure, place = projected(model, data, P, Q, context.generator(2))
    right = [result.right_side(side) for side in (0, 1)]
    apart = float((result.means[1] - result.means[0]).norm())
    said = {"points": POINTS, "p": P, "q": Q, "right": right, "apart": apart, "geometry": result}
    numbers = result.numbers() | {"test_image": place, "on_their_side": right}
    return Made.single("figure-2", figure, numbers, **said)


def draw_geometry(scene: Geometry, images: Sequence[pictures.Array], p: str, q: str) -> Figure:
    """Draw the plane with equal scales on both axes, below the images of z, α₀ and α₁."""
    points = torch.cat(scene.points)
    # Room for the outer images at the sides, and for the names of the classes below.
    left = min(float(points[:, 0].min()) - 0.5, float(scene.z[0]) - 1.5)
    right = max(float(points[:, 0].max()) + 0.5, float(scene.convincing[0]) + 1.5)
    low, high = float(points[:, 1].min()) - 1.5, float(points[:, 1].max()) + 0.5
    width = style.COLUMN
    inch = (width - 0.12) / (right - left)
    top, bottom, tall = 0.56, 0.14, (high - low) * inch
    figure, page = style.page(width, top + tall + bottom)
    with style.styled():
        axes = figure.add_axes((0.06 / width, bottom / (top + tall + bottom),
                                (width - 0.12) / width, tall / (top + tall + bottom)))  # fmt: skip
    axes.set(xlim=(left, right), ylim=(low, high), xticks=[], yticks=[])
    axes.patch.set_alpha(0.0)
    axes.spines[["left", "bottom"]].set_visible(False)
    with style.styled():
        _draw_plane(axes, scene, p, q)
    marks = ((scene.z, "$x$"), (scene.tipping_point, r"$\hat{x}$ at $\alpha_0$"),
             (scene.convincing, r"$\hat{x}$ at $\alpha_1$"))  # fmt: skip
    side = style.enlarged(28, 3)
    for (point, name), array in zip(marks, images, strict=True):
        across = 0.06 + (float(point[0]) - left) * inch
        down = top + (high - float(point[1])) * inch
        style.write(page, across, 0.02, name)
        style.place(page, array, across - side / 2, 0.13, 3)
        page.plot([across] * 2, [0.13 + side, down - 0.05], color=style.FRAME, linewidth=0.5)
    look: dict[str, Any] = {"va": "center", "color": style.MUTED}
    text = r"$\rightarrow$ along $\Delta$,  $\uparrow$ leading principal component within classes"
    style.write(page, width / 2, top + tall + 0.06, text, **look)
    return figure


def _draw_plane(axes: Axes, scene: Geometry, p: str, q: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
    clear: dict[str, Any] = {"va": "center", "bbox": box}
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    sides: tuple[Any, ...] = ((p, style.SKY, left, "left"), (q, style.PURPLE, right, "right"))
    for points, (name, colour, edge, side) in zip(scene.points, sides, strict=True):
        x, y = points.T.numpy()
        axes.plot(x, y, ".", color=colour, markersize=2.2, markeredgewidth=0, alpha=0.6)
        look = clear | {"ha": side, "color": colour}
        style.write(axes, edge, low + 0.7, f"test images of {name}", **look)
    axes.plot([0, 0], [low, high], color=style.BLUE, zorder=3)
    look = clear | {"ha": "left", "color": style.BLUE}
    style.write(axes, 0.5, high - 0.7, "decision boundary", **look)
    axes.plot([left, right], [float(scene.z[1])] * 2, color=style.ORANGE, zorder=3)
    start, end = scene.means.tolist()
    arrow = {"arrowstyle": "-|>", "color": style.GREEN, "linewidth": 0.9, "mutation_scale": 7}
    axes.annotate("", end, start, arrowprops=arrow | {"shrinkA": 0, "shrinkB": 2}, zorder=4)
    # z lies above Δ: its line is named above, the means and Δ are named below.
    style.write(axes, 0.35 * start[0], -0.9, r"$\Delta$", color=style.GREEN, **clear)
    for mean, letter in zip((start, end), "pq", strict=True):
        dotted: dict[str, Any] = {"edgecolor": style.INK, "linestyle": ":", "linewidth": 0.6}
        axes.add_patch(Circle(tuple(mean), 1, fill=False, zorder=5, **dotted))
        axes.plot(*mean, "o", color=style.GREEN, markersize=3, zorder=5)
        style.write(axes, mean[0], -1.9, rf"$\mu_{letter}$", color=style.GREEN, **clear)
    for point, colour, name, aside in (
        (scene.z, style.ORANGE, "$z$", 0.0),
        (scene.tipping_point, style.BLUE, r"$\alpha_0$", 1.1),
        (scene.convincing, style.INK, r"$\alpha_1$", 0.0),
    ):
        axes.plot(*point.tolist(), "s", color=colour, markersize=3.5, zorder=6)
        place = (float(point[0]) + aside, float(point[1]) + 1.0)
        style.write(axes, *place, name, color=colour, **clear)
