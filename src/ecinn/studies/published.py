"""Read the numbers that other people published, from `published.toml`."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def published() -> dict[str, Any]:
    """Return every section of the file."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def face_errors(dataset: str) -> tuple[float, float] | None:
    """Return Table 1's errors of the paper's INN and Inception-V3 for a label of CelebA."""
    for row in published()["table_1"].values():
        if "attribute" in row and dataset == f"celeba/{row['attribute']}":
            return row["error"], row["inception_error"]
    return None
