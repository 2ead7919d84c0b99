"""Claims of the paper: read from `claims.toml`, judged by votes, and put into words."""

import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ecinn.metrics.statistics import Interval

Verdict = Literal["supported", "partly", "refuted", "vague", "untested"]
"""Vague: the text leaves open what is meant. Untested: nothing was measured."""
Votes = Sequence[bool]
CLAIMS_COMMAND = "ecinn paper claims"


@dataclass(frozen=True)
class Entry:
    """A claim as `claims.toml` has it; the comment there explains the fields."""

    name: str
    section: str
    sentence: str
    measured: str
    figure: str = ""
    command: str = CLAIMS_COMMAND
    verdict: Verdict | None = None
    needs: str = ""
    without: str = ""
    untested: str = ""
    thresholds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    phrases: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[Sequence[str]] = ()


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
    """A sentence of the paper with its verdict and a report of the measurement."""

    name: str
    section: str
    sentence: str
    verdict: Verdict
    measured: str
    figure: str = ""
    command: str = CLAIMS_COMMAND
    thresholds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""


@cache
def document() -> dict[str, Any]:
    """Return the parsed file: the introduction, the chapters and the claims."""
    path = Path(__file__).with_name("claims.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def entries() -> dict[str, Entry]:
    """Return all claims by name, in the order of the file."""

    def one_line(value: Any) -> Any:  # noqa: ANN401
        return " ".join(value.split()) if isinstance(value, str) else value

    found = {}
    for name, fields in document()["claim"].items():
        plain = {key: one_line(value) for key, value in fields.items()}
        plain["phrases"] = {k: one_line(text) for k, text in fields.get("phrases", {}).items()}
        found[name] = Entry(name, **plain)
    return found


def limits(name: str) -> dict[str, float]:
    """Return the thresholds of a claim."""
    return {key: float(limit["value"]) for key, limit in entries()[name].thresholds.items()}


def share_votes(share: Interval, wanted: float) -> Votes:
    """Vote on a share that must reach a threshold; below one half it is refuted."""
    return share.low >= wanted, share.high >= 0.5


def judge(votes: Sequence[Votes]) -> Verdict:
    """Return the worst verdict of all groups: all votes support, some partly, none refutes."""
    order: tuple[Verdict, ...] = ("refuted", "partly", "supported")
    return min((order[all(group) + any(group)] for group in votes), key=order.index)


def show(value: Any, spec: str = "") -> str:  # noqa: ANN401
    """Format a value; an interval is shown in brackets, and % leaves a space.

    >>> show(Interval(0.5, 0.25, 0.875, 8), ".1%"), show(0.25, ".0%"), show(2000, ",")
    ('50.0 % [25.0, 87.5]', '25 %', '2,000')
    """
    if spec.endswith("%"):
        scale, unit, spec = 100, " %", spec[:-1]
    else:
        scale, unit = 1, ""
    if spec[-1:].isdigit():
        spec += "f"
    if isinstance(value, Interval):
        mean, low, high = (format(scale * v, spec) for v in (value.mean, value.low, value.high))
        return f"{mean}{unit} [{low}, {high}]"
    return f"{format(scale * value, spec)}{unit}" if unit else format(value, spec)


class _Report(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401
        """Format values as `show` does."""
        return show(value, format_spec)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table, with all columns but the first aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def claim_of(measurement: Measurement) -> Claim:
    """Judge a measurement and report it."""
    entry, report = entries()[measurement.name], _Report()
    values = limits(entry.name) | measurement.words | measurement.numbers
    for place, keys in measurement.chosen.items():
        phrases = [report.vformat(entry.phrases[key], (), values) for key in keys]
        values[place] = "; ".join(phrases) if keys else "nothing"
    table = ""
    if measurement.rows:
        head = [report.vformat(heading, (), values) for heading, _ in entry.columns]
        formats = [spec for _, spec in entry.columns]
        rows = [list(map(show, row, formats)) for row in measurement.rows]
        table = markdown_table(head, rows)
    return Claim(
        entry.name,
        entry.section,
        entry.sentence,
        entry.verdict or judge(measurement.votes),
        report.vformat(entry.measured, (), values),
        entry.figure,
        entry.command,
        entry.thresholds,
        measurement.numbers,
        table,
    )


def unmeasured(entry: Entry) -> Claim:
    """Report a claim that nothing was measured of."""
    words = entry.untested or entry.measured
    return Claim(
        entry.name,
        entry.section,
        entry.sentence,
        "untested",
        words,
        entry.figure,
        entry.command,
        entry.thresholds,
    )
