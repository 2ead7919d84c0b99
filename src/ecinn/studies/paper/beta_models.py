"""Models trained at ascending β: what Figure 10 shows of them, in one small file."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.recipes import MNIST_BETA, Recipe
from ecinn.classifier.tensor_files import read_tensors, write_tensors
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.files import ASSETS
from ecinn.model import Model
from ecinn.studies.benchmark.quality import MAIN_ORACLE, judge
from ecinn.studies.benchmark.quality import predicted_classes as read_as
from ecinn.studies.judges import Judges
from ecinn.training.evaluation import random_offsets

BETAS = (0.02, 0.1, 0.5, 1.4265, 4.0, 10.0, 25.0, 50.0)
"""The paper's β among others from 1/50 to 50."""
TARGET = 3
"""As in the paper's figure."""
ROUNDS = 2
"""Digits of every other class: one for the figure, the rest for the supplement."""
PAIRS = 2000
"""Test digits, each with a random target, whose counterfactuals are judged."""
BATCH_SIZE = 250
FILE = "trade_off.safetensors"
SHIPPED = ASSETS / "paper" / FILE


@dataclass(frozen=True)
class TradeOff:
    """The same test digits explained by every model; models by ascending β."""

    beta: tuple[float, ...]
    error: tuple[float, ...]
    """Share of test images whose prediction is not their label."""
    bits_per_dim: tuple[float, ...]
    """Exact, on test images."""
    reached_q: tuple[float, ...]
    """Share of test images whose α₁ counterfactual is read as a random target from 8 bits."""
    judged: tuple[int, ...]
    """Random pairs of a test digit and another target, the same for every model, of which those
    are left out whose digit the model reads as the target already."""
    convinced: tuple[int, ...]
    """In how many of them the oracle reads the stored α₁ counterfactual as the target."""
    frechet: tuple[float, ...]
    """Fréchet distance of these counterfactuals from the test images."""
    target: int
    places: tuple[int, ...]
    """Of the digits among the test images."""
    training: Mapping[str, int]
    """Epochs, training images and test images of every model."""
    images: UInt8[Tensor, "images channels height width"]
    counterfactuals: UInt8[Tensor, "models images channels height width"]
    """At α₁; black where there is none."""
    already: Bool[Tensor, "models images"]
    """Whether the model reads the digit itself as the target: nothing is to be explained."""
    reached: Bool[Tensor, "models images"]
    """Whether the model reads its stored counterfactual as the target."""


@dataclass(frozen=True)
class Judged:
    """What judges that took no part say of a model's counterfactuals, as `TradeOff` has it."""

    judged: int
    convinced: int
    frechet: float


MEASURED = frozenset(field.name for field in dataclasses.fields(Judged))


def settings(beta: float, epochs: int | None = None) -> Recipe:
    """How the model of this β is trained."""
    if not 0 < beta < float("inf"):
        raise InputError(f"β is a finite number above 0, not {beta}")
    return dataclasses.replace(MNIST_BETA, beta=beta, epochs=epochs or MNIST_BETA.epochs)


def draw_digits(data: Dataset, seed: int, target: int = TARGET) -> Int[Tensor, " images"]:
    """Places of random images, for every round one of each class but the target."""
    generator = torch.Generator().manual_seed(seed)
    columns = []
    for label in range(len(data.class_names)):
        if label == target:
            continue
        candidates = (data.labels == label).nonzero()[:, 0]
        if len(candidates) < ROUNDS:
            raise InputError(
                f"{ROUNDS} test images of every digit are needed: give --limit 200 or more"
            )
        columns.append(candidates[torch.randperm(len(candidates), generator=generator)[:ROUNDS]])
    return torch.stack(columns, 1).flatten()


@dataclass(frozen=True)
class Jury:
    """The pairs that every model explains, and the judges of all counterfactuals."""

    judges: Judges
    images: UInt8[Tensor, "pairs channels height width"]
    q: Int[Tensor, " pairs"]
    real_features: Float[Tensor, "real features"]

    @classmethod
    def assemble(cls, judges: Judges, data: Dataset, seed: int = 0) -> "Jury":
        """Random test digits, and for each a random class that is not its label."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(data), generator=generator)[:PAIRS]
        classes = len(data.class_names)
        q = (data.labels[rows] + random_offsets(len(rows), classes, seed)) % classes
        return cls(judges, data.images[rows], q, judges.features(data.images))

    def say(self, model: Model) -> Judged:
        """Of the α₁ counterfactuals on 8 bits of what the model does not read as q already."""
        other = read_as(model, self.images) != self.q
        images, q = self.images[other], self.q[other]
        stored = [
            model.explain(some, target[:, None], check=False).stored_convincing[:, 0].cpu()
            for some, target in zip(images.split(BATCH_SIZE), q.split(BATCH_SIZE), strict=True)
        ]
        verdict = judge(self.judges, images, torch.cat(stored), q, self.real_features)
        assert verdict.oracles is not None
        share = verdict.oracles[MAIN_ORACLE]
        return Judged(share.n, round(share.mean * share.n), verdict.frechet)


def compare(
    models: Sequence[Checkpoint],
    data: Dataset,
    places: Int[Tensor, " images"],
    device: torch.device,
    target: int = TARGET,
) -> TradeOff:
    """Explain the same digits with every model; what was measured of each is in its checkpoint."""
    models = sorted(models, key=lambda checkpoint: checkpoint.recipe.beta)
    images = data.images[places]
    explained = [_into(target, images, Model(checkpoint, device)) for checkpoint in models]
    return TradeOff(
        beta=tuple(checkpoint.recipe.beta for checkpoint in models),
        error=_metric(models, "error"),
        bits_per_dim=_metric(models, "bits_per_dim"),
        reached_q=_metric(models, "reached_q"),
        judged=tuple(int(checkpoint.metrics["judged"]) for checkpoint in models),
        convinced=tuple(int(checkpoint.metrics["convinced"]) for checkpoint in models),
        frechet=_metric(models, "frechet"),
        target=target,
        places=tuple(places.tolist()),
        training={
            "epochs": models[0].recipe.epochs,
            "training_images": int(models[0].training["training_images"]),
            "test_images": int(models[0].metrics["n"]),
        },
        images=images,
        counterfactuals=torch.stack([one.stored for one in explained]),
        already=torch.stack([one.already for one in explained]),
        reached=torch.stack([one.reached for one in explained]),
    )


def _metric(models: Sequence[Checkpoint], name: str) -> tuple[float, ...]:
    return tuple(float(checkpoint.metrics[name]) for checkpoint in models)


@dataclass(frozen=True)
class _Explained:
    """One model's row of `TradeOff`."""

    stored: UInt8[Tensor, "images channels height width"]
    already: Bool[Tensor, " images"]
    reached: Bool[Tensor, " images"]


def _into(
    target: int, images: UInt8[Tensor, "images channels height width"], model: Model
) -> _Explained:
    """Explain what is not read as the target already."""
    already = read_as(model, images) == target
    stored, reached = torch.zeros_like(images), torch.zeros_like(already)
    if not already.all():
        explanation = model.explain(images[~already], target)
        stored[~already] = explanation.stored_convincing[:, 0].cpu()
        reached[~already] = explanation.convincing_certificate.reached[:, 0].cpu()
    return _Explained(stored, already, reached)


def save(result: TradeOff, path: Path) -> None:
    """Write it at once or not at all."""
    tensors = {name: getattr(result, name) for name in _TENSORS}
    about = {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(TradeOff)
        if field.name not in _TENSORS
    }
    write_tensors(path, tensors, about)


def find(folder: Path | None) -> Path | None:
    """The results in a folder that `ecinn beta` wrote, else those that ship, else None."""
    if folder is None:
        return SHIPPED if SHIPPED.is_file() else None
    if not (folder / FILE).is_file():
        raise InputError(f"no {FILE} in {folder}: give a folder that `ecinn beta --out` wrote")
    return folder / FILE


def read(path: Path) -> TradeOff:
    """What `save` wrote."""
    tensors, about = read_tensors(path)
    try:
        values: dict[str, Any] = {name: tensors[name] for name in _TENSORS}
        values |= {k: tuple(v) if isinstance(v, list) else v for k, v in about.items()}
        return TradeOff(**values)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} was not written by `ecinn beta`: make it again") from error


_TENSORS = ("images", "counterfactuals", "already", "reached")
