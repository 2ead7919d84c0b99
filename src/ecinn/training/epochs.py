"""Run the epochs of a stage: reports, saved states, and restarts after divergence."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecinn.classifier.recipes import Recipe
from ecinn.classifier.tensor_files import write_tensors
from ecinn.errors import EcinnError
from ecinn.progress import Observer, Progress
from ecinn.training.networks import REPORT_EVERY
from ecinn.training.ranks import LostProcessError, Ranks
from ecinn.training.state import TrainingState
from ecinn.training.step import OptimisationStep

FIGURES = ("loss", "bits_per_dim", "error")
LARGEST_LOSS = 1e3
"""Training does not recover from a loss above this."""
MOST_RESTARTS = 2
"""Restarts from the last good state, each with half the learning rate, before training fails."""


@dataclass(frozen=True)
class Epochs:
    """The epochs of one stage."""

    recipe: Recipe
    step: OptimisationStep
    images: int
    state_file: Path
    ranks: Ranks
    observe: Observer
    save_every: float

    def run(self, state: TrainingState) -> None:
        """Train the remaining epochs; after a divergence, go back and halve the learning rate."""
        recipe, saved = self.recipe, time.monotonic()
        began = saved - state.seconds
        # A state is good once the first loss that follows from it has been read.
        good = latest = state.snapshot(recipe)
        unsaved = False
        try:
            while state.epoch < recipe.epochs:
                try:
                    for progress in _run_epoch(recipe, state, self.step, self.images):
                        good = latest
                        self.observe(progress)
                except _DivergedError as error:
                    self._restart(state, good, error.loss)
                    good = latest = state.snapshot(recipe)
                    unsaved = state.epoch > 0
                    continue
                now = time.monotonic()
                state.seconds = now - began
                state.curve[-1]["seconds"] = state.seconds
                latest, unsaved = state.snapshot(recipe), True
                if now - saved >= self.save_every or state.epoch == recipe.epochs:
                    self._write(latest)
                    unsaved, saved = False, now
        except (KeyboardInterrupt, LostProcessError):
            if unsaved:
                self._write(latest)
            raise

    def _write(self, snapshot: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
        if self.ranks.leads:
            write_tensors(self.state_file, *snapshot)

    def _restart(
        self,
        state: TrainingState,
        good: tuple[dict[str, Tensor], dict[str, Any]],
        loss: float,
    ) -> None:
        """Return to the last good state with half the learning rate, or raise an `EcinnError`."""
        tensors, about = good
        failed = state.epoch + 1
        state.overwrite(tensors)
        state.epoch, state.curve = about["epoch"], list(about["curve"])
        stored = self.state_file.exists()
        if len(state.restarts) >= MOST_RESTARTS:
            kept = f"the last good state is {self.state_file}" if stored else "nothing was saved"
            raise EcinnError(
                f"training diverged: the loss became {loss:.3g} in spite of {MOST_RESTARTS} "
                f"restarts with half the learning rate; {kept}. "
                "Lower the learning rate or the clamp, or raise the weight decay"
            )
        rate = self.recipe.learning_rate / 2 ** (len(state.restarts) + 1)
        state.restarts.append({"epoch": failed, "learning_rate": rate})
        if stored:  # its state may be the one that led to this
            self._write(state.snapshot(self.recipe))
        figures = {"epoch": failed, "learning_rate": rate}
        task = f"{self.step.stage} diverged and continues with half the learning rate"
        self.observe(Progress(task, 1, 1, figures))


class _DivergedError(Exception):
    """The mean loss since the last report is not a number, or too large to recover from."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


def _run_epoch(
    recipe: Recipe, state: TrainingState, step: OptimisationStep, images: int
) -> Iterator[Progress]:
    """Train one epoch and yield what to report; its randomness depends on (seed, epoch) only.

    So an epoch that was interrupted and is started again is the same.
    """
    batch, epoch = step.batch_size, state.epoch
    per_epoch = images // batch
    steps = per_epoch * recipe.epochs
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
        report = {"epoch": float(epoch + 1), "epochs": float(recipe.epochs)}
        report |= dict(zip(FIGURES, means, strict=True))
        report["images_per_second"] = (index + 1) * batch / (time.monotonic() - began)
        yield Progress(step.stage, number + 1, steps, report)
    state.epoch = epoch + 1
    point = dict(zip(FIGURES, (sums / per_epoch).tolist(), strict=True))
    state.curve.append({"epoch": epoch + 1, **point})
