"""A labelled set of 8-bit images, and the registry of datasets known by name.

To add a dataset, write a loader (`mnist.py` is the shortest) and register it in `DATASETS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from jaxtyping import UInt8
from torch import Tensor

from ecinn.errors import InputError
from ecinn.pixels import Labels, StoredImages
from ecinn.progress import Observer, ignore

Split = Literal["train", "validation", "test"]
Loader = Callable[[str, Split, Path | None, Observer], "Dataset"]
"""Loads a split, given what follows the slash in the dataset's name, and a folder."""


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

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def first(self, n: int | None) -> "Dataset":
        """Return the first n images, or all of them if n is None."""
        if n is not None and n < 1:
            raise InputError(f"take at least one image, not {n}")
        attributes = None if self.attributes is None else self.attributes[:n]
        return replace(self, images=self.images[:n], labels=self.labels[:n], attributes=attributes)


def _mnist(variant: str, split: Split, folder: Path | None, observe: Observer) -> Dataset:
    from ecinn.data.mnist import load_mnist

    return load_mnist(split)


def _fake_mnist(variant: str, split: Split, folder: Path | None, observe: Observer) -> Dataset:
    from ecinn.data.planted import load_fake_mnist

    return load_fake_mnist(split)


def _celeba(attribute: str, split: Split, folder: Path | None, observe: Observer) -> Dataset:
    from ecinn.data.celeba import load_celeba

    return load_celeba(attribute, split, folder, observe=observe)


DATASETS: Mapping[str, Loader] = MappingProxyType(
    {"mnist": _mnist, "fakemnist": _fake_mnist, "celeba/ATTRIBUTE": _celeba}
)
"""Every dataset that `load_dataset` knows; a word in capitals stands for any of its variants."""


def load_dataset(
    name: str, split: Split, folder: Path | str | None = None, observe: Observer = ignore
) -> Dataset:
    """Load a split of a dataset by its name: mnist, fakemnist or celeba/ATTRIBUTE.

    Args:
        folder: the folder of CelebA or CelebA-HQ; the digits ship with the package.
        observe: called while images are decoded, which happens once.
    """
    if split not in get_args(Split):
        raise InputError(f"split is one of {', '.join(get_args(Split))}, not {split!r}")
    base, slash, variant = name.partition("/")
    loader = DATASETS.get(f"{base}/ATTRIBUTE" if slash else base)
    if loader is None:
        raise InputError(f"there is no dataset {name!r}; choose one of {', '.join(DATASETS)}")
    return loader(variant, split, None if folder is None else Path(folder), observe)
