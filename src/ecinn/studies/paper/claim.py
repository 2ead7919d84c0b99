"""Claims of the paper: read from `claims.toml`, judged by votes, and put into words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ecinn.drawing.table import Table
from ecinn.drawing.words import fill, read_toml, show
from ecinn.metrics.statistics import Interval

Verdict = Literal["supported", "partly", "refuted", "vague", "untested"]
"""Vague: the text leaves open what is meant. Untested: nothing was measured."""
Votes = Sequence[bool]
CLAIMS_COMMAND = "ecinn paper claims"


@dataclass(frozen=True)
class Measurement:
    """The outcome of measuring one claim."""

    name: str
    numbers: Mapping[str, Any]
    votes: Sequence[Votes] = ()
    """Groups of votes; the worst group decides. None for a claim whose verdict is in the file."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """Further values that the report mentions."""
    chosen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Phrases that the outcome selects, by their place in the report."""
    rows: Sequence[Sequence[Any]] = ()
    """Rows of the claim's table."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, as `claims.toml` has it; its comment explains the fields."""

    name: str
    section: str
    sentence: str
    measured: str = ""
    models: Sequence[str] = ()
    about: str = ""
    verdict: Verdict | Literal[""] = ""
    figure: str = ""
    command: str = CLAIMS_COMMAND
    thresholds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    untested: str = ""
    phrases: Mapping[str, str] = field(default_factory=dict)
    table: Sequence[Sequence[str]] = ()

    @property
    def limits(self) -> dict[str, float]:
        """The values of the thresholds."""
        return {key: float(limit["value"]) for key, limit in self.thresholds.items()}


@dataclass(frozen=True)
class Judgement:
    """A claim's verdict by the models of one column, or without a model."""

    verdict: Verdict
    measured: str
    """What was measured, or why nothing was."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None
    column: str = ""
    """Empty for claims that do not depend on a model."""
    models: tuple[str, ...] = ()
    """Names of the models behind the numbers; empty if nothing was measured."""


@dataclass(frozen=True)
class Report:
    """A claim with its judgements, in the order of the columns."""

    claim: Claim
    judgements: tuple[Judgement, ...]
    lacking: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Datasets of the claim that a column has no model of, by the title of the column."""


def document() -> dict[str, Any]:
    """Return the parsed file: introduction, chapters, columns and claims."""
    return read_toml(Path(__file__).with_name("claims.toml"))


@cache
def entries() -> dict[str, Claim]:
    """Return all claims by name, in the order of the file."""
    return {
        name: Claim(name, **fields | {"sentence": fill(fields["sentence"], {})})
        for name, fields in document()["claim"].items()
    }


def limits(name: str) -> dict[str, float]:
    """Return the thresholds of a claim."""
    return entries()[name].limits


def share_votes(share: Interval, wanted: float) -> Votes:
    """Vote on a share that must reach a threshold; below one half it is refuted."""
    return share.low >= wanted, share.high >= 0.5


def judge(votes: Sequence[Votes]) -> Verdict:
    """Return the worst verdict of all groups: all votes support, some partly, none refutes."""
    order: tuple[Verdict, ...] = ("refuted", "partly", "supported")
    return min((order[all(group) + any(group)] for group in votes), key=order.index)


def judgement(measurement: Measurement) -> Judgement:
    """Judge a measurement and put it into words."""
    entry = entries()[measurement.name]
    values = {**entry.limits, **measurement.words, **measurement.numbers}
    for place, keys in measurement.chosen.items():
        phrases = [fill(entry.phrases[key], values) for key in keys]
        values[place] = "; ".join(phrases) if keys else "nothing"
    table = None
    if measurement.rows:
        head = tuple(fill(heading, values) for heading, _ in entry.table)
        formats = [spec for _, spec in entry.table]
        table = Table("", head, tuple(tuple(map(show, row, formats)) for row in measurement.rows))
    verdict = entry.verdict or judge(measurement.votes)
    return Judgement(verdict, fill(entry.measured, values), measurement.numbers, table)
