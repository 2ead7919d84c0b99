"""The path from an image to its counterfactual: for sliders, films and plots."""

from dataclasses import dataclass

from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from ecinn.drawing import pictures
from ecinn.explanation.reading import Reading
from ecinn.pixels import to_uint8

PerPairSteps = Float[Tensor, "batch targets steps"]


@dataclass(frozen=True)
class CounterfactualPath(Reading):
    """x̂ = f⁻¹(z + αΔ) at many α, for every image and target, with the posteriors along it."""

    alphas: PerPairSteps
    images: Float[Tensor, "batch targets steps channels height width"]
    p: Int[Tensor, " batch"]
    q: Int[Tensor, "batch targets"]
    class_names: tuple[str, ...]

    @property
    def stored(self) -> UInt8[Tensor, "batch targets steps channels height width"]:
        """The images of the path in 8 bits."""
        return to_uint8(self.images)

    def plot(self, index: int = 0, target: int = 0, step: int | None = None) -> Image.Image:
        """Plot the probability of every class along the path, with a mark at `step`."""
        return pictures.draw_curves(self._curves(index, target), step)

    def film(self, index: int = 0, target: int = 0) -> list[Image.Image]:
        """Draw one frame per step: the image above the plot, with a mark that moves."""
        curves = self._curves(index, target)
        return [
            pictures.film_frame(pictures.image_array(image), curves, step)
            for step, image in enumerate(self.stored[index, target])
        ]

    def _curves(self, index: int, target: int) -> pictures.Curves:
        p, q = int(self.p[index]), int(self.q[index, target])
        return pictures.Curves(
            title=f"from {self.class_names[p]} to {self.class_names[q]}",
            x=self.alphas[index, target].cpu().numpy(),
            y=self.verdict[index, target].T.cpu().numpy(),
            names=self.class_names,
            first=p,
            second=q,
        )
