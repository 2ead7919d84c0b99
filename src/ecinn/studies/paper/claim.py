"""A claim of the paper with what was measured of it here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ecinn.auditing.measurement import Rate
from ecinn.metrics.statistics import Interval

Verdict = Literal["supported", "partly", "refuted", "vague", "untested"]
"""Vague: the text leaves open what is meant. Untested: nothing was measured."""
CLAIMS_COMMAND = "ecinn paper claims"


@dataclass(frozen=True)
class Claim:
    """A sentence, and what came out."""

    name: str
    section: str
    """Of the paper."""
    says: str
    """In our words."""
    verdict: Verdict
    measured: str
    """With intervals of 95 %."""
    figure: str = ""
    """As in `ecinn paper NAME`; empty where none shows it."""
    command: str = CLAIMS_COMMAND
    """What measures more of it, where anything does."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    detail: str = ""
    """A table, where a sentence does not hold it all."""


def of_share(share: Rate, wanted: float) -> Verdict:
    """Supported where the interval lies above what is wanted, refuted where below one half."""
    if share.low >= wanted:
        return "supported"
    return "refuted" if share.high < 0.5 else "partly"


def of_votes(votes: Sequence[bool]) -> Verdict:
    """Supported where all say yes, refuted where none does."""
    if all(votes):
        return "supported"
    return "partly" if any(votes) else "refuted"


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Where all are needed: refuted before partly before supported."""
    return min(verdicts, key=("refuted", "partly", "supported").index)


def percent(share: Rate, digits: int = 1) -> str:
    """A share with Wilson's interval."""
    middle, low, high = (f"{100 * v:.{digits}f}" for v in (share.share, share.low, share.high))
    return f"{middle} % [{low}, {high}]"


def number(value: Interval, digits: int = 3) -> str:
    """A mean, or a correlation, with its interval."""
    return f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, the first column to the left and the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def page(claims: Sequence[Claim], introduction: str) -> str:
    """All claims at a glance, then every one with what was measured, by the paper's sections."""
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in _VERDICTS}
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    chapters = [
        (title, [claim for claim in claims if claim.section in sections])
        for title, sections in _CHAPTERS
    ]
    rows = [
        [claim.says, f"**{claim.verdict}**", claim.section] for _, own in chapters for claim in own
    ]
    glance = table(["claim", "verdict", "section"], rows)
    parts = [introduction, f"{len(claims)} claims: {tally}.", glance]
    for title, own in chapters:
        if own:
            parts += [f"## {title}", *(_entry(claim) for claim in own)]
    return "\n\n".join(parts) + "\n"


_VERDICTS: tuple[Verdict, ...] = ("supported", "partly", "refuted", "vague", "untested")
_CHAPTERS = (
    ("Counterfactuals (Sections 1 and 3)", ("1", "2.2", "3.1", "3.2", "3.3")),
    ("FakeMNIST (Section 4.1)", ("4.1",)),
    ("MNIST (Section 4.2)", ("4", "4.2")),
    ("Faces and heatmaps (Section 4.3)", ("4.3", "5")),
    ("The supplement", ("A", "B", "C")),
)


def _entry(claim: Claim) -> str:
    parts = [f"*{claim.verdict.capitalize()}.* {claim.measured}"]
    if claim.figure:
        parts.append(f"Figure: `ecinn paper {claim.figure}`.")
    if claim.verdict != "untested":
        more = "" if claim.command == CLAIMS_COMMAND else f"; more: `{claim.command}`"
        parts.append(f"Measured by `{CLAIMS_COMMAND}`{more}.")
    text = f"**{claim.says}** (Section {claim.section})\n\n{' '.join(parts)}"
    return f"{text}\n\n{claim.detail}" if claim.detail else text
