"""Texts with values filled in: numbers, intervals, and templates from TOML files."""

import re
import string
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

NONE = "–"
"""Stands for a value that does not exist."""


def show(value: Any, spec: str = "") -> str:  # noqa: ANN401
    """Format a value as Python does, with more formats; None and nan are dashes.

    `%` puts a space before its sign, and `p` is a percentage without a sign. The ends of an
    interval follow in brackets; `±` shows half its width instead.

    >>> from types import SimpleNamespace
    >>> share = SimpleNamespace(mean=0.5, low=0.25, high=0.875)
    >>> show(share, ".1%"), show(share, "±.2"), show(share, "+.0p"), show(2000, ",")
    ('50.0 % [25.0, 87.5]', '0.50 ± 0.38', '+50 [+25, +88]', '2,000')
    """
    is_interval = hasattr(value, "low")
    mean = value.mean if is_interval else value
    if mean is None or mean != mean:
        return NONE
    form = spec.removeprefix("±").rstrip("%p")
    form += "f" if form[-1:].isdigit() else ""
    unit = " %" if spec.endswith("%") else ""

    def text(number: Any, form: str = form) -> str:  # noqa: ANN401
        return format(100 * number if spec.endswith(("%", "p")) else number, form)

    if not is_interval:
        return text(mean) + unit
    if spec.startswith("±"):
        return f"{text(mean)} ± {text(value.high - mean, form.removeprefix('+'))}"
    return f"{text(mean)}{unit} [{text(value.low)}, {text(value.high)}]"


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Fill in the `{path.to[value]:format}` of a text, in the formats of `show`, on one line.

    Parts of a missing value are missing, too: they become dashes.
    """
    return " ".join(_Filler().vformat(text, (), values).split())


class _Filler(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:  # noqa: ANN401
        first, *path = re.findall(r"[^.\[\]]+", field_name)
        value = kwargs[first]
        for part in path:
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, Sequence):
                value = value[int(part)]
            elif value is not None:
                value = getattr(value, part)
        return value, first

    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401
        return show(value, format_spec)


@cache
def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))
