"""The way from an image to its counterfactual: for sliders, films and plots."""

from dataclasses import dataclass

from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from ecinn.drawing import pictures
from ecinn.pixels import to_uint8

PerPairSteps = Float[Tensor, "batch targets steps"]


@dataclass(frozen=True)
class CounterfactualPath:
    """x̂ = f⁻¹(z + αΔ) at many α, for every image and target: all from one decode."""

    alphas: PerPairSteps
    images: Float[Tensor, "batch targets steps channels height width"]
    posterior: Float[Tensor, "batch targets steps classes"]
    """p(y|x̂) of every class along the way, before rounding to 8 bits."""
    stored_posterior: Float[Tensor, "batch targets steps classes"] | None
    """Of the stored 8-bit images; None if they were not verified."""
    p: Int[Tensor, " batch"]
    q: Int[Tensor, "batch targets"]
    class_names: tuple[str, ...]

    @property
    def verdict(self) -> Float[Tensor, "batch targets steps classes"]:
        """The best that is known of p(y): of the stored images where they were verified."""
        return self.posterior if self.stored_posterior is None else self.stored_posterior

    @property
    def stored(self) -> UInt8[Tensor, "batch targets steps channels height width"]:
        """Every picture of the way, 8-bit."""
        return to_uint8(self.images)

    def plot(self, index: int = 0, target: int = 0, step: int | None = None) -> Image.Image:
        """Every class's probability along the way; a mark where `step` is."""
        return pictures.draw_curves(self._curves(index, target), step)

    def film(self, index: int = 0, target: int = 0) -> list[Image.Image]:
        """One frame per step: the picture, and below it the plot with a mark that moves."""
        curves = self._curves(index, target)
        stored = self.stored[index, target]
        return [
            pictures.film_frame(pictures.image_array(image), curves, step)
            for step, image in enumerate(stored)
        ]

    def _curves(self, index: int, target: int) -> pictures.Curves:
        pair = (int(self.p[index]), int(self.q[index, target]))
        return pictures.Curves(
            title=f"from {self.class_names[pair[0]]} to {self.class_names[pair[1]]}",
            x=self.alphas[index, target].cpu().numpy(),
            y=self.verdict[index, target].T.cpu().numpy(),
            names=self.class_names,
            first=pair[0],
            second=pair[1],
        )
