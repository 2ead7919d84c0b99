"""One training step: the loss of a batch, the optimisers and the moving average."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn import equations
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import augment
from ecinn.data.dataset import Dataset
from ecinn.flow.bijections import Chain, Convolution, Coupling
from ecinn.pixels import Images, Labels, StoredImages, dequantise
from ecinn.training.ranks import Ranks, share_dropout
from ecinn.training.state import TrainingState

MEANS_WEIGHT = 0.02
"""Weight of a batch's mean latents in the class means."""
COMPILED_VALUES = 900_000 * 28 * 28
"""Runs that process fewer pixel values are not compiled: compilation takes 40 seconds on an H200,
and 900,000 images of MNIST are needed to win them back."""
RESIDENT_SHARE = 0.25
"""Share of the free GPU memory that images may fill; otherwise they are copied batch by batch."""


class OptimisationStep:
    """One step on one batch; on a GPU it is captured once as a CUDA graph and replayed.

    Of several processes, each takes its rows of the batch, as many of either half. All of them
    draw the random numbers of the whole batch, and add up gradients and sums of latents.
    """

    stage = "training"
    inverts = False
    """A step also decodes: the inverse is compiled, and there is no dropout."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        state: TrainingState,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.recipe, self.state, self.device = recipe, state, device
        self.batch_size = min(recipe.batch_size, len(data))
        self.ranks = ranks or Ranks(device=device)
        half = self.batch_size // 2
        halves = [self.ranks.rows(0, half), self.ranks.rows(half, self.batch_size)]
        self.rows, self.half = torch.cat(halves), len(halves[0])
        """The rows of this process, and how many of them are in the first half of the batch."""
        self.share = len(self.rows) / self.batch_size
        if self.ranks.size > 1 and not self.inverts:
            share_dropout(state.classifier, self.batch_size, self.rows)
        self.images, self.labels = resident(data.images, device), data.labels.to(device)
        self.attributes = None if data.attributes is None else data.attributes.to(device)
        self.answers = None if data.answers is None else data.answers.to(device)
        self.attribute = data.attribute
        self.generator = torch.Generator(device)
        optimisers = (state.optimiser, state.attribute_optimiser)
        self.optimisers = [optimiser for optimiser in optimisers if optimiser is not None]
        # A captured graph has no arguments: the inputs of a step are kept in tensors.
        self.batch = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        shape = (self.batch_size, *data.images.shape[1:])
        self.batch_images = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.ema_weight = torch.zeros((), device=device)
        self.figures = torch.zeros(3, device=device)
        self.averages: list[Tensor] = list(state.average.parameters())
        self.parameters: list[Tensor] = list(state.classifier.parameters())
        for module in state.classifier.train().modules():
            if self.inverts and isinstance(module, nn.Dropout | nn.Dropout2d):
                module.eval()  # decoding must invert encoding
        self.prepare(data)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            passes = 3 if self.inverts else 1
            values = passes * recipe.epochs * self.images.numel()
            for network in (state.classifier, state.maker):
                if network is not None:
                    prepare_for_gpu(network, recipe)
                    if values >= COMPILED_VALUES:
                        compile_blocks(network, inverse=self.inverts)
            with _compilation():
                self._capture()

    def prepare(self, data: Dataset) -> None:
        """Prepare additional state of this stage."""

    def begin_epoch(self, epoch: int) -> Int[Tensor, " images"]:
        """Seed the random generators and return the order of the images."""
        seed = self.recipe.seed * 1_000_003 + epoch
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        if self.recipe.balanced:
            order = balanced_order(self.labels.cpu(), generator)
        else:
            order = torch.randperm(len(self.labels), generator=generator)
        return order.to(self.images.device)

    def load_batch(self, batch: Int[Tensor, " batch"]) -> None:
        """Copy the indices and images of a batch to where the step reads them."""
        # Images in memory are collected while a GPU still works on the last step.
        images = self.images[batch.to(self.images.device)]
        self.batch_images.copy_(images)
        self.batch.copy_(batch)

    def __call__(self, batch: Int[Tensor, " batch"], done: float, number: int) -> None:
        """Take step `number` of the run, of which the share `done` is completed."""
        self.load_batch(batch)
        rate = learning_rate(self.recipe, done) / 2 ** len(self.state.restarts)
        self._set_learning_rate(rate)
        self.ema_weight.fill_(ema_weight(self.recipe.ema_decay, number))
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def _set_learning_rate(self, rate: float) -> None:
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"].fill_(rate * group.get("lr_factor", 1.0))

    def read_figures(self) -> Float[Tensor, " figures"]:
        """Return the sums of loss, bits/dim and error since the last call."""
        figures = self.figures.clone()
        self.ranks.sum_(figures)
        self.figures.zero_()
        return figures.cpu()

    def _own(self, whole: Tensor) -> Tensor:
        """Return the rows of this process."""
        return whole if self.ranks.size == 1 else whole[self.rows]

    @property
    def own_batch(self) -> Int[Tensor, " rows"]:
        """The indices of the images that this process takes."""
        return self._own(self.batch)

    def _step(self) -> None:
        first = self._batch_loss()
        self._descend(self.share * first.loss)
        self._update_means(first.z)
        self._update_average(first.figures)

    def _batch_loss(self) -> "BatchLoss":
        images = augment(self.batch_images, self.recipe.augmentation, self.generator)
        x = self._own(dequantise(images, self.generator, self.recipe.noise))
        attributes, targets = self._targets(x)
        labels = self.labels[self.own_batch]
        first = batch_loss(self.state.classifier, x, labels, self.recipe, targets)
        head = self.state.attribute_head
        if head is None or attributes is None:
            return first
        attribute_loss = F.binary_cross_entropy_with_logits(head(first.z), attributes)
        return first._replace(loss=first.loss + self.recipe.attribute_weight * attribute_loss)

    @torch.no_grad()
    def _targets(
        self, x: Images
    ) -> tuple[Float[Tensor, "batch attributes"] | None, Float[Tensor, "batch classes"] | None]:
        """Return the targets of all attributes and of the class, mixed with the teacher's."""
        if self.answers is not None:
            return None, self.answers[self.own_batch]
        if self.attributes is None:
            return None, None
        labels = self.attributes[self.own_batch].to(x.dtype)
        if not self.recipe.distillation_weight or self.attribute is None:
            return labels, None
        assert self.state.teacher is not None
        predicted = torch.sigmoid(self.state.teacher(x.clamp(0, 1)).to(x.dtype))
        mixed = torch.lerp(labels, predicted, self.recipe.distillation_weight)
        positive = mixed[:, self.attribute]
        return mixed, torch.stack([1 - positive, positive], 1)

    def _class_probabilities(
        self, logits: Float[Tensor, "batch outputs"]
    ) -> Float[Tensor, "batch classes"]:
        """Turn a teacher's logits, of all classes or of all attributes, into probabilities."""
        if self.attribute is None:
            return logits.softmax(1)
        positive = torch.sigmoid(logits[:, self.attribute])
        return torch.stack([1 - positive, positive], 1)

    def _descend(self, loss: Float[Tensor, ""]) -> None:
        """Take a step on the sum of the losses of all processes."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        networks = self.state.networks.values()
        weights = [weight for network in networks for weight in network.parameters()]
        self.ranks.sum_(*(weight.grad for weight in weights if weight.grad is not None))
        nn.utils.clip_grad_norm_(self.state.classifier.parameters(), self.recipe.gradient_clip)
        for optimiser in self.optimisers:
            optimiser.step()

    @torch.no_grad()
    def _update_means(self, z: Float[Tensor, "batch dim"]) -> None:
        """μ_y ← (1 − w)μ_y + w·m_y for the classes in this batch, with mean latents m_y."""
        if not self.recipe.tied:
            return
        mu = self.state.classifier.mu
        member = F.one_hot(self.labels[self.own_batch], len(mu)).to(z.dtype)
        total, count = member.T @ z, member.sum(0)[:, None]
        self.ranks.sum_(total, count)
        batch_means = total / count.clamp(min=1)
        mu.add_(MEANS_WEIGHT * (count > 0) * (batch_means - mu))

    @torch.no_grad()
    def _update_average(self, figures: Float[Tensor, " figures"]) -> None:
        """Update the moving average of the weights, and add up the figures."""
        # All tensors in a few launches: one by one they would take a tenth of the step's time.
        torch._foreach_mul_(self.averages, 1 - self.ema_weight)
        torch._foreach_add_(self.averages, torch._foreach_mul(self.parameters, self.ema_weight))
        buffers = list(self.state.classifier.buffers())
        torch._foreach_copy_(list(self.state.average.buffers()), buffers)
        self.figures += self.share * figures

    def _capture(self) -> None:
        """Warm up on a side stream, record one step, and restore the state.

        Steps of several processes are not recorded, because they wait for each other.
        """
        before = {name: value.clone() for name, value in self.state.tensors().items()}
        self.ema_weight.fill_(1.0)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._set_learning_rate(0.0)
            for _ in range(3):
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        if self.ranks.size == 1:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.generator)
            with torch.cuda.graph(self.graph):
                self._step()
        self.state.overwrite(before)
        self.figures.zero_()


class BatchLoss(NamedTuple):
    """The loss of a batch with its figures, images and latents."""

    loss: Float[Tensor, ""]
    figures: Float[Tensor, " figures"]
    """Loss, bits/dim and error."""
    x: Images
    z: Float[Tensor, "batch dim"]


def batch_loss(
    classifier: GenerativeClassifier,
    x: Images,
    labels: Labels,
    recipe: Recipe,
    targets: Float[Tensor, "batch classes"] | None = None,
) -> BatchLoss:
    """Eq. 9: the loss of a batch; targets are class probabilities that replace the labels."""
    z, log_det = classifier.encode_with_log_det(x)
    dim = classifier.architecture.dim
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, classifier.mu))
    log_posterior = equations.log_posterior(z, classifier.mu, classifier.tau)
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


def resident(images: StoredImages, device: torch.device) -> StoredImages:
    """Return the images on the device if they fit there, else as they are.

    They may be a file that is mapped into memory, so nothing else may copy all of them.
    """
    if device.type == "cuda" and images.device != device:
        free, _ = torch.cuda.mem_get_info(device)
        if images.numel() <= RESIDENT_SHARE * free:
            return images.to(device)
    return images


def balanced_order(labels: Labels, generator: torch.Generator) -> Int[Tensor, " images"]:
    """Draw as many indices as there are images, equally many of every class, in random order.

    Images of a small class are repeated, all equally often up to one; those of a large class take
    turns from epoch to epoch.
    """
    classes = int(labels.max()) + 1
    # The number of images divided by the classes leaves a rest: random classes get one more.
    quota = torch.full((classes,), len(labels) // classes)
    quota[torch.randperm(classes, generator=generator)[: len(labels) % classes]] += 1
    drawn = []
    for label, count in enumerate(quota.tolist()):
        own = (labels == label).nonzero()[:, 0]
        rounds = [
            own[torch.randperm(len(own), generator=generator)]
            for _ in range(math.ceil(count / len(own)))
        ]
        drawn += [part[: max(0, count - i * len(own))] for i, part in enumerate(rounds)]
    order = torch.cat(drawn)
    return order[torch.randperm(len(order), generator=generator)]


def learning_rate(recipe: Recipe, done: float) -> float:
    """Return the learning rate when a share of the run is done."""
    if recipe.sgd is None:
        return recipe.learning_rate * cosine_schedule(done, recipe.warm_up)
    passed = sum(done >= milestone for milestone in recipe.sgd.milestones)
    return recipe.learning_rate * 0.1**passed


def cosine_schedule(done: float, warm_up: float) -> float:
    """Rise linearly from 0 to 1 during the warm-up, then fall to 0 along half a cosine."""
    if done < warm_up:
        return done / warm_up
    return 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))


def ema_weight(decay: float, step: int) -> float:
    """Return 1 − decay at a step, counted from 0; the first steps forget the initial weights."""
    return 1 - min(decay, (1 + step) / (10 + step))


@contextmanager
def _compilation() -> Iterator[None]:
    """Set torch's compiler up: each shape, stage and direction is compiled once, channels last.

    Left to itself it would not use channels-last convolutions for so few channels.
    """
    dynamo: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    layout = {"force_layout_optimization": True}
    with dynamo.patch({name: 64}), torch._inductor.config.patch(layout):
        yield


def prepare_for_gpu(classifier: GenerativeClassifier, recipe: Recipe) -> None:
    """Switch the subnets to bfloat16 and padded channels."""
    for module in classifier.modules():
        if isinstance(module, Coupling):
            module.half_precision = recipe.half_precision
        elif isinstance(module, Convolution):
            module.padded = recipe.half_precision


def compile_blocks(classifier: GenerativeClassifier, *, inverse: bool) -> None:
    """Compile all blocks, once per shape, and their inverses if they are needed."""
    for block in classifier.inn.bijections:
        if isinstance(block, Chain):
            block.compile(dynamic=False)
            if inverse:
                block.inverse = torch.compile(block.inverse, dynamic=False)  # type: ignore[method-assign]
