"""A labelled set of 8-bit images, and datasets by name.

To add a dataset, write a loader (`mnist.py` is the shortest) and call it in `load_dataset`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from jaxtyping import Float, UInt8
from torch import Tensor

from ecinn.data.face_crop import CELEBA_CROP, FaceCrop
from ecinn.errors import InputError
from ecinn.pixels import Labels, StoredImages
from ecinn.progress import Observer, ignore

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Dataset:
    """Images with their labels and the names of the classes."""

    images: StoredImages
    labels: Labels
    class_names: tuple[str, ...]
    attributes: UInt8[Tensor, "batch attributes"] | None = None
    """Further binary attributes of every image, where the dataset has them."""
    attribute: int | None = None
    """The column of `attributes` that is the label."""
    answers: Float[Tensor, "batch classes"] | None = None
    """Class probabilities from another classifier, which replace the labels in training."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further columns of a table, one text per image: groups for an audit."""

    def __post_init__(self) -> None:
        """Check the names of the classes."""
        if len({*self.class_names}) < len(self.class_names):
            raise InputError(f"two classes have the same name: {', '.join(self.class_names)}")

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def first(self, n: int | None) -> "Dataset":
        """Return the first n images, or all of them if n is None."""
        if n is not None and n < 1:
            raise InputError(f"take at least one image, not {n}")
        return self.select(slice(n))

    def select(self, rows: slice | Labels) -> "Dataset":
        """Return some of the images; a slice shares their memory."""
        numbers = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        columns = {name: tuple(texts[n] for n in numbers) for name, texts in self.columns.items()}
        return replace(
            self,
            images=self.images[rows],
            labels=self.labels[rows],
            attributes=None if self.attributes is None else self.attributes[rows],
            answers=None if self.answers is None else self.answers[rows],
            columns=columns,
        )


@dataclass(frozen=True)
class Splits:
    """Images to train on, to calibrate and choose with, and to measure on."""

    train: Dataset
    validation: Dataset
    test: Dataset

    def first(self, n: int | None) -> "Splits":
        """Return the first n images of every split, or all of them if n is None."""
        parts = {name: getattr(self, name).first(n) for name in get_args(Split)}
        return replace(self, **parts)


DATASETS = ("mnist", "fakemnist", "celeba/ATTRIBUTE")
"""Names that `load_dataset` knows; a word in capitals stands for any of its variants."""


def load_dataset(
    name: str,
    split: Split,
    folder: Path | str | None = None,
    observe: Observer = ignore,
    *,
    crop: FaceCrop | None = CELEBA_CROP,
) -> Dataset:
    """Load a split of a dataset by its name: mnist, fakemnist or celeba/ATTRIBUTE.

    Args:
        folder: the folder of CelebA or CelebA-HQ; the digits ship with the package.
        observe: called while images are decoded, which happens once.
        crop: the square of CelebA's faces to take; None takes the largest about the centre.
    """
    # Loaders import this module, so they are imported here.
    if split not in get_args(Split):
        raise InputError(f"split is one of {', '.join(get_args(Split))}, not {split!r}")
    if name == "mnist":
        from ecinn.data.mnist import load_mnist

        return load_mnist(split)
    if name == "fakemnist":
        from ecinn.data.planted import load_fake_mnist

        return load_fake_mnist(split)
    if name.startswith("celeba/"):
        from ecinn.data.celeba import load_celeba

        attribute = name.removeprefix("celeba/")
        where = Path(folder) if folder else None
        return load_celeba(attribute, split, where, crop=crop, observe=observe)
    raise InputError(f"there is no dataset {name!r}; choose one of {', '.join(DATASETS)}")
