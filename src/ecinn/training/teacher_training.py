"""Training of the teacher on strongly changed pictures, what came out, and its file."""

import copy
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ecinn.classifier.checkpoint import read_tensors, write_tensors
from ecinn.data.augmentation import Augmentation, augment
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.flow.bijections import Image
from ecinn.pixels import to_pixels
from ecinn.training.plain_networks import NetworkProgress, as_stored, train_network
from ecinn.training.step import schedule
from ecinn.training.teacher import (
    SMALLEST_SIDE,
    WIDTH,
    AttributeNetwork,
    Teachers,
    cut_out,
    jitter,
    mix,
)

KIND = "teacher"
"""Tells a teacher's file from a model's."""
Targets = Float[Tensor, "batch attributes"]
_BATCH = 500
"""Images read at a time when errors are counted, which bounds memory."""


@dataclass(frozen=True)
class TeacherSettings:
    """All that is needed to train a teacher again; every value is ours."""

    members: int = 2
    width: int = WIDTH
    epochs: int = 40
    batch_size: int = 256
    learning_rate: float = 2e-3
    warm_up: float = 0.05
    """Share of the run; then half a cosine down to 0."""
    weight_decay: float = 0.05
    """Of kernels and matrices; norms and biases are left alone."""
    label_smoothing: float = 0.05
    ema_decay: float = 0.998
    """Decay of the moving average of the weights, which is what is kept."""
    augmentation: Augmentation = field(
        default_factory=lambda: Augmentation(6.0, rotate=12.0, scale=0.12, shear=0.05, flip=True)
    )
    cut_out: float = 0.35
    """Side of the square that is greyed out, as a share of the picture's."""
    cut_out_share: float = 0.5
    """Share of the pictures that have one."""
    jitter: float = 0.25
    """Largest relative change of brightness, contrast and saturation."""
    mixup: float = 0.2
    """Parameter of the Beta distribution of λ."""
    mixup_share: float = 0.5
    """Share of the batches that are mixed."""
    seed: int = 0


@dataclass(frozen=True)
class TeacherProgress:
    """Where the training of one of the networks stands."""

    member: int
    members: int
    network: NetworkProgress

    @property
    def seconds_left(self) -> float:
        """Of all members."""
        p = self.network
        return ((self.members - self.member + 1) * p.steps - p.step) * p.seconds / p.step


@dataclass(frozen=True)
class TeacherResult:
    """Trained networks and what is known of them."""

    teachers: Teachers
    settings: TeacherSettings
    record: Mapping[str, Any]
    """How they were made, and "errors": per attribute, of a "single" network on average and of
    the "ensemble", where there was something to measure them with."""


Observe = Callable[[TeacherProgress], None]


def train_teacher(
    train: Dataset,
    settings: TeacherSettings,
    device: torch.device,
    observe: Observe = lambda progress: None,
    validation: Dataset | None = None,
) -> TeacherResult:
    """Train every member from a seed of its own and measure them as they will be stored."""
    attributes = _require_trainable(train, validation, settings)
    began = time.monotonic()
    curves: list[list[NetworkProgress]] = []
    weights: dict[str, Tensor] = {}
    for member in range(settings.members):
        network, curve = _train_member(member, train, attributes, settings, device, observe)
        curves.append(curve)
        weights |= {f"members.{member}.{name}": v for name, v in network.state_dict().items()}
    seconds = time.monotonic() - began
    teachers = _assemble(as_stored(weights), attributes, settings, device)
    spent = sum(curve[-1].seconds for curve in curves)
    images = sum(curve[-1].images_per_second * curve[-1].seconds for curve in curves)
    record = {
        "training_images": len(train),
        "attributes": attributes,
        "seconds": round(seconds, 1),
        "images_per_second": round(images / spent),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "curves": [
            [{"epoch": p.epoch, "loss": p.loss, "error": p.error} for p in curve]
            for curve in curves
        ],
    }
    if validation is not None:
        record["validation_images"] = len(validation)
        record["errors"] = attribute_errors(teachers, validation)
    return TeacherResult(teachers, settings, record)


def _train_member(
    member: int,
    data: Dataset,
    attributes: int,
    settings: TeacherSettings,
    device: torch.device,
    observe: Observe,
) -> tuple[AttributeNetwork, list[NetworkProgress]]:
    """AdamW on the cross-entropy of all attributes; averaged weights, and every epoch's end."""
    assert data.attributes is not None
    seed = settings.seed * 1_000_003 + member
    images, known = data.images.to(device), data.attributes.to(device)
    generator = torch.Generator(device).manual_seed(seed)
    draws = random.Random(seed)
    # Weights and dropout come from the global generators: they are given back as they were.
    own = torch.random.fork_rng([device] if device.type == "cuda" else [])
    # All batches are of one shape: cuDNN looks for the fastest kernels once.
    fastest = torch.backends.cudnn.flags(enabled=True, benchmark=True)
    with own, fastest:
        torch.manual_seed(seed)
        step = _Step(AttributeNetwork(attributes, settings.width).to(device), settings)

        def take_step(batch: Int[Tensor, " batch"], number: int, steps: int) -> Tensor:
            weight = mixing_weight(settings, draws)
            x, targets = training_batch(images[batch], known[batch], settings, weight, generator)
            return step(x, targets, number / steps, number)

        curve = train_network(
            take_step,
            len(data),
            settings.batch_size,
            settings.epochs,
            generator,
            lambda progress: observe(TeacherProgress(member + 1, settings.members, progress)),
        )
    return step.averaged(), curve


class _Step:
    """One step of AdamW on a batch, and of the average after it."""

    def __init__(self, network: AttributeNetwork, settings: TeacherSettings) -> None:
        self.on_gpu = next(network.parameters()).device.type == "cuda"
        if self.on_gpu:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network = network.train()
        self.settings = settings
        self.average = copy.deepcopy(network).requires_grad_(requires_grad=False)
        kernels = [p for p in network.parameters() if p.ndim > 1]
        others = [p for p in network.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": kernels, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, settings.learning_rate, fused=self.on_gpu)

    def __call__(
        self, x: Image, targets: Targets, done: float, number: int
    ) -> Float[Tensor, " figures"]:
        """Take it; loss and error. `done` is the share of the run that lies behind."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.learning_rate * schedule(done, self.settings.warm_up)
        if self.on_gpu:
            x = x.contiguous(memory_format=torch.channels_last)
        # Not on a CPU: some crash on bf16.
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.on_gpu):
            logits = self.network(x).float()
        loss = F.binary_cross_entropy_with_logits(logits, targets)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        with torch.no_grad():
            # The average starts short, so that it does not remember the first weights for long.
            decay = min(self.settings.ema_decay, (1 + number) / (10 + number))
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.network.parameters()), 1 - decay
            )
            wrong = ((logits > 0) != (targets > 0.5)).float().mean()
            return torch.stack([loss.detach(), wrong])

    def averaged(self) -> AttributeNetwork:
        """The average of the weights, with the last statistics of the norms."""
        for kept, last in zip(self.average.buffers(), self.network.buffers(), strict=True):
            kept.copy_(last)
        return self.average


def training_batch(
    images: UInt8[Tensor, "batch channels height width"],
    attributes: UInt8[Tensor, "batch attributes"],
    settings: TeacherSettings,
    weight: float,
    generator: torch.Generator,
) -> tuple[Image, Targets]:
    """Moved, recoloured, covered and mixed pictures, and what is to be read in them."""
    x = to_pixels(augment(images, settings.augmentation, generator))
    x = jitter(x, settings.jitter, generator)
    x = cut_out(x, settings.cut_out, settings.cut_out_share, generator)
    smoothing = settings.label_smoothing
    return mix(x, (1 - smoothing) * attributes.float() + smoothing / 2, weight)


def mixing_weight(settings: TeacherSettings, draws: random.Random) -> float:
    """λ ~ Beta(mixup, mixup) for a share of the batches, 1 for the others."""
    if settings.mixup <= 0 or draws.random() >= settings.mixup_share:
        return 1.0
    return draws.betavariate(settings.mixup, settings.mixup)


@torch.no_grad()
def attribute_errors(teachers: Teachers, data: Dataset) -> dict[str, list[float]]:
    """Share of clean pictures of which an attribute is read wrongly, for every attribute.

    Of a "single" network, the members' mean, and of the "ensemble" with mirror images.
    """
    if data.attributes is None or not len(data):
        raise InputError("there are no pictures with attributes to measure errors with")
    device = next(teachers.parameters()).device
    single = torch.zeros(data.attributes.shape[1], device=device)
    ensemble = torch.zeros_like(single)
    for images, attributes in zip(
        data.images.split(_BATCH), data.attributes.split(_BATCH), strict=True
    ):
        x, known = to_pixels(images.to(device)), attributes.to(device) > 0
        single += ((teachers.read(x) > 0) != known).float().mean(0).sum(0)
        ensemble += ((teachers(x) > 0) != known).float().sum(0)
    return {"single": (single / len(data)).tolist(), "ensemble": (ensemble / len(data)).tolist()}


def save_teacher(result: TeacherResult, path: Path) -> None:
    """One safetensors file, written at once; kernels as float16."""
    about = {"kind": KIND, "settings": asdict(result.settings), "record": result.record}
    write_tensors(path, as_stored(result.teachers.state_dict()), about)


def load_teacher(path: Path, device: torch.device) -> TeacherResult:
    """The inverse of `save_teacher`."""
    tensors, about = read_tensors(path)
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise InputError(f"{path} holds no teacher: give a file that `ecinn teacher` wrote")
    try:
        augmentation = Augmentation(**about["settings"]["augmentation"])
        settings = TeacherSettings(**{**about["settings"], "augmentation": augmentation})
        record = about["record"]
        teachers = _assemble(tensors, record["attributes"], settings, device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{path} does not fit this version's teacher ({reason}); "
            "use the version of ecinn that wrote it, or train it again"
        ) from error
    return TeacherResult(teachers, settings, record)


def _assemble(
    weights: Mapping[str, Tensor], attributes: int, settings: TeacherSettings, device: torch.device
) -> Teachers:
    """Networks with the stored weights, which is also how freshly trained ones are measured."""
    with torch.device("meta"):
        members = [AttributeNetwork(attributes, settings.width) for _ in range(settings.members)]
        teachers = Teachers(members)
    teachers.to_empty(device=device).load_state_dict(dict(weights))
    if device.type == "cuda":
        teachers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return teachers


def _require_trainable(
    train: Dataset, validation: Dataset | None, settings: TeacherSettings
) -> int:
    """The number of attributes to learn, where they can be."""
    _, channels, height, width = train.images.shape
    if channels != 3 or min(height, width) < SMALLEST_SIDE:
        raise InputError(
            f"a teacher reads images of 3 channels and at least {SMALLEST_SIDE} pixels a side, "
            f"not {channels}×{height}×{width}: take a data set of photographs"
        )
    if train.attributes is None:
        raise InputError("a teacher learns attributes: take a data set that has some, like CelebA")
    if min(settings.members, settings.epochs) < 1 or min(settings.batch_size, len(train)) < 2:
        raise InputError("give at least one member, one epoch, two images and a batch of two")
    attributes = train.attributes.shape[1]
    if validation is not None and (
        not len(validation)
        or validation.attributes is None
        or validation.attributes.shape[1] != attributes
    ):
        raise InputError("validation images are missing or have other attributes: give one set")
    return attributes
