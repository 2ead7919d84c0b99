"""Results of models trained at increasing β, which Figure 10 shows, in one small file."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.recipes import MNIST_BETA, Recipe
from ecinn.classifier.tensor_files import read_tensors, write_tensors
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.files import ASSETS
from ecinn.model import Model
from ecinn.studies.benchmark.quality import (
    MAIN_ORACLE,
    Panel,
    draw_of_class,
    stored_counterfactuals,
)
from ecinn.studies.judges import Judges
from ecinn.training.evaluation import random_offsets

BETAS = (0.02, 0.1, 0.5, 1.4265, 4.0, 10.0, 25.0, 50.0)
"""The β of the paper, and others from 1/50 to 50."""
TARGET = 3
"""The target of the paper's figure."""
ROUNDS = 2
"""Digits per class: one for the figure, the rest for the supplement."""
PAIRS = 2000
"""Test digits with a random target each, whose counterfactuals are judged."""
FILE = "trade_off.safetensors"
SHIPPED = ASSETS / "paper" / FILE
JUDGED = ("judged", "convinced", "frechet")
"""The metrics of a checkpoint that `Jury.judge` measures."""
METRICS = ("error", "bits_per_dim", "reached_q", *JUDGED)


@dataclass(frozen=True)
class TradeOff:
    """The same test digits explained by every model, in the order of β."""

    beta: tuple[float, ...]
    error: tuple[float, ...]
    """Share of misclassified test images."""
    bits_per_dim: tuple[float, ...]
    """Exact, on test images."""
    reached_q: tuple[float, ...]
    """Share of test images whose stored α₁ counterfactual is read as a random target."""
    judged: tuple[int, ...]
    """Number of pairs of a test digit and a random target, the same for every model, without
    those whose digit the model already reads as the target."""
    convinced: tuple[int, ...]
    """Number of pairs whose stored α₁ counterfactual the oracle reads as the target."""
    frechet: tuple[float, ...]
    """Fréchet distance of these counterfactuals from the test images."""
    target: int
    places: tuple[int, ...]
    """Positions of the shown digits among the test images."""
    training: Mapping[str, int]
    """Numbers of epochs, training images and test images, the same for every model."""
    images: UInt8[Tensor, "images channels height width"]
    counterfactuals: UInt8[Tensor, "models images channels height width"]
    """Stored images at α₁; black where the digit is already read as the target."""
    already: Bool[Tensor, "models images"]
    """True where the model reads the digit itself as the target, so that nothing is explained."""
    reached: Bool[Tensor, "models images"]
    """True where the model reads its stored counterfactual as the target."""


def settings(beta: float, epochs: int | None = None) -> Recipe:
    """Return the recipe of the model with this β."""
    if not 0 < beta < float("inf"):
        raise InputError(f"β must be a finite number above 0, not {beta}")
    return dataclasses.replace(MNIST_BETA, beta=beta, epochs=epochs or MNIST_BETA.epochs)


def draw_digits(data: Dataset, seed: int, target: int = TARGET) -> Int[Tensor, " images"]:
    """Draw one image of each class but the target per round; return their positions."""
    generator = torch.Generator().manual_seed(seed)
    columns = []
    for label in (label for label in range(len(data.class_names)) if label != target):
        columns.append(draw_of_class(data.labels, label, ROUNDS, generator))
        if len(columns[-1]) < ROUNDS:
            raise InputError(
                f"{ROUNDS} test images of every digit are needed: give --limit 200 or more"
            )
    return torch.stack(columns, 1).flatten()


@dataclass(frozen=True)
class Jury:
    """The pairs that every model explains, and the judges of the counterfactuals."""

    panel: Panel
    images: UInt8[Tensor, "pairs channels height width"]
    q: Int[Tensor, " pairs"]

    @classmethod
    def assemble(cls, judges: Judges, data: Dataset, seed: int = 0) -> "Jury":
        """Draw random test digits, and for each a random class other than its label."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(data), generator=generator)[:PAIRS]
        classes = len(data.class_names)
        q = (data.labels[rows] + random_offsets(len(rows), classes, seed)) % classes
        return cls(Panel.of(judges, data.images, "mnist"), data.images[rows], q)

    def judge(self, model: Model) -> dict[str, float | int]:
        """Measure `JUDGED` on stored α₁ counterfactuals; digits already read as q are left out."""
        p, stored, _ = stored_counterfactuals(model, self.images, self.q)
        other = p != self.q
        verdict, _ = self.panel.judge(self.images[other], stored[other], self.q[other])
        assert verdict.oracles is not None
        share = verdict.oracles[MAIN_ORACLE]
        values = (share.n, round(share.mean * share.n), verdict.frechet.mean)
        return dict(zip(JUDGED, values, strict=True))


def compare(
    models: Sequence[Checkpoint],
    data: Dataset,
    places: Int[Tensor, " images"],
    device: torch.device,
    target: int = TARGET,
) -> TradeOff:
    """Explain the same digits with every model; the checkpoints hold the other measurements."""
    models = sorted(models, key=lambda checkpoint: checkpoint.recipe.beta)
    images, q = data.images[places], torch.full_like(places, target)
    explained = [stored_counterfactuals(Model(each, device), images, q) for each in models]
    p, counterfactuals, read_as = map(torch.stack, zip(*explained, strict=True))
    return TradeOff(
        beta=tuple(checkpoint.recipe.beta for checkpoint in models),
        **{name: tuple(checkpoint.metrics[name] for checkpoint in models) for name in METRICS},
        target=target,
        places=tuple(places.tolist()),
        training={
            "epochs": models[0].recipe.epochs,
            "training_images": int(models[0].training["training_images"]),
            "test_images": int(models[0].metrics["n"]),
        },
        images=images,
        counterfactuals=counterfactuals,
        already=p == target,
        reached=read_as == target,
    )


def save(result: TradeOff, path: Path) -> None:
    """Write the results in one step."""
    tensors = {name: value for name, value in vars(result).items() if isinstance(value, Tensor)}
    about = {name: value for name, value in vars(result).items() if name not in tensors}
    write_tensors(path, tensors, about)


def find(folder: Path | None) -> Path | None:
    """Return the results in a folder that `ecinn beta` wrote, else the shipped ones, else None."""
    if folder is None:
        return SHIPPED if SHIPPED.is_file() else None
    if not (folder / FILE).is_file():
        raise InputError(f"no {FILE} in {folder}: give a folder that `ecinn beta --out` wrote to")
    return folder / FILE


def read(path: Path) -> TradeOff:
    """Read the results that `save` wrote."""
    tensors, about = read_tensors(path)
    try:
        values: dict[str, Any] = dict(tensors)
        values |= {k: tuple(v) if isinstance(v, list) else v for k, v in about.items()}
        return TradeOff(**values)
    except (AttributeError, TypeError) as error:
        raise InputError(f"{path} was not written by `ecinn beta`: make it again") from error
