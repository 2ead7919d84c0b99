"""What the figures of an audit warn of, in words."""

from collections.abc import Iterable

from ecinn.auditing.measurement import Audit
from ecinn.metrics.statistics import wilson_interval

FEW, FEW_OF_A_GROUP, REACHED, TYPICAL = 100, 30, 0.95, 0.9
"""Pictures and shares below which there is a caution."""
ALIKE = 0.5
"""Likeness of maps from which two models are said to look at the same thing."""


def find_cautions(audit: Audit) -> Iterable[str]:
    """What the figures themselves warn of, in words."""
    n, overall = len(audit.images), audit.overall
    if n < FEW:
        yield f"Only {n} pictures were looked at: every figure here is rough. Take more (--n)."
    for region in audit.regions:
        if region.name == "background" and region.density.mean > 1:
            much = f"{region.density.mean:.1f} times an average place"
            yield f"The background changes {much}: the model may look at things beside the face."
    if overall.reached.share < REACHED:
        yield f"{n - overall.reached.count} of {n} changed pictures are not read as was asked."
    if overall.typical_counterfactual.share < TYPICAL:
        share = f"{100 * (1 - overall.typical_counterfactual.share):.1f} %"
        yield f"{share} of the changed pictures are unlike those that the model learned from."
    for group in (*audit.classes, *audit.subgroups):
        own, every = group.error, overall.error
        others, wrong = every.n - own.n, every.count - own.count
        if others and own.low > wilson_interval(wrong, others)[1]:
            often = f"{own.count} of {own.n}, against {wrong} of {others}"
            yield f"“{group.name}” is misread more often than others: {often}."
    if n >= FEW and (few := [g.name for g in audit.subgroups if g.n < FEW_OF_A_GROUP]):
        yield f"Too few pictures to say anything of: {', '.join(few)}."
    for comparison in audit.comparisons:
        same, control = comparison.same.absolute, comparison.shuffled.absolute
        if same.mean >= ALIKE and same.low > control.high:
            yield (
                f"The maps of {comparison.other} are much like these (likeness {same.mean:.2f} of "
                "1): these two models may look at the same thing."
            )
