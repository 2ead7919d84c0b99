"""Read the numbers that other people published, from `published.toml`."""

from pathlib import Path

from ecinn.drawing.words import read_toml

PUBLISHED = read_toml(Path(__file__).with_suffix(".toml"))


def face_errors(dataset: str) -> tuple[float, float] | None:
    """Return Table 1's errors of the paper's INN and Inception-V3 for a label of CelebA."""
    for row in PUBLISHED["table_1"].values():
        if "attribute" in row and dataset == f"celeba/{row['attribute']}":
            return row["error"], row["inception_error"]
    return None
