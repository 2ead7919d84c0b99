"""The claim about β: accuracy against the quality of counterfactuals."""

import math
from collections.abc import Sequence
from pathlib import Path

from ecinn.auditing.measurement import Rate
from ecinn.metrics.statistics import wilson_interval
from ecinn.studies.paper import beta_models
from ecinn.studies.paper.beta_models import TradeOff
from ecinn.studies.paper.claim import Claim, of_votes, percent, table

COMMAND = "ecinn paper figure-10"
SAYS = (
    "β trades accuracy against the quality of counterfactuals; values near one strike a good "
    "balance."
)
MONOTONE = 0.75
"""Share of all pairs of models that must agree where something falls or rises with β."""


def trade_off_found(folder: Path | None) -> Claim:
    """Of the models that `ecinn beta` left in a folder, or whose results ship, if any."""
    path = beta_models.find(folder)
    if path is not None:
        return trade_off(beta_models.read(path))
    measured = (
        "Models trained at ascending β are needed: make them with `ecinn beta --out DIR` and give "
        "`--beta DIR`."
    )
    return Claim("beta", "C", SAYS, "untested", measured, "figure-10", COMMAND)


def trade_off(result: TradeOff) -> Claim:
    """Errors and quality should both fall with β, and at β near one both be nearly the best."""
    models = range(len(result.beta))
    n = result.training["test_images"]
    errors = [_rate(round(error * n), n) for error in result.error]
    convinced = [_rate(result.convinced[k], result.judged[k]) for k in models]
    near = min(models, key=lambda k: abs(math.log(result.beta[k])))
    here = f"β = {result.beta[near]:g}"
    accurate = falling([error.share for error in errors])
    doubted = falling([share.share for share in convinced])
    unlike = falling([-distance for distance in result.frechet])
    most = max(convinced, key=lambda share: share.share)
    fewest = min(errors, key=lambda share: share.share)
    votes = [
        (accurate >= MONOTONE, f"errors fall with β (in {_pairs(accurate)})"),
        (
            doubted >= MONOTONE,
            f"an oracle reads fewer counterfactuals as their target (in {_pairs(doubted)})",
        ),
        (
            unlike >= MONOTONE,
            f"their Fréchet distance from test digits grows (in {_pairs(unlike)})",
        ),
        (
            convinced[near].share >= most.low,
            f"at {here}, where the oracle reads {percent(convinced[near])} as their target, it "
            f"is as good as the best, {percent(most)}",
        ),
        (
            errors[near].share <= fewest.high,
            f"at {here}, where errors are {percent(errors[near], 2)}, they are as few as the "
            f"fewest, {percent(fewest, 2)}",
        ),
    ]
    return Claim(
        "beta",
        "C",
        SAYS,
        of_votes([holds for holds, _ in votes]),
        _measured_on(result)
        + " ".join(
            f"{said}: {'; '.join(words)}."
            for said, wanted in (("Holds", True), ("Does not hold", False))
            if (words := [vote for holds, vote in votes if holds is wanted])
        ),
        figure="figure-10",
        command=COMMAND,
        numbers={
            "beta": result.beta,
            "error": errors,
            "bits_per_dim": result.bits_per_dim,
            "reached_q": result.reached_q,
            "convinced": convinced,
            "frechet": result.frechet,
        },
        detail=table(
            ["β", "error", "bits/dim", "reached q", "oracle reads the target", "Fréchet distance"],
            [
                [
                    f"{result.beta[k]:g}",
                    percent(errors[k], 2),
                    f"{result.bits_per_dim[k]:.2f}",
                    f"{100 * result.reached_q[k]:.2f} %",
                    percent(convinced[k]),
                    f"{result.frechet[k]:.2f}",
                ]
                for k in models
            ],
        ),
    )


def falling(values: Sequence[float]) -> float:
    """Share of pairs of which the later is the smaller."""
    pairs = [(a, b) for place, a in enumerate(values) for b in values[place + 1 :]]
    return sum(b < a for a, b in pairs) / max(len(pairs), 1)


def _measured_on(result: TradeOff) -> str:
    t = result.training
    epochs = "1 epoch" if t["epochs"] == 1 else f"{t['epochs']} epochs"
    return (
        f"{len(result.beta)} models, {epochs} of {t['training_images']:,} digits each, judged on "
        f"{t['test_images']:,}. "
    )


def _pairs(share: float) -> str:
    return f"{100 * share:.0f} % of all pairs of models"


def _rate(count: int, n: int) -> Rate:
    return Rate(count, n, count / max(n, 1), *wilson_interval(count, n))
