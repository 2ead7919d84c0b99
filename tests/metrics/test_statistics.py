"""Intervals: against scipy's, and by how often they hold the truth."""

import math
import random

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.stats import binomtest

from ecinn.errors import InputError
from ecinn.metrics.statistics import (
    bootstrap_interval,
    paired_difference_interval,
    wilson_interval,
)


@pytest.fixture
def noise(generator: torch.Generator):
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def test_wilson_interval_is_scipys() -> None:
    draw = random.Random(0)
    for n in (1, 7, 989, 10_000):
        for k in {0, n, draw.randint(0, n), draw.randint(0, n)}:
            expected = binomtest(k, n).proportion_ci(0.95, method="wilson")
            assert wilson_interval(k, n) == pytest.approx(tuple(expected), abs=1e-12)


def test_wilson_interval_ends_where_the_share_is_as_many_deviations_away() -> None:
    """Its definition: |p̂ − p| = 1.96 deviations of a share of n with probability p."""
    for end in wilson_interval(86, 989):
        deviation = math.sqrt(end * (1 - end) / 989)
        assert abs(86 / 989 - end) == pytest.approx(1.96 * deviation, rel=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_share_lies_between_none_and_all() -> None:
    """Exactly: what exceeds it by rounding would be a share of more than all."""
    for n in range(1, 100):
        assert wilson_interval(0, n)[0] >= 0
        assert wilson_interval(n, n)[1] <= 1


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_is_scipys_percentile_bootstrap(level: float, uniform, generator) -> None:
    values = uniform(60) ** 3
    ours = bootstrap_interval(values, level=level, resamples=8000, generator=generator)
    scipys = scipy.stats.bootstrap(
        (values.numpy(),),
        np.mean,
        n_resamples=8000,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(0),
    ).bootstrap_interval
    assert ours.mean == pytest.approx(float(values.mean()))
    width = scipys.high - scipys.low
    assert ours.low == pytest.approx(scipys.low, abs=0.04 * width)
    assert ours.high == pytest.approx(scipys.high, abs=0.04 * width)


def test_interval_covers_the_true_mean_9_times_of_10(noise, generator) -> None:
    covered = []
    for values in 2 + 3 * noise(500, 80):
        answer = bootstrap_interval(values, level=0.9, resamples=150, generator=generator)
        covered.append(answer.low <= 2 <= answer.high)
    assert 0.86 < np.mean(covered) < 0.94


def test_pairs_are_resampled_together(uniform) -> None:
    """What images differ in cancels: a constant difference has no width at all."""

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(4)

    a, b = 10 * uniform(50), uniform(50)
    answer = paired_difference_interval(a + 0.25, a, generator=seeded())
    assert answer == pytest.approx((0.25, 0.25, 0.25))
    expected = bootstrap_interval(a - b, generator=seeded())
    assert paired_difference_interval(a, b, generator=seeded()) == expected
    for asked in ({"level": 0.5}, {"resamples": 40}):
        narrow = bootstrap_interval(a - b, **asked, generator=seeded())
        assert paired_difference_interval(a, b, **asked, generator=seeded()) == narrow != expected
    won, lost = a > 5, a <= 5
    shares = paired_difference_interval(won, lost, generator=seeded())
    assert shares.mean == pytest.approx(float(won.double().mean() - lost.double().mean()))


def test_intervals_that_cannot_be_had_are_refused(uniform, generator) -> None:
    some = uniform(5)
    for wrong in ({"level": 0.0}, {"level": 1.0}, {"resamples": 0}):
        with pytest.raises(InputError, match="level"):
            bootstrap_interval(some, **wrong, generator=generator)
    with pytest.raises(InputError, match="at least one value"):
        bootstrap_interval(some[:0], generator=generator)
    with pytest.raises(InputError, match="not pairs"):
        # Past the type checker on purpose: it would refuse this first.
        paired_difference_interval.__wrapped__(some, some[:1], generator=generator)
