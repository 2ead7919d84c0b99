"""What each process does in the tests of training in several processes: `two_processes.py DIR`."""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ecinn import files
from ecinn.classifier import tensor_files
from ecinn.classifier.recipes import RECIPES, SGD, FineTuning, Recipe
from ecinn.cli import app
from ecinn.cli import train as command
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.errors import EcinnError
from ecinn.flow.network import Architecture, Stage
from ecinn.training.loop import train
from ecinn.training.ranks import joined
from ecinn.training.step import OptimisationStep

BATCH = 11
"""Odd, so that processes and halves get different numbers of images."""


class MeanTeacher(torch.nn.Module):
    """Logits of three attributes: differences of mean brightness."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compare three rows with the next ones."""
        return 40 * (x.mean((1, 3))[:, :3] - x.mean((1, 3))[:, 3:6])


def tiny_recipe() -> Recipe:
    """Everything that draws random numbers, compares classes or trains a second network."""
    stages = (Stage(1, 4), Stage(1, 4))
    return Recipe(
        "tiny",
        "tiny",
        Architecture(1, 8, 8, 2, stages, dense_width=8, dropout=0.2, dense_dropout=0.3),
        beta=1.0,
        tau=0.1,
        noise=0.01,
        label_smoothing=0.02,
        augmentation=Augmentation(shift=1.0, rotate=5.0, flip=True, share=0.7),
        balanced=True,
        epochs=2,
        batch_size=BATCH,
        learning_rate=1e-2,
        sgd=SGD(milestones=(0.5,)),  # Adam would enlarge rounding errors
        gradient_clip=0.5,
        ema_decay=0.9,
        attribute_weight=1.0,
        distillation_weight=0.4,
        finetuning=FineTuning(2, 1.0, 1.0, batch_size=BATCH, learning_rate=1e-3, realism=0.5),
        stored_bits=32,
    )


def tiny_data(n: int, seed: int) -> Dataset:
    """Noise, brighter at the top in class 1; the class is the second of three attributes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(60, 160, (n, 1, 8, 8), generator=generator)
    attributes = torch.randint(2, (n, 3), generator=generator)
    images[:, :, :4] += 60 * attributes[:, 1, None, None, None]
    return Dataset(images.byte(), attributes[:, 1], ("dark", "bright"), attributes.byte(), 1)


def run(folder: Path, **options: Any) -> None:
    """Train the tiny recipe."""
    images = {"held_out": tiny_data(20, 2), "test": tiny_data(12, 3), "teacher": MeanTeacher()}
    train(tiny_recipe(), tiny_data(45, 1), folder, device="cpu", **images, **options)


def refuse_to_write(path: Path, data: bytes) -> None:
    """Fail instead of writing a file."""
    raise EcinnError("the second process writes files")


def load_and_tell(*_: object) -> Dataset:
    """Say that images are loaded."""
    app.err.print("loading")
    return tiny_data(45, 1)


def main(folder: Path) -> None:
    """Train, resume runs that one process started, use the command line, and fail."""
    if os.environ["RANK"] == "1":
        files.atomic_write = tensor_files.atomic_write = refuse_to_write
        command.atomic_write = refuse_to_write
    run(folder / "two")
    for stage in ("training", "fine-tuning"):
        run(folder / f"{stage}-from-one", resume=True)
    plain = {"finetuning": None, "distillation_weight": 0.0, "epochs": 1}
    RECIPES["tiny"] = replace(tiny_recipe(), **plain)  # type: ignore[index]
    command.load_images = load_and_tell  # type: ignore[assignment]
    sys.argv[1:] = ["train", "tiny", "--out", str(folder / "cli"), "--limit", "40"]
    with suppress(SystemExit):
        app.main()
    with joined("cpu") as ranks:
        if ranks.rank == 1:
            begin = OptimisationStep.begin_epoch

            def fail(step: OptimisationStep, epoch: int) -> Any:
                if epoch == 1:
                    raise EcinnError("the second process fails")
                return begin(step, epoch)

            OptimisationStep.begin_epoch = fail  # type: ignore[method-assign]
        run(folder / "from-two", save_every=1e9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main(Path(sys.argv[1]))
    except EcinnError as error:
        app.fail(str(error), error.exit_code)
