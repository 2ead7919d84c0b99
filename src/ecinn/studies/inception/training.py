"""Training of Inception-V3 by the paper's recipe, what came out, and its file."""

import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from ecinn.classifier.checkpoint import read_tensors, write_tensors
from ecinn.data.augmentation import Augmentation, augment
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import to_pixels
from ecinn.studies.inception.network import SIDE, InceptionClassifier
from ecinn.training.plain_networks import NetworkProgress, as_stored, train_network

KIND = "inception"
"""Tells a file of Inception-V3 from a model's."""
_BATCH = 100
"""Images classified at a time, which bounds memory."""


@dataclass(frozen=True)
class InceptionSettings:
    """All that is needed to train one network again; Adam's other parameters are its defaults."""

    dataset: str
    epochs: int = 9
    """Paper; after them it overfits."""
    learning_rate: float = 1e-3
    """Paper; constant."""
    batch_size: int = 128
    """Ours: the paper does not say."""
    augmentation: Augmentation = field(default_factory=lambda: Augmentation(flip=True))
    """Ours: the paper does not say."""
    side: int = SIDE
    """Paper: images are enlarged to this many pixels a side."""
    seed: int = 0


@dataclass(frozen=True)
class InceptionResult:
    """A trained network, in evaluation mode, and what is known of it."""

    classifier: InceptionClassifier
    class_names: tuple[str, ...]
    settings: InceptionSettings
    errors: Mapping[str, float]
    """Share of wrong answers on "test" and, where there are such images, "validation"."""
    record: Mapping[str, Any]
    """How it was made: seconds, images per second, curve, versions."""


Observe = Callable[[NetworkProgress], None]


def train_inception(
    train: Dataset,
    test: Dataset,
    settings: InceptionSettings,
    device: torch.device,
    observe: Observe = lambda progress: None,
    *,
    validation: Dataset | None = None,
) -> InceptionResult:
    """Train from random weights and measure the last ones, as they will be stored."""
    measured = {"test": test} if validation is None else {"test": test, "validation": validation}
    _require_trainable(train, measured, settings)
    classes = len(train.class_names)
    # All batches are of one shape: cuDNN looks for the fastest kernels once.
    fastest = torch.backends.cudnn.flags(enabled=True, benchmark=True)
    with _own_randomness(settings.seed, device), fastest:
        network = InceptionClassifier(classes, settings.side).to(device)
        curve = fit(network, train, settings, observe)
    record = {
        "training_images": len(train),
        "images": {name: len(data) for name, data in measured.items()},
        "seconds": round(curve[-1].seconds, 1),
        "images_per_second": round(curve[-1].images_per_second),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "curve": [
            {"epoch": p.epoch, "loss": p.loss, "error": p.error, "seconds": round(p.seconds, 1)}
            for p in curve
        ],
    }
    classifier = _assemble(as_stored(network.state_dict()), classes, settings.side, device)
    errors = {name: error_rate(classifier, data) for name, data in measured.items()}
    return InceptionResult(classifier, train.class_names, settings, errors, record)


def fit(
    network: nn.Module,
    data: Dataset,
    settings: InceptionSettings,
    observe: Observe = lambda progress: None,
) -> list[NetworkProgress]:
    """Adam on the cross-entropy of augmented images, where the network is; every epoch's end."""
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(settings.seed)
    images, labels = data.images.to(device), data.labels.to(device).long()
    optimiser = torch.optim.Adam(network.parameters(), settings.learning_rate)
    network.train()

    def take_step(batch: Int[Tensor, " batch"], number: int, steps: int) -> Tensor:
        x = to_pixels(augment(images[batch], settings.augmentation, generator))
        # Not on a CPU: some crash on bf16.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = network(x.contiguous(memory_format=torch.channels_last)).float()
        loss = F.cross_entropy(logits, labels[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        wrong = (logits.detach().argmax(1) != labels[batch]).float().mean()
        return torch.stack([loss.detach(), wrong])

    return train_network(
        take_step, len(data), settings.batch_size, settings.epochs, generator, observe
    )


@torch.no_grad()
def error_rate(network: nn.Module, data: Dataset) -> float:
    """Share of clean images, in evaluation mode and float32, whose likeliest class is wrong."""
    device = next(network.parameters()).device
    was_training = network.training
    network.eval()
    wrong = 0
    with exact_convolutions():
        for images, labels in zip(
            data.images.split(_BATCH), data.labels.split(_BATCH), strict=True
        ):
            answers = network(to_pixels(images.to(device))).argmax(1)
            wrong += int((answers != labels.to(device)).sum())
    network.train(was_training)
    return wrong / len(data)


def save_inception(result: InceptionResult, path: Path) -> None:
    """One safetensors file, written at once; filters as float16."""
    about = {
        "kind": KIND,
        "class_names": result.class_names,
        "settings": asdict(result.settings),
        "errors": result.errors,
        "record": result.record,
    }
    write_tensors(path, as_stored(result.classifier.state_dict()), about)


def load_inception(
    path: Path, device: torch.device, class_names: Sequence[str] | None = None
) -> InceptionResult:
    """The inverse of `save_inception`; it must tell these classes, where they are given."""
    tensors, about = read_tensors(path)
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise InputError(f"{path} holds no Inception-V3: give a file that `ecinn inception` wrote")
    try:
        augmentation = Augmentation(**about["settings"]["augmentation"])
        settings = InceptionSettings(**{**about["settings"], "augmentation": augmentation})
        names = tuple(about["class_names"])
        classifier = _assemble(tensors, len(names), settings.side, device)
        errors, record = about["errors"], about["record"]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{path} does not fit this version's Inception-V3 ({reason}); "
            "use the version of ecinn that wrote it, or train it again"
        ) from error
    if class_names is not None and tuple(class_names) != names:
        raise InputError(
            f"{path} tells {' from '.join(names)}, the model {' from '.join(class_names)}: "
            "give a CNN of the model's data set"
        )
    return InceptionResult(classifier, names, settings, errors, record)


def _assemble(
    weights: Mapping[str, Tensor], classes: int, side: int, device: torch.device
) -> InceptionClassifier:
    """A network with the stored weights, which is also how a freshly trained one is measured."""
    with torch.device("meta"):
        classifier = InceptionClassifier(classes, side)
    classifier.to_empty(device=device).load_state_dict(dict(weights))
    return classifier.eval().requires_grad_(requires_grad=False)


@contextlib.contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Weights and dropout come from the global generators: give the caller's back as they were."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _require_trainable(
    train: Dataset, measured: Mapping[str, Dataset], settings: InceptionSettings
) -> None:
    if train.images.shape[1] != 3:
        raise InputError(
            f"Inception-V3 reads images of 3 channels, not {train.images.shape[1]}: "
            "take a data set of photographs"
        )
    if settings.epochs < 1 or min(settings.batch_size, len(train)) < 2:
        raise InputError("give at least one epoch, two training images and a batch of two")
    for name, data in measured.items():
        if not len(data) or data.class_names != train.class_names:
            raise InputError(f"{name} images are missing or of other classes: give one data set")
