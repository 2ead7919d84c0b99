"""Tables: Markdown that survives its own separators, and formatted numbers."""

import math

import pytest

from ecinn.drawing.table import Table
from ecinn.drawing.words import NONE, fill, show
from ecinn.metrics.statistics import Interval


def test_markdown_has_a_line_per_row_and_escapes_its_separator() -> None:
    table = Table("Sizes", ("name", "|h|"), (("a", "1"), ("b|c", "2")), ("A note.",))
    assert table.markdown().splitlines() == [
        "## Sizes", "", "| name | \\|h\\| |", "|---|---:|", "| a | 1 |", "| b\\|c | 2 |", "",
        "A note.",
    ]  # fmt: skip


def test_columns_are_aligned_as_given() -> None:
    table = Table("", ("name", "size", "meaning"), (), align="lrl")
    assert table.markdown().splitlines()[1] == "|---|---:|---|"


def test_records_become_rows_under_their_headings() -> None:
    table = Table.of("t", [{"a": "1", "b": "2"}, {"b": "4", "a": "3"}], ["note"])
    assert table == Table("t", ("a", "b"), (("1", "2"), ("3", "4")), ("note",))


def test_a_table_without_rows_keeps_its_title_and_notes() -> None:
    assert Table.of("Empty", [], ["Nothing."]).markdown() == "## Empty\n\nNothing.\n"


def test_a_transposed_table_has_its_first_column_as_head() -> None:
    table = Table("t", ("a", "b", "c"), (("1", "2", "3"), ("4", "5", "6")), ("note",))
    assert table.transposed().rows == (("b", "2", "5"), ("c", "3", "6"))
    assert table.transposed().transposed() == table


@pytest.mark.parametrize("missing", [None, math.nan, Interval(math.nan, 0.0, 1.0, 0)])
def test_missing_values_are_dashes(missing) -> None:
    assert show(missing, ".2") == show(missing, "±.1p") == fill("{a:.0%}", {"a": missing}) == NONE


def test_intervals_are_ends_in_brackets_or_half_widths() -> None:
    interval = Interval(0.125, -0.0625, 0.3125, 7)
    assert show(interval, ".1p") == "12.5 [-6.2, 31.2]"
    assert show(interval, "+.2p") == "+12.50 [-6.25, +31.25]"
    assert show(interval, ".1%") == "12.5 % [-6.2, 31.2]"
    assert show(interval, "±.4") == "0.1250 ± 0.1875"
    assert show(interval, "±+.1p") == "+12.5 ± 18.8"
    clamped = Interval(0.1, 0.0, 0.4, 7)  # a distance is not below 0
    assert show(clamped, "±.1") == "0.1 ± 0.3"


def test_values_are_found_by_their_path() -> None:
    share = Interval(0.5, 0.25, 0.75, 1234)
    values = {"by": {"fully connected": share}, "both": (share, None), "n": 3}
    text = "{by[fully connected].n:,}\n{both[0].low:.2} {both[1].low:.2} {by[other].n} {n}"
    assert fill(text, values) == f"1,234 0.25 {NONE} {NONE} 3"
    with pytest.raises(KeyError):
        fill("{typo}", values)
    with pytest.raises(AttributeError):
        fill("{both[0].typo}", values)
