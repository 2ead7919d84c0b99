"""Images whose class is planted at a known place: ground truth to test explanations on."""

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Num
from torch import Tensor

from ecinn.data.dataset import Dataset, Split
from ecinn.data.mnist import read_mnist, select_split
from ecinn.errors import InputError
from ecinn.pixels import Labels, StoredImages

Pixel = tuple[int, int]
"""Row and column."""


@dataclass(frozen=True)
class Cue:
    """One mark per class. All marks together form the region that alone determines the class."""

    marks: tuple[tuple[Pixel, ...], ...]
    """Pixels of every class's mark; no two marks share a pixel."""
    height: int
    width: int
    on: int = 255
    off: int = 0

    def __post_init__(self) -> None:
        """Check that the marks are possible."""
        pixels = [pixel for mark in self.marks for pixel in mark]
        image = set(itertools.product(range(self.height), range(self.width)))
        if len(self.marks) < 2 or not all(self.marks):
            raise InputError("a cue needs two classes or more, each marked by a pixel or more")
        if len(set(pixels) & image) < len(pixels):
            raise InputError("marks must lie inside the image and must not share a pixel")
        if not 0 <= min(self.on, self.off) < max(self.on, self.off) <= 255:
            raise InputError(
                f"on and off are two different values of 0 to 255, not {self.on} and {self.off}"
            )

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.marks)

    @property
    def stencils(self) -> Bool[Tensor, "classes height width"]:
        """Pixels of the mark of every class."""
        stencils = torch.zeros((self.classes, self.height, self.width), dtype=torch.bool)
        for label, mark in enumerate(self.marks):
            for row, column in mark:
                stencils[label, row, column] = True
        return stencils

    @property
    def mask(self) -> Bool[Tensor, "height width"]:
        """Pixels of all marks: the only place that a correct explanation points to."""
        return self.stencils.any(0)

    def paint(self, images: StoredImages, labels: Labels) -> StoredImages:
        """Copy images, switch the label's mark on and the rest of the region off.

        This is the perfect counterfactual.
        """
        self._require_fit(images)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise InputError(f"labels of this cue are 0 to {self.classes - 1}")
        stencils = self.stencils.to(images.device)
        mark = stencils[labels.to(images.device)][:, None]
        return images.masked_fill(stencils.any(0), self.off).masked_fill(mark, self.on)

    def read(self, images: Num[Tensor, "*batch channels height width"]) -> Int[Tensor, "*batch"]:
        """argmax_k of the mean over mark k, towards `on`: the true class of a counterfactual.

        Ties go to the lowest class.
        """
        self._require_fit(images)
        stencils = self.stencils.to(images.device)
        means = [images[..., stencil].double().mean((-2, -1)) for stencil in stencils]
        intensity = torch.stack(means, -1)
        return (intensity if self.on > self.off else -intensity).argmax(-1)

    def _require_fit(self, images: Tensor) -> None:
        if images.shape[-2:] != (self.height, self.width):
            raise InputError(
                f"this cue is for images of {self.height}×{self.width} pixels, "
                f"not {images.shape[-2]}×{images.shape[-1]}"
            )


def plant(dataset: Dataset, cue: Cue, generator: torch.Generator) -> Dataset:
    """Give the images new, uniformly random labels that only the cue reveals."""
    labels = torch.randint(
        cue.classes, (len(dataset),), generator=generator, device=generator.device
    ).to(dataset.images.device)
    names = tuple(str(label) for label in range(cue.classes))
    return Dataset(cue.paint(dataset.images, labels), labels, names)


FAKE_MNIST_CUE = Cue(marks=tuple(((row, 0),) for row in range(10)), height=28, width=28)
"""Section 4.1: a white pixel in row k of the left column means class k.

The authors leave the other nine pixels as they are in MNIST, where they are black in all but two
of the 10,000 test images. Here they are black in all, so that the region holds nothing else.
"""


def load_fake_mnist(split: Split) -> Dataset:
    """Load FakeMNIST: MNIST's split in its order, with labels that are the same for everybody."""
    mnist = read_mnist("test" if split == "test" else "train")
    seed = len(mnist)  # 60,000 training or 10,000 test images
    planted = plant(mnist, FAKE_MNIST_CUE, torch.Generator().manual_seed(seed))
    return select_split(planted, split)
