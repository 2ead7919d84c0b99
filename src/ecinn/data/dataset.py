"""A labelled set of 8-bit images, and the sets known by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jaxtyping import Int, UInt8
from torch import Tensor

from ecinn.errors import InputError

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Dataset:
    """Images with their labels and what the labels are called."""

    images: UInt8[Tensor, "batch channels height width"]
    labels: Int[Tensor, " batch"]
    class_names: tuple[str, ...]
    attributes: UInt8[Tensor, "batch attributes"] | None = None
    """All that is known of every image, 0 or 1, where there is more than its label."""
    attribute: int | None = None
    """Which of the attributes the label is."""

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def first(self, n: int | None) -> "Dataset":
        """The first n images, or all of them."""
        if n is not None and n < 1:
            raise InputError(f"take at least one image, not {n}")
        attributes = None if self.attributes is None else self.attributes[:n]
        return replace(self, images=self.images[:n], labels=self.labels[:n], attributes=attributes)


def load_dataset(
    name: str,
    split: Split,
    folder: Path | None = None,
    *,
    observe: Callable[[int, int], None] = lambda done, total: None,
) -> Dataset:
    """The images of a split of a data set by its name: mnist, fakemnist, celeba/ATTRIBUTE.

    Args:
        folder: where CelebA or CelebA-HQ is; the digits come with the package.
        observe: told how many of how many images are decoded, where that takes a while.
    """
    from ecinn.data.celeba import ATTRIBUTES, load_attributes, load_celeba
    from ecinn.data.fake_mnist import load_fake_mnist
    from ecinn.data.mnist import load_mnist

    kind, _, attribute = name.partition("/")
    if kind == "celeba" and attribute:
        faces = load_celeba(attribute, split, folder, observe=observe)
        attributes = load_attributes(split, folder)
        return replace(faces, attributes=attributes, attribute=ATTRIBUTES.index(attribute))
    loaders: Mapping[str, Callable[[Split], Dataset]] = {
        "mnist": load_mnist,
        "fakemnist": load_fake_mnist,
    }
    if name not in loaders:
        known = ", ".join([*loaders, "celeba/ATTRIBUTE"])
        raise InputError(f"no data set is called {name!r}; there are: {known}")
    if split == "validation":
        raise InputError(f"{name} has no validation images: take the train or the test split")
    return loaders[name](split)
