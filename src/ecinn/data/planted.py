"""A class cue planted at a known place into any images: ground truth to test explainers on."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Num, UInt8
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError

Pixel = tuple[int, int]
"""Row and column."""


@dataclass(frozen=True)
class Cue:
    """One mark per class. All marks together are the region, where alone the class is said."""

    marks: tuple[tuple[Pixel, ...], ...]
    """Pixels of every class's mark; no pixel belongs to two of them."""
    height: int
    width: int
    on: int = 255
    off: int = 0

    def __post_init__(self) -> None:
        if len(self.marks) < 2:
            raise InputError(f"a cue tells at least two classes apart, not {len(self.marks)}")
        if not all(self.marks):
            raise InputError("every class needs a mark of at least one pixel")
        pixels = [pixel for mark in self.marks for pixel in mark]
        for row, column in pixels:
            if not (0 <= row < self.height and 0 <= column < self.width):
                raise InputError(
                    f"the mark at row {row}, column {column} lies outside of the "
                    f"{self.height}×{self.width} image: move it inside"
                )
        if len(set(pixels)) < len(pixels):
            raise InputError("two marks share a pixel: give every class pixels of its own")
        if not {self.on, self.off} <= set(range(256)) or self.on == self.off:
            raise InputError(
                f"on and off are two different values of 0 to 255, not {self.on} and {self.off}"
            )

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.marks)

    @property
    def stencils(self) -> Bool[Tensor, "classes height width"]:
        """Where the mark of every class is."""
        stencils = torch.zeros((self.classes, self.height, self.width), dtype=torch.bool)
        for label, mark in enumerate(self.marks):
            for row, column in mark:
                stencils[label, row, column] = True
        return stencils

    @property
    def mask(self) -> Bool[Tensor, "height width"]:
        """The region: where any mark may be, so where a right explanation may point to."""
        return self.stencils.any(0)

    def paint(
        self, images: UInt8[Tensor, "batch channels height width"], labels: Int[Tensor, " batch"]
    ) -> UInt8[Tensor, "batch channels height width"]:
        """Copies with the label's mark on and the rest of the region off: the perfect answer."""
        self._require_fit(images)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise InputError(f"labels of this cue are 0 to {self.classes - 1}")
        mask, stencils = self.mask.to(images.device), self.stencils.to(images.device)
        mark = stencils[labels.to(images.device)][:, None]
        return images.masked_fill(mask, self.off).masked_fill(mark, self.on)

    def read(self, images: Num[Tensor, "*batch channels height width"]) -> Int[Tensor, "*batch"]:
        """argmax_k of the mean over mark k, towards "on": the true class of a counterfactual.

        A tie is told as the first of its classes.
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


def plant(
    dataset: Dataset, cue: Cue, generator: torch.Generator, class_names: tuple[str, ...]
) -> Dataset:
    """The same images under new, uniformly random labels that only the cue tells."""
    if len(class_names) != cue.classes:
        raise InputError(
            f"{len(class_names)} class names for a cue of {cue.classes} classes: give one for each"
        )
    labels = torch.randint(
        cue.classes, (len(dataset),), generator=generator, device=generator.device
    ).to(dataset.images.device)
    return Dataset(cue.paint(dataset.images, labels), labels, class_names)
