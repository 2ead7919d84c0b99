"""Tables of text: written as Markdown, printed by the command line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

NONE = "–"
"""Stands for a value that does not exist."""


@runtime_checkable
class Estimate(Protocol):
    """A mean with whatever belongs to it, such as an interval."""

    @property
    def mean(self) -> float:
        """The value that tables show."""


@runtime_checkable
class IntervalEstimate(Estimate, Protocol):
    """A mean with the ends of its interval."""

    @property
    def low(self) -> float:
        """The lower end."""

    @property
    def high(self) -> float:
        """The upper end."""


@dataclass(frozen=True)
class Table:
    """A head, rows of the same length, notes below them, and a title unless it is empty."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    align: str = ""
    """An l or r for each column in Markdown; by default the first is left-aligned only."""

    @classmethod
    def of(
        cls, title: str, records: Sequence[Mapping[str, str]], notes: Sequence[str] = ()
    ) -> "Table":
        """Build a table from one mapping per row, from column heading to cell."""
        head = tuple(records[0]) if records else ()
        rows = tuple(tuple(record[name] for name in head) for record in records)
        return cls(title, head, rows, tuple(notes))

    def markdown(self) -> str:
        """Return the table in GitHub's flavour of Markdown; cells may hold Markdown themselves."""
        lines = [f"## {self.title}", ""] if self.title else []
        if self.head:
            align = self.align or "l" + "r" * (len(self.head) - 1)
            rules = ({"l": "---|", "r": "---:|"}[column] for column in align)
            lines += [_line(self.head), "|" + "".join(rules)]
            lines += [*(_line(row) for row in self.rows), ""]
        return "\n".join([*lines, *(line for note in self.notes for line in (note, ""))])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(
    figure: Estimate | float | None, digits: int = 2, factor: float = 1.0, sign: str = "-"
) -> str:
    """Format a value or an estimate's mean with fixed digits; a dash for None and nan.

    Args:
        sign: "+" also marks values that are not negative.
    """
    value = figure.mean if isinstance(figure, Estimate) else figure
    return NONE if value is None or math.isnan(value) else f"{factor * value:{sign}.{digits}f}"


def percent(share: Estimate | float | None, digits: int = 2) -> str:
    """Format a share of one as a percentage without its sign."""
    return number(share, digits, 100.0)


def percent_interval(share: IntervalEstimate | None, digits: int = 1, sign: str = "-") -> str:
    """Format a share of one and the ends of its interval as percentages.

    >>> from types import SimpleNamespace
    >>> percent_interval(SimpleNamespace(mean=0.5, low=0.25, high=0.755))
    '50.0 [25.0, 75.5]'
    """
    return number_interval(share, digits, 100.0, sign)


def number_interval(
    figure: IntervalEstimate | None, digits: int = 2, factor: float = 1.0, sign: str = "-"
) -> str:
    """Format an estimate and the ends of its interval; for intervals that are not symmetric."""
    if figure is None or math.isnan(figure.mean):
        return NONE
    mean, low, high = (
        number(value, digits, factor, sign) for value in (figure.mean, figure.low, figure.high)
    )
    return f"{mean} [{low}, {high}]"


def plus_minus(
    figure: IntervalEstimate | None, digits: int = 2, factor: float = 1.0, sign: str = "-"
) -> str:
    """Format an estimate in the middle of its interval.

    >>> from types import SimpleNamespace
    >>> plus_minus(SimpleNamespace(mean=0.5, low=0.25, high=0.75))
    '0.50 ± 0.25'
    """
    if figure is None or math.isnan(figure.mean):
        return NONE
    half_width = number(figure.high - figure.mean, digits, factor)
    return f"{number(figure, digits, factor, sign)} ± {half_width}"
