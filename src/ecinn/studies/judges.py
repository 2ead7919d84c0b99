"""Judges: two oracles, features for the Fréchet distance, and autoencoders for IM1 and IM2."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn.classifier.tensor_files import find_file, load_tensors, shipped_names, write_tensors
from ecinn.data.augmentation import Augmentation, augment
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.files import ASSETS, rebuild
from ecinn.flow.device import resolve_device
from ecinn.pixels import Images, Labels, StoredImages
from ecinn.progress import Observer, ignore
from ecinn.training.networks import (
    ConvolutionalNetwork,
    Trained,
    assemble,
    one_cycle,
    seeded,
    stored_weights,
    train_network,
    training_record,
)

SHIPPED = ASSETS / "judges"
KIND = "judges"
_BATCH = 500
"""Images per forward pass, which bounds memory."""


def scaled(images: StoredImages) -> Images:
    """k/255 − ½: the input of every judge, and the scale of IM1, IM2 and EN."""
    return images.float() / 255 - 0.5


@dataclass(frozen=True)
class JudgeSettings:
    """Sizes, chosen so that training on MNIST takes minutes on one CPU core, and schedules."""

    convolution_width: int = 16
    """Channels of the first convolution; there are four times as many features."""
    dense_width: int = 512
    autoencoder_width: int = 16
    """As in the autoencoders that the authors of ECINN published."""
    convolution_epochs: int = 5
    dense_epochs: int = 25
    autoencoder_epochs: int = 5
    batch_size: int = 128
    learning_rate: float = 0.004
    autoencoder_batch_size: int = 32
    autoencoder_learning_rate: float = 0.01
    shift: float = 2.0
    """Augmentation of half of the classifiers' images: pixels, degrees and shares."""
    rotate: float = 8.0
    scale: float = 0.08
    shear: float = 0.08
    stored_bits: int = 16
    """Bits per stored weight: 16, or 8 with vectors of 16 bits."""


DEFAULTS = JudgeSettings()


class FullyConnectedNetwork(nn.Sequential):
    """Two hidden layers with batch norm and ReLU on the flattened pixels."""

    def __init__(self, dim: int, classes: int, width: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(dim, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width // 2),
            nn.BatchNorm1d(width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, classes),
        )


class Autoencoder(nn.Sequential):
    """The authors' layers: ReLU, ReLU, max-pool 2, linear | ReLU, nearest ×2, ReLU, linear."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, channels, 3, padding=1),
        )


class Judges(nn.Module):
    """Networks that took no part in making the counterfactuals, and their training record."""

    record: Mapping[str, Any]
    """Seed, training record, and `accuracy` and `reconstruction_error` on the test images."""

    def __init__(
        self, shape: Sequence[int], class_names: Sequence[str], settings: JudgeSettings
    ) -> None:
        super().__init__()
        channels, height, width = shape
        classes, dim = len(class_names), channels * height * width
        self.shape, self.class_names = (channels, height, width), tuple(class_names)
        self.settings, self.record = settings, {}
        self.convolutional = ConvolutionalNetwork(channels, classes, settings.convolution_width)
        self.fully_connected = FullyConnectedNetwork(dim, classes, settings.dense_width)
        self.feature_network = ConvolutionalNetwork(channels, classes, settings.convolution_width)
        self.autoencoders = nn.ModuleList(
            Autoencoder(channels, settings.autoencoder_width) for _ in range(classes)
        )
        self.autoencoder_of_all = Autoencoder(channels, settings.autoencoder_width)
        # Twice as fast on a CPU with few channels.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def scores(self, images: StoredImages) -> dict[str, Float[Tensor, "batch classes"]]:
        """Return the logits of each oracle by family."""
        oracles = {"convolutional": self.convolutional, "fully connected": self.fully_connected}
        return {family: self.judge(oracle, images) for family, oracle in oracles.items()}

    def verdicts(self, images: StoredImages) -> dict[str, Labels]:
        """Return the class that each oracle predicts, by family."""
        return {family: scores.argmax(1) for family, scores in self.scores(images).items()}

    def features(self, images: StoredImages) -> Float[Tensor, "batch features"]:
        """Return the feature network's penultimate layer, for the Fréchet distance."""
        return self.judge(self.feature_network.features, images)

    def reconstruct(self, images: StoredImages, labels: Labels | None = None) -> Images:
        """AE_label(x) of every image, or AE_all(x) without labels, on the scale of `scaled`."""
        if labels is None:
            return self.judge(self.autoencoder_of_all, images)
        reconstructed = torch.empty(images.shape, device=images.device)
        for label, network in enumerate(self.autoencoders):
            rows = labels == label
            if bool(rows.any()):
                reconstructed[rows] = self.judge(network, images[rows])
        return reconstructed

    @torch.no_grad()
    def judge(self, network: Callable[[Tensor], Tensor], images: StoredImages) -> Tensor:
        """Return the output for images of any device, in parts."""
        if tuple(images.shape[1:]) != self.shape:
            raise InputError(
                f"these judges need images of shape {self.shape}, not {tuple(images.shape[1:])}"
            )
        device = self.convolutional.head.weight.device
        outputs = [network(scaled(batch.to(device))) for batch in images.split(_BATCH)]
        return torch.cat(outputs).to(images.device)

    def save(self, path: Path) -> None:
        """Write one safetensors file, completely or not at all."""
        about = {
            "kind": KIND,
            "shape": self.shape,
            "class_names": self.class_names,
            "settings": dataclasses.asdict(self.settings),
            "record": self.record,
        }
        write_tensors(path, stored_weights(self, self.settings.stored_bits, vectors=True), about)


def shipped_judges() -> list[str]:
    """Return the names that `load_judges` accepts instead of a path."""
    return shipped_names(SHIPPED)


def load_judges(name_or_path: str | Path) -> Judges:
    """Read shipped judges by their name, or any judges by their path."""

    def build(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Judges:
        settings: JudgeSettings = rebuild(JudgeSettings, about["settings"])
        shape, names = about["shape"], about["class_names"]
        judges = assemble(lambda: Judges(shape, names, settings), tensors, torch.device("cpu"))
        judges.record = about["record"]
        return judges

    return load_tensors(find_file(name_or_path, SHIPPED, KIND), KIND, build)


def train_judges(
    data: Dataset,
    test: Dataset,
    *,
    seed: int,
    device: str | torch.device = "auto",
    observe: Observer = ignore,
    settings: JudgeSettings = DEFAULTS,
) -> Judges:
    """Train every judge from its own seed, and measure them with their stored weights."""
    device = resolve_device(device)
    names = data.class_names
    counts = torch.bincount(data.labels, minlength=len(names))
    if len(counts) < 2 or not bool(counts.all()):
        raise InputError("give at least two classes and training images of each")

    def build() -> Judges:
        return Judges(data.images.shape[1:], names, settings)

    with seeded(torch.device("cpu"), seed):
        networks = build().to(device)
    everything = Dataset(data.images.to(device), data.labels.to(device), names)
    assignments: list[tuple[str, nn.Module, int, Dataset]] = [
        ("convolutional", networks.convolutional, settings.convolution_epochs, everything),
        ("fully connected", networks.fully_connected, settings.dense_epochs, everything),
        ("features", networks.feature_network, settings.convolution_epochs, everything),
        ("autoencoder", networks.autoencoder_of_all, settings.autoencoder_epochs, everything),
    ]
    for label, network in enumerate(networks.autoencoders):
        own = everything.select((everything.labels == label).nonzero()[:, 0])
        task = f"autoencoder of {names[label]}"
        assignments.append((task, network, settings.autoencoder_epochs, own))
    trainings = [
        _fit(network, part, epochs, settings, 1_000 * seed + number, task, observe)
        for number, (task, network, epochs, part) in enumerate(assignments)
    ]
    stored = stored_weights(networks, settings.stored_bits, vectors=True)
    judges = assemble(build, stored, device)
    judges.record = {
        "seed": seed,
        "test_images": len(test),
        **training_record(trainings, len(data), device),
        **_measure(judges, test),
    }
    return judges.cpu()


def _fit(
    network: nn.Module,
    data: Dataset,
    epochs: int,
    settings: JudgeSettings,
    seed: int,
    task: str,
    observe: Observer,
) -> Trained[nn.Module]:
    """Train with AdamW and a one-cycle schedule: autoencoders on their error, others on labels."""
    generator = torch.Generator(data.images.device).manual_seed(seed)
    is_autoencoder = isinstance(network, Autoencoder)
    s = settings
    augmentation = Augmentation(s.shift, rotate=s.rotate, scale=s.scale, shear=s.shear, share=0.5)
    batch_size, rate = s.batch_size, s.learning_rate
    if is_autoencoder:
        batch_size, rate = s.autoencoder_batch_size, s.autoencoder_learning_rate

    def loss(batch: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor | None]:
        if is_autoencoder:
            x = scaled(data.images[batch])
            return F.mse_loss(network(x), x), None
        logits = network(scaled(augment(data.images[batch], augmentation, generator)))
        wrong = logits.detach().argmax(1) != data.labels[batch]
        return F.cross_entropy(logits, data.labels[batch]), wrong.float().mean()

    return train_network(
        network,
        loss,
        torch.optim.AdamW(network.parameters(), rate),
        images=len(data),
        batch_size=batch_size,
        epochs=epochs,
        generator=generator,
        schedule=one_cycle(rate),
        task=task,
        observe=observe,
    )


def _measure(judges: Judges, test: Dataset) -> dict[str, dict[str, float]]:
    """Return the classifiers' accuracies and the autoencoders' mean squared errors per pixel."""
    scores = judges.scores(test.images)
    scores["features"] = judges.judge(judges.feature_network, test.images)
    x = scaled(test.images)
    another = (test.labels + 1) % len(test.class_names)
    reconstructions = {
        "of the image's class": judges.reconstruct(test.images, test.labels),
        "of another class": judges.reconstruct(test.images, another),
        "of all classes": judges.reconstruct(test.images),
    }
    return {
        "accuracy": {
            name: (logits.argmax(1) == test.labels).double().mean().item()
            for name, logits in scores.items()
        },
        "reconstruction_error": {
            name: F.mse_loss(image, x).item() for name, image in reconstructions.items()
        },
    }
