"""What a score does while pixels are replaced in the order that a heatmap says."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.errors import InputError
from ecinn.metrics.heatmaps import Importance, PerImage

Images = Float[Tensor, "batch channels height width"]


@torch.no_grad()
def replacement_curve(
    score: Callable[[Tensor], Tensor],
    x: Images,
    replacement: Images,
    importance: Importance,
    *,
    insertion: bool,
    steps: int = 20,
) -> Float[Tensor, "batch {steps}+1"]:
    """Scores while pixels change in equal steps, the most important first, equal ones as read.

    A pixel changes in all its channels. The last step has changed all of them.

    Args:
        score: a number per image; called steps + 1 times with the batch.
        replacement: what deletion puts in place of x: blur, noise, or the counterfactual.
        insertion: start from the replacement and bring x back, instead of deleting from x.
    """
    if steps < 1:
        raise InputError(f"a curve takes at least one step, not {steps}")
    start, end = (replacement, x) if insertion else (x, replacement)
    order = importance.flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(1).reshape(importance.shape).unsqueeze(1)
    pixels = importance.shape[1] * importance.shape[2]
    points = []
    for step in range(steps + 1):
        answer = score(torch.where(rank < step * pixels // steps, end, start))
        if answer.shape != x.shape[:1]:
            raise InputError(
                f"a score is one number for each of {len(x)} images, not {tuple(answer.shape)}"
            )
        points.append(answer)
    return torch.stack(points, 1)


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


def _blur_matrix(n: int, sigma: float) -> Float[Tensor, "n n"]:
    """Row i holds the weights of all pixels in pixel i, up to 4σ away."""
    reach = math.ceil(4 * sigma)
    offset = torch.arange(-reach, reach + 1)
    weight = (-0.5 * (offset.double() / sigma).square()).exp()
    place = (torch.arange(n)[:, None] + offset) % (2 * n)
    place = torch.minimum(place, 2 * n - 1 - place)
    matrix = torch.zeros(n, n, dtype=torch.float64)
    return matrix.scatter_add(1, place, (weight / weight.sum()).expand(n, -1))
