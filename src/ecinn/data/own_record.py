"""Options for reading your own pictures, and the record with which a run finds them again."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ecinn.data.framing import Fit, Framing, Intensity
from ecinn.data.sources import Columns
from ecinn.errors import InputError
from ecinn.files import rebuild

RECORD_FILE = "data.json"
"""In the folder of a training run: where its pictures are, and on which side each was."""


@dataclass(frozen=True)
class OwnDataOptions:
    """Options for reading a source; None means: choose from the pictures."""

    size: int | None = None
    channels: int | None = None
    """1 for grey, 3 for colour."""
    fit: Fit = "stretch"
    window: tuple[float, float] | None = None
    """Raw values that become black and white, for pictures with more than 8 bits."""
    group: str | None = None
    """Pictures of one group stay on one side: a column of the table, or a regular expression whose
    first group is taken from every path."""
    skip_damaged: bool = False
    columns: Columns = dataclasses.field(default_factory=Columns)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check size, channels and window."""
        if self.window is not None:
            Intensity(*self.window, "given")
        if self.size is not None and (self.size % 4 or not 16 <= self.size <= 128):
            raise InputError(f"the size is a multiple of 4 from 16 to 128, not {self.size}")
        if self.channels not in (None, 1, 3):
            raise InputError(f"channels are 1 (grey) or 3 (colour), not {self.channels}")


@dataclass(frozen=True)
class DataRecord:
    """Record of a source and its split, with which the same pictures are found again."""

    source: str
    options: OwnDataOptions
    key: str
    """Identifies files and options: the same key gives the same splits."""
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    framing: Framing
    counts: tuple[int, ...]
    """Training, validation and test pictures, in this order in the cache."""
    order: tuple[int, ...]
    """Their numbers in the source."""
    hashes: tuple[str, ...]
    """Their decoded contents."""
    damaged: tuple[str, ...]
    notes: tuple[str, ...]

    def sides(self) -> dict[str, int]:
        """Return the side of every content."""
        sides = np.repeat(range(3), self.counts).tolist()
        # A copy on two sides counts for the first.
        return dict(zip(reversed(self.hashes), reversed(sides), strict=True))


def read_record(path: Path) -> DataRecord | None:
    """Read a record from JSON; None if there is none."""
    try:
        record: DataRecord = rebuild(DataRecord, json.loads(path.read_bytes())["data"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): restore it, or train into a new folder"
        ) from None
    return record
