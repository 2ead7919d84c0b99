"""Other methods of counterfactuals, on the same classifier and behind the same signature."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from ecinn import equations
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import Targets, convincing_latent, resolve_targets
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.result import Counterfactuals, Images
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import to_pixels, to_uint8

PART_SIZE = 64
"""Pairs that are worked on at once: all that a gradient method keeps for its backward pass."""
CANDIDATES = 4096
"""Training images that are compared at once."""

Norm = Literal["l1", "l2"]
Judge = Callable[[Images], Float[Tensor, "batch classes"]]
"""log p(y|x) of a batch of images, differentiable in x."""


@dataclass(frozen=True)
class _Pairs:
    """Images with one target each, a row per pair."""

    x: Images
    z: Float[Tensor, "batch dim"]
    p: Int[Tensor, " batch"]
    q: Int[Tensor, " batch"]


_Answer = tuple[Images, Int[Tensor, " batch"], Bool[Tensor, " batch"]]
"""Images, network evaluations beyond the first encode, and where nothing was found."""


def ecinn(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    target: Targets,
) -> Counterfactuals:
    """Eq. 3 at α₁, x̂ = f⁻¹(f(x) + α₁Δ) with Δ = μ̄_q − μ̄_p: one encode, one decode."""

    def answer(pairs: _Pairs) -> _Answer:
        z_hat = convincing_latent(pairs.z, classifier.mu, mu_bar, pairs.p, pairs.q)
        images = classifier.decode(z_hat)
        return images, torch.ones_like(pairs.q), ~images.isfinite().flatten(1).all(1)

    return _every_pair(classifier, x, target, answer)


def model_means(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    target: Targets,
) -> Counterfactuals:
    """ECINN with Δ = μ_q − μ_p, the model's own means instead of the measured ones."""
    return ecinn(classifier, classifier.mu, x, target)


def nearest_image(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    target: Targets,
    *,
    images: UInt8[Tensor, "candidates channels height width"],
    predicted: Int[Tensor, " candidates"],
    norm: Norm = "l2",
) -> Counterfactuals:
    """argmin ‖x' − x‖ over real images x' that the classifier reads as q: one encode.

    Args:
        images: the training images to choose from.
        predicted: the class that the classifier reads each of them as.
    """
    if images.shape[1:] != x.shape[1:]:
        raise InputError(
            f"images to choose from are of shape {tuple(x.shape[1:])} as those to explain, "
            f"not {tuple(images.shape[1:])}"
        )
    order = 1.0 if norm == "l1" else 2.0

    def answer(pairs: _Pairs) -> _Answer:
        nearest = pairs.x.clone()
        smallest = pairs.x.new_full((len(nearest),), math.inf)
        for q in pairs.q.unique():
            rows = (pairs.q == q).nonzero()[:, 0]
            of_q = (predicted == q.to(predicted.device)).nonzero()[:, 0]
            for part in of_q.split(CANDIDATES) if len(of_q) else ():
                candidates = to_pixels(images[part.to(images.device)].to(x.device)).to(x.dtype)
                # Differences, not the expanded square, which cancels in float32.
                distance, index = torch.cdist(
                    pairs.x[rows].flatten(1),
                    candidates.flatten(1),
                    p=order,
                    compute_mode="donot_use_mm_for_euclid_dist",
                ).min(1)
                nearer = distance < smallest[rows]
                nearest[rows[nearer]] = candidates[index[nearer]]
                smallest[rows[nearer]] = distance[nearer]
        return nearest, torch.zeros_like(pairs.q), smallest.isinf()

    return _every_pair(classifier, x, target, answer)


def pixel_gradient(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    target: Targets,
    *,
    norm: Norm = "l1",
    weight: float = 5.0,
    confidence: float = 0.9,
    steps: int = 200,
    learning_rate: float = 0.005,
) -> Counterfactuals:
    """Wachter et al.: −log p(q|x') + λ‖x' − x‖₁ (or λ‖x' − x‖₂²) falls, pixels in [0, 1].

    It is the stored 8-bit image that is judged, and that ends the search: what is returned
    reaches the confidence when it is saved.

    Args:
        weight: λ at the start; it halves every five steps, so that q is not given up for
            nearness (Wachter et al. raise the other term's weight instead).
        confidence: the p(q) at which an image is done.
        learning_rate: about the root mean square by which the first step changes a pixel.
    """
    if not weight >= 0:
        raise InputError(f"weight is 0 or more, not {weight}")

    def judge(image: Images) -> Float[Tensor, "batch classes"]:
        # Straight through: the rounding has no gradient of its own, and costs no pass of its own.
        stored = to_pixels(to_uint8(image.detach())).to(image.dtype)
        z, _ = classifier.encode_with_log_det(stored + (image - image.detach()))
        return equations.log_posterior(z, classifier.mu)

    def nearer(moved: Tensor, start: Tensor, size: Tensor) -> Tensor:
        return (start + _proximal(moved - start, size * weight, norm)).clamp(0, 1)

    search = _Search(lambda image: image, judge, nearer, 1, confidence, steps, learning_rate)
    return _every_pair(classifier, x, target, lambda pairs: search.run(pairs, pairs.x))


def _proximal(
    change: Float[Tensor, "batch ..."], weight: Float[Tensor, "batch ..."], norm: Norm
) -> Float[Tensor, "batch ..."]:
    """argmin_u ½‖u − change‖² + λ‖u‖₁ (or λ‖u‖₂²); under l1 a pixel not needed stays as it was."""
    if norm == "l1":
        return change.sign() * (change.abs() - weight).clamp(min=0)
    return change / (1 + 2 * weight)


def latent_gradient(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    target: Targets,
    *,
    judge: Judge | None = None,
    confidence: float = 0.99,
    steps: int = 100,
    learning_rate: float = 0.1,
) -> Counterfactuals:
    """Diffeomorphic counterfactuals (Dombrowski et al.): log p(q|f⁻¹(z)) rises in z.

    Every step decodes, judges the image, and goes back through both: four passes.

    Args:
        judge: the classifier of images to convince; by default the flow's own posterior. Then
            f(f⁻¹(z)) = z, and ascent without any pass between the first encode and one last
            decode would give the same images; the published method does not know that.
        confidence: the p(q) of the decoded image at which it is done.
        learning_rate: about the root mean square by which the first step changes a latent.
    """

    def own(image: Images) -> Float[Tensor, "batch classes"]:
        return equations.log_posterior(classifier.encode_with_log_det(image)[0], classifier.mu)

    def free(moved: Tensor, start: Tensor, size: Tensor) -> Tensor:
        return moved

    search = _Search(classifier.decode, judge or own, free, 2, confidence, steps, learning_rate)
    return _every_pair(classifier, x, target, lambda pairs: search.run(pairs, pairs.z))


@dataclass(frozen=True)
class _Search:
    """Gradient ascent on log p(q) until each image by itself has reached the confidence."""

    decode: Callable[[Tensor], Images]
    """From what is varied to the image."""
    judge: Judge
    constrain: Callable[[Tensor, Tensor, Tensor], Tensor]
    """What is varied after a step, from: as moved, as it was at the start, the step size, here
    halved every five steps."""
    forward_passes: int
    """Network evaluations of `decode` and `judge` together; going back costs as many."""
    confidence: float
    steps: int
    learning_rate: float

    def __post_init__(self) -> None:
        """Refuse what cannot end well."""
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence lies between 0 and 1, not at {self.confidence}")
        if self.steps < 1:
            raise InputError(f"take at least one step, not {self.steps}")
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate is above 0, not {self.learning_rate}")

    def run(self, pairs: _Pairs, start: Float[Tensor, "batch ..."]) -> _Answer:
        """The first image of every pair to reach the confidence, else its most confident."""
        enough = math.log(self.confidence)
        images, point, adam = pairs.x.clone(), start.clone(), _Adam(start, self.learning_rate)
        best = images.new_full((len(images),), -math.inf)
        passes = torch.zeros_like(pairs.q)
        rows = torch.arange(len(images), device=images.device)
        for step in range(1, self.steps + 2):
            with torch.enable_grad():
                varied = point[rows].requires_grad_()
                image = self.decode(varied)
                log_q = self.judge(image).gather(1, pairs.q[rows, None])[:, 0]
            passes[rows] += self.forward_passes
            better = log_q > best[rows]
            images[rows[better]] = image.detach()[better]
            best[rows[better]] = log_q.detach()[better]
            going = log_q < enough
            if step > self.steps or not bool(going.any()):
                break
            (gradient,) = torch.autograd.grad(log_q, varied, torch.ones_like(log_q))
            passes[rows[going]] += self.forward_passes
            going &= gradient.flatten(1).isfinite().all(1)
            if not bool(going.any()):
                break
            rows = rows[going]
            move, size = adam.step(rows, gradient[going], step)
            size = size * 0.5 ** (step / 5)
            point[rows] = self.constrain(point[rows] + move, start[rows], size)
        return images, passes, ~(best >= enough)


class _Adam:
    """Adam with one step size per image: its second moment is averaged over all that is varied.

    Steps so keep the direction of the gradient, where Adam's own follow its signs. On the MNIST
    model the l2 search ends with some 40 % less change, and that in z takes some 40 % fewer steps.
    Both moments forget equally fast (β₁ = β₂ = 0.9), for the gradient of log p fades as p nears
    one: a longer memory of how large it was makes steps too small to get there.
    """

    def __init__(self, start: Float[Tensor, "batch ..."], learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.first = torch.zeros_like(start)
        self.second = start.new_zeros((len(start), *[1] * (start.ndim - 1)))

    def step(
        self, rows: Int[Tensor, " going"], gradient: Float[Tensor, "going ..."], step: int
    ) -> tuple[Float[Tensor, "going ..."], Float[Tensor, "going ..."]]:
        """The move uphill of these rows, and its size per unit of gradient."""
        square = gradient.square().flatten(1).mean(1).reshape(-1, *self.second.shape[1:])
        self.first[rows] = self.first[rows].lerp(gradient, 0.1)
        self.second[rows] = self.second[rows].lerp(square, 0.1)
        unbiased = 1 / (1 - 0.9**step)
        size = self.learning_rate / ((unbiased * self.second[rows]).sqrt() + 1e-8)
        return size * unbiased * self.first[rows], size


def _every_pair(
    classifier: InvertibleClassifier,
    x: Images,
    target: Targets,
    answer: Callable[[_Pairs], _Answer],
) -> Counterfactuals:
    """One encode of every image, then the method for every image and target, part by part."""
    with exact_convolutions(), torch.inference_mode(mode=False), torch.no_grad():
        x = x.clone()
        z = torch.cat([classifier.encode_with_log_det(part)[0] for part in x.split(PART_SIZE)])
        p = equations.log_posterior(z, classifier.mu).argmax(1)
        q = resolve_targets(target, p, len(classifier.mu))
        rows = torch.arange(len(x), device=x.device).repeat_interleave(q.shape[1])
        answers = [
            answer(_Pairs(x[row], z[row], p[row], target_class))
            for row, target_class in zip(
                rows.split(PART_SIZE), q.flatten().split(PART_SIZE), strict=True
            )
        ]
        images, passes, failed = (torch.cat(parts) for parts in zip(*answers, strict=True))
    return Counterfactuals(
        x=x,
        p=p,
        q=q,
        images=images.reshape(*q.shape, *x.shape[1:]),
        passes=1 + passes.reshape(q.shape),
        failed=failed.reshape(q.shape),
    )
