"""Models trained at ascending β: what Figure 10 shows of them, in one small file."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from ecinn.checkpoints import Checkpoint, read_tensors, write_tensors
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.experiments import MNIST_BETA, Experiment
from ecinn.pretrained import Model

BETAS = (0.02, 0.1, 0.5, 1.4265, 4.0, 10.0, 25.0, 50.0)
"""The paper's β among others from 1/50 to 50."""
TARGET = 3
"""As in the paper's figure."""
ROUNDS = 2
"""Digits of every other class: one for the figure, the rest for the supplement."""
FILE = "trade_off.safetensors"
SHIPPED = Path(__file__).parent.parent / "assets" / "paper" / FILE


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
    target: int
    places: tuple[int, ...]
    """Of the digits among the test images."""
    training: Mapping[str, int]
    """Epochs, training images and test images of every model."""
    images: UInt8[Tensor, "images channels height width"]
    counterfactuals: UInt8[Tensor, "models images channels height width"]
    """At α₁; the input itself where a model reads it as the target already."""
    reached: Bool[Tensor, "models images"]
    """Whether the model reads its stored counterfactual as the target."""


def settings(beta: float, epochs: int | None = None) -> Experiment:
    """How the model of this β is trained."""
    if not 0 < beta < float("inf"):
        raise InputError(f"β is above 0, not {beta}")
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
            raise InputError(f"{ROUNDS} images of every digit are needed: take more images")
        columns.append(candidates[torch.randperm(len(candidates), generator=generator)[:ROUNDS]])
    return torch.stack(columns, 1).flatten()


def compare(
    models: Sequence[Checkpoint],
    data: Dataset,
    places: Int[Tensor, " images"],
    device: torch.device,
    target: int = TARGET,
) -> TradeOff:
    """Explain the same digits with every model; what was measured of each is in its checkpoint."""
    models = sorted(models, key=lambda checkpoint: checkpoint.experiment.beta)
    images = data.images[places]
    explained = [_into(target, images, Model(checkpoint, device)) for checkpoint in models]
    return TradeOff(
        beta=tuple(checkpoint.experiment.beta for checkpoint in models),
        error=_metric(models, "error"),
        bits_per_dim=_metric(models, "bits_per_dim"),
        reached_q=_metric(models, "reached_q"),
        target=target,
        places=tuple(places.tolist()),
        training={
            "epochs": models[0].experiment.epochs,
            "training_images": int(models[0].training["training_images"]),
            "test_images": int(models[0].metrics["n"]),
        },
        images=images,
        counterfactuals=torch.stack([stored for stored, _ in explained]),
        reached=torch.stack([reached for _, reached in explained]),
    )


def _metric(models: Sequence[Checkpoint], name: str) -> tuple[float, ...]:
    return tuple(float(checkpoint.metrics[name]) for checkpoint in models)


def _into(
    target: int, images: UInt8[Tensor, "images channels height width"], model: Model
) -> tuple[UInt8[Tensor, "images channels height width"], Bool[Tensor, " images"]]:
    """The stored counterfactuals, and whether each is read as the target."""
    stored, reached = images.clone(), torch.ones(len(images), dtype=torch.bool)
    other = model.predict(images).argmax(1).cpu() != target
    if other.any():
        explanation = model.explain(images[other], target)
        stored[other] = explanation.stored_convincing[:, 0].cpu()
        reached[other] = explanation.convincing_certificate.reached[:, 0].cpu()
    return stored, reached


def save(result: TradeOff, path: Path) -> None:
    """Write it at once or not at all."""
    tensors = {name: getattr(result, name) for name in _TENSORS}
    about = {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(TradeOff)
        if field.name not in _TENSORS
    }
    write_tensors(path, tensors, about)


def read(path: Path = SHIPPED) -> TradeOff:
    """What `save` wrote."""
    if not path.is_file():
        raise InputError(
            f"{path} is missing: make it with `ecinn beta --out DIR` (on a GPU) and copy "
            f"DIR/{FILE} there"
        )
    tensors, about = read_tensors(path)
    try:
        values: dict[str, Any] = {name: tensors[name] for name in _TENSORS}
        values |= {k: tuple(v) if isinstance(v, list) else v for k, v in about.items()}
        return TradeOff(**values)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} was not written by `ecinn beta`: make it again") from error


_TENSORS = ("images", "counterfactuals", "reached")
