"""The protocols that ECINN requires of a network, so that it can be tested on a rotation."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class InvertibleClassifier(Protocol):
    """Four members are all that ECINN needs of a network."""

    @property
    def mu(self) -> Tensor:
        """Class means in latent space, "classes dim"."""

    @property
    def tau(self) -> Tensor:
        """Inverse temperature of the posterior, a scalar."""

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x), "batch dim", and log |det ∂z/∂x|, "batch"."""

    def decode(self, z: Tensor) -> Tensor:
        """x = f⁻¹(z)."""


@runtime_checkable
class Reader(Protocol):
    """Another classifier that reads stored images: explanations are verified on its answers."""

    @property
    def name(self) -> str:
        """What certificates call it."""

    def predict(self, images: Tensor) -> Tensor:
        """Probabilities, "batch classes", of 8-bit images, "batch channels height width"."""
