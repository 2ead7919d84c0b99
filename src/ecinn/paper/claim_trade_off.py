"""The claim about β: accuracy against the quality of what is generated."""

from ecinn.audit import rate
from ecinn.benchmark.quality import MAIN_ORACLE
from ecinn.judges import Judges
from ecinn.paper.beta_models import SHIPPED, TradeOff, read
from ecinn.paper.claim import Claim, of_votes, percent, table

COMMAND = "ecinn paper figure-10"
SAYS = (
    "β trades accuracy against the quality of counterfactuals; values near one strike a good "
    "balance."
)


def shipped_trade_off(judges: Judges) -> Claim:
    """Of the models whose results ship, where they do."""
    if SHIPPED.is_file():
        return trade_off(read(), judges)
    measured = f"Models trained at ascending β are needed: `ecinn beta --out DIR`, `{COMMAND}`."
    return Claim("beta", "C", SAYS, "untested", measured, "figure-10", COMMAND)


def trade_off(result: TradeOff, judges: Judges) -> Claim:
    """Errors should fall with β, and bits/dim rise; oracles say what counterfactuals are worth."""
    rows, convinced = [], []
    for number, beta in enumerate(result.beta):
        verdicts = judges.verdicts(result.counterfactuals[number])[MAIN_ORACLE]
        convinced.append(rate(verdicts == result.target))
        rows.append(
            [
                f"{beta:g}",
                f"{100 * result.error[number]:.2f} %",
                f"{result.bits_per_dim[number]:.2f}",
                f"{100 * result.reached_q[number]:.2f} %",
                percent(convinced[-1], 0),
            ]
        )
    accurate = _falling(result.error)
    dearer = _falling([-bits for bits in result.bits_per_dim])
    nearest = min(range(len(rows)), key=lambda number: abs(result.beta[number] - 1))
    balanced = convinced[nearest].high >= max(share.share for share in convinced)
    return Claim(
        "beta",
        "C",
        SAYS,
        of_votes([accurate > 0.7, dearer > 0.7, balanced]),
        f"Of all pairs of models, that with the larger β errs less in {100 * accurate:.0f} % and "
        f"has more bits/dim in {100 * dearer:.0f} %. The oracle reads the target in "
        f"{percent(convinced[nearest], 0)} of the counterfactuals at β = {result.beta[nearest]:g}"
        f", of {len(result.images)} digits, and in "
        f"{100 * max(share.share for share in convinced):.0f} % at best.",
        figure="figure-10",
        command=COMMAND,
        numbers={
            "beta": result.beta,
            "error": result.error,
            "bits_per_dim": result.bits_per_dim,
            "reached_q": result.reached_q,
            "convinced": convinced,
        },
        detail=table(["β", "error", "bits/dim", "reached q", "oracle reads the target"], rows),
    )


def _falling(values: list[float] | tuple[float, ...]) -> float:
    """Share of pairs of which the later is the smaller."""
    pairs = [(a, b) for place, a in enumerate(values) for b in values[place + 1 :]]
    return sum(b < a for a, b in pairs) / len(pairs)
