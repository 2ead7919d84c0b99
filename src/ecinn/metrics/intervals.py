"""How sure a measured share or mean is."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ecinn.errors import InputError

_Z_95 = 1.959963984540054
"""97.5 % of a standard normal lies below."""


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval, which need not be equally far from it."""

    mean: float
    low: float
    high: float


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Where a share lies with 95 % confidence, of which successes in n were seen (Wilson, 1927).

    All p with |p̂ − p| ≤ z·√(p(1 − p)/n): (p̂ + z²/2n ± z·√(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n);
    of nothing anything can be true.
    """
    if n == 0:
        return 0.0, 1.0
    share, z = successes / n, _Z_95
    middle = share + z**2 / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = ((middle + sign * spread) / (1 + z**2 / n) for sign in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def confidence_interval(
    values: Float[Tensor, " values"] | Bool[Tensor, " values"],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    generator: torch.Generator,
) -> Interval:
    """The mean, and the percentile bootstrap's interval of it over images."""
    if not 0 < level < 1 or resamples < 1:
        raise InputError(
            f"a level lies above 0 and below 1 and resamples are at least 1, "
            f"not {level} and {resamples}"
        )
    n, device = len(values), generator.device
    if n == 0:
        raise InputError("an interval needs at least one value")
    values = values.double().to(device)
    means = torch.stack(
        [
            values[torch.randint(n, (n,), generator=generator, device=device)].mean()
            for _ in range(resamples)
        ]
    )
    ends = means.new_tensor([(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), *means.quantile(ends).tolist())


def paired_difference_interval(
    a: Float[Tensor, " values"] | Bool[Tensor, " values"],
    b: Float[Tensor, " values"] | Bool[Tensor, " values"],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    generator: torch.Generator,
) -> Interval:
    """The interval of a − b where both were measured on the same images."""
    if a.shape != b.shape:
        raise InputError(
            f"{len(a)} and {len(b)} values are not pairs: give both of the same images, in order"
        )
    return confidence_interval(
        a.double() - b.double(), level=level, resamples=resamples, generator=generator
    )
