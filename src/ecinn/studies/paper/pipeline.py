"""Figure 1: the whole method on one face, latents before and after as pictures."""

import math
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ecinn import equations
from ecinn.data.celeba import ATTRIBUTES
from ecinn.drawing import pictures
from ecinn.explanation.result import Explanation
from ecinn.flow.precision import exact_convolutions
from ecinn.model import Model
from ecinn.pixels import to_uint8
from ecinn.studies.paper import style
from ecinn.studies.paper.artefact import Artefact, Context, Made
from ecinn.studies.paper.draws import draw, generator
from ecinn.studies.paper.explained import Shown, every_image
from ecinn.studies.paper.style import share

FULL_COLOUR = 2.0
"""Of a latent, whose standard deviation around its mean is 1 under the model."""
_FACE, _LATENT = 3, 1
"""Printed pixels for every pixel of a face and for every latent."""


def latent_picture(latent: Float[Tensor, " dim"], limit: float = FULL_COLOUR) -> pictures.Array:
    """All latents as a rectangle of signed colours, row by row, the lowest frequencies first."""
    dim = len(latent)
    height = max(side for side in range(1, math.isqrt(dim) + 1) if dim % side == 0)
    return pictures.heatmap_array(latent.reshape(1, height, dim // height), limit)


def pipelines(context: Context, n: int, draws: torch.Generator) -> tuple[list[Figure], Shown]:
    """So many random women whom the model reads as without makeup, each into makeup."""
    model, data = context.model("celeba-makeup"), context.data("celeba/Heavy_Makeup", "test")
    assert data.attributes is not None
    women = data.attributes[:, ATTRIBUTES.index("Male")] == 0
    places = draw(model, data, women & (data.labels == 0), n, draws)
    explanation = model.explain(data.images[places], 1)
    latents = _latents(model, explanation)
    figures = [
        draw_pipeline(explanation, image, z, change)
        for image, (z, change) in enumerate(zip(*latents, strict=True))
    ]
    return figures, every_image(explanation, tuple(places.tolist()))


def _figure_1(context: Context) -> Made:
    figures, shown = pipelines(context, 1, generator(context, 1))
    caption = (
        "A random test face of a woman whom the model reads as without makeup. f turns it into "
        "the latent z, drawn as a picture (red: positive, blue: negative, white: 0; lowest "
        "frequencies on top); α₁Δ is added in closed form; f⁻¹ turns the sum into the "
        "counterfactual x̂. h = x̂ − x. Numbers: what the model says of the 8-bit image."
    )
    name = "figure-1"
    return Made({name: figures[0]}, data={name: shown.numbers()}, captions={name: caption})


@torch.inference_mode()
def _latents(model: Model, explanation: Explanation) -> tuple[Tensor, Tensor]:
    """z and α₁Δ of every image and its first target."""
    with exact_convolutions():
        z, _ = model.classifier.encode_with_log_det(explanation.x)
    delta = equations.latent_direction(model.mu_bar, explanation.p, explanation.q[:, 0])
    return z.cpu(), (explanation.alpha_1[:, :1] * delta).cpu()


def draw_pipeline(
    explanation: Explanation,
    image: int,
    z: Float[Tensor, " dim"],
    change: Float[Tensor, " dim"],
) -> Figure:
    """x, then z, α₁Δ and their sum below each other, then x̂ and h of the first target."""
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
    for array, words in zip(latents, sums, strict=True):
        style.write(page, left + wide / 2, top + 0.01, words, fontsize=style.NORMAL)
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
        "red: lighter\nblue: darker",
    )
    look: dict[str, Any] = {"va": "bottom", "fontsize": style.NORMAL}
    for start, array, symbol, words in zip(
        lefts, faces, ("$x$", r"$\hat{x}$", "$h$"), below, strict=True
    ):
        style.write(page, start + side / 2, middle - side / 2 - 0.03, symbol, **look)
        _, bottom = style.place(page, array, start, middle - side / 2, _FACE)
        style.write(page, start + side / 2, bottom + 0.03, words)
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


FIGURE_1 = Artefact(
    "figure-1",
    "the pipeline on a face, latents as pictures",
    _figure_1,
    frozenset({"faces"}),
    reported=(
        "A woman without makeup, her internal representation before and after the closed-form "
        "correction, and the counterfactual with makeup."
    ),
)
