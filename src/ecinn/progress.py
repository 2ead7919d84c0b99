"""Progress reports of long-running work: one protocol for the whole package, and its displays."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Progress:
    """A task, how much of it is done, and the figures it can tell so far."""

    task: str
    done: int
    total: int
    figures: Mapping[str, float | int] = field(default_factory=dict)
    """Such as epoch, epochs, loss, bits_per_dim, error and images_per_second."""


Observer = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """Observe nothing: the default of every `observe` argument."""


def counter(observe: Observer, task: str, total: int) -> Callable[[int], None]:
    """Report how much of one task is done."""
    return lambda done: observe(Progress(task, done, total))


SLOW = 2.0
"""Seconds after which a piped task prints its first line."""
INTERVAL = 10.0
"""Seconds between further lines, except at the end of an epoch."""


@contextmanager
def bars(console: "Console") -> Iterator[Observer]:
    """Yield an observer that shows every task: bars on a terminal or in a notebook, else lines.

    A notebook shows bars if ipywidgets is installed.
    """
    widgets = console.is_jupyter and find_spec("ipywidgets") is not None
    if not (console.is_terminal or widgets):
        yield Lines(lambda line: console.print(plain(line), soft_wrap=True, highlight=False))
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


_FORMATS = {
    "loss": "loss {:.3f}",
    "bits_per_dim": "bits/dim {:.3f}",
    "error": "error {:.2%}",
    "images_per_second": "{:,.0f} images/s",
}


def format_figures(figures: Mapping[str, float | int]) -> str:
    """Format figures with their usual names, digits and units."""
    of_epochs = f"/{figures['epochs']:.0f}" if "epochs" in figures else ""
    formats = {"epoch": "epoch {:.0f}" + of_epochs, **_FORMATS}
    return "  ".join(
        formats.get(name, name.replace("_", " ") + " {:.4g}").format(value).replace("%", " %")
        for name, value in figures.items()
        if name != "epochs"
    )


def plain(text: str) -> str:
    """Escape text so that Rich prints it as it is."""
    return text.replace("[", r"\[")
