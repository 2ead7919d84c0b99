"""Calibration: against NumPy, written-out bins, and classifiers whose truth is known."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from ecinn.metrics.calibration import (
    calibration_error,
    calibration_error_by_chance,
    reliability_curve,
)


@pytest.fixture
def predictions(uniform):
    """Confidences of any shape, and outcomes of a classifier that is as sure as this says."""

    def draw(n: int, power: float, honesty: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        confidence = 1 - 0.9 * uniform(n) ** power
        return confidence, uniform(n) < honesty * confidence

    return draw


@pytest.mark.parametrize("bins", [1, 4, 15, 40])
def test_calibration_error_is_that_of_a_histogram(predictions, bins: int) -> None:
    for n, power, honesty in ((3, 1, 0.2), (400, 1, 1.0), (2_000, 6, 0.7)):
        confidence, correct = predictions(n, power, honesty)
        count, sure, right = (
            np.histogram(confidence.numpy(), bins, (0, 1), weights=weights)[0]
            for weights in (None, confidence.numpy(), correct.double().numpy())
        )
        full = count > 0
        gap = np.abs(right[full] / count[full] - sure[full] / count[full])
        expected = np.average(gap, weights=count[full])
        assert calibration_error(confidence, correct, bins) == pytest.approx(expected)


def test_bins_hold_their_images_and_give_the_error(predictions) -> None:
    confidence, correct = predictions(700, 2, 0.8)
    found = reliability_curve(confidence, correct, 15)
    total = 0.0
    rows = list(zip(confidence.tolist(), correct.tolist(), strict=True))
    for number in range(15):
        left, right = number / 15, (number + 1) / 15
        inside = [(c, r) for c, r in rows if left < c <= right]
        of_bin = [b for b in found if b.edges == (left, right)]
        assert bool(inside) == bool(of_bin)
        if not inside:
            continue
        (one,) = of_bin
        right_ones = sum(r for _, r in inside)
        assert one.accuracy.n == len(inside)
        assert one.confidence == pytest.approx(math.fsum(c for c, _ in inside) / len(inside))
        assert one.accuracy.mean == pytest.approx(right_ones / len(inside))
        ends = binomtest(right_ones, len(inside)).proportion_ci(0.95, method="wilson")
        assert (one.accuracy.low, one.accuracy.high) == pytest.approx(tuple(ends), abs=1e-12)
        total += len(inside) * abs(one.confidence - one.accuracy.mean)
    assert calibration_error(confidence, correct) == pytest.approx(total / 700)


def test_edges_belong_to_the_lower_bin_and_0_to_the_first() -> None:
    confidence = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.0 + 1e-7], dtype=torch.float64)
    found = reliability_curve(confidence, torch.ones(5, dtype=torch.bool), 4)
    assert [(b.edges, b.accuracy.n) for b in found] == [
        ((0.0, 0.25), 2), ((0.25, 0.5), 1), ((0.75, 1.0), 2),
    ]  # fmt: skip


def test_error_is_the_shift_where_all_are_too_sure(predictions) -> None:
    """Right in a share c − 0.2 of the cases: the error tends to 0.2."""
    confidence, _ = predictions(200_000, 1)
    confidence = confidence.clamp(min=0.2)
    draws = torch.rand(
        len(confidence), generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    assert calibration_error(confidence, draws < confidence - 0.2) == pytest.approx(0.2, abs=0.01)


def test_chance_is_what_calibrated_classifiers_score(predictions, generator) -> None:
    """Of fresh outcomes, 95 % lie in the interval, and their mean is the mean."""
    confidence, _ = predictions(500, 3)
    chance = calibration_error_by_chance(confidence, generator=generator)
    scores = []
    for _ in range(400):
        happened = torch.bernoulli(confidence, generator=generator) > 0
        scores.append(calibration_error(confidence, happened))
    inside = sum(chance.low <= score <= chance.high for score in scores) / len(scores)
    assert 0.90 < inside < 0.99
    assert sum(scores) / len(scores) == pytest.approx(chance.mean, rel=0.05)
    few = calibration_error_by_chance(confidence[:50], generator=generator)
    assert few.mean > 2 * chance.mean
