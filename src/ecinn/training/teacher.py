"""The teacher: an ensemble that predicts classes or attributes, its training and its file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from ecinn.classifier.recipes import Recipe
from ecinn.classifier.tensor_files import load_tensors, write_tensors
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.files import rebuild
from ecinn.flow.device import resolve_device
from ecinn.pixels import Images, to_pixels
from ecinn.progress import Observer, ignore
from ecinn.training.augmented import TeacherSettings, fastest_format, train_augmented
from ecinn.training.networks import (
    assemble,
    digest,
    gpu_autocast,
    stored_weights,
    training_record,
)
from ecinn.training.state import STATE_FILES

KIND = "teacher"
TEACHER_FILE = "teacher.safetensors"
"""The teacher that a run trained because none was given."""
WIDTH = 64
SMALLEST_SIDE = 16
"""Smallest image side in pixels: three of the four stages halve it."""
_STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))
"""For each stage: multiple of the width, and stride of the first block."""

Logits = Float[Tensor, "batch outputs"]


class ResidualNetwork(nn.Module):
    """A residual network for small images: pixels in [0, 1] to one logit per output."""

    def __init__(self, channels: int, outputs: int, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        channels = width
        for multiple, stride in _STAGES:
            filters = multiple * width
            blocks += [_Block(channels, filters, stride), _Block(filters, filters, 1)]
            channels = filters
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(channels, outputs)

    def forward(self, x: Images) -> Logits:
        """Return the logit of every output."""
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        h = self.blocks(self.stem(4 * (x - 0.5)))
        pooled = F.relu(self.norm(h)).mean((2, 3))
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


class _Block(nn.Module):
    """s(x) + F(x), with norm and ReLU before each of the two convolutions."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.convolution1 = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(filters)
        self.convolution2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if channels != filters or stride != 1:
            self.shortcut = nn.Conv2d(channels, filters, 1, stride, bias=False)

    def forward(self, x: Images) -> Float[Tensor, "batch filters rows columns"]:
        h = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        residual: Tensor = self.convolution2(F.relu(self.norm2(self.convolution1(h))))
        return shortcut + residual


class Ensemble(nn.Module):
    """Mean prediction of several networks, for faces also over the mirror image.

    Frozen, always in evaluation mode and without gradients; calls can be captured in a CUDA graph.

    Args:
        exclusive: the outputs are classes, of which one is right, and not attributes.
    """

    def __init__(self, members: Sequence[ResidualNetwork], *, exclusive: bool) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.exclusive = exclusive
        self.requires_grad_(requires_grad=False).eval()

    def train(self, mode: bool = True) -> "Ensemble":  # noqa: FBT001, FBT002
        """Stay in evaluation mode, even as a part of a network in training."""
        super().train(mode=False)
        return self

    def forward(self, x: Images) -> Logits:
        """log p̄ of classes, or logit p̄ of attributes, with p̄ the mean probability."""
        logits = self.member_logits(x)
        if self.exclusive:
            return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
        return logit_of_mean(torch.cat([logits, self.member_logits(x.flip(-1))]))

    @torch.no_grad()
    def member_logits(self, x: Images) -> Float[Tensor, "members batch outputs"]:
        """Return the logits of every member for the images, without mirroring."""
        with gpu_autocast(x.device):
            return torch.stack([member(x).to(x.dtype) for member in self.members])


def logit_of_mean(logits: Float[Tensor, "predictions batch outputs"]) -> Logits:
    """log p̄ − log(1 − p̄), with p̄ the mean of σ(logit); exact even if σ rounds to 0 or 1."""
    present = F.logsigmoid(logits).logsumexp(0)
    return present - F.logsigmoid(-logits).logsumexp(0)


CLASS_TEACHER = TeacherSettings(
    members=3,
    width=24,
    epochs=8,
    batch_size=512,
    weight_decay=0.01,
    label_smoothing=0.01,
    ema_decay=0.99,
    augmentation=Augmentation(2.0, rotate=12.0, scale=0.12, shear=0.12),
    cut_out_share=0.0,
    jitter=0.0,
    mixup=0.0,
)
"""Settings for images whose classes exclude each other, such as digits."""


def default_settings(data: Dataset) -> TeacherSettings:
    """Return the settings for images with attributes, or with classes only."""
    return TeacherSettings() if data.attributes is not None else CLASS_TEACHER


@dataclass(frozen=True)
class Teacher:
    """A trained ensemble with its settings and training record."""

    ensemble: Ensemble
    settings: TeacherSettings
    record: Mapping[str, Any]
    """Training record, and as "errors" the `teacher_errors` on the validation images."""

    def save(self, path: Path) -> None:
        """Write one safetensors file, completely or not at all."""
        about = {"kind": KIND, "settings": asdict(self.settings), "record": self.record}
        write_tensors(path, stored_weights(self.ensemble), about)


def load_teacher(path: Path, device: str | torch.device = "auto") -> Teacher:
    """Read a teacher that `Teacher.save` wrote."""
    target = resolve_device(device)

    def build(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Teacher:
        settings: TeacherSettings = rebuild(TeacherSettings, about["settings"])
        record = about["record"]
        return Teacher(_assemble(tensors, record, settings, target), settings, record)

    return load_tensors(path, KIND, build)


def _assemble(
    weights: Mapping[str, Tensor],
    about: Mapping[str, Any],
    settings: TeacherSettings,
    device: torch.device,
) -> Ensemble:
    """Build an ensemble with the stored weights, for the recorded channels and outputs."""

    def build() -> Ensemble:
        one = partial(ResidualNetwork, about["channels"], about["outputs"], settings.width)
        return Ensemble([one() for _ in range(settings.members)], exclusive=about["exclusive"])

    ensemble: Ensemble = fastest_format(assemble(build, weights, device))
    return ensemble


def train_teacher(
    data: Dataset,
    held_out: Dataset | None,
    settings: TeacherSettings | None = None,
    *,
    device: str | torch.device = "auto",
    observe: Observer = ignore,
) -> Teacher:
    """Train every member from its own seed, and measure the ensemble on held-out images.

    It learns all attributes of the images, or their classes if there are no attributes.
    """
    device = resolve_device(device)
    _, channels, height, width = data.images.shape
    if min(height, width) < SMALLEST_SIDE:
        raise InputError(
            f"a teacher needs images of at least {SMALLEST_SIDE} pixels a side, "
            f"not {height}×{width}"
        )
    exclusive, outputs = data.attributes is None, _targets(data).shape[1]
    settings = settings or default_settings(data)
    trainings = [
        train_augmented(
            partial(ResidualNetwork, channels, outputs, settings.width),
            data.images,
            _targets(data),
            settings,
            number=member,
            exclusive=exclusive,
            task=f"network {member + 1} of {settings.members}",
            device=device,
            observe=observe,
        )
        for member in range(settings.members)
    ]
    trained = Ensemble([training.network for training in trainings], exclusive=exclusive)
    about = {"channels": channels, "outputs": outputs, "exclusive": exclusive}
    ensemble = _assemble(stored_weights(trained), about, settings, device)
    timing = training_record(trainings, len(data), device)
    record = {**about, "targets": targets_hash(data), **timing}
    if held_out is not None:
        record["validation_images"] = len(held_out)
        record["errors"] = teacher_errors(ensemble, held_out)
    return Teacher(ensemble, settings, record)


def _targets(data: Dataset) -> UInt8[Tensor, "batch outputs"]:
    """Return the attributes, or the classes as one-hot vectors."""
    if data.attributes is not None:
        return data.attributes
    return F.one_hot(data.labels, len(data.class_names)).to(torch.uint8)


def targets_hash(data: Dataset) -> str:
    """Return a hash that identifies the images a teacher learned, by their labels in order."""
    return digest(_targets(data)).hex()[:16]


@torch.no_grad()
def teacher_errors(
    ensemble: Ensemble, data: Dataset, batch_size: int = 500
) -> dict[str, list[float]]:
    """Return the error rate of every attribute, or of the class, on clean images.

    "single" is the mean over the members, "ensemble" is that of all members.
    """
    device = next(ensemble.parameters()).device
    targets = _targets(data)
    single = torch.zeros(1 if ensemble.exclusive else targets.shape[1], device=device)
    together = torch.zeros_like(single)

    def wrong(logits: Tensor, target: Tensor) -> Tensor:
        if ensemble.exclusive:
            return (logits.argmax(-1) != target.argmax(-1)).float()[..., None]
        return ((logits > 0) != (target > 0)).float()

    parts = zip(data.images.split(batch_size), targets.split(batch_size), strict=True)
    for images, target in parts:
        x, target = to_pixels(images.to(device)), target.to(device)
        single += wrong(ensemble.member_logits(x), target).mean(0).sum(0)
        together += wrong(ensemble(x), target).sum(0)
    return {"single": (single / len(data)).tolist(), "ensemble": (together / len(data)).tolist()}


def own_teacher(
    data: Dataset,
    held_out: Dataset | None,
    folder: Path,
    device: torch.device,
    observe: Observer,
) -> nn.Module:
    """Return the teacher of this run, trained unless an earlier start did so."""
    path = folder / TEACHER_FILE
    if path.exists():
        teacher = load_teacher(path, device)
        if teacher.record.get("targets") != targets_hash(data):
            raise InputError(f"{path} was trained on other images: choose another folder")
        return teacher.ensemble
    if any((folder / name).exists() for name in STATE_FILES):
        raise InputError(f"the run in {folder} was given a teacher: give the same to resume")
    teacher = train_teacher(data, held_out, device=device, observe=observe)
    teacher.save(path)
    return teacher.ensemble


def prepare_teacher(
    teacher: nn.Module | None, recipe: Recipe, data: Dataset, device: torch.device
) -> tuple[nn.Module | None, dict[str, str]]:
    """Return the teacher on its device, tested on one image, and a hash that identifies it."""
    if teacher is None:
        return None, {}
    outputs = recipe.architecture.classes if data.attributes is None else data.attributes.shape[1]
    teacher = teacher.to(device).eval()
    with torch.no_grad():
        logits = teacher(to_pixels(data.images[:1].to(device)))
    if logits.shape != (1, outputs):
        raise InputError(
            f"the teacher predicts {logits.shape[-1]} classes or attributes and the dataset has "
            f"{outputs}: train a teacher on this dataset"
        )
    return teacher, {"teacher": digest(*teacher.state_dict().values()).hex()[:16]}
