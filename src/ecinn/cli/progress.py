"""Bars for work that takes a while, and the images of an recipe read under one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ecinn.cli.app import err, plain
from ecinn.data.dataset import Dataset, Split, load_dataset
from ecinn.progress import Progress as Step

Observe = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""

CelebA = Annotated[
    Path | None,
    typer.Option("--celeba", help="Folder of CelebA or CelebA-HQ; else that of $ECINN_CELEBA."),
]


@contextmanager
def bars() -> Iterator[Any]:
    """A bar for every piece of work, on stderr; without a terminal a line for each."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    tasks: dict[str, Any] = {}

    def observe(what: str | Step, done: int = 0, total: int = 0) -> None:
        if isinstance(what, Step):
            done, total, what = what.done, what.total, what.task
        if what not in tasks:
            tasks[what] = bar.add_task(plain(what), total=total)
        bar.update(tasks[what], completed=done, total=total)
        if not err.is_terminal and done == total:
            err.print(f"{plain(what)}: done ({total})")

    with bar:
        yield observe


def load_images(dataset: str, split: Split, celeba: Path | None = None) -> Dataset:
    """The images of a split; faces are decoded under a bar the first time."""
    with bars() as observe:
        return load_dataset(
            dataset,
            split,
            celeba,
            observe=lambda done, total: observe("decoding images", done, total),
        )


@contextmanager
def training_bar() -> Iterator[Callable[[str, int, int, float | None], None]]:
    """How a training goes, on stderr: a bar, or without a terminal a line for every epoch.

    What it gives takes the words, the steps done and all steps, and at the end of an epoch the
    seconds that are left.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    task = bar.add_task("starting")

    def show(words: str, done: int, total: int, seconds_left: float | None) -> None:
        bar.update(task, description=words, total=total, completed=done)
        if not err.is_terminal and seconds_left is not None:
            err.print(f"{words}  {seconds_left:.0f} s left")

    with bar:
        yield show
