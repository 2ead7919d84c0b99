"""Posteriors of images before and after rounding to 8 bits."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ecinn import equations
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.pixels import Images, to_pixels, to_uint8


@dataclass(frozen=True)
class Reading:
    """The posterior of images as computed, and of the 8-bit images that would be stored."""

    posterior: Float[Tensor, "*batch classes"]
    """p(y|x̂) before rounding to 8 bits."""
    stored_posterior: Float[Tensor, "*batch classes"] | None
    """p(y) of the stored 8-bit images, from a forward pass of its own; None if not checked."""

    @property
    def verdict(self) -> Float[Tensor, "*batch classes"]:
        """The posterior of the stored image if it was checked, else the computed one."""
        return self.posterior if self.stored_posterior is None else self.stored_posterior


def stored_posterior(
    classifier: InvertibleClassifier, x_hat: Images
) -> Float[Tensor, "batch classes"]:
    """p(y) of the 8-bit images that would be stored."""
    z, _ = classifier.encode_with_log_det(to_pixels(to_uint8(x_hat)).to(x_hat.dtype))
    return equations.log_posterior(z, classifier.mu, classifier.tau).exp()
