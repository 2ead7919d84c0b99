"""`ecinn.fit`: from arrays to a model, with settings chosen for them."""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from rich.console import Console
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError, InterruptedRunError
from ecinn.flow.device import resolve_device
from ecinn.model import Model
from ecinn.pixels import Labels, StoredImages
from ecinn.progress import Observer, bars, ignore
from ecinn.training.loop import train
from ecinn.training.plan import plan_recipe

RandomState = int | np.integer | np.random.RandomState | np.random.Generator | None


def fit(
    images: Any,  # noqa: ANN401
    labels: Any,  # noqa: ANN401
    *,
    class_names: Sequence[str] | None = None,
    device: str | torch.device = "auto",
    minutes: float | None = None,
    random_state: RandomState = 0,
    validation_fraction: float = 0.1,
    settings: Mapping[str, Any] | None = None,
    observe: Observer | None = None,
    verbose: bool = True,
    name: str = "own",
) -> Model:
    """Train a model on arrays; its settings are chosen from the images and the device.

    Args:
        images: array, tensor or list of shape (n, height, width), (n, height, width, channels)
            or (n, channels, height, width): whole numbers from 0 to 255, or floats in [0, 1]; or
            a list of Pillow images of one size.
        labels: one per image: integers or strings.
        class_names: names of the classes in their order; integer labels then count from 0.
            Without them, the sorted labels are the names.
        minutes: time for training and calibration; its speed is measured first.
        random_state: seed of split, initial weights and training; None draws one, a generator of
            NumPy gives one.
        validation_fraction: share of each class that is held out to fit the temperature; 0: none.
        settings: settings of `Recipe` or `Architecture` that replace the chosen ones.
        observe: called with progress, instead of showing it.
        verbose: show bars, or lines where bars cannot be shown.

    Returns:
        The model; `model.checkpoint.training["plan"]` holds every setting with its reason.
    """
    target = resolve_device(device)
    data = dataset_from_arrays(images, labels, class_names)
    seed = seed_from(random_state)
    held_out, rest = split_classes(data.labels, validation_fraction, seed)
    training = data.select(rest) if len(held_out) else data  # all images are not copied
    given = {"seed": seed} | dict(settings or {})
    with shown(observe, verbose=verbose) as show:
        plan = plan_recipe(
            training, target, name=name, minutes=minutes, overrides=given, observe=show
        )
        with tempfile.TemporaryDirectory(prefix="ecinn-") as folder:
            try:
                checkpoint = train(
                    plan.recipe,
                    training,
                    Path(folder) / "run",
                    held_out=data.select(held_out) if len(held_out) else None,
                    device=target,
                    observe=show,
                )
            except InterruptedRunError:
                raise InterruptedRunError(
                    "interrupted: ecinn.fit keeps nothing; ecinn.train can be resumed"
                ) from None
    reasons = [list(row) for row in plan.reasons]
    return Model(replace(checkpoint, training={**checkpoint.training, "plan": reasons}), target)


def dataset_from_arrays(
    images: Any,  # noqa: ANN401
    labels: Any,  # noqa: ANN401
    class_names: Sequence[str] | None = None,
) -> Dataset:
    """Check images and labels of any array type and return them as a dataset."""
    stored = stored_images(images)
    numbers, names = class_numbers(labels, class_names)
    if len(stored) != len(numbers):
        raise InputError(f"there are {len(stored):,} images and {len(numbers):,} labels")
    if len(names) < 2:
        raise InputError("a classifier needs at least 2 classes: give images of another class")
    counts = numbers.bincount(minlength=len(names))
    rare = [name for name, count in zip(names, counts.tolist(), strict=True) if count < 2]
    if rare:
        raise InputError(f"give at least 2 images of every class; too few: {', '.join(rare)}")
    return Dataset(stored, numbers, names)


def split_classes(
    labels: Labels, share: float, seed: int
) -> tuple[Int[Tensor, " held_out"], Int[Tensor, " rest"]]:
    """Draw this share of every class, at least one image and not all; return both parts sorted."""
    if not 0 <= share <= 0.5:
        raise InputError(f"validation_fraction is a share from 0 to 0.5, not {share}")
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        own = (labels == label).nonzero()[:, 0]
        count = min(max(1, round(share * len(own))), len(own) - 1) if share else 0
        held_out[own[torch.randperm(len(own), generator=generator)[:count]]] = True
    return held_out.nonzero()[:, 0], (~held_out).nonzero()[:, 0]


def seed_from(random_state: RandomState) -> int:
    """Return a seed, as scikit-learn's functions draw one.

    >>> seed_from(3), seed_from(np.random.RandomState(3)) == seed_from(np.random.RandomState(3))
    (3, True)
    """
    if random_state is None:
        random_state = np.random.default_rng()
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    if isinstance(random_state, bool) or not isinstance(random_state, int | np.integer):
        raise InputError(f"random_state is a whole number, not {random_state!r}")
    if not 0 <= random_state < 2**63:
        raise InputError(f"random_state is 0 or more, not {random_state}")
    return int(random_state)


def _array(values: Any, what: str) -> np.ndarray:  # noqa: ANN401
    """Return anything array-like as an array."""
    listed = list(values) if isinstance(values, list | tuple) else []
    try:
        if listed and all(isinstance(value, Tensor) for value in listed):
            values = torch.stack(listed)
        elif listed and all(isinstance(value, Image.Image) for value in listed):
            return np.stack(_of_one_mode(listed))
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return np.asarray(values)
    except (ValueError, RuntimeError):
        raise InputError(f"the {what} differ in shape: give one array of equal {what}") from None


def _of_one_mode(images: list[Image.Image]) -> list[np.ndarray]:
    """Return grey values if all images are grey, else colours; deeper grey values as they are."""
    modes = {image.mode for image in images}
    if len(modes) == 1 and modes <= {"L", "RGB", "F", "I", "I;16"}:
        return [np.asarray(image) for image in images]
    mode = "L" if modes <= {"1", "L", "LA"} else "RGB"
    return [np.asarray(image.convert(mode)) for image in images]


def stored_images(images: Any) -> StoredImages:  # noqa: ANN401
    """Return 8-bit images, channels first."""
    if str(getattr(images, "dtype", "")) == "object":  # of pandas, which holds arrays or images
        images = list(images)
    array = _array(images, "images")
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"images are numbers or Pillow images, not {array.dtype}: for files, use "
            "`ecinn train FOLDER`"
        )
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1] > 3:
        array = np.moveaxis(array, 3, 1)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or not len(array):
        raise InputError(
            "images are of shape (n, height, width), (n, height, width, channels) or "
            f"(n, channels, height, width) with 1 or 3 channels, not {np.shape(images)}"
        )
    if array.dtype.kind == "f":
        # One image after the other, so that no second copy of all of them is made as floats.
        stored = np.empty(array.shape, np.uint8)
        for image, kept in zip(array, stored, strict=True):
            low, high = image.min(), image.max()
            if not np.isfinite(low + high):
                raise InputError("an image has values that are NaN or infinite: leave it out")
            if low < 0 or high > 1:
                raise InputError(
                    f"float images lie in [0, 1], not from {low:.3g} to {high:.3g}: divide them "
                    "by the largest possible value"
                )
            np.rint(255 * image, out=kept, casting="unsafe")
        array = stored
    elif array.dtype == np.bool_:
        array = array * np.uint8(255)
    elif array.dtype != np.uint8:
        if array.dtype == np.uint16:
            raise InputError(
                "images of uint16 may have 10, 12 or 16 bits: scale them to uint8, or to floats "
                "in [0, 1]"
            )
        low, high = array.min(), array.max()
        if low < 0 or high > 255:
            raise InputError(
                f"whole numbers lie between 0 and 255, not {low} and {high}: scale them, or give "
                "floats in [0, 1]"
            )
        array = array.astype(np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing writes to a read-only array
        return torch.from_numpy(np.ascontiguousarray(array))


def class_numbers(
    labels: Any,  # noqa: ANN401
    class_names: Sequence[str] | None = None,
) -> tuple[Labels, tuple[str, ...]]:
    """Return a class number for every label, and the names of the classes."""
    if isinstance(labels, list | tuple) and any(isinstance(label, str) for label in labels):
        labels = np.array(labels, dtype=object)  # which keeps None and NaN apart from strings
    array = _array(labels, "labels")
    if array.ndim == 2 and array.shape[1] == 1:  # a column of a table
        array = array[:, 0]
    values = array.tolist() if array.ndim == 1 and array.dtype.kind in "fO" else []
    missing = [place for place, value in enumerate(values) if _is_missing(value)]
    if missing:
        raise InputError(f"label {missing[0]} is missing (None or NaN): leave its image out")
    whole = array.dtype.kind == "f" and bool((array == np.rint(array)).all())
    if array.ndim != 1 or not (array.dtype.kind in "biuUSO" or whole):
        raise InputError(
            "labels are one integer or string for each image, not an array of shape "
            f"{array.shape} and type {array.dtype}"
        )
    if whole:
        array = array.astype(np.int64)
    if array.dtype.kind in "SO":
        array = array.astype(str)
    if class_names is None:
        values, numbers = np.unique(array, return_inverse=True)
        return torch.from_numpy(numbers.astype(np.int64)), tuple(str(value) for value in values)
    names = tuple(map(str, class_names))
    if array.dtype.kind == "U":
        unknown = sorted(set(array.tolist()) - set(names))
        if unknown:
            raise InputError(f"label {unknown[0]!r} is none of the class names")
        return torch.tensor([names.index(label) for label in array.tolist()]), names
    if len(array) and not 0 <= array.min() <= array.max() < len(names):
        raise InputError(
            f"{len(names)} class names need labels from 0 to {len(names) - 1}, "
            f"not from {array.min()} to {array.max()}"
        )
    return torch.from_numpy(array.astype(np.int64)), names


def _is_missing(value: object) -> bool:
    """Return whether a label is None, NaN or a missing value of pandas."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value


def shown(observe: Observer | None, *, verbose: bool) -> AbstractContextManager[Observer]:
    """Yield the observer, or one that shows bars."""
    if observe is None and verbose:
        return bars(Console(stderr=True))
    return nullcontext(observe or ignore)
