"""Read texts from TOML files and fill in their values."""

import string
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ecinn.metrics.statistics import Interval


@cache
def read_toml(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this folder."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Fill in the values of a text and join its lines; formats are those of `show`."""
    return _Filler().vformat(" ".join(text.split()), (), values)


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


class _Filler(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401
        """Format values as `show` does."""
        return show(value, format_spec)
