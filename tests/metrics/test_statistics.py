"""Confidence intervals: compared with scipy's, and by how often they cover the true value."""

import math
import random
from dataclasses import astuple

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.stats import binomtest

from ecinn.errors import InputError
from ecinn.metrics.statistics import (
    Interval,
    bootstrap,
    bootstrap_interval,
    normal_interval,
    paired_share_difference,
    proportion,
    wilson,
)


@pytest.fixture
def noise(generator: torch.Generator):
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def test_wilson_interval_is_scipys() -> None:
    draw = random.Random(0)
    for n in (1, 7, 989, 10_000):
        for k in {0, n, draw.randint(0, n), draw.randint(0, n)}:
            expected = binomtest(k, n).proportion_ci(0.95, method="wilson")
            interval = wilson(k, n)
            assert (interval.mean, interval.n) == (k / n, n)
            assert (interval.low, interval.high) == pytest.approx(tuple(expected), abs=1e-12)


def test_ends_of_wilsons_interval_are_196_deviations_from_the_share() -> None:
    """Its definition: |p̂ − p| = 1.96 deviations of a share of n with probability p."""
    interval = wilson(86, 989)
    for end in (interval.low, interval.high):
        deviation = math.sqrt(end * (1 - end) / 989)
        assert abs(86 / 989 - end) == pytest.approx(1.96 * deviation, rel=1e-4)
    assert wilson(0, 0) == Interval(0.0, 0.0, 1.0, 0)


def test_wilsons_interval_stays_within_0_and_1() -> None:
    for n in range(1, 100):
        assert wilson(0, n).low >= 0
        assert wilson(n, n).high <= 1


def test_proportion_counts_true_values(generator) -> None:
    happened = torch.rand(70, generator=generator) < 0.3
    assert proportion(happened) == wilson(sum(happened.tolist()), 70)


def test_half_width_is_half_of_the_interval() -> None:
    assert Interval(0.4, 0.1, 0.9, 3).half_width == pytest.approx(0.4)


def test_bootstrap_interval_is_scipys(uniform, generator) -> None:
    values = uniform(60) ** 3
    ours = bootstrap_interval(values, resamples=8000, generator=generator)
    scipys = scipy.stats.bootstrap(
        (values.numpy(),),
        np.mean,
        n_resamples=8000,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert ours.mean == pytest.approx(float(values.mean()))
    width = scipys.high - scipys.low
    assert ours.low == pytest.approx(scipys.low, abs=0.04 * width)
    assert ours.high == pytest.approx(scipys.high, abs=0.04 * width)


def test_bootstrap_interval_covers_the_true_mean_19_times_of_20(noise, generator) -> None:
    covered = []
    for values in 2 + 3 * noise(500, 80):
        answer = bootstrap_interval(values, resamples=150, generator=generator)
        covered.append(answer.low <= 2 <= answer.high)
    assert 0.91 < np.mean(covered) < 0.97


def test_bootstrap_of_any_statistic_resamples_columns_together(uniform, generator) -> None:
    a = uniform(200)
    ratio = bootstrap(
        lambda x, y: x.sum(-1) / y.sum(-1), a, 2 * a, resamples=50, generator=generator
    )
    assert astuple(ratio) == pytest.approx((0.5, 0.5, 0.5, 200))


@pytest.mark.parametrize(("n", "resamples"), [(3, 7), (1000, 200), (70_000, 3)])
def test_bootstrap_draws_the_same_numbers_one_resample_at_a_time(n: int, resamples: int) -> None:
    """Many resamples are drawn at once, in parts; the seed alone decides which."""
    one, other = (torch.Generator().manual_seed(n) for _ in range(2))
    values = torch.rand(n, generator=torch.Generator().manual_seed(1)).double()
    drawn = [values[torch.randint(n, (n,), generator=one)].mean().item() for _ in range(resamples)]
    found = bootstrap_interval(values, resamples=resamples, generator=other)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))


def pairs(both: int, only_a: int, only_b: int, neither: int) -> tuple[torch.Tensor, torch.Tensor]:
    times = torch.tensor([both, only_a, only_b, neither])
    return (
        torch.tensor([True, True, False, False]).repeat_interleave(times),
        torch.tensor([True, False, True, False]).repeat_interleave(times),
    )


def test_paired_shares_have_newcombes_interval() -> None:
    """The example 36, 12, 2, 0 of Newcombe (1998), Table II, method 10."""
    found = paired_share_difference(*pairs(36, 12, 2, 0))
    assert astuple(found) == pytest.approx((0.2, 0.0569, 0.3404, 50), abs=5e-5)


def test_interval_of_paired_shares_is_its_formula(generator) -> None:
    """With scipy's Wilson intervals and numpy's correlation, of agreeing and opposed readers."""
    for both, only_a, only_b, neither in torch.randint(
        1, 40, (40, 4), generator=generator
    ).tolist():
        a, b = pairs(both, only_a, only_b, neither)
        n, phi = len(a), np.corrcoef(a.numpy(), b.numpy())[0, 1]
        if phi > 0:
            phi *= max(1 - n / 2 / (both * neither - only_a * only_b), 0)
        shares, ends = [], []
        for happened in (a, b):
            share = binomtest(int(happened.sum()), n)
            shares.append(share.statistic)
            ends.append(share.proportion_ci(0.95, method="wilson"))
        below, above = (
            [share - end.low for share, end in zip(shares, ends, strict=True)],
            [end.high - share for share, end in zip(shares, ends, strict=True)],
        )
        difference = shares[0] - shares[1]
        low, high = (
            difference + sign * np.sqrt(x**2 + y**2 - 2 * phi * x * y)
            for sign, x, y in ((-1, below[0], above[1]), (1, above[0], below[1]))
        )
        found = paired_share_difference(a, b)
        assert astuple(found) == pytest.approx((difference, low, high, n), abs=1e-9)


def test_paired_shares_without_any_difference_have_a_wide_interval() -> None:
    """Of n pairs that all agree nothing is known below 1/n."""
    every = torch.ones(300, dtype=torch.bool)
    found = paired_share_difference(every, every)
    assert (found.mean, found.high) == (0, -found.low)
    assert found.high == pytest.approx(1 - wilson(300, 300).low)


def test_interval_of_paired_shares_covers_the_truth_19_times_of_20(generator) -> None:
    """Two readers of the same images, who agree more often than by chance."""
    cells = torch.tensor([0.8, 0.12, 0.04, 0.04])
    covered = []
    for _ in range(800):
        drawn = torch.multinomial(cells, 200, replacement=True, generator=generator)
        found = paired_share_difference(*pairs(*drawn.bincount(minlength=4).tolist()))
        covered.append(found.low <= 0.08 <= found.high)
    assert 0.93 < np.mean(covered) < 0.975


def test_impossible_intervals_are_refused(uniform, generator) -> None:
    some = uniform(5)
    for values, resamples in ((some, 0), (some[:0], 10)):
        with pytest.raises(InputError, match="at least one value and one resample"):
            bootstrap_interval(values, resamples=resamples, generator=generator)


def test_normal_interval_covers_the_true_mean_19_times_of_20(generator: torch.Generator) -> None:
    draws = 2 + 3 * torch.randn((4000, 100), generator=generator, dtype=torch.float64)
    answers = [normal_interval(row) for row in draws]
    covered = np.mean([abs(answer.mean - 2) <= answer.half_width for answer in answers])
    assert 0.935 < covered < 0.96
    assert answers[0].mean == pytest.approx(float(draws[0].mean()))
    assert answers[0].n == 100


def test_normal_interval_of_a_share_is_the_binomials_and_of_nothing_is_nan() -> None:
    share = normal_interval(torch.arange(1000) < 250)
    assert share.mean == 0.25
    assert share.half_width == pytest.approx(1.96 * math.sqrt(0.25 * 0.75 / 1000))
    nothing = normal_interval(torch.zeros(0))
    assert math.isnan(nothing.mean)
    assert nothing.n == 0
