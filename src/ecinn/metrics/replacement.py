"""What a score does while pixels are replaced in the order that a heatmap says."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ecinn.errors import InputError
from ecinn.metrics.heatmaps import Importance, PerImage

Images = Float[Tensor, "batch channels height width"]
STEPS = 10
"""Of a curve: as many evaluations of the network per image, order and replacement."""


@torch.no_grad()
def replacement_curve(
    score: Callable[[Tensor], Tensor],
    x: Images,
    replacement: Images,
    importance: Importance,
    *,
    insertion: bool,
    generator: torch.Generator,
    steps: int = STEPS,
    ends: tuple[PerImage, PerImage] | None = None,
) -> Float[Tensor, "batch {steps}+1"]:
    """Scores while pixels change in equal steps, the most important first, equal ones by lot.

    A pixel changes in all its channels. The last step has changed all of them.

    Args:
        score: a number per image; called with the batch, once for every point not in `ends`.
        replacement: what deletion puts in place of x: blur, noise, or the counterfactual.
        insertion: start from the replacement and bring x back, instead of deleting from x.
        generator: what equally important pixels are drawn with.
        ends: the scores of x and of the replacement where they are known, being the same for
            every order.
    """
    if steps < 1:
        raise InputError(f"a curve takes at least one step, not {steps}")
    known = (_checked(score, x), _checked(score, replacement)) if ends is None else ends
    rank = _ranks(importance, generator).unsqueeze(1)
    pixels = importance.shape[1] * importance.shape[2]
    start, end = (replacement, x) if insertion else (x, replacement)
    first, last = reversed(known) if insertion else known
    between = [
        _checked(score, torch.where(rank < step * pixels // steps, end, start))
        for step in range(1, steps)
    ]
    return torch.stack([first, *between, last], 1)


def area_under_curve(curve: Float[Tensor, "batch points"]) -> PerImage:
    """∫₀¹ of the curve by the trapezoid rule, points at equal distances."""
    if curve.shape[1] < 2:
        raise InputError("an area needs a curve of at least two points")
    return torch.trapezoid(curve, dim=1) / (curve.shape[1] - 1)


def blurred(x: Images, sigma: float) -> Images:
    """A Gaussian blur. Edges are mirrored with the edge pixel, so every image keeps its mean.

    Args:
        sigma: a fraction of the shorter side; 0.1 of 28 pixels is 2.8.
    """
    if not sigma > 0:
        raise InputError(f"a blur has a sigma above 0, not {sigma}")
    height, width = x.shape[2:]
    pixels = sigma * min(height, width)
    down, across = (_blur_matrix(n, pixels).to(x) for n in (height, width))
    return down @ x @ across.T


def noise_like(x: Images, generator: torch.Generator) -> Images:
    """Uniform noise in [0, 1), the same on every device that x may be on."""
    noise = torch.rand(x.shape, generator=generator, device=generator.device, dtype=x.dtype)
    return noise.to(x.device)


def _checked(score: Callable[[Tensor], Tensor], images: Images) -> PerImage:
    answer = score(images)
    if answer.shape != images.shape[:1]:
        raise InputError(
            f"a score is one number for each of {len(images)} images, not {tuple(answer.shape)}"
        )
    return answer


def _ranks(
    importance: Importance, generator: torch.Generator
) -> Int[Tensor, "batch height width"]:
    """0 for the most important pixel of every image; a random permutation decides ties."""
    values = importance.flatten(1)
    lots = torch.rand(values.shape, generator=generator, device=generator.device)
    shuffle = lots.argsort(1).to(values.device)
    shuffled = values.gather(1, shuffle).argsort(dim=1, descending=True, stable=True)
    return shuffle.gather(1, shuffled).argsort(1).reshape(importance.shape)


def _blur_matrix(n: int, sigma: float) -> Float[Tensor, "n n"]:
    """Row i holds the weights of all pixels in pixel i, up to 4σ away."""
    reach = math.ceil(4 * sigma)
    offset = torch.arange(-reach, reach + 1)
    weight = (-0.5 * (offset.double() / sigma).square()).exp()
    place = (torch.arange(n)[:, None] + offset) % (2 * n)
    place = torch.minimum(place, 2 * n - 1 - place)
    matrix = torch.zeros(n, n, dtype=torch.float64)
    return matrix.scatter_add(1, place, (weight / weight.sum()).expand(n, -1))
