"""What trainings of networks that are no flows share: the loop over batches, what is stored."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ecinn.errors import EcinnError

_REPORT = 50
"""Steps between two reports."""

Step = Callable[[Int[Tensor, " batch"], int, int], Float[Tensor, " figures"]]
"""Takes a step on these images, as that number of all steps, from 0; gives loss and error."""


@dataclass(frozen=True)
class NetworkProgress:
    """Where a training stands; loss and error are means over the epoch so far."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    error: float
    images_per_second: float
    seconds: float
    seconds_left: float


def train_network(
    take_step: Step,
    images: int,
    batch_size: int,
    epochs: int,
    generator: torch.Generator,
    observe: Callable[[NetworkProgress], None],
) -> list[NetworkProgress]:
    """Steps on shuffled batches, where the generator is; how every epoch ended.

    A last batch that is not full is left out: the images of an epoch are drawn anew.
    """
    size = min(batch_size, images)
    per_epoch = images // size
    steps = epochs * per_epoch
    curve: list[NetworkProgress] = []
    began = time.monotonic()
    for epoch in range(1, epochs + 1):
        order = torch.randperm(images, generator=generator, device=generator.device)
        totals = torch.zeros(2, device=generator.device)
        for index, batch in enumerate(order.split(size)[:per_epoch], start=1):
            step = (epoch - 1) * per_epoch + index
            totals += take_step(batch, step - 1, steps)
            if index % _REPORT and index < per_epoch:
                continue
            # The only place where the GPU is waited for.
            loss, error = (totals / index).tolist()
            _stop_if_broken(loss, step)
            seconds = max(time.monotonic() - began, 1e-9)
            progress = NetworkProgress(
                epoch=epoch,
                epochs=epochs,
                step=step,
                steps=steps,
                loss=loss,
                error=error,
                images_per_second=step * size / seconds,
                seconds=seconds,
                seconds_left=(steps - step) * seconds / step,
            )
            observe(progress)
            if index == per_epoch:
                curve.append(progress)
    return curve


def as_stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Kernels and matrices as float16; BatchNorm's variances may be too small for it."""
    return {name: value.half() if value.ndim > 1 else value for name, value in weights.items()}


def _stop_if_broken(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise EcinnError(
            f"training broke: the loss became {loss} within {step} steps and nothing was written; "
            "lower the learning rate"
        )
