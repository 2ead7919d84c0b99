"""Choose a recipe for somebody's own images: every setting with its reason."""

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
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
"""Steps of a speed measurement, after two to warm up."""


@dataclass(frozen=True)
class Size:
    """A network's size, and the training that it needs."""

    stages: tuple[tuple[Stage, ...], ...]
    """For one, two, three and four halvings."""
    dense_width: int
    seen: int
    """Images to train on, each counted once per epoch."""
    batch: int


# Large: the recipes of MNIST (two halvings) and of faces (three); the others lie between.
LARGE = Size(
    (
        (Stage(24, 48),),
        (Stage(24, 32), Stage(24, 64)),
        (Stage(16, 80), Stage(16, 96), Stage(8, 112)),
        (Stage(8, 48), Stage(16, 80), Stage(16, 96), Stage(8, 112)),
    ),
    dense_width=1024,
    seen=2_100_000,
    batch=512,
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
    framing: Any = None,  # noqa: ANN401
    overrides: Mapping[str, Any] | None = None,
    observe: Observer = ignore,
) -> Plan:
    """Choose architecture and schedule from the training images and the device.

    Args:
        minutes: time for training, calibration and evaluation on this machine, whose speed is
            measured; without it, the number of images decides.
        overrides: settings of `Recipe` or `Architecture` by name, which replace the choices.
    """
    overrides = dict(overrides or {})
    _require_plannable(data, minutes, overrides)
    if minutes is None:
        size = LARGE if device.type == "cuda" else SMALL
        return _Planner(data, device, size, overrides).plan(name, dataset, framing)
    for size in (LARGE, SMALL):
        planner = _Planner(data, device, size, overrides)
        trial = planner.plan(name, dataset, framing)
        rate = images_per_second(trial.recipe, data, device, observe)
        epochs, reason = _epochs_in(minutes, rate, len(data))
        if size is SMALL or epochs >= trial.recipe.epochs / 2:
            break
    planner = _Planner(data, device, size, overrides)
    return planner.plan(name, dataset, framing, epochs=(max(1, epochs), reason))


class _Planner:
    """Collects choices: a given value replaces the chosen one."""

    def __init__(
        self, data: Dataset, device: torch.device, size: Size, overrides: Mapping[str, Any]
    ) -> None:
        self.data, self.device, self.size = data, device, size
        self.given = dict(overrides)
        self.rows: list[tuple[str, str, str]] = []

    def plan(
        self,
        name: str,
        dataset: str,
        framing: Any,  # noqa: ANN401
        epochs: tuple[int, str] | None = None,
    ) -> Plan:
        """Choose all settings; the number of epochs may be planned already, with its reason."""
        n, (channels, height, width) = len(self.data), self.data.images.shape[1:]
        classes = len(self.data.class_names)
        kind = "grey" if channels == 1 else f"{channels} channels"
        text = f"{n:,} of {height}×{width}, {kind}, {classes} classes"
        self.rows.append(("images", text, "counted"))
        self.rows.append(("device", *self._device_in_words()))
        architecture = self._architecture(channels, height, width, classes)
        large = architecture.dim > 4096
        counts = self.data.labels.bincount(minlength=classes)
        small, most = int(counts.min()), int(counts.max())
        unequal = most > IMBALANCE * small
        recipe = Recipe(
            name=name,
            dataset=dataset,
            architecture=architecture,
            balanced=self.choose(
                "balanced",
                unequal,
                f"the classes have {small:,} to {most:,} images"
                + ("; the prior is uniform, so epochs draw them equally" if unequal else ""),
            ),
            beta=self.choose(
                "beta",
                1.0 if classes == 2 else 1.4265,
                "as for faces" if classes == 2 else "as for MNIST, from the paper",
            ),
            tau=self.choose(
                "tau",
                0.01 if large else 0.02 if self.size is LARGE else 0.05,
                "inverse temperature in training; fitted on held-out images at the end",
            ),
            label_smoothing=self.choose(
                "label_smoothing", 0.02 if classes == 2 else 0.03, "no image is quite certain"
            ),
            noise=self._noise(),
            augmentation=self._augmentation(height, width),
            **self._schedule(n, epochs, large=large),
            warm_up=0.1,
            weight_decay=1e-2,
            **({} if framing is None else {"framing": framing}),
        )
        for key in list(self.given):
            value = self.choose(key, None, "")
            if key in _RECIPE:
                recipe = replace(recipe, **{key: value})
            if key in _ARCHITECTURE:
                changed = replace(recipe.architecture, **{key: value})
                recipe = replace(recipe, architecture=changed)
        return Plan(recipe, tuple(self.rows))

    def choose(self, name: str, value: Any, reason: str) -> Any:  # noqa: ANN401
        """Return the given value, or this one, and note the reason."""
        if name in self.given:
            value, reason = self.given.pop(name), "given"
        self.rows.append((name, _in_words(value), reason))
        return value

    def _device_in_words(self) -> tuple[str, str]:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device), "found"
        return (
            f"CPU, {torch.get_num_threads()} threads",
            "no GPU is used: one would train a network with three times the layers on seven "
            "times the images in a few minutes, with fewer errors and better pictures",
        )

    def _architecture(self, channels: int, height: int, width: int, classes: int) -> Architecture:
        halvings = _halvings(height, width)
        side = f"{height >> halvings}×{width >> halvings}"
        reason = f"halved to {side}, where a coupling sees most of the image"
        if max(height, width) >> halvings > LAST_SIDE:
            step = 2 ** math.ceil(math.log2(max(height, width) / LAST_SIDE))
            reason = f"only halved to {side}: a size divisible by {step} would be better"
        stages = self.choose("stages", self.size.stages[halvings - 1], reason)
        dim = channels * height * width
        dense = self.size.dense_width if dim <= 1024 else 0
        few = len(self.data) < 20_000
        return Architecture(
            channels=channels,
            height=height,
            width=width,
            classes=classes,
            stages=stages,
            dense_width=self.choose(
                "dense_width",
                dense,
                "mixes all latents at the end, as for MNIST"
                if dense
                else "no fully connected layer: it would hold most of the weights",
            ),
            dropout=self.choose(
                "dropout",
                0.1 if self.size is LARGE and (few or dim > 4096) else 0.0,
                "against overfitting, which few or large images cause"
                if self.size is LARGE and (few or dim > 4096)
                else "a short training does not overfit",
            ),
            clamp=1.2 if halvings <= 2 else 1.0,
            pixel_scale=2.0 if channels == 1 else 4.0,
            pixel_margin=0.02,
            mixing="rotation" if halvings <= 2 else "cosine",
            norm="group",
        )

    def _noise(self) -> float:
        sample = self.data.images[:1000]
        flat = float(((sample == 0) | (sample == 255)).float().mean())
        clean = flat > 0.05
        return float(
            self.choose(
                "noise",
                0.005 if clean else 0.0,
                f"{flat:.0%} of the pixels are black or white"
                + (", and without noise their likelihood is unbounded" if clean else ""),
            )
        )

    def _augmentation(self, height: int, width: int) -> Augmentation:
        small = Augmentation(
            shift=round(min(height, width) / 18, 1), rotate=5.0, scale=0.05, share=0.5
        )
        reason = "keeps most labels; no mirroring, which would change letters or left and right"
        chosen: Augmentation = self.choose("augmentation", small, reason)
        return chosen

    def _schedule(
        self, n: int, planned: tuple[int, str] | None, *, large: bool
    ) -> dict[str, Any]:
        usual = batch = min(256, self.size.batch) if large else self.size.batch
        while batch > 32 and n < 40 * batch:
            batch //= 2
        reason = "as in our recipes" if batch == usual else "small, because there are few images"
        batch = int(self.choose("batch_size", batch, reason))
        peak = 1.5e-3 * math.sqrt(batch / 256) if large else 2.8e-3 * math.sqrt(batch / 512)
        if self.size is SMALL:
            peak = 2e-3 * math.sqrt(batch / 64)
        rate = float(f"{peak:.2g}")
        rate = float(self.choose("learning_rate", rate, "grows with the square root of the batch"))
        if planned is None:
            epochs = min(MOST_EPOCHS, max(5, math.ceil(self.size.seen / n)))
            planned = epochs, f"about {self.size.seen:,} images, at most {MOST_EPOCHS} times each"
        epochs = int(self.choose("epochs", *planned))
        steps = epochs * max(1, n // batch)
        decay = float(f"{min(0.999, max(0.9, 1 - 8 / steps)):.3f}")
        decay = float(
            self.choose("ema_decay", decay, f"averages an eighth of all {steps:,} steps")
        )
        return {
            "batch_size": batch,
            "learning_rate": rate,
            "epochs": epochs,
            "ema_decay": decay,
        }


def images_per_second(
    recipe: Recipe, data: Dataset, device: torch.device, observe: Observer = ignore
) -> float:
    """Measure the speed of training with a few steps on the first images."""
    batch = min(recipe.batch_size, len(data))
    few = data.first(min(len(data), (MEASURED_STEPS + 2) * batch))
    # One epoch: compiling the network would take longer than the measurement.
    with seeded(device):
        state = TrainingState.start(replace(recipe, epochs=1), device)
        step = OptimisationStep(replace(recipe, epochs=1), few, state, device)
        order = step.begin_epoch(0)
        began = 0.0
        for number in range(MEASURED_STEPS + 2):
            if number == 2:
                step.read_figures()  # waits for the GPU
                began = time.perf_counter()
            first = number * batch % (len(few) - batch + 1)
            step(order[first : first + batch], 0.0, number)
            observe(Progress("measuring the speed", number + 1, MEASURED_STEPS + 2))
        step.read_figures()
        return MEASURED_STEPS * batch / (time.perf_counter() - began)


def _epochs_in(minutes: float, rate: float, images: int) -> tuple[int, str]:
    """Return how many epochs fit, and why; below 1 the time is too short.

    Calibration encodes every image once, which costs a quarter of a training step. Evaluation of
    a quarter as many images takes about eight passes each. Together that is one epoch.
    """
    seconds = 60 * minutes
    fitting = math.floor(0.95 * seconds * rate / images - 1)
    epochs = min(MOST_EPOCHS, fitting)
    reason = f"{rate:,.0f} images/s were measured; fits {minutes:g} minutes with the evaluation"
    if fitting > MOST_EPOCHS:
        reason += f"; more than {MOST_EPOCHS} epochs overfit"
    if fitting < 5:
        reason += f"; {math.ceil(11 * images / rate / 57)} minutes would give 10 epochs"
    return epochs, reason


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
    if minutes is not None and "epochs" in overrides:
        raise InputError("minutes plan the number of epochs: give one of the two")
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
