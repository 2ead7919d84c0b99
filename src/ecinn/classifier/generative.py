"""The generative classifier: an invertible network and one Gaussian per class in its latents."""

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ecinn import equations
from ecinn.flow.bijections import LogDet, Vector
from ecinn.flow.captured import Captured
from ecinn.flow.fused import fused, gpu_kernels
from ecinn.flow.network import Architecture, build_inn
from ecinn.pixels import Images, Labels

GPU_PART = 2048
"""Images per pass on a GPU, which bounds memory."""
CPU_FLOATS = 800_000
"""Size of the largest feature map per pass on a CPU (127 digits or 9 faces): larger parts exceed
the caches and can be half as fast."""


class GenerativeClassifier(nn.Module):
    """p(x|y) = N(f(x); μ_y, 1) |det J|, p(y) = 1/K."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.inn = build_inn(architecture)
        self.mu = nn.Parameter(_spread_means(architecture))
        self.tau = nn.Buffer(torch.ones(()))
        """Inverse temperature of the posterior; densities and samples do not depend on it."""

    def fused(self) -> "GenerativeClassifier":
        """Return the same classifier for inference, faster, with the weights as they are now."""
        same = copy.copy(self)
        inn = fused(self.inn, gpu_kernels(self.mu.device, self.mu.dtype))
        same._modules = {**self._modules, "inn": Captured(inn) if self.mu.is_cuda else inn}
        return same

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        a = self.architecture
        return a.channels, a.height, a.width

    def encode_with_log_det(self, x: Images) -> tuple[Vector, LogDet]:
        """z = f(x) and log |det J|."""
        z, log_det = zip(*(self.inn(part) for part in self._parts(x)), strict=True)
        return _joined(z), _joined(log_det)

    def encode(self, x: Images) -> Vector:
        """z = f(x)."""
        return self.encode_with_log_det(x)[0]

    def decode(self, z: Vector) -> Images:
        """x = f⁻¹(z)."""
        return _joined([self.inn.inverse(part) for part in self._parts(z)])

    def _parts(self, batch: Tensor) -> Sequence[Tensor]:
        """Split a large batch to bound memory, except during training."""
        if self.training:
            return [batch]
        a = self.architecture
        largest = a.stages[0].width * (a.height // 2) * (a.width // 2)
        size = GPU_PART if batch.is_cuda else max(1, CPU_FLOATS // largest)
        return list(batch.split(size))

    def log_likelihood(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Eq. 1: log p(x|y) of every class for pixels in [0, 1]."""
        z, log_det = self.encode_with_log_det(x)
        return equations.log_likelihood(z, log_det, self.mu)

    def log_posterior(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Eq. 2 with temperature: log p(y|x)."""
        return equations.log_posterior(self.encode(x), self.mu, self.tau)

    def log_marginal(self, x: Images) -> LogDet:
        """log p(x)."""
        return equations.log_marginal(self.log_likelihood(x))

    def predict(self, x: Images) -> Labels:
        """C(x), the class of the nearest mean μ_y."""
        return equations.predicted_class(self.encode(x), self.mu)

    def sample(
        self, label: Labels, generator: torch.Generator, temperature: float = 1.0
    ) -> Images:
        """Draw x ~ p(x|y); a temperature below 1 stays nearer to the class mean."""
        noise = torch.randn(
            (len(label), self.architecture.dim), generator=generator, device=self.mu.device
        )
        return self.decode(self.mu[label] + temperature * noise)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _spread_means(architecture: Architecture) -> Float[Tensor, "classes dim"]:
    """Draw random means whose pairwise distances are all about `class_distance`."""
    generator = torch.Generator().manual_seed(architecture.seed + 1)
    directions = torch.randn(architecture.classes, architecture.dim, generator=generator)
    return F.normalize(directions) * (architecture.class_distance / math.sqrt(2))
