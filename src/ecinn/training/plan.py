"""Choose a recipe for somebody's own images: every setting with its reason."""

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.data.framing import Framing
from ecinn.errors import InputError
from ecinn.flow.network import Architecture, Stage
from ecinn.progress import Observer, Progress, ignore
from ecinn.training.networks import seeded
from ecinn.training.state import TrainingState
from ecinn.training.step import OptimisationStep

SMALLEST_SIDE, LARGEST_SIDE = 8, 128
"""Pixels a side."""
LAST_SIDE = 8
"""Images are halved to this side or less: there, a coupling of two 3×3 convolutions sees most of
the image."""
IMBALANCE = 1.5
"""Largest class divided by smallest above which epochs are balanced."""
MOST_EPOCHS = 100
"""More repetitions of the same images overfit."""
MEASURED_STEPS = 10
"""Largest number of steps of a speed measurement, after two to warm up."""
MEASURED_SECONDS = 3.0
"""A measurement ends after so many seconds."""
MEASURED_BATCH = 64
"""Largest batch of a measurement on a CPU, whose speed per image does not depend on it."""


@dataclass(frozen=True)
class Size:
    """A network's size, and the training that it needs."""

    stages: tuple[tuple[Stage, ...], ...]
    """Stages for one to four halvings."""
    dense_width: int
    seen: int
    """Images to train on, each counted once per epoch."""
    batch: int
    rate: float
    """Learning rate with this batch."""


# Large: the recipes of MNIST (two halvings) and of faces (three); the others lie between. None is
# 48 wide: a FakeMNIST of that width diverged on a GPU, for reasons unknown.
LARGE = Size(
    (
        (Stage(24, 64),),
        (Stage(24, 32), Stage(24, 64)),
        (Stage(16, 80), Stage(16, 96), Stage(8, 112)),
        (Stage(8, 64), Stage(16, 80), Stage(16, 96), Stage(8, 112)),
    ),
    dense_width=1024,
    seen=3_600_000,
    batch=512,
    rate=2.8e-3,
)
# Small: chosen on held-out training images of Fashion-MNIST, in CPU seconds.
SMALL = Size(
    (
        (Stage(8, 32),),
        (Stage(8, 16), Stage(8, 48)),
        (Stage(4, 16), Stage(8, 32), Stage(8, 48)),
        (Stage(2, 16), Stage(4, 24), Stage(8, 32), Stage(8, 48)),
    ),
    dense_width=0,
    seen=300_000,
    batch=64,
    rate=2e-3,
)


@dataclass(frozen=True)
class Plan:
    """A recipe and the reasons for its settings."""

    recipe: Recipe
    reasons: tuple[tuple[str, str, str], ...]
    """Setting, value and reason, in words."""


def plan_recipe(
    data: Dataset,
    device: torch.device,
    *,
    name: str,
    dataset: str = "own",
    minutes: float | None = None,
    framing: Framing | None = None,
    overrides: Mapping[str, Any] | None = None,
    observe: Observer = ignore,
) -> Plan:
    """Choose architecture and schedule from the training images and the device.

    Args:
        minutes: time for training, calibration and evaluation on this machine, whose speed is
            measured; without it, the number of images decides.
        overrides: settings of `Recipe` or `Architecture` by name, which replace the choices.
    """
    began = time.monotonic()
    given = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in (overrides or {}).items()
    }
    _require_plannable(data, minutes, given)

    def plan(size: Size, epochs: tuple[int, str] | None = None) -> Plan:
        chosen = _choose(data, size, given, epochs)
        chosen |= {name: (value, "given") for name, value in given.items()}
        values = {setting: value for setting, (value, _) in chosen.items()}
        _, channels, height, width = data.images.shape
        classes = len(data.class_names)
        own = {key: value for key, value in values.items() if key in _ARCHITECTURE}
        architecture = Architecture(channels, height, width, classes, **own)
        own = {key: value for key, value in values.items() if key in _RECIPE}
        own |= {} if framing is None else {"framing": framing}
        colours = "grey" if channels == 1 else "colour"
        counted = f"{len(data):,} of {height}×{width}, {colours}, {classes} classes"
        rows = [("images", counted, "counted"), ("device", *_device_in_words(device))]
        rows += [(name, _in_words(value), reason) for name, (value, reason) in chosen.items()]
        return Plan(Recipe(name, dataset, architecture, **own), tuple(rows))

    if minutes is None:
        return plan(LARGE if device.type == "cuda" else SMALL)
    for size in (LARGE, SMALL):
        trial = plan(size).recipe
        rate = images_per_second(trial, data, device, observe)
        left = 60 * minutes - (time.monotonic() - began)  # the measurement takes time, too
        epochs, reason = _epochs_in(left, minutes, rate, len(data))
        if epochs >= trial.epochs / 2:
            break
    return plan(size, (epochs, reason))


def _choose(
    data: Dataset, size: Size, given: Mapping[str, Any], epochs: tuple[int, str] | None
) -> dict[str, tuple[Any, str]]:
    """Return the value and the reason of every setting; others may depend on those given."""
    n, channels, height, width = data.images.shape
    dim, classes, side = channels * height * width, len(data.class_names), max(height, width)
    halvings = _halvings(height, width)
    last = f"{height >> halvings}×{width >> halvings}"
    deep, large = halvings > 2, dim > 4096
    overfits = size is LARGE and (large or n < 20_000)
    dense = size.dense_width if dim <= 1024 else 0
    counts = data.labels.bincount(minlength=classes)
    fewest, most = int(counts.min()), int(counts.max())
    unequal = most > IMBALANCE * fewest
    sample = data.images[:1000]
    extreme = float(((sample == 0) | (sample == 255)).float().mean())
    shift = round(min(height, width) / 18, 1)
    usual = batch = min(256, size.batch) if large else size.batch
    while batch > 32 and n < 40 * batch:
        batch //= 2
    used_batch = given.get("batch_size", batch)
    if epochs is None:
        epochs = (
            min(MOST_EPOCHS, max(5, math.ceil(size.seen / n))),
            f"about {size.seen:,} images in all, but none more than {MOST_EPOCHS} times",
        )
    steps = given.get("epochs", epochs[0]) * max(1, n // used_batch)
    return {
        "stages": (
            size.stages[halvings - 1],
            f"halved to {last}, where a coupling sees most of the image"
            if side >> halvings <= LAST_SIDE
            else f"only halved to {last}: a size divisible by "
            f"{2 ** math.ceil(math.log2(side / LAST_SIDE))} would be better",
        ),
        "dense_width": (
            dense,
            "mixes all latents at the end, as for MNIST"
            if dense
            else "a fully connected layer would hold most of the weights"
            if size is LARGE
            else "in a trial, a fully connected layer made the likelihood worse",
        ),
        "dropout": (
            0.1 if overfits else 0.0,
            "few or large images overfit" if overfits else "many images, or a small network",
        ),
        "clamp": (1.0 if deep else 1.2, "as for faces" if deep else "as for MNIST"),
        "mixing": (
            "cosine" if deep else "rotation",
            "rotations would take much of the file" if deep else "as for MNIST",
        ),
        "pixel_scale": (2.0 if channels == 1 else 4.0, "IB-INN's, for grey and colour"),
        "pixel_margin": (0.02, "keeps pixels close to [0, 1]"),
        "balanced": (
            unequal,
            f"the classes have {fewest:,} to {most:,} images"
            + ("; the prior is uniform, so epochs draw them equally" if unequal else ""),
        ),
        "beta": (
            1.0 if classes == 2 else 1.4265,
            "the paper's, for two classes and for ten",
        ),
        "tau": (
            0.01 if large else 0.02 if size is LARGE else 0.05,
            "of training only: the model's is fitted on held-out images",
        ),
        "label_smoothing": (0.02 if classes == 2 else 0.03, "no label is quite certain"),
        "noise": (
            0.005 if extreme > 0.05 else 0.0,
            f"{extreme:.0%} of the pixels are black or white"
            + ("; without noise they would dominate the likelihood" if extreme > 0.05 else ""),
        ),
        "augmentation": (
            Augmentation(shift=shift, rotate=5.0, scale=0.05, share=0.5),
            "keeps most labels; mirroring would change letters, or left and right",
        ),
        "batch_size": (
            batch,
            "small, because there are few images"
            if batch < usual
            else "as for MNIST or faces"
            if size is LARGE
            else "32 is slower on a CPU, and 128 is not faster",
        ),
        "learning_rate": (
            float(
                f"{size.rate * (0.75 if large else 1) * math.sqrt(used_batch / size.batch):.2g}"
            ),
            "grows with the square root of the batch",
        ),
        "weight_decay": (0.01, "as for MNIST and faces"),
        "epochs": epochs,
        "ema_decay": (
            float(f"{min(0.999, max(0.9, 1 - 8 / steps)):.3f}"),
            f"averages an eighth of all {steps:,} steps",
        ),
    }


def _device_in_words(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), "found"
    factor, threads = round(LARGE.seen / SMALL.seen), torch.get_num_threads()
    return (
        f"CPU, {threads} thread{'s' if threads > 1 else ''}",
        "no GPU is used: one would train a network with two to three times the layers on "
        f"{factor} times the images in minutes, which should give fewer errors and better "
        "pictures",
    )


def images_per_second(
    recipe: Recipe, data: Dataset, device: torch.device, observe: Observer = ignore
) -> float:
    """Measure the speed of training with a few steps on the first images."""
    # One epoch: compiling the network would take longer than the measurement.
    recipe = replace(recipe, epochs=1)
    if device.type == "cpu":
        recipe = replace(recipe, batch_size=min(MEASURED_BATCH, recipe.batch_size))
    total = MEASURED_STEPS + 2
    few = data.first(min(len(data), total * recipe.batch_size))
    with seeded(device):
        step = OptimisationStep(recipe, few, TrainingState.start(recipe, device), device)
        order, batch = step.begin_epoch(0), step.batch_size
        began = seconds = 0.0
        number = 0
        while number < total and seconds < MEASURED_SECONDS:
            first = number * batch % (len(few) - batch + 1)
            step(order[first : first + batch], 0.0, number)
            step.read_figures()  # waits for the GPU
            number += 1
            now = time.perf_counter()
            if number <= 2:
                began = now
            seconds = now - began
            observe(Progress("measuring the speed", number, total))
        observe(Progress("measuring the speed", total, total))
    return (number - 2) * batch / seconds


def _epochs_in(seconds: float, minutes: float, rate: float, images: int) -> tuple[int, str]:
    """Return how many epochs fit into what is left of the time, and why; at least one.

    Calibration encodes every image once, which costs a quarter of a training step. Evaluating a
    quarter as many images costs two and a half steps each. Together that is one epoch.
    """
    fitting = max(1, math.floor(0.95 * seconds * rate / images - 1))
    reason = f"{rate:,.0f} images/s were measured; fits {minutes:g} minutes with the evaluation"
    if fitting > MOST_EPOCHS:
        reason += f"; more than {MOST_EPOCHS} epochs overfit"
    if fitting < 5:
        reason += f"; {math.ceil(11 * images / rate / 57)} minutes would give 10 epochs"
    return min(MOST_EPOCHS, fitting), reason


def _halvings(height: int, width: int) -> int:
    """Return how often to halve the sides: to 8 pixels or less, twice where possible."""
    halvings = 0
    while height % 2 == width % 2 == 0 and halvings < 4:
        if halvings >= 2 and max(height, width) <= LAST_SIDE:
            break
        height, width, halvings = height // 2, width // 2, halvings + 1
        if min(height, width) < 4:
            return max(1, halvings - 1)
    return halvings


_RECIPE = {field.name for field in dataclasses.fields(Recipe)}
_RECIPE -= {"name", "dataset", "architecture", "framing"}
_ARCHITECTURE = {field.name for field in dataclasses.fields(Architecture)}
_ARCHITECTURE -= {"channels", "height", "width", "classes"}


def _require_plannable(data: Dataset, minutes: float | None, overrides: Mapping[str, Any]) -> None:
    """Raise an `InputError` if no recipe fits these images or wishes."""
    unknown = sorted(overrides.keys() - _RECIPE - _ARCHITECTURE)
    if unknown:
        known = ", ".join(sorted(_RECIPE | _ARCHITECTURE))
        raise InputError(f"there is no setting {unknown[0]!r}; choose one of: {known}")
    for name in {"epochs", "batch_size"} & overrides.keys():
        if type(overrides[name]) is not int or overrides[name] < 1:
            raise InputError(f"{name} is a whole number of at least 1, not {overrides[name]!r}")
    if minutes is not None and "epochs" in overrides:
        raise InputError(
            "minutes determines the number of epochs: give minutes or epochs, not both"
        )
    if minutes is not None and not 0 < minutes < math.inf:
        raise InputError(f"the time is more than 0 minutes, not {minutes:g}")
    if len(data.class_names) < 2:
        raise InputError("a classifier needs at least 2 classes: give images of another class")
    height, width = data.images.shape[2:]
    for side in (height, width):
        if side % 2 or not SMALLEST_SIDE <= side <= LARGEST_SIDE:
            raise InputError(
                f"images of {height}×{width} cannot be halved, or are too small or large: "
                f"resize them to even sides of {SMALLEST_SIDE} to {LARGEST_SIDE} pixels"
            )


def _in_words(value: Any) -> str:  # noqa: ANN401
    """Format a setting for a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple) and all(isinstance(stage, Stage) for stage in value):
        return ", ".join(f"{stage.couplings} couplings of width {stage.width}" for stage in value)
    if isinstance(value, Augmentation):
        changes = [
            (value.shift, f"shift {value.shift:g} pixels"),
            (value.rotate, f"rotate {value.rotate:g}°"),
            (value.scale, f"scale {value.scale:.0%}"),
            (value.shear, f"shear {value.shear:g}"),
            (value.flip, "mirror"),
        ]
        return ", ".join(text for size, text in changes if size) or "none"
    return str(value)
