"""Measure the claim about β, which needs models trained at increasing β."""

import itertools
import math
from collections.abc import Iterator, Sequence

from ecinn.metrics.statistics import wilson
from ecinn.studies.paper import beta_models
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.beta_models import TradeOff
from ecinn.studies.paper.claim import Measurement, limits


def measure(context: Context) -> Iterator[Measurement]:
    """Measure it where such models are at hand."""
    path = beta_models.find(context.beta)
    if path is not None:
        yield trade_off(beta_models.read(path))


def trade_off(result: TradeOff) -> Measurement:
    """Errors and quality should fall with β, and both be nearly the best at β near one."""
    n, models = result.training["test_images"], range(len(result.beta))
    errors = [wilson(round(error * n), n) for error in result.error]
    convinced = [wilson(result.convinced[k], result.judged[k]) for k in models]
    near = min(models, key=lambda k: abs(math.log(result.beta[k])))
    best = max(convinced, key=lambda share: share.mean)
    least = min(errors, key=lambda share: share.mean)
    falls = {
        "errors_fall": falling([error.mean for error in errors]),
        "fewer_convince": falling([share.mean for share in convinced]),
        "distance_grows": falling([-distance for distance in result.frechet]),
    }
    votes = {name: share >= limits("beta")["monotone"] for name, share in falls.items()} | {
        "convinces_best": convinced[near].mean >= best.low,
        "errs_least": errors[near].mean <= least.high,
    }
    columns = {
        "beta": result.beta,
        "error": errors,
        "bits_per_dim": result.bits_per_dim,
        "reached_q": result.reached_q,
        "convinced": convinced,
        "frechet": result.frechet,
    }
    return Measurement(
        "beta",
        columns,
        [list(votes.values())],
        {
            "models": len(result.beta),
            "training": result.training,
            "near": result.beta[near],
            "convinced_near": convinced[near],
            "convinced_best": best,
            "error_near": errors[near],
            "error_least": least,
            "falls": falls,
        },
        {
            "held": [name for name, holds in votes.items() if holds],
            "failed": [name for name, holds in votes.items() if not holds],
        },
        list(zip(*columns.values(), strict=True)),
    )


def falling(values: Sequence[float]) -> float:
    """Share of all pairs of which the later value is the smaller."""
    pairs = list(itertools.combinations(values, 2))
    return sum(b < a for a, b in pairs) / max(len(pairs), 1)
