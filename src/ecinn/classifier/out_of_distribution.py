"""Whether a picture is like those a model was trained on, told from its latent alone.

A likelihood is not enough: a flat colour or a face upside down is as likely as a face. So up to
three things are looked at, and each can say that a picture is unlike the training images.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

IN_WORDS = {
    "likelihood": "not as likely as they are",
    "texture": "smoother or rougher",
    "pose": "turned, shifted or inverted",
}
"""What a picture is that is unlike the training images, by the reason."""
REASONS = tuple(IN_WORDS)
RARE = 0.002
"""Share of the training images that each of the three calls unlike the others."""
RIDGE = 1e4
"""Of the pose's readout: there are more latents than pictures to fit it to."""
FITTED = 4000
"""Pictures, and as many misplaced ones, that the pose is fitted to."""

Latents = Float[Tensor, "batch dim"]
PerImage = Float[Tensor, " batch"]
Frequency = Int[Tensor, " dim"]


class Texture(NamedTuple):
    """How strong the latents of every frequency are: of smooth, blurred or rough pictures not so.

    log(mean (z − μ̄_p)² of a frequency) has a mean and a covariance over the training images.
    """

    frequency: Int[Tensor, " dim"]
    """Of every latent, from 0."""
    mean: Float[Tensor, " frequencies"]
    whitening: Float[Tensor, "frequencies frequencies"]
    """Wᵀ W is the inverse covariance."""
    limit: float
    """Of the squared Mahalanobis distance."""

    def distance(self, residual: Latents) -> PerImage:
        """Of latents, less the mean of their class."""
        return self.distance_of(band_energies(residual, self.frequency))

    def distance_of(self, energies: Float[Tensor, "batch frequencies"]) -> PerImage:
        """‖W(e − ē)‖², squared Mahalanobis."""
        return ((energies - self.mean) @ self.whitening.T).square().sum(1)


class Pose(NamedTuple):
    """A linear readout: low for pictures that are turned, shifted or inverted."""

    weight: Float[Tensor, " dim"]
    limit: float

    def score(self, z: Latents) -> PerImage:
        """w·z."""
        return z @ self.weight


@dataclass(frozen=True)
class OODDetector:
    """What is usual of the training images."""

    log_p: tuple[float, float]
    """Between these log p(x) lie 99.8 % of the training images."""
    texture: Texture | None = None
    pose: Pose | None = None

    def flags(self, z: Latents, residual: Latents, log_p: PerImage) -> Bool[Tensor, "batch 3"]:
        """For every one of `REASONS`, whether it calls an image unlike those of the training."""
        low, high = self.log_p
        texture = pose = torch.zeros_like(log_p, dtype=torch.bool)
        if self.texture is not None:
            texture = self.texture.distance(residual) > self.texture.limit
        if self.pose is not None:
            pose = self.pose.score(z) < self.pose.limit
        return torch.stack([(log_p < low) | (log_p > high), texture, pose], 1)

    def to(self, device: torch.device) -> "OODDetector":
        """The same on another device."""
        texture, pose = self.texture, self.pose
        if texture is not None:
            texture = Texture(
                texture.frequency.to(device),
                texture.mean.to(device),
                texture.whitening.to(device),
                texture.limit,
            )
        if pose is not None:
            pose = Pose(pose.weight.to(device), pose.limit)
        return OODDetector(self.log_p, texture, pose)


def fit_log_p(log_p: PerImage) -> tuple[float, float]:
    """The range of all but the rarest, half of them on either side."""
    ends = torch.tensor([RARE / 2, 1 - RARE / 2], dtype=torch.float64, device=log_p.device)
    low, high = log_p.double().quantile(ends).tolist()
    return low, high


def fit_texture(energies: Float[Tensor, "batch frequencies"], frequency: Frequency) -> Texture:
    """Mean and covariance of the energies, and where the rarest begin."""
    mean = energies.mean(0)
    covariance = torch.cov(energies.T.double()).reshape(len(mean), len(mean))
    # A little of the identity: frequencies of few latents must not make it singular.
    ridge = 1e-6 * covariance.diagonal().mean() * torch.eye(len(mean), device=mean.device)
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance + ridge)).to(mean.dtype)
    texture = Texture(frequency, mean, whitening, 0.0)
    limit = float(texture.distance_of(energies).double().quantile(1 - RARE))
    return texture._replace(limit=limit)


def fit_pose(z: Latents, misplaced: Float[Tensor, "others dim"]) -> Pose:
    """Ridge regression of +1 for z against −1 for the misplaced; the limit from other pictures.

    The first half of z, `FITTED` at most, are fitted; where the rarest begin the rest says, which
    the readout has not seen.
    """
    count = min(FITTED, len(z) // 2, len(misplaced))
    rows = torch.cat([z[:count], misplaced[:count]]).double()
    centre = rows.mean(0)
    sign = torch.ones(2 * count, dtype=rows.dtype, device=rows.device)
    sign[count:] = -1
    rows = rows - centre
    # In its dual form: as many unknowns as pictures.
    gram = rows @ rows.T + RIDGE * torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    weight = (rows.T @ torch.linalg.solve(gram, sign)).to(z.dtype)
    pose = Pose(weight, 0.0)
    return pose._replace(limit=float(pose.score(z[count:]).double().quantile(RARE)))


def band_energies(
    residual: Latents, frequency: Int[Tensor, " dim"]
) -> Float[Tensor, "batch frequencies"]:
    """e_k = log of the mean square of the latents of frequency k."""
    count = torch.bincount(frequency).to(residual.dtype)
    total = residual.new_zeros(len(residual), len(count))
    total.index_add_(1, frequency, residual.square())
    return (total / count).clamp(min=1e-12).log()
