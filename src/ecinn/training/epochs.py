"""Run the epochs of a stage: reports, saved states, and restarts after divergence."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecinn.classifier.tensor_files import write_tensors
from ecinn.errors import EcinnError
from ecinn.progress import Observer, Progress
from ecinn.training.networks import REPORT_EVERY
from ecinn.training.ranks import LostProcessError
from ecinn.training.step import OptimisationStep

FIGURES = ("loss", "bits_per_dim", "error")
LARGEST_LOSS = 1e3
"""Training does not recover from a loss above this."""
MOST_RESTARTS = 2
"""Restarts from the last good state, each with half the learning rate, before training fails."""

Snapshot = tuple[dict[str, Tensor], dict[str, Any]]


def run_epochs(
    step: OptimisationStep, state_file: Path, observe: Observer, save_every: float
) -> None:
    """Train the remaining epochs; after a divergence, go back and halve the learning rate."""
    state, recipe, saved = step.state, step.recipe, time.monotonic()
    began = saved - state.seconds
    # A state is good once the first loss that follows from it has been read.
    good = latest = state.snapshot(recipe)
    unsaved = False

    def write(snapshot: Snapshot) -> None:
        if step.ranks.leads:
            write_tensors(state_file, *snapshot)

    try:
        while state.epoch < recipe.epochs:
            try:
                for progress in _run_epoch(step):
                    good = latest
                    observe(progress)
            except _DivergedError as error:
                observe(_restart(step, good, error.loss, state_file))
                good = latest = state.snapshot(recipe)
                if state_file.exists():  # its state may be the one that led to this
                    write(latest)
                unsaved = state.epoch > 0
                continue
            now = time.monotonic()
            state.seconds = now - began
            state.curve[-1]["seconds"] = state.seconds
            latest, unsaved = state.snapshot(recipe), True
            if now - saved >= save_every or state.epoch == recipe.epochs:
                write(latest)
                unsaved, saved = False, now
    except (KeyboardInterrupt, LostProcessError):
        if unsaved:
            write(latest)
        raise


class _DivergedError(Exception):
    """The mean loss since the last report is not a number, or too large to recover from."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


def _restart(step: OptimisationStep, good: Snapshot, loss: float, state_file: Path) -> Progress:
    """Return to the last good state with half the learning rate, or raise an `EcinnError`."""
    (tensors, about), state = good, step.state
    failed = state.epoch + 1
    state.overwrite(tensors)
    state.epoch, state.curve = about["epoch"], list(about["curve"])
    if len(state.restarts) >= MOST_RESTARTS:
        kept = "nothing was saved"
        if state_file.exists():
            kept = f"the last good state is {state_file}"
        raise EcinnError(
            f"training diverged: the loss became {loss:.3g} in spite of {MOST_RESTARTS} "
            f"restarts with half the learning rate; {kept}. "
            "Lower the learning rate or the clamp, or raise the weight decay"
        )
    rate = step.recipe.learning_rate / 2 ** (len(state.restarts) + 1)
    restart = {"epoch": failed, "learning_rate": rate}
    state.restarts.append(restart)
    task = f"{step.stage} diverged and continues with half the learning rate"
    return Progress(task, 1, 1, restart)


def _run_epoch(step: OptimisationStep) -> Iterator[Progress]:
    """Train one epoch and yield what to report; its randomness depends on (seed, epoch) only.

    So an epoch that was interrupted and is started again is the same.
    """
    batch, state, epochs = step.batch_size, step.state, step.recipe.epochs
    epoch, per_epoch = state.epoch, len(step.labels) // batch
    steps = per_epoch * epochs
    order = step.begin_epoch(epoch)
    began = time.monotonic()
    sums, reported = torch.zeros(3), 0
    for index in range(per_epoch):
        number = epoch * per_epoch + index
        step(order[index * batch : (index + 1) * batch], number / steps, number)
        # The loss of the first step tells whether the state before it was good.
        if 0 < index < per_epoch - 1 and (index + 1) % REPORT_EVERY:
            continue
        figures = step.read_figures()
        sums += figures
        means = (figures / (index + 1 - reported)).tolist()
        reported = index + 1
        if not -math.inf < means[0] < LARGEST_LOSS:
            raise _DivergedError(means[0])
        report = {"epoch": float(epoch + 1), "epochs": float(epochs)}
        report |= dict(zip(FIGURES, means, strict=True))
        report["images_per_second"] = (index + 1) * batch / (time.monotonic() - began)
        yield Progress(step.stage, number + 1, steps, report)
    state.epoch = epoch + 1
    point = dict(zip(FIGURES, (sums / per_epoch).tolist(), strict=True))
    state.curve.append({"epoch": epoch + 1, **point})
