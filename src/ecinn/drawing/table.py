"""Tables of text: written as Markdown, printed by the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


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

    def transposed(self) -> "Table":
        """Exchange rows and columns."""
        head, *rows = zip(self.head, *self.rows, strict=True)
        return replace(self, head=head, rows=tuple(rows))

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
