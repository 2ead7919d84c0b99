"""Train networks that are not flows: one loop, with optional schedule and EMA, and one record."""

import contextlib
import copy
import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn.classifier.quantisation import pack, unpack
from ecinn.errors import EcinnError
from ecinn.pixels import Images
from ecinn.progress import Observer, Progress, ignore
from ecinn.training.step import cosine_schedule, ema_weight

REPORT_EVERY = 50
"""Steps between two progress reports."""

Network = TypeVar("Network", bound=nn.Module)
Loss = Callable[[Int[Tensor, " batch"]], tuple[Float[Tensor, ""], Float[Tensor, ""] | None]]
"""Returns the loss of the images with these indices, and the error rate if there is one."""
Schedule = Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler]
"""Returns the learning-rate schedule of an optimiser for a number of steps."""


class ConvolutionalNetwork(nn.Module):
    """3×3 convolutions with batch norm and ReLU, max-pools, global average pooling.

    Args:
        pools: number of max-pools, each after a convolution; two more convolutions follow.
    """

    def __init__(self, channels: int, classes: int, width: int, pools: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(pools + 2):
            filters = width * min(2**number, 4)
            layers += [nn.Conv2d(channels, filters, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(filters), nn.ReLU(), *[nn.MaxPool2d(2)] * (number < pools)]
            channels = filters
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def features(self, x: Images) -> Float[Tensor, "batch features"]:
        """Return the penultimate layer."""
        return torch.mean(self.body(x), (2, 3))

    def forward(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Return the logits."""
        logits: Tensor = self.head(self.features(x))
        return logits


def cosine(warm_up: float) -> Schedule:
    """Rise linearly to the optimiser's learning rate during the warm-up, then fall to 0."""
    return lambda optimiser, steps: torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: cosine_schedule(step / steps, warm_up)
    )


def one_cycle(peak: float, extra_steps: int = 0) -> Schedule:
    """Rise to the peak and fall to 0, with momentum in the opposite direction (PyTorch's)."""
    return lambda optimiser, steps: torch.optim.lr_scheduler.OneCycleLR(
        optimiser, peak, total_steps=steps + extra_steps
    )


@dataclass(frozen=True)
class Trained(Generic[Network]):
    """A trained network, or the EMA of its weights, and its training curve."""

    network: Network
    task: str
    curve: list[dict[str, Any]]
    """For each epoch: epoch, loss, error if there is one, and seconds since the beginning."""
    images: int
    """Images seen, each counted once per epoch."""
    seconds: float


def train_network(
    network: Network,
    loss: Loss,
    optimiser: torch.optim.Optimizer,
    *,
    images: int,
    batch_size: int,
    epochs: int,
    generator: torch.Generator,
    schedule: Schedule | None = None,
    ema_decay: float | None = None,
    task: str = "training",
    observe: Observer = ignore,
) -> Trained[Network]:
    """Train on shuffled batches of the training images.

    An incomplete last batch is dropped; every epoch draws a new order.

    Args:
        images: number of training images.
        generator: draws the order; its device is the network's.
        schedule: of the learning rate; None keeps it constant.
        ema_decay: return the exponential moving average of the weights with this decay.
        task: name of the training in progress reports.
    """
    network.train()
    average = None
    if ema_decay is not None:
        average = copy.deepcopy(network).requires_grad_(requires_grad=False)
    size = min(batch_size, images)
    per_epoch = images // size
    steps = epochs * per_epoch
    scheduler = None if schedule is None else schedule(optimiser, steps)
    curve: list[dict[str, Any]] = []
    began = time.monotonic()
    for epoch in range(1, epochs + 1):
        order = torch.randperm(images, generator=generator, device=generator.device)
        totals = torch.zeros(2, device=generator.device)
        for index, batch in enumerate(order.split(size)[:per_epoch], start=1):
            step = (epoch - 1) * per_epoch + index
            value, error = loss(batch)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            if scheduler is not None:
                scheduler.step()
            if average is not None and ema_decay is not None:
                weight = ema_weight(ema_decay, step - 1)
                with torch.no_grad():
                    torch._foreach_lerp_(
                        list(average.parameters()), list(network.parameters()), weight
                    )
            value = value.detach()
            totals += torch.stack([value, torch.zeros_like(value) if error is None else error])
            if index % REPORT_EVERY and index < per_epoch:
                continue
            # The only place that waits for the GPU.
            means = (totals / index).tolist()
            if not math.isfinite(means[0]):
                raise EcinnError(
                    f"training diverged: the loss became {means[0]} within {step} steps and "
                    "nothing was written; lower the learning rate"
                )
            seconds = max(time.monotonic() - began, 1e-9)
            figures = {"epoch": float(epoch), "epochs": float(epochs), "loss": means[0]}
            figures |= {} if error is None else {"error": means[1]}
            figures |= {"images_per_second": step * size / seconds}
            observe(Progress(task, step, steps, figures))
        point = {"loss": means[0], "error": None if error is None else means[1]}
        curve.append({"epoch": epoch, **point, "seconds": round(seconds, 1)})
    if average is not None:
        for kept, last in zip(average.buffers(), network.buffers(), strict=True):
            kept.copy_(last)
        network = average
    return Trained(network, task, curve, steps * size, seconds)


def training_record(
    trainings: Sequence[Trained[Any]], images: int, device: torch.device
) -> dict[str, Any]:
    """Return the record of all trainings, with their curves by task."""
    seen, seconds = (sum(getattr(t, name) for t in trainings) for name in ("images", "seconds"))
    record = timing_record(images, seen, seconds, device)
    return record | {"curves": {training.task: training.curve for training in trainings}}


def timing_record(
    images: int, seen: int, seconds: float, device: torch.device
) -> dict[str, int | float | str]:
    """Return the number of training images, the speed, the device and the versions."""
    return {
        "training_images": images,
        "seconds": round(seconds, 1),
        "images_per_second": round(seen / max(seconds, 1e-9)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def stored_weights(
    network: nn.Module, bits: int = 16, *, vectors: bool = False
) -> dict[str, Tensor]:
    """Return the weights to store: kernels and matrices with these bits, vectors as they are.

    Args:
        vectors: store them as float16, too; variances of batch norms may be too small for it.
    """
    weights = network.state_dict()
    rounded = {name: value for name, value in weights.items() if vectors or value.ndim > 1}
    return {**weights, **pack(rounded, bits, rounded="")}


def assemble(
    build: Callable[[], Network], weights: Mapping[str, Tensor], device: torch.device
) -> Network:
    """Build a network with stored weights, in evaluation mode and without gradients."""
    with torch.device("meta"):
        network = build()
    network.to_empty(device=device).load_state_dict(unpack(weights))
    return network.eval().requires_grad_(requires_grad=False)


def digest(*values: Tensor) -> bytes:
    """Return the SHA-256 of tensors."""
    whole = hashlib.sha256()
    for value in values:
        whole.update(value.cpu().contiguous().numpy().tobytes())
    return whole.digest()


@contextlib.contextmanager
def seeded(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Seed the global generators, which draw initial weights and dropout; restore them at exit."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
        yield


def gpu_autocast(device: torch.device) -> torch.autocast:
    """Compute in bfloat16 on a GPU; some CPUs crash on it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
