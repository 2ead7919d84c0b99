"""Calibration: predictions made with confidence c should come true in a share c of the cases.

Confidence is the posterior of the predicted class. Its bins are equally wide, 15 of them, as in
Guo et al., On Calibration of Modern Neural Networks (2017), so that figures can be compared.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn.metrics.statistics import Interval, wilson

BINS = 15
RESAMPLES = 1000

Confidence = Float[Tensor, " batch"]
Correct = Bool[Tensor, " batch"]


@dataclass(frozen=True)
class ReliabilityBin:
    """Images whose confidence lies between two edges."""

    edges: tuple[float, float]
    confidence: float
    """Mean confidence."""
    accuracy: Interval
    """Share that is classified correctly, with Wilson's interval and the number of images."""


def reliability_curve(
    confidence: Confidence, correct: Correct, bins: int = BINS
) -> tuple[ReliabilityBin, ...]:
    """Confidence and accuracy in equally wide bins ((b − 1)/B, b/B]; empty bins are left out."""
    index = _bins(confidence, bins)
    return tuple(
        ReliabilityBin(
            edges=(b / bins, (b + 1) / bins),
            confidence=float(confidence[index == b].double().mean()),
            accuracy=wilson(int(correct[index == b].sum()), int((index == b).sum())),
        )
        for b in index.unique().tolist()
    )


def calibration_error(confidence: Confidence, correct: Correct, bins: int = BINS) -> float:
    """Expected calibration error: Σ_b n_b/n · |accuracy_b − confidence_b|."""
    index = _bins(confidence, bins)
    surplus = confidence.double() - correct.double()
    return float(torch.bincount(index, surplus, minlength=bins).abs().sum() / len(index))


def calibration_error_by_chance(
    confidence: Confidence,
    bins: int = BINS,
    *,
    resamples: int = RESAMPLES,
    generator: torch.Generator,
) -> Interval:
    """Expected calibration error of a perfectly calibrated classifier with these confidences.

    Its predictions come true with the probability that it states (consistency resampling, Bröcker
    & Smith 2007). Chance alone keeps the error above 0: larger ones show miscalibration. A
    bootstrap of the error itself would not tell, because resampling adds to the error once more.
    """
    drawn = torch.tensor(
        [
            calibration_error(
                confidence,
                torch.rand(confidence.shape, generator=generator, device=confidence.device)
                < confidence,
                bins,
            )
            for _ in range(resamples)
        ],
        dtype=torch.float64,
    )
    low, high = drawn.quantile(drawn.new_tensor([0.025, 0.975])).tolist()
    return Interval(float(drawn.mean()), low, high, len(confidence))


def _bins(confidence: Confidence, bins: int) -> Int[Tensor, " batch"]:
    """Return the bin of every image, from 0."""
    return ((confidence.double() * bins).ceil().long() - 1).clamp(0, bins - 1)
