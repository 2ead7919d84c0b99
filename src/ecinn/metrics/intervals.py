"""How sure a measured share or mean is."""

import math

_Z_95 = 1.959963984540054
"""97.5 % of a standard normal lies below."""


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Where a share lies with 95 % confidence, of which successes in n were seen (Wilson, 1927).

    All p with |p̂ − p| ≤ z·√(p(1 − p)/n): (p̂ + z²/2n ± z·√(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n).
    """
    share, z = successes / n, _Z_95
    middle = share + z**2 / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = ((middle + sign * spread) / (1 + z**2 / n) for sign in (-1, 1))
    return max(low, 0.0), min(high, 1.0)
