"""Progress on stderr, and images by the name of their dataset."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ecinn import progress
from ecinn.cli.app import err
from ecinn.errors import InputError
from ecinn.progress import Observer

if TYPE_CHECKING:
    from ecinn.classifier.recipes import Recipe
    from ecinn.data.dataset import Dataset, Split

CelebA = Annotated[
    Path | None,
    typer.Option("--celeba", help="Folder of CelebA or CelebA-HQ; default: $ECINN_CELEBA."),
]


def bars(console: Console = err) -> AbstractContextManager[Observer]:
    """Yield an observer that shows every task, on stderr by default."""
    return progress.bars(console)


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
        if dataset.dataset != DATASET:
            if source is not None:
                raise InputError(
                    f"--data is for models of your own pictures; the images of {dataset.name} are "
                    f"those of {dataset.dataset}: leave it out"
                )
            return dataset.load(split, celeba, observe)
        run = Path(model)
        data, cautions = load_recorded(run if run.is_dir() else run.parent, split, source, observe)
    for caution in cautions:
        err.print(caution, markup=False)
    return data
