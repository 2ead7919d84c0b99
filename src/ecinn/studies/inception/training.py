"""Train Inception-V3 by the paper's recipe, measure it, and store it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from ecinn.classifier.tensor_files import load_tensors, write_tensors
from ecinn.data.augmentation import Augmentation, augment
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.files import rebuild
from ecinn.flow.device import resolve_device
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import to_pixels
from ecinn.progress import Observer, ignore
from ecinn.studies.inception.network import SIDE, InceptionClassifier, torchvision_models
from ecinn.training.networks import (
    Trained,
    assemble,
    gpu_autocast,
    seeded,
    stored_weights,
    train_network,
    training_record,
)

KIND = "inception"
_BATCH = 100


@dataclass(frozen=True)
class InceptionSettings:
    """Everything that is needed to train a network again, with Adam's default parameters."""

    dataset: str
    epochs: int = 9
    """Paper; more epochs overfit."""
    learning_rate: float = 1e-3
    """Paper; constant."""
    batch_size: int = 128
    """Ours, as the augmentation; the paper does not specify them."""
    augmentation: Augmentation = field(default_factory=lambda: Augmentation(flip=True))
    side: int = SIDE
    """Paper: images are enlarged to this many pixels a side."""
    seed: int = 0
    stored_bits: int = 16
    """Bits per stored weight of convolutions and matrices: 16 or 8."""


@dataclass(frozen=True)
class InceptionResult:
    """A trained network in evaluation mode, with its error rates and training record."""

    classifier: InceptionClassifier
    class_names: tuple[str, ...]
    settings: InceptionSettings
    errors: Mapping[str, float]
    """Error rate on each set of held-out images, as "test" and "validation"."""
    record: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write one safetensors file, completely or not at all."""
        about = {
            "kind": KIND,
            "class_names": self.class_names,
            "settings": asdict(self.settings),
            "errors": self.errors,
            "record": self.record,
        }
        write_tensors(path, stored_weights(self.classifier, self.settings.stored_bits), about)


def load_inception(
    path: Path, device: str | torch.device = "auto", class_names: Sequence[str] | None = None
) -> InceptionResult:
    """Read a stored network; it must have these classes, if they are given."""
    target = resolve_device(device)
    torchvision_models()  # raises an error of its own if torchvision is missing

    def build(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> InceptionResult:
        settings: InceptionSettings = rebuild(InceptionSettings, about["settings"])
        names = tuple(about["class_names"])
        classifier = assemble(
            lambda: InceptionClassifier(len(names), settings.side), tensors, target
        )
        return InceptionResult(classifier, names, settings, about["errors"], about["record"])

    result = load_tensors(path, KIND, build)
    if class_names is not None and tuple(class_names) != result.class_names:
        raise InputError(
            f"{path} has the classes {', '.join(result.class_names)}, the model has "
            f"{', '.join(class_names)}: use a network of the model's dataset"
        )
    return result


def train_inception(
    data: Dataset,
    held_out: Mapping[str, Dataset],
    settings: InceptionSettings,
    *,
    device: str | torch.device = "auto",
    observe: Observer = ignore,
) -> InceptionResult:
    """Train from random weights, and measure the stored weights on the held-out images."""
    device = resolve_device(device)

    def build() -> InceptionClassifier:
        return InceptionClassifier(len(data.class_names), settings.side)

    with seeded(device, settings.seed), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        training = fit(build().to(device), data, settings, observe)
    stored = stored_weights(training.network, settings.stored_bits)
    classifier = assemble(build, stored, device)
    record = {
        "images": {name: len(images) for name, images in held_out.items()},
        **training_record([training], len(data), device),
    }
    errors = {name: error_rate(classifier, images) for name, images in held_out.items()}
    return InceptionResult(classifier, data.class_names, settings, errors, record)


def fit(
    network: nn.Module, data: Dataset, settings: InceptionSettings, observe: Observer = ignore
) -> Trained[nn.Module]:
    """Train with Adam on the cross-entropy of augmented images, on the network's device."""
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(settings.seed)
    images, labels = data.images.to(device), data.labels.to(device).long()

    def loss(batch: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        x = to_pixels(augment(images[batch], settings.augmentation, generator))
        with gpu_autocast(device):
            logits = network(x.contiguous(memory_format=torch.channels_last)).float()
        wrong = logits.detach().argmax(1) != labels[batch]
        return F.cross_entropy(logits, labels[batch]), wrong.float().mean()

    return train_network(
        network,
        loss,
        torch.optim.Adam(network.parameters(), settings.learning_rate),
        images=len(data),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        generator=generator,
        observe=observe,
    )


@torch.no_grad()
def error_rate(network: nn.Module, data: Dataset) -> float:
    """Return the share of clean images that are misclassified in evaluation mode and float32."""
    device = next(network.parameters()).device
    was_training = network.training
    network.eval()
    with exact_convolutions():
        parts = [network(to_pixels(x.to(device))).argmax(1) for x in data.images.split(_BATCH)]
    network.train(was_training)
    return int((torch.cat(parts).cpu() != data.labels.cpu()).sum()) / len(data)
