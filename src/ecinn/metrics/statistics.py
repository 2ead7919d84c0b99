"""Means, proportions and their 95 % confidence intervals."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ecinn.errors import InputError

Z_95 = 1.959963984540054
"""The 97.5th percentile of a standard normal distribution."""
RESAMPLES = 2000
_DRAWN = 1 << 16
"""Values that are drawn at a time, which bounds memory."""

Values = Float[Tensor, " values"] | Bool[Tensor, " values"]


@dataclass(frozen=True)
class Interval:
    """An estimate, the ends of its confidence interval, and the number of values behind it."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


def proportion(happened: Bool[Tensor, " values"]) -> Interval:
    """The share of true values with Wilson's interval."""
    return wilson(int(happened.sum()), len(happened))


def wilson(successes: int, n: int) -> Interval:
    """p̂ = successes/n with Wilson's score interval (1927), which also holds for small n.

    All p with |p̂ − p| ≤ z·√(p(1 − p)/n): (p̂ + z²/2n ± z·√(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n).
    Without observations the interval is [0, 1].
    """
    if n == 0:
        return Interval(0.0, 0.0, 1.0, 0)
    share, z = successes / n, Z_95
    middle = share + z**2 / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = ((middle + sign * spread) / (1 + z**2 / n) for sign in (-1, 1))
    return Interval(share, max(low, 0.0), min(high, 1.0), n)


def normal_interval(values: Values) -> Interval:
    """mean ± 1.96 σ/√n, for large n; nan without values."""
    values = values.double()
    mean = values.mean()
    sigma = (values - mean).square().mean().sqrt()
    half_width = 1.96 * float(sigma) / math.sqrt(max(len(values), 1))
    return Interval(float(mean), float(mean) - half_width, float(mean) + half_width, len(values))


def mean_difference(a: Float[Tensor, " first"], b: Float[Tensor, " second"]) -> Interval:
    """mean(a) − mean(b) of different images, ± 1.96 √(σ_a²/n_a + σ_b²/n_b)."""
    first, second = normal_interval(a), normal_interval(b)
    difference = first.mean - second.mean
    half_width = math.hypot(first.half_width, second.half_width)
    n = min(first.n, second.n)
    return Interval(difference, difference - half_width, difference + half_width, n)


def bootstrap_interval(
    values: Values, *, resamples: int = RESAMPLES, generator: torch.Generator
) -> Interval:
    """The mean with the percentile bootstrap's interval."""
    values = values.double()
    return bootstrap(lambda v: v.mean(-1), values, resamples=resamples, generator=generator)


def bootstrap(
    statistic: Callable[..., Tensor],
    *columns: Float[Tensor, " values"],
    resamples: int = RESAMPLES,
    generator: torch.Generator,
) -> Interval:
    """Any statistic of one or more columns, resampled together, by the percentile bootstrap.

    Args:
        statistic: reduces the last dimension of its arguments, which are many resamples at once.
    """
    n, device = len(columns[0]), generator.device
    if n == 0 or resamples < 1:
        raise InputError("an interval needs at least one value and one resample")
    columns = tuple(column.to(device) for column in columns)
    estimates = []
    for some in torch.arange(resamples).split(max(_DRAWN // n, 1)):
        rows = torch.randint(n, (len(some), n), generator=generator, device=device)
        estimates.append(statistic(*(column[rows] for column in columns)))
    drawn = torch.cat(estimates)
    low, high = drawn.quantile(drawn.new_tensor([(1 - 0.95) / 2, (1 + 0.95) / 2])).tolist()
    return Interval(float(statistic(*columns)), low, high, n)


def paired_share_difference(a: Bool[Tensor, " values"], b: Bool[Tensor, " values"]) -> Interval:
    """share(a) − share(b), of the same images, with Newcombe's interval (1998, method 10).

    With Wilson's intervals [l, u] of both shares and the correlation φ of a and b, whose positive
    values are corrected for continuity, low is a − b − √(x² − 2φxy + y²) with x = a − l_a and
    y = u_b − b; high likewise. Unlike the bootstrap's, it is not a point if no pair differs.
    """
    both, neither = int((a & b).sum()), int((~a & ~b).sum())
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    n = len(a)
    concordance = float(both * neither - only_a * only_b)
    if concordance > 0:
        concordance = max(concordance - n / 2, 0.0)
    first, second = proportion(a), proportion(b)
    scale = math.sqrt(
        math.prod((both + only_a, both + only_b, neither + only_a, neither + only_b))
    )
    phi = concordance / scale if scale else 0.0

    def reach(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0))

    difference = first.mean - second.mean
    down = reach(first.mean - first.low, second.high - second.mean)
    up = reach(first.high - first.mean, second.mean - second.low)
    return Interval(difference, difference - down, difference + up, n)
