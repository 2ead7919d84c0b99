"""A labelled set of 8-bit images, and the sets known by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Int, UInt8
from torch import Tensor

from ecinn.errors import InputError

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Dataset:
    """Images with their labels and what the labels are called."""

    images: UInt8[Tensor, "batch channels height width"]
    labels: Int[Tensor, " batch"]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def first(self, n: int | None) -> "Dataset":
        """The first n images, or all of them."""
        if n is not None and n < 1:
            raise InputError(f"take at least one image, not {n}")
        return Dataset(self.images[:n], self.labels[:n], self.class_names)


def load_dataset(name: str, split: Split) -> Dataset:
    """The train or test images of a data set by its name."""
    from ecinn.data.fake_mnist import load_fake_mnist
    from ecinn.data.mnist import load_mnist

    loaders: Mapping[str, Callable[[Split], Dataset]] = {
        "mnist": load_mnist,
        "fakemnist": load_fake_mnist,
    }
    if name not in loaders:
        raise InputError(f"no data set is called {name!r}; there are: {', '.join(loaders)}")
    return loaders[name](split)
