"""Progress on stderr: bars on a terminal, lines when stderr is piped."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ecinn.cli.app import err, plain
from ecinn.progress import Observer, Progress

if TYPE_CHECKING:
    from rich.console import Console

    from ecinn.classifier.recipes import Recipe
    from ecinn.data.dataset import Dataset, Split

CelebA = Annotated[
    Path | None,
    typer.Option("--celeba", help="Folder of CelebA or CelebA-HQ; default: $ECINN_CELEBA."),
]

SLOW = 2.0
"""Seconds after which a piped task prints its first line."""
INTERVAL = 10.0
"""Seconds between further lines, except at the end of an epoch."""


@contextmanager
def bars(console: "Console" = err) -> Iterator[Observer]:
    """Yield an observer that shows every task on a console."""
    if not console.is_terminal:
        yield Lines(lambda line: console.print(plain(line)))
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    display = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def observe(progress: Progress) -> None:
        if progress.task not in tasks:
            for task in display.tasks:  # only running tasks stay on the screen
                display.update(task.id, visible=not task.finished)
            description = plain(progress.task)
            tasks[progress.task] = display.add_task(description, total=None, figures="")
        display.update(
            tasks[progress.task],
            completed=progress.done,
            total=progress.total,
            figures=plain(format_figures(progress.figures)),
            visible=True,
        )

    with display:
        yield observe


class Lines:
    """Observe tasks and write a line now and then: for logs and pipes.

    A task is written at its end, at the end of each epoch (when its figure `epoch` grows), once
    it has taken `SLOW` seconds, and every `INTERVAL` seconds from then on.
    """

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._tasks: dict[str, _Task] = {}

    def __call__(self, progress: Progress) -> None:
        """Write a line if one is due."""
        now = self._clock()
        finished = progress.done >= progress.total
        task = self._tasks.get(progress.task)
        if task is None:
            task = self._tasks[progress.task] = _Task(now, progress.done, now + SLOW)
        epoch = progress.figures.get("epoch")
        if task.unwritten and task.epoch != epoch:
            self._write(task.unwritten)
        task.epoch = epoch
        task.unwritten = _line(progress, now - task.start, task.done_at_start)
        if finished or now >= task.due:
            self._write(task.unwritten)
            task.unwritten = ""
            task.due = now + INTERVAL
        if finished:
            del self._tasks[progress.task]


@dataclass
class _Task:
    """When and where a task started, when its next line is due, and its last report."""

    start: float
    done_at_start: int
    due: float
    epoch: float | int | None = None
    unwritten: str = ""


def _line(progress: Progress, seconds: float, done_at_start: int) -> str:
    parts = [f"{progress.done:,}/{progress.total:,}", format_figures(progress.figures)]
    done = progress.done - done_at_start
    if progress.done >= progress.total:
        parts.append(f"done in {seconds:.0f} s")
    elif done > 0:
        parts.append(f"{seconds / done * (progress.total - progress.done):.0f} s left")
    return f"{progress.task}: {'  '.join(part for part in parts if part)}"


def format_figures(figures: Mapping[str, float | int]) -> str:
    """Format figures with their usual names, digits and units."""
    parts = []
    for name, value in figures.items():
        match name:
            case "epoch":
                of_epochs = f"/{figures['epochs']:.0f}" if "epochs" in figures else ""
                parts.append(f"epoch {value:.0f}{of_epochs}")
            case "epochs":
                pass
            case "loss":
                parts.append(f"loss {value:.3f}")
            case "bits_per_dim":
                parts.append(f"bits/dim {value:.3f}")
            case "error":
                parts.append(f"error {100 * value:.2f} %")
            case "images_per_second":
                parts.append(f"{value:,.0f} images/s")
            case _:
                parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return "  ".join(parts)


def load_images(
    dataset: "str | Recipe",
    split: "Split",
    celeba: Path | None = None,
    *,
    model: str | Path = "",
    source: Path | None = None,
) -> "Dataset":
    """Load a split of a dataset, or of a recipe's, whose pictures are framed as it says.

    Pictures are decoded the first time, which takes a while.

    Args:
        model: path of a model; the folder of a run knows pictures of your own.
        source: where these are instead.
    """
    from ecinn.data.dataset import load_dataset
    from ecinn.data.own import DATASET, load_recorded

    with bars() as observe:
        if isinstance(dataset, str):
            return load_dataset(dataset, split, celeba, observe)
        if dataset.dataset != DATASET and source is None:
            return dataset.load(split, celeba, observe)
        run = Path(model)
        data, cautions = load_recorded(run if run.is_dir() else run.parent, split, source, observe)
    for caution in cautions:
        err.print(caution, markup=False)
    return data
