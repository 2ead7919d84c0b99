"""Figure 2: the latent geometry, as a projection of real test images."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.flow.precision import exact_convolutions
from ecinn.model import Model
from ecinn.pixels import to_uint8
from ecinn.studies.paper import style
from ecinn.studies.paper.artefact import Artefact, Context, Made
from ecinn.studies.paper.draws import draw, generator

P, Q = 4, 9
POINTS = 400
"""Test images of either class."""

Point = Float[Tensor, " 2"]
Points = Float[Tensor, "_ 2"]


@dataclass(frozen=True)
class Plane:
    """The plane through the middle of μ_p and μ_q that Δ and w = μ_q − μ_p span.

    It holds the normal of the decision boundary. So the boundary is a line in it, and every
    latent, projected, lies on that side of the line on which it truly is.
    """

    origin: Float[Tensor, " dim"]
    along: Float[Tensor, " dim"]
    """Δ/‖Δ‖."""
    across: Float[Tensor, " dim"]
    """What of w is orthogonal to Δ, of length 1."""

    def project(self, z: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch 2"]:
        """Coordinates of the nearest point of the plane."""
        basis = torch.stack([self.along, self.across])
        return (z - self.origin) @ basis.T

    def lift(self, points: Float[Tensor, "*batch 2"]) -> Float[Tensor, "*batch dim"]:
        """The point of latent space that has these coordinates."""
        return self.origin + points @ torch.stack([self.along, self.across])


def plane_of(
    mu_p: Float[Tensor, " dim"], mu_q: Float[Tensor, " dim"], delta: Float[Tensor, " dim"]
) -> Plane:
    """Its axes by Gram and Schmidt."""
    along = delta / delta.norm()
    w = mu_q - mu_p
    across = w - (w @ along) * along
    return Plane((mu_p + mu_q) / 2, along, across / across.norm())


@dataclass(frozen=True)
class Geometry:
    """All that the figure shows, in the plane's coordinates."""

    points: tuple[Points, Points]
    """Test images of p and of q."""
    model_means: Points
    """μ_p and μ_q."""
    measured_means: Points
    """μ̄_p and μ̄_q."""
    normal: Point
    """Of the decision boundary, which goes through the origin."""
    z: Point
    tipping: Point
    convincing: Point
    alpha_0: float
    alpha_1: float

    def right_side(self, side: int) -> float:
        """Share of the points of a class that the boundary gives to it."""
        towards_q = self.points[side] @ self.normal > 0
        return float((towards_q == bool(side)).double().mean())

    def numbers(self) -> dict[str, Any]:
        """For the file beside the figure."""
        return {
            "model_means": _rounded(self.model_means),
            "measured_means": _rounded(self.measured_means),
            "boundary_normal": _rounded(self.normal),
            "z": _rounded(self.z),
            "tipping_point": _rounded(self.tipping),
            "convincing": _rounded(self.convincing),
            "alpha_0": round(self.alpha_0, 6),
            "alpha_1": round(self.alpha_1, 6),
            "points": [_rounded(points) for points in self.points],
        }


def _rounded(values: Tensor) -> Any:  # noqa: ANN401
    return (values.double() * 1e4).round().div(1e4).tolist()


def geometry(
    mu: Float[Tensor, "2 dim"],
    mu_bar: Float[Tensor, "2 dim"],
    latents: tuple[Float[Tensor, "some dim"], Float[Tensor, "others dim"]],
    z: Float[Tensor, " dim"],
) -> Geometry:
    """Project the latents of two classes, p first; z is one of p and is to become q."""
    delta = mu_bar[1] - mu_bar[0]
    plane = plane_of(mu[0], mu[1], delta)
    alpha_0 = equations.tipping_point_alpha(z, delta, mu[0], mu[1])
    alpha_1 = equations.convincing_alpha(alpha_0)
    w, _ = equations.decision_boundary(mu[0], mu[1])
    return Geometry(
        points=(plane.project(latents[0]), plane.project(latents[1])),
        model_means=plane.project(mu),
        measured_means=plane.project(mu_bar),
        # w lies in the plane: its coordinates are the whole of it.
        normal=torch.stack([w @ plane.along, w @ plane.across]),
        z=plane.project(z),
        tipping=plane.project(z + alpha_0 * delta),
        convincing=plane.project(z + alpha_1 * delta),
        alpha_0=float(alpha_0),
        alpha_1=float(alpha_1),
    )


def projected(
    model: Model, data: Dataset, p: int, q: int, draws: torch.Generator
) -> tuple[Geometry, Figure, int]:
    """Random test images of p and q, and a random one of p on its way to q; its place."""
    place = int(draw(model, data, data.labels == p, 1, draws))
    some, others = (_some(data.labels == label, draws) for label in (p, q))
    latents = _latents(model, data.images[some]), _latents(model, data.images[others])
    z = _latents(model, data.images[place : place + 1])[0]
    mu, mu_bar = (means[[p, q]].cpu().double() for means in (model.classifier.mu, model.mu_bar))
    found = geometry(mu, mu_bar, latents, z)
    explanation = model.explain(data.images[place], q)
    images = (
        to_uint8(explanation.x[0]),
        explanation.stored_tipping_point[0, 0],
        explanation.stored_convincing[0, 0],
    )
    arrays = [pictures.image_array(image) for image in images]
    return found, draw_geometry(found, arrays, data.class_names[p], data.class_names[q]), place


def _figure_2(context: Context) -> Made:
    model, data = context.model("mnist"), context.data("mnist", "test")
    found, figure, place = projected(model, data, P, Q, generator(context, 2))
    right = [found.right_side(side) for side in (0, 1)]
    distance = [
        float((means[1] - means[0]).norm()) for means in (found.model_means, found.measured_means)
    ]
    words = (
        f"{POINTS} random test images of {P} and of {Q}, projected orthogonally on the plane that "
        "Δ and w = μ_q − μ_p span. w, the normal of the decision boundary, lies in it: the line "
        "is where the boundary cuts the plane, and every point lies on its true side of it "
        f"({100 * right[0]:.1f} % of the {P}s and {100 * right[1]:.1f} % of the {Q}s on their "
        "own). Dotted: unit variance around the model means. The paper draws measured means near "
        f"the model's; here the model's are {distance[0]:.1f} apart and the measured ones "
        f"{distance[1]:.1f}, and Δ is far from parallel to w. α₀ = {found.alpha_0:.2f}, "
        f"α₁ = {found.alpha_1:.2f}."
    )
    numbers = found.numbers() | {"test_image": place, "on_their_side": right}
    return Made({"figure-2": figure}, data={"figure-2": numbers}, captions={"figure-2": words})


def _some(among: Tensor, draws: torch.Generator) -> Tensor:
    candidates = among.nonzero()[:, 0]
    return candidates[torch.randperm(len(candidates), generator=draws)[:POINTS]]


@torch.inference_mode()
def _latents(model: Model, images: Tensor) -> Float[Tensor, "batch dim"]:
    with exact_convolutions():
        parts = [
            model.classifier.encode_with_log_det(model.pixels(part))[0]
            for part in images.split(100)
        ]
    return torch.cat(parts).cpu().double()


def draw_geometry(found: Geometry, images: list[pictures.Array], p: str, q: str) -> Figure:
    """The plane with equal scales on both axes; above it the images of z, α₀ and α₁."""
    everything = torch.cat([*found.points, found.model_means, found.measured_means])
    low, high = everything.amin(0) - 0.5, everything.amax(0) + 0.5
    reach = float(torch.stack([-low[1], high[1], torch.tensor(3.2).double()]).max())
    width = style.COLUMN
    inch = (width - 0.12) / float(high[0] - low[0])
    top, bottom, tall = 0.56, 0.14, 2 * reach * inch
    figure, page = style.page(width, top + tall + bottom)
    with style.styled():
        axes = figure.add_axes((0.06 / width, bottom / (top + tall + bottom),
                                (width - 0.12) / width, tall / (top + tall + bottom)))  # fmt: skip
    axes.set(xlim=(float(low[0]), float(high[0])), ylim=(-reach, reach), xticks=[], yticks=[])
    axes.patch.set_alpha(0.0)
    axes.spines[["left", "bottom"]].set_visible(False)
    with style.styled():
        _draw_plane(axes, found, p, q)
    marks = ((found.z, "$x$"), (found.tipping, r"$\hat{x}$ at $\alpha_0$"),
             (found.convincing, r"$\hat{x}$ at $\alpha_1$"))  # fmt: skip
    side = style.enlarged(28, 3)
    for (point, name), array in zip(marks, images, strict=True):
        across = 0.06 + (float(point[0]) - float(low[0])) * inch
        down = top + (reach - float(point[1])) * inch
        style.write(page, across, 0.02, name)
        style.place(page, array, across - side / 2, 0.13, 3)
        page.plot([across] * 2, [0.13 + side, down - 0.05], color=style.FRAME, linewidth=0.5)
    scale = 0.06 + 2 * inch
    page.plot([0.06, scale], [top + tall + 0.06] * 2, color=style.MUTED, linewidth=0.8)
    look: dict[str, Any] = {"ha": "left", "va": "center", "color": style.MUTED}
    style.write(page, scale + 0.04, top + tall + 0.06, r"2 ($2\sigma$ of the model)", **look)
    look["ha"] = "right"
    words = r"$\rightarrow$ along $\Delta$,  $\uparrow$ the rest of $\mu_q-\mu_p$"
    style.write(page, width - 0.06, top + tall + 0.06, words, **look)
    return figure


def _draw_plane(axes: Axes, found: Geometry, p: str, q: str) -> None:
    clear: dict[str, Any] = {"va": "center", "bbox": dict(style.CLEAR)}
    # The boundary falls from left to right: free room is below p and above q.
    for points, colour, name, level in zip(
        found.points, (style.SKY, style.PURPLE), (p, q), (-2.1, 2.1), strict=True
    ):
        x, y = points.T.numpy()
        axes.plot(x, y, ".", color=colour, markersize=2.2, markeredgewidth=0, alpha=0.7)
        words = f"test images of {name}"
        style.write(axes, float(x.mean()), level, words, color=colour, **clear)
    left, right = axes.get_xlim()
    slope = float(-found.normal[0] / found.normal[1])
    axes.plot([left, right], [slope * left, slope * right], color=style.BLUE, zorder=3)
    high = axes.get_ylim()[1] - 0.5
    look = clear | {"ha": "left", "color": style.BLUE}
    style.write(axes, high / slope + 1.0, high, "decision boundary", **look)
    axes.plot([left, right], [float(found.z[1])] * 2, color=style.ORANGE, zorder=3)
    for mean, letter, up in zip(found.model_means.tolist(), "pq", (-1, 1), strict=True):
        axes.add_patch(
            Circle(tuple(mean), 1, fill=False, edgecolor=style.INK, linestyle=":", linewidth=0.6)
        )
        axes.plot(*mean, "o", color=style.INK, markersize=3, zorder=5)
        style.write(axes, mean[0], mean[1] + 1.5 * up, rf"$\mu_{letter}$", **clear)
    start, end = found.measured_means.tolist()
    arrow = {"arrowstyle": "-|>", "color": style.GREEN, "linewidth": 0.9, "mutation_scale": 7}
    axes.annotate("", end, start, arrowprops=arrow | {"shrinkA": 0, "shrinkB": 2}, zorder=4)
    # Names of the line's points on one side of both lines, those of the means on the other.
    above = -1 if found.z[1] < start[1] else 1
    for mean, letter in zip((start, end), "pq", strict=True):
        axes.plot(*mean, "s", color=style.GREEN, markersize=3.5, zorder=5)
        name = rf"$\bar{{\mu}}_{letter}$"
        style.write(axes, mean[0], mean[1] - 0.75 * above, name, color=style.GREEN, **clear)
    place = 0.8 * start[0] + 0.2 * end[0], start[1] - 0.65 * above
    style.write(axes, *place, r"$\Delta$", color=style.GREEN, **clear)
    for point, colour, name in (
        (found.z, style.ORANGE, "$z$"),
        (found.tipping, style.BLUE, r"$\alpha_0$"),
        (found.convincing, style.INK, r"$\alpha_1$"),
    ):
        axes.plot(*point.tolist(), "s", color=colour, markersize=3.5, zorder=6)
        place = (float(point[0]), float(point[1]) + 0.75 * above)
        style.write(axes, *place, name, color=colour, **clear)


FIGURE_2 = Artefact(
    "figure-2",
    "the latent geometry of two digits, projected",
    _figure_2,
    reported=(
        "A drawing: two unit-variance normals, the decision boundary, the line through z along "
        "Δ between the measured means, and the points at α₀ and α₁ on it."
    ),
)
