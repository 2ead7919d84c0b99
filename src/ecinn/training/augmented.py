"""Train networks on strongly augmented images: settings, augmentation of a batch, training."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from ecinn.data.augmentation import Augmentation, augment
from ecinn.data.dataset import Dataset
from ecinn.pixels import Images, StoredImages, to_pixels
from ecinn.progress import Observer
from ecinn.training.networks import (
    ConvolutionalNetwork,
    Trained,
    cosine,
    gpu_autocast,
    seeded,
    train_network,
)
from ecinn.training.step import resident

Network = TypeVar("Network", bound=nn.Module)
Targets = Float[Tensor, "batch outputs"]


@dataclass(frozen=True)
class TeacherSettings:
    """Everything that is needed to train a teacher again; every value is ours."""

    members: int = 2
    width: int = 64
    epochs: int = 40
    batch_size: int = 256
    learning_rate: float = 2e-3
    """Peak of a cosine schedule with linear warm-up."""
    warm_up: float = 0.05
    """Share of all steps."""
    weight_decay: float = 0.05
    """Weight decay of kernels and matrices; norms and biases have none."""
    label_smoothing: float = 0.05
    ema_decay: float = 0.998
    """Decay of the moving average (EMA) of the weights that is stored."""
    augmentation: Augmentation = field(
        default_factory=lambda: Augmentation(6.0, rotate=12.0, scale=0.12, shear=0.05, flip=True)
    )
    cut_out: float = 0.35
    """Side of the grey square of cut-out, as a share of the image's side."""
    cut_out_share: float = 0.5
    """Share of the images with cut-out."""
    jitter: float = 0.25
    """Largest relative change of brightness, contrast and saturation."""
    mixup: float = 0.2
    """Parameter of the Beta distribution of the mixup weight λ."""
    mixup_share: float = 0.5
    """Share of the batches with mixup."""
    seed: int = 0


def train_augmented(
    build: Callable[[], Network],
    images: StoredImages,
    labels: UInt8[Tensor, "batch outputs"],
    settings: TeacherSettings,
    *,
    number: int,
    task: str,
    device: torch.device,
    observe: Observer,
    exclusive: bool = False,
    weights: Float[Tensor, " outputs"] | None = None,
) -> Trained[Network]:
    """Train a network with AdamW, a cosine schedule and a moving average of its weights.

    Args:
        number: index of the network in the ensemble; determines its seed.
        exclusive: the outputs are classes, of which one is right, and not attributes.
        weights: of the attributes in the loss.
    """
    seed = settings.seed * 1_000_003 + number
    images, labels = resident(images, device), labels.to(device)
    generator = torch.Generator(device).manual_seed(seed)
    python_generator = random.Random(seed)
    with seeded(device, seed), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        network: Network = fastest_format(build().to(device))

        def batch_loss(batch: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
            weight = mixup_weight(settings, python_generator)
            own = images[batch.to(images.device)].to(device)
            x, targets = training_batch(
                own, labels[batch], settings, weight, generator, exclusive=exclusive
            )
            with gpu_autocast(device):
                logits = network(x).float()
            return loss_and_error(logits, targets, weights, exclusive=exclusive)

        return train_network(
            network,
            batch_loss,
            teacher_optimiser(network, settings),
            images=len(images),
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            generator=generator,
            schedule=cosine(settings.warm_up),
            ema_decay=settings.ema_decay,
            task=task,
            observe=observe,
        )


def loss_and_error(
    logits: Float[Tensor, "batch outputs"],
    targets: Targets,
    weights: Float[Tensor, " outputs"] | None = None,
    *,
    exclusive: bool,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return cross-entropy and error rate: of the classes, or the mean over all attributes."""
    if exclusive:
        wrong = logits.detach().argmax(1) != targets.argmax(1)
        return F.cross_entropy(logits, targets), wrong.float().mean()
    wrong = (logits.detach() > 0) != (targets > 0.5)
    return F.binary_cross_entropy_with_logits(logits, targets, weights), wrong.float().mean()


def train_cnn(
    data: Dataset,
    settings: TeacherSettings,
    *,
    pools: int = 2,
    task: str,
    device: torch.device,
    observe: Observer,
) -> ConvolutionalNetwork:
    """Train a small convolutional network on the classes of a dataset, and freeze it."""
    classes = len(data.class_names)
    trained = train_augmented(
        lambda: ConvolutionalNetwork(data.images.shape[1], classes, settings.width, pools),
        data.images,
        F.one_hot(data.labels, classes).to(torch.uint8),
        settings,
        number=0,
        exclusive=True,
        task=task,
        device=device,
        observe=observe,
    )
    return trained.network.eval().requires_grad_(requires_grad=False)


def fastest_format(network: Any) -> Any:  # noqa: ANN401
    """Use the memory format in which a GPU's half-precision convolutions are fastest."""
    on_gpu = next(network.parameters()).is_cuda
    return network.to(memory_format=torch.channels_last) if on_gpu else network


def teacher_optimiser(network: nn.Module, settings: TeacherSettings) -> torch.optim.AdamW:
    """AdamW with weight decay for kernels and matrices only."""
    parameters = list(network.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, settings.learning_rate, fused=parameters[0].is_cuda)


def training_batch(
    images: StoredImages,
    labels: UInt8[Tensor, "batch outputs"],
    settings: TeacherSettings,
    weight: float,
    generator: torch.Generator,
    *,
    exclusive: bool = False,
) -> tuple[Images, Targets]:
    """Return augmented images and their smoothed targets, both mixed with this weight."""
    x = to_pixels(augment(images, settings.augmentation, generator))
    if settings.jitter:
        x = jitter(x, settings.jitter, generator)
    if settings.cut_out_share:
        x = cut_out(x, settings.cut_out, settings.cut_out_share, generator)
    targets = (1 - settings.label_smoothing) * labels.float()
    targets += settings.label_smoothing * (1 / labels.shape[1] if exclusive else 0.5)
    return mixup(x, weight), mixup(targets, weight)


def jitter(x: Images, strength: float, generator: torch.Generator) -> Images:
    """Multiply each image's saturation, contrast and brightness by random 1 ± strength."""
    draws = torch.rand((3, len(x), 1, 1, 1), generator=generator, device=x.device)
    saturation, contrast, brightness = (1 + strength * (2 * draws - 1)).unbind()
    x = torch.lerp(x.mean(1, keepdim=True), x, saturation)
    x = torch.lerp(x.mean((1, 2, 3), keepdim=True), x, contrast)
    return (brightness * x).clamp(0, 1)


def cut_out(x: Images, side: float, share: float, generator: torch.Generator) -> Images:
    """Cover a random window, `side` times as high and wide, with grey in a share of the images."""
    draws = torch.rand((3, len(x), 1), generator=generator, device=x.device)

    def window(length: int, draw: Tensor) -> Tensor:
        """Mark the pixels of one axis that a window inside the image covers."""
        size = round(side * length)
        first = (draw * (length - size + 1)).floor()
        pixel = torch.arange(length, device=x.device)
        return (pixel >= first) & (pixel < first + size)

    rows, columns = window(x.shape[2], draws[0]), window(x.shape[3], draws[1])
    covered = rows[:, :, None] & columns[:, None, :] & (draws[2, :, :, None] < share)
    return torch.where(covered[:, None], 0.5, x)


def mixup(values: Float[Tensor, "*shape"], weight: float) -> Float[Tensor, "*shape"]:
    """λ of each row and 1 − λ of the previous row in the shuffled batch."""
    return values if weight == 1 else weight * values + (1 - weight) * values.roll(1, 0)


def mixup_weight(settings: TeacherSettings, generator: random.Random) -> float:
    """λ ~ Beta(mixup, mixup) for a share of the batches, 1 for the others."""
    if settings.mixup <= 0 or generator.random() >= settings.mixup_share:
        return 1.0
    return generator.betavariate(settings.mixup, settings.mixup)
