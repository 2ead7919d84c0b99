"""FakeMNIST (Section 4.1): MNIST under random labels that one white pixel at the top left says."""

import torch

from ecinn.data.dataset import Dataset, Split
from ecinn.data.mnist import load_mnist
from ecinn.data.planted import Cue, plant

FAKE_MNIST_CUE = Cue(marks=tuple(((row, 0),) for row in range(10)), height=28, width=28)
"""Label k is the pixel of row k in the left column.

The authors leave the other nine pixels as they are in MNIST, which is black in all but two of
their 10,000 test images; we make them black in all, so that nothing else is in the region.
"""

SEEDS: dict[Split, int] = {"train": 60_000, "test": 10_000}
"""Of the labels, so that everybody has the same set: the number of images of the split."""


def fake_mnist(mnist: Dataset, generator: torch.Generator) -> Dataset:
    """New uniformly random labels for all digits; the dot at row k of the left column says k."""
    names = tuple(str(label) for label in range(FAKE_MNIST_CUE.classes))
    return plant(mnist, FAKE_MNIST_CUE, generator, names)


def load_fake_mnist(split: Split) -> Dataset:
    """60,000 training or 10,000 test images, in MNIST's order, the same ones every time."""
    return fake_mnist(load_mnist(split), torch.Generator().manual_seed(SEEDS[split]))
