"""Gradient methods: the part of F(x) − F(baseline) that every pixel accounts for."""

import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn.attribution.scores import PairScore
from ecinn.errors import InputError
from ecinn.pixels import Images, Labels

DEEP_LIFT_LAYERS = (
    nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softmax,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
)  # fmt: skip
"""Modules for which DeepLIFT has rules."""


@dataclass(frozen=True)
class Comparison:
    """Images with the baselines that each of them is compared with."""

    score: PairScore
    x: Images
    p: Labels
    q: Labels
    baselines: Float[Tensor, "baselines channels height width"]
    index: Int[Tensor, "batch compared"]
    """Rows of `baselines` that every image is compared with."""
    batch_size: int

    def output_change(self) -> Float[Tensor, " batch"]:
        """F(x) − F(baseline), averaged over the image's baselines."""
        at_x, at_baselines = (
            class_scores(self.score.scores, images, self.batch_size)
            for images in (self.x, self.baselines)
        )
        require_classes(at_x.shape[1], self.p, self.q)
        p, q = (labels[:, None].expand_as(self.index) for labels in (self.p, self.q))
        start = self.score.compare(at_baselines[self.index], p, q)
        return self.score.compare(at_x, self.p, self.q) - start.mean(1)

    def mean_map(self, size: int, attribute: Callable[[Tensor, Tensor], Tensor]) -> Images:
        """Average `attribute(rows of x, rows of baselines)`, computed for `size` pairs at once."""
        total = torch.zeros_like(self.x)
        compared = self.index.shape[1]
        for part in torch.arange(self.index.numel(), device=self.x.device).split(size):
            rows = part // compared
            total.index_add_(0, rows, attribute(rows, self.index.flatten()[part]).detach())
        return total / compared

    def captum_map(self, size: int, attribute: Callable[..., Tensor], **options: int) -> Images:
        """Average the attributions of one of Captum's methods."""

        def attribute_rows(rows: Tensor, baselines: Tensor) -> Tensor:
            return attribute(
                self.x[rows].requires_grad_(),
                self.baselines[baselines],
                additional_forward_args=(self.p[rows], self.q[rows]),
                **options,
            )

        return self.mean_map(size, attribute_rows)


def integrated_gradients(comparison: Comparison, steps: int) -> Images:
    """(x − b) ∫₀¹ ∇F(b + t(x − b)) dt, by Gauss–Legendre quadrature."""
    method, size = captum().IntegratedGradients(comparison.score), comparison.batch_size
    return comparison.captum_map(size, method.attribute, n_steps=steps, internal_batch_size=size)


def deep_lift(comparison: Comparison) -> Images:
    """DeepLIFT's rescale rule; DeepLiftSHAP is its mean over several baselines."""
    # Captum attaches hooks and tensors to modules. A copy that shares the weights protects others
    # who use the network meanwhile, and nothing is left behind after an error.
    shared = (*comparison.score.parameters(), *comparison.score.buffers())
    score = copy.deepcopy(comparison.score, {id(tensor): tensor for tensor in shared})
    for module in score.modules():
        if isinstance(module, DEEP_LIFT_LAYERS):
            # Captum's hooks confuse two layers that share a tensor, such as ReLU and max-pool.
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].clone())
    method = captum().DeepLift(score)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Setting forward, backward hooks", UserWarning)
        try:
            # x and its baseline go through the network in one batch.
            return comparison.captum_map(comparison.batch_size // 2, method.attribute)
        except RuntimeError as error:
            if "more than once" not in str(error):
                raise
            raise InputError(
                "DeepLift needs a separate module for every non-linearity, but this network "
                "uses one more than once"
            ) from error


def gradient_shap(comparison: Comparison, noise: float, generator: torch.Generator) -> Images:
    """Mean of (x' − b) ∇F(b + t(x' − b)) with x' = x + noise, t ~ U(0, 1) and random baselines b.

    Captum's own version draws from global generators and depends on the batch size.
    """
    x, device = comparison.x, generator.device
    t = torch.rand(comparison.index.numel(), generator=generator, device=device).to(x)
    done = 0

    def attribute_rows(rows: Tensor, baselines: Tensor) -> Tensor:
        nonlocal done
        start, end = comparison.baselines[baselines], x[rows]
        if noise:
            # Image by image, so that the draws do not depend on the batch size.
            shape = x.shape[1:]
            draws = [torch.randn(shape, generator=generator, device=device) for _ in rows]
            end = end + noise * torch.stack(draws).to(x)
        weight = t[done : done + len(rows), None, None, None]
        done += len(rows)
        point = torch.lerp(start, end, weight).requires_grad_()
        value = comparison.score(point, comparison.p[rows], comparison.q[rows])
        (gradient,) = torch.autograd.grad(value.sum(), point)
        return (end - start) * gradient

    return comparison.mean_map(comparison.batch_size, attribute_rows)


def class_scores(
    network: nn.Module, images: Images, batch_size: int
) -> Float[Tensor, "batch classes"]:
    """Return the network's output, if it is in evaluation mode and scores every class."""
    if any(module.training for module in network.modules()):
        raise InputError("the network is in training mode: call its eval() first")
    with torch.no_grad():
        scores = torch.cat([network(part) for part in images.split(batch_size)])
    if scores.ndim != 2:
        shape = tuple(scores.shape)
        raise InputError(f"the network must return scores of shape (images, classes), not {shape}")
    return scores


def require_classes(classes: int, p: Tensor, q: Tensor) -> None:
    """Refuse labels that are not class numbers."""
    both = torch.cat([p, q])
    if bool(((both < 0) | (both >= classes)).any()):
        raise InputError(f"p and q are classes 0 to {classes - 1}")


def captum() -> ModuleType:
    """Import Captum, or say how to install it."""
    try:
        return importlib.import_module("captum.attr")
    except ImportError as error:
        raise InputError("this method needs Captum: pip install 'ecinn[heatmaps]'") from error
