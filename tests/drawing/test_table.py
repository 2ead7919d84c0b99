"""Tables: Markdown that survives its own separators, and formatted numbers."""

import math

import pytest

from ecinn.drawing.table import (
    NONE,
    Table,
    number,
    number_interval,
    percent,
    percent_interval,
    plus_minus,
)
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


@pytest.mark.parametrize("missing", [None, math.nan, Interval(math.nan, 0.0, 1.0, 0)])
def test_missing_values_are_dashes(missing) -> None:
    assert number(missing) == percent(missing) == NONE
    if not isinstance(missing, float):
        assert plus_minus(missing) == percent_interval(missing) == NONE


def test_numbers_are_values_or_means_with_fixed_digits() -> None:
    interval = Interval(0.12345, 0.1, 0.2, 7)
    assert (number(interval), number(0.5, 3), number(interval, 1, 100.0)) == (
        "0.12", "0.500", "12.3",
    )  # fmt: skip
    assert (percent(interval), percent(1.0, 0)) == ("12.35", "100")


def test_intervals_are_ends_in_brackets_or_half_widths() -> None:
    interval = Interval(0.125, -0.0625, 0.3125, 7)
    assert percent_interval(interval) == "12.5 [-6.2, 31.2]"
    assert percent_interval(interval, 2, sign="+") == "+12.50 [-6.25, +31.25]"
    assert number_interval(interval, 1, 10.0) == "1.2 [-0.6, 3.1]"
    assert plus_minus(interval, 4) == "0.1250 ± 0.1875"
    clamped = Interval(0.1, 0.0, 0.4, 7)  # a distance is not below 0
    assert plus_minus(clamped, 1) == "0.1 ± 0.3"
