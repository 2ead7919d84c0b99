"""A student's settings, and the queries that they cost."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ecinn.blackbox.classifier import BlackBox
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.recipes import FineTuning, Recipe, find_recipe
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset, Splits
from ecinn.data.framing import Framing
from ecinn.data.own import DATASET
from ecinn.errors import InputError
from ecinn.progress import Observer, ignore
from ecinn.training.agreement import QUERIES_PER_IMAGE
from ecinn.training.answers import SPLITS
from ecinn.training.plan import plan_recipe

ON_THE_PATH = FineTuning(epochs=6, faithfulness=4.0, distillation_weight=0.5)
"""Fine-tuning of a student whose recipe has none; the numbers are those of digits."""
CONFIDENCE = 0.95
"""Default request of a student's explanations: within the tolerance of 0.05, the classifier
must give the target at least 90 %. To be the most probable class, as α₁ asks, is not enough: among
the eight answers of a classifier that saw no pattern, the target wins now and then by chance."""
CONTINUED = FineTuning(
    epochs=1, faithfulness=4.0, distillation_weight=2.0, batch_size=32, learning_rate=6e-4
)
"""Training of a student that starts from another model; without requested epochs on the path, only
batch size and learning rate apply. Chosen on validation digits, with few images."""
MANY_IMAGES = 20_000
"""Number of images from which on a student's images are not augmented: the classifier may answer
differently about a shifted image. With fewer images, the student would memorise them."""
CONTINUED_IMAGES, CONTINUED_LARGE_IMAGES = 10_000, 2_000
"""Small and large images on which another model's layers are trained, summed over epochs; at
least one epoch. On one CPU core, this takes a minute for digits and a few for faces."""
LARGE_IMAGE = 4096
"""Values above which an image is large."""
MOST_EPOCHS = 20
"""Largest number of epochs of this training."""
PATH_IMAGES = 500
"""Held-out images on whose paths the temperature is fitted."""
REPORT_IMAGES = 300
"""Held-out images on whose paths student and classifier are compared, and of the student's own
metrics, which cost as much again."""


def student_recipe(
    data: Dataset,
    device: torch.device,
    *,
    recipe: Recipe | str | None = None,
    init_from: Checkpoint | None = None,
    minutes: float | None = None,
    framing: Framing | None = None,
    observe: Observer = ignore,
) -> Recipe:
    """Return the student's settings: a recipe, or a plan for this data, with fine-tuning.

    A student that starts from another model has the settings of this model, and its layers are
    trained for a short time, not on the path. With 0 epochs they are kept, and only class means
    and temperature are the student's own.
    A small network, which is planned where there is no GPU, is not trained on the path either: it
    lowered the agreement of a student of clothes from 94 to 91 %.
    What a recipe says about attributes and other models is left out, and so is the default
    confidence of a shipped model. Label smoothing stays: without it, a classifier's saturated
    answers drive the class means apart, and fewer counterfactuals convince it.

    Args:
        framing: of pictures of your own, whatever the recipe.
    """
    if isinstance(recipe, str):
        recipe = replace(find_recipe(recipe), default_confidence=None)
    on_path = recipe is not None or (init_from is None and device.type != "cpu")
    if init_from is not None:
        recipe = _continued(init_from, data, recipe)
    if recipe is not None and minutes is not None:
        raise InputError(
            "minutes cannot be combined with a recipe, a dataset's name or init_from: "
            "give epochs instead"
        )
    if recipe is None:
        plan = plan_recipe(
            data, device, name="student", minutes=minutes, framing=framing, observe=observe
        )
        recipe = plan.recipe
    elif framing is not None:
        recipe = replace(
            recipe, dataset=DATASET, framing=framing, mnist_framing=False, face_crop=None
        )
    tuning = recipe.finetuning or path_settings(recipe)
    if len(data) >= MANY_IMAGES:
        recipe = replace(recipe, augmentation=Augmentation())
    return replace(
        recipe,
        name=f"{recipe.name}-student" if not recipe.name.endswith("student") else recipe.name,
        finetuning=tuning if on_path else None,
        attribute_weight=0.0,
        distillation_weight=0.0,
        init_from=None,
        default_confidence=recipe.default_confidence or CONFIDENCE,
    )


def path_settings(recipe: Recipe, *, continued: bool = False) -> FineTuning:
    """Return settings of training on the path for a student whose recipe has none."""
    if continued:
        return CONTINUED
    # Small batches, as in the first stage: of few images, large ones would make few steps.
    return replace(ON_THE_PATH, batch_size=min(ON_THE_PATH.batch_size, recipe.batch_size))


def _continued(start: Checkpoint, data: Dataset, recipe: Recipe | None) -> Recipe:
    """Return the settings of a student that starts from another model."""
    a = start.recipe.architecture
    shape, expected = tuple(data.images.shape[1:]), (a.channels, a.height, a.width)
    if shape != expected:
        had, has = ("×".join(map(str, sides)) for sides in (expected, shape))
        raise InputError(
            f"cannot start from {start.recipe.name}: it reads pictures of {had} (channels, "
            f"height, width), and these are {has}; choose another model, or leave it out"
        )
    if recipe is not None:
        return recipe
    return replace(
        start.recipe,
        architecture=replace(a, classes=len(data.class_names)),
        epochs=continued_epochs(data),
        batch_size=CONTINUED.batch_size,
        learning_rate=CONTINUED.learning_rate,
        sgd=None,  # the learning rate is Adam's
        stored_bits=max(16, start.recipe.stored_bits),  # 8 bits would be calibrated twice
        default_confidence=None,
    )


def continued_epochs(data: Dataset) -> int:
    """Return the epochs for which the layers of another model are trained on the answers."""
    large = data.images[0].numel() > LARGE_IMAGE
    seen = CONTINUED_LARGE_IMAGES if large else CONTINUED_IMAGES
    return min(math.ceil(seen / len(data)), MOST_EPOCHS)


def queries_needed(
    recipe: Recipe,
    data: Splits,
    known: Sequence[str] = (),
    report_images: int = REPORT_IMAGES,
) -> tuple[int, int]:
    """Return the queries for the data and the report, and those of an epoch on the path."""
    on_data = sum(len(getattr(data, name)) for name in SPLITS if name not in known)
    on_data += QUERIES_PER_IMAGE * min(report_images, len(data.test)) + 1
    if recipe.finetuning is None:
        return on_data + min(PATH_IMAGES, len(data.validation)), 0
    batch = min(recipe.finetuning.batch_size, len(data.train))
    return on_data, len(data.train) // batch * (batch - batch // 2)


def affordable(
    recipe: Recipe,
    black_box: BlackBox,
    data: Splits,
    known: Sequence[str] | dict[str, Any] = (),
    report_images: int = REPORT_IMAGES,
) -> Recipe:
    """Shorten fine-tuning until its queries fit into the budget."""
    if black_box.budget is None:
        return recipe
    on_data, per_epoch = queries_needed(recipe, data, list(known), report_images)
    if black_box.left < on_data + per_epoch:
        path = f", and an epoch on the path {per_epoch:,}" if per_epoch else ""
        asked = f"{black_box.queries:,} were asked before, " if black_box.queries > 1 else ""
        raise InputError(
            f"{black_box.budget:,} queries are too few: {asked}the images and the report need "
            f"{on_data:,}{path}: allow {black_box.queries + on_data + per_epoch:,}, "
            "or use fewer images"
        )
    if recipe.finetuning is None:
        return recipe
    epochs = int((black_box.left - on_data) // per_epoch)
    shorter = replace(recipe.finetuning, epochs=min(epochs, recipe.finetuning.epochs))
    return replace(recipe, finetuning=shorter)
