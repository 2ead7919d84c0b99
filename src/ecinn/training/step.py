"""One step of training: the loss of a batch, the optimiser, the moving average, on any device."""

import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import augment
from ecinn.data.dataset import Dataset
from ecinn.flow.bijections import Chain, Coupling
from ecinn.pixels import dequantise
from ecinn.training.state import TrainingState


class OptimisationStep:
    """One step on one batch; on a GPU captured once as a CUDA graph and replayed."""

    stage = "training"
    inverts = False
    """Whether a step also runs the inverse, which is then worth compiling."""

    def __init__(
        self, recipe: Recipe, data: Dataset, state: TrainingState, device: torch.device
    ) -> None:
        self.recipe = recipe
        self.state = state
        self.batch_size = min(recipe.batch_size, len(data))
        self.images = data.images.to(device)
        self.labels = data.labels.to(device)
        self.attributes = None if data.attributes is None else data.attributes.to(device)
        self.attribute = data.attribute
        self.generator = torch.Generator(device)
        self.device = device
        # What a step reads lives in tensors, because a captured graph has no arguments.
        self.batch = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        self.averaging_weight = torch.zeros((), device=device)
        self.figures = torch.zeros(3, device=device)
        self.averages: list[Tensor] = list(state.average.parameters())
        self.parameters: list[Tensor] = list(state.classifier.parameters())
        self._set_mode()
        self.epoch = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            prepare_for_gpu(state.classifier, self.recipe, inverse=self.inverts)
            with _room_for_compiled_shapes():
                self._capture()

    def _set_mode(self) -> None:
        self.state.classifier.train()

    def begin_epoch(self, epoch: int) -> Int[Tensor, " images"]:
        """Seed what is random and shuffle the images."""
        self.epoch = epoch
        seed = self.recipe.seed * 1_000_003 + epoch
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        return order.to(self.device)

    def __call__(self, batch: Int[Tensor, " batch"], done: float, number: int) -> None:
        """Take a step; `done` is the share of the run that lies behind."""
        self.batch.copy_(batch)
        self._set_learning_rate(learning_rate(self.recipe, done, self.epoch))
        # The average starts short, so that it does not remember the first weights for long.
        decay = min(self.recipe.ema_decay, (1 + number) / (10 + number))
        self.averaging_weight.fill_(1 - decay)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def _set_learning_rate(self, rate: float) -> None:
        for optimiser in self.state.descending:
            for group in optimiser.param_groups:
                group["lr"].fill_(rate * group.get("multiple", 1.0))

    def read_figures(self) -> Float[Tensor, " figures"]:
        """Sums of loss, bits/dim and error since the last call."""
        figures = self.figures.to("cpu", copy=True)
        self.figures.zero_()
        return figures

    def _step(self) -> None:
        first = self._batch_loss()
        self._descend(first.loss)
        self._follow(first.figures)

    def _batch_loss(self) -> "BatchLoss":
        images = augment(self.images[self.batch], self.recipe.augmentation, self.generator)
        x = dequantise(images, self.generator, self.recipe.noise)
        known, targets = self._targets(x)
        first = batch_loss(self.state.classifier, x, self.labels[self.batch], self.recipe, targets)
        if self.state.readout is None or known is None:
            return first
        attributes = F.binary_cross_entropy_with_logits(self.state.readout(first.z), known)
        return first._replace(loss=first.loss + self.recipe.attribute_weight * attributes)

    @torch.no_grad()
    def _targets(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch attributes"] | None, Float[Tensor, "batch classes"] | None]:
        """What is to be learned of all attributes and of the class, a teacher's share included."""
        if self.attributes is None:
            return None, None
        known = self.attributes[self.batch].to(x.dtype)
        if self.state.teacher is None or self.attribute is None:
            return known, None
        taught = torch.sigmoid(self.state.teacher(x.clamp(0, 1)).to(x.dtype))
        known = torch.lerp(known, taught, self.recipe.distillation_weight)
        share = known[:, self.attribute]
        return known, torch.stack([1 - share, share], 1)

    def _descend(self, loss: Float[Tensor, ""]) -> None:
        """Move the classifier down the loss."""
        for optimiser in self.state.descending:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            self.state.classifier.parameters(), self.recipe.gradient_clip
        )
        for optimiser in self.state.descending:
            optimiser.step()

    @torch.no_grad()
    def _follow(self, figures: Float[Tensor, " figures"]) -> None:
        """Move the average after the classifier, and count."""
        # All tensors in a few launches; one by one they would cost a tenth of the step.
        torch._foreach_mul_(self.averages, 1 - self.averaging_weight)
        torch._foreach_add_(
            self.averages, torch._foreach_mul(self.parameters, self.averaging_weight)
        )
        buffers = list(self.state.classifier.buffers())
        torch._foreach_copy_(list(self.state.average.buffers()), buffers)
        self.figures += figures

    def _capture(self) -> None:
        """Warm up on a side stream, record one step, put everything back as it was."""
        before = {name: value.clone() for name, value in self.state.tensors().items()}
        self.averaging_weight.fill_(1.0)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._set_learning_rate(0.0)
            for _ in range(3):
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph):
            self._step()
        with torch.no_grad():
            for name, value in self.state.tensors().items():
                # What an optimiser remembers came into being in the first step, as zeros.
                value.copy_(before[name]) if name in before else value.zero_()
        self.figures.zero_()


class BatchLoss(NamedTuple):
    """The loss of a batch, and what it was computed from."""

    loss: Float[Tensor, ""]
    figures: Float[Tensor, " figures"]
    """Loss, bits/dim and error, to report."""
    x: Float[Tensor, "batch channels height width"]
    z: Float[Tensor, "batch dim"]


def batch_loss(
    classifier: GenerativeClassifier,
    x: Float[Tensor, "batch channels height width"],
    labels: Int[Tensor, " batch"],
    recipe: Recipe,
    targets: Float[Tensor, "batch classes"] | None = None,
) -> BatchLoss:
    """Eq. 9.

    Args:
        targets: probabilities to learn instead of the labels.
    """
    z, log_det = classifier.encode_with_log_det(x)
    dim = classifier.architecture.dim
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, classifier.mu))
    log_posterior = equations.log_posterior(z, classifier.mu)
    smoothing = recipe.label_smoothing
    if targets is None:
        cross_entropy = equations.smoothed_cross_entropy(log_posterior, labels, smoothing)
    else:
        targets = (1 - smoothing) * targets + smoothing / len(classifier.mu)
        cross_entropy = -(targets * log_posterior).sum(1).mean()
    loss = equations.information_bottleneck_loss(-log_p.mean() / dim, cross_entropy, recipe.beta)
    with torch.no_grad():
        error = (log_posterior.argmax(1) != labels).float().mean()
        figures = torch.stack([loss, equations.bits_per_dim(log_p, dim).mean(), error])
    return BatchLoss(loss, figures, x, z)


def learning_rate(recipe: Recipe, done: float, epoch: int) -> float:
    """Of a step in this epoch, counted from 0, when that share of the run lies behind."""
    if recipe.sgd is None:
        return recipe.learning_rate * schedule(done, recipe.warm_up)
    passed = sum(epoch >= milestone for milestone in recipe.sgd.milestones)
    return recipe.learning_rate * 0.1**passed


def schedule(done: float, warm_up: float) -> float:
    """Linear from 0 to 1 over the warm-up, then half a cosine down to 0."""
    if done < warm_up:
        return done / warm_up
    return 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))


def _room_for_compiled_shapes() -> AbstractContextManager[None]:
    """One function is compiled per shape, stage and direction: more often than torch expects."""
    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    patch: AbstractContextManager[None] = config.patch({name: 64})
    return patch


def prepare_for_gpu(classifier: GenerativeClassifier, recipe: Recipe, *, inverse: bool) -> None:
    """bf16 inside the subnets, whose precision no inverse depends on; one compile per shape."""
    for module in classifier.modules():
        if isinstance(module, Coupling):
            module.half_precision = recipe.half_precision
    for block in classifier.inn.bijections:
        if isinstance(block, Chain):
            block.compile(dynamic=False)
            if inverse:
                block.inverse = torch.compile(block.inverse, dynamic=False)  # type: ignore[method-assign]
