"""Train networks that are not flows: one loop, with optional schedule and EMA, and one record."""

import contextlib
import copy
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn.errors import EcinnError
from ecinn.progress import Observer, Progress, ignore
from ecinn.training.step import cosine_schedule, ema_weight

REPORT_EVERY = 50
"""Steps between two progress reports."""

Network = TypeVar("Network", bound=nn.Module)
Loss = Callable[[Int[Tensor, " batch"]], tuple[Float[Tensor, ""], Float[Tensor, ""] | None]]
"""Returns the loss of the images with these indices, and the error rate if there is one."""
Schedule = Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler]
"""Returns the learning-rate schedule of an optimiser for a number of steps."""


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
class Epoch:
    """One point of a training curve: means over the epoch's training images."""

    epoch: int
    loss: float
    error: float | None
    seconds: float
    """Time since the training began."""


@dataclass(frozen=True)
class Trained(Generic[Network]):
    """A trained network, or the EMA of its weights, and its training curve."""

    network: Network
    task: str
    curve: tuple[Epoch, ...]
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
    curve: list[Epoch] = []
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
                _update_average(average, network, ema_weight(ema_decay, step - 1))
            value = value.detach()
            totals += torch.stack([value, torch.zeros_like(value) if error is None else error])
            if index % REPORT_EVERY and index < per_epoch:
                continue
            # The only place that waits for the GPU.
            means = (totals / index).tolist()
            _require_finite(means[0], step)
            seconds = max(time.monotonic() - began, 1e-9)
            figures = {"epoch": float(epoch), "epochs": float(epochs), "loss": means[0]}
            figures |= {} if error is None else {"error": means[1]}
            figures |= {"images_per_second": step * size / seconds}
            observe(Progress(task, step, steps, figures))
        error_rate = None if error is None else means[1]
        curve.append(Epoch(epoch, means[0], error_rate, round(seconds, 1)))
    if average is not None:
        for kept, last in zip(average.buffers(), network.buffers(), strict=True):
            kept.copy_(last)
        network = average
    return Trained(network, task, tuple(curve), steps * size, seconds)


def training_record(
    trainings: Sequence[Trained[Any]], images: int, device: torch.device
) -> dict[str, Any]:
    """Return how networks were trained: images, seconds, images per second, versions, curves."""
    seconds = sum(training.seconds for training in trainings)
    return {
        "training_images": images,
        "seconds": round(seconds, 1),
        "images_per_second": round(sum(t.images for t in trainings) / seconds),
        **versions(device),
        "curves": {t.task: [asdict(epoch) for epoch in t.curve] for t in trainings},
    }


def versions(device: torch.device) -> dict[str, str]:
    """Return the device and the versions that a training ran with."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def stored_weights(network: nn.Module, *, vectors: bool = False) -> dict[str, Tensor]:
    """Return the weights to store: kernels and matrices as float16.

    Args:
        vectors: also round vectors; variances of batch norms may be too small for float16.
    """
    return {
        name: value.half() if value.is_floating_point() and (vectors or value.ndim > 1) else value
        for name, value in network.state_dict().items()
    }


def assemble(
    build: Callable[[], Network], weights: Mapping[str, Tensor], device: torch.device
) -> Network:
    """Build a network with stored weights, in evaluation mode and without gradients."""
    with torch.device("meta"):
        network = build()
    network.to_empty(device=device).load_state_dict(dict(weights))
    return network.eval().requires_grad_(requires_grad=False)


@contextlib.contextmanager
def seeded(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Seed the global random generators, and restore them afterwards.

    Initial weights and dropout draw from them.
    """
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
        yield


def fastest_kernels() -> contextlib.AbstractContextManager[None]:
    """Let cuDNN search for the fastest kernels, which pays off when all batches have one shape."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=True)


def gpu_autocast(device: torch.device) -> torch.autocast:
    """Compute in bfloat16 on a GPU; some CPUs crash on it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def _update_average(average: nn.Module, network: nn.Module, weight: float) -> None:
    """Move the average towards the network by this weight."""
    torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), weight)


def _require_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise EcinnError(
            f"training diverged: the loss became {loss} within {step} steps and nothing was "
            "written; lower the learning rate"
        )
