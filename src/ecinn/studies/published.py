"""Numbers published by the paper and its authors, read from `published.toml`."""

import functools
import tomllib
from pathlib import Path
from typing import Any


@functools.cache
def published() -> dict[str, Any]:
    """Return everything in the file, by section."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def face_errors(dataset: str) -> tuple[float, float] | None:
    """Return the paper's test errors of its INN and its Inception-V3, where it has that label."""
    errors = published()["faces"].get(dataset)
    return None if errors is None else (errors["inn"], errors["inception"])
