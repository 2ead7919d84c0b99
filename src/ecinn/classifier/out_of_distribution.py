"""Detect out-of-distribution images from their latents.

A likelihood is not enough: a uniform colour or a face upside down can be as likely as a face. So
up to five scores are compared with their limits, and each is a reason of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

IN_WORDS = {
    "likelihood": "unusually likely or unlikely",
    "texture": "smoother or rougher",
    "pose": "rotated, shifted or inverted",
    "distance": "unlike every class",
    "shape": "not shaped like a digit",
}
"""For each reason, how the image differs from the training images."""
REASONS = tuple(IN_WORDS)
FALSE_ALARM_RATE = 0.002
"""Share of the training images that likelihood, texture and pose flag, each of them."""
FAR_RATE = 0.015
"""Share of held-out images that the distance flags, so that all scores flag less than 2 %.
With a shape score the rate is `FALSE_ALARM_RATE`, because the shape score detects most drawings
that are no digits."""
SHAPE_RATE = 0.003
"""Share of held-out digits, half of them drawn again with the page's pen, that the shape flags."""
SHAPE_BITS = 8
"""Bits per weight of the shape score in a model's file."""
RIDGE = 1e4
"""Regularisation of the pose score, which has more weights than images to fit."""
POSE_IMAGES = 4000
"""Largest number of images, and of misplaced images, that the pose score is fitted to."""

Latents = Float[Tensor, "batch dim"]
PerImage = Float[Tensor, " batch"]
Frequency = Int[Tensor, " dim"]
Energies = Float[Tensor, "batch frequencies"]


class Texture(NamedTuple):
    """Squared Mahalanobis distance of the latents' band energies: large for unusual texture.

    Smooth, blurred and noisy images have unusual energies e_k = log mean (z − μ̄_p)², where the
    mean is over the latents of frequency k.
    """

    frequency: Frequency
    """Frequency of every latent, from 0."""
    mean: Float[Tensor, " frequencies"]
    whitening: Float[Tensor, "frequencies frequencies"]
    """W, where Wᵀ W is the inverse covariance of the energies."""
    limit: float
    """Largest distance that is not flagged."""

    def distance(self, residual: Latents) -> PerImage:
        """Return the distance of latents from which the mean of their class was subtracted."""
        energies = band_energies(residual, self.frequency)
        return ((energies - self.mean) @ self.whitening.T).square().sum(1)


class Pose(NamedTuple):
    """w·z, a linear score: low for rotated, shifted or inverted images."""

    weight: Float[Tensor, " dim"]
    limit: float
    """Smallest score that is not flagged."""

    def score(self, z: Latents) -> PerImage:
        """w·z."""
        return z @ self.weight


class Shape(NamedTuple):
    """v·max(0, W z + b): high for drawings that are no digits, such as letters.

    Such drawings can be as likely as digits, and as close to a class.
    """

    weight: Float[Tensor, "hidden dim"]
    bias: Float[Tensor, " hidden"]
    out: Float[Tensor, " hidden"]
    limit: float
    """Largest score that is not flagged."""

    def score(self, z: Latents) -> PerImage:
        """v·max(0, W z + b)."""
        return (z @ self.weight.T + self.bias).relu() @ self.out


@dataclass(frozen=True)
class OODDetector:
    """Flag images that differ from training images in one of `REASONS`."""

    log_p: tuple[float, float]
    """Range of log p(x) that holds 99.8 % of the training images."""
    texture: Texture | None = None
    pose: Pose | None = None
    distance: float | None = None
    """Largest ‖z − μ̄_p‖² that is not flagged. A letter or a shoe has the likelihood of a digit
    that is hard to read, but it lies far from the mean of the class that it is predicted as."""
    shape: Shape | None = None

    def flags(self, z: Latents, residual: Latents, log_p: PerImage) -> Bool[Tensor, "batch 5"]:
        """Return for each of `REASONS` if it flags an image as out-of-distribution.

        Args:
            residual: the latents minus the mean latent of their predicted class.
        """
        low, high = self.log_p
        texture = pose = far = odd = torch.zeros_like(log_p, dtype=torch.bool)
        if self.texture is not None:
            texture = self.texture.distance(residual) > self.texture.limit
        if self.pose is not None:
            pose = self.pose.score(z) < self.pose.limit
        if self.distance is not None:
            far = residual.square().sum(1) > self.distance
        if self.shape is not None:
            odd = self.shape.score(z) > self.shape.limit
        return torch.stack([(log_p < low) | (log_p > high), texture, pose, far, odd], 1)

    def to(self, device: torch.device) -> "OODDetector":
        """Return the same detector on another device."""

        def moved(score: Any) -> Any:  # noqa: ANN401
            values = (value.to(device) if isinstance(value, Tensor) else value for value in score)
            return type(score)(*values)

        scores = (self.texture, self.pose, self.shape)
        texture, pose, shape = (None if score is None else moved(score) for score in scores)
        return OODDetector(self.log_p, texture, pose, self.distance, shape)


def fit_log_p(log_p: PerImage) -> tuple[float, float]:
    """Return the range of all but the rarest values, half of those on either side."""
    tail = FALSE_ALARM_RATE / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64, device=log_p.device)
    low, high = log_p.double().quantile(ends).tolist()
    return low, high


def fit_distance(squares: PerImage, rate: float = FAR_RATE) -> float:
    """Return the limit of ‖z − μ̄_p‖² that this share of the held-out images exceeds."""
    return float(squares.double().quantile(1 - rate))


def fit_texture(energies: Energies, frequency: Frequency) -> Texture:
    """Fit mean, covariance and limit to the energies of the training images."""
    mean = energies.mean(0)
    covariance = torch.cov(energies.T.double()).reshape(len(mean), len(mean))
    # A small ridge, because few images or latents of a frequency make the covariance singular.
    variance = covariance.diagonal().mean().clamp(min=1e-6)
    ridge = 1e-6 * variance * torch.eye(len(mean), device=mean.device)
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance + ridge)).to(mean.dtype)
    distance = ((energies - mean) @ whitening.T).square().sum(1)
    limit = float(distance.double().quantile(1 - FALSE_ALARM_RATE))
    return Texture(frequency, mean, whitening, limit)


def fit_pose(z: Latents, misplaced: Latents, others: Iterable[Tensor]) -> Pose:
    """Fit a ridge regression of +1 for z against −1 for as many misplaced images.

    The limit comes from other images, given as parts of their latents.
    """
    rows = torch.cat([z, misplaced]).double()
    rows = rows - rows.mean(0)
    sign = torch.tensor([1.0, -1.0]).to(rows).repeat_interleave(len(z))
    # The dual form has as many unknowns as images.
    gram = rows @ rows.T + RIDGE * torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    weight = (rows.T @ torch.linalg.solve(gram, sign)).to(z.dtype)
    scores = torch.cat([part @ weight for part in others])
    return Pose(weight, float(scores.double().quantile(FALSE_ALARM_RATE)))


def band_energies(residual: Latents, frequency: Frequency) -> Energies:
    """e_k = log of the mean square of the latents of frequency k."""
    count = torch.bincount(frequency).to(residual.dtype)
    total = residual.new_zeros(len(residual), len(count))
    total.index_add_(1, frequency, residual.square())
    return (total / count).clamp(min=1e-12).log()
