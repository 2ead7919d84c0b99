"""A figure or table of the paper: its name, what it needs, and how it is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from ecinn.data.dataset import Dataset, Split, load_dataset
from ecinn.model import Model, load

Need = Literal["faces", "inception", "beta"]
"""What may not be in the package: CelebA's pictures, what `ecinn inception` wrote, and what
`ecinn beta` did."""


@dataclass(frozen=True)
class Context:
    """What is given to all of them."""

    seed: int = 0
    celeba: Path | None = None
    """Folder of CelebA."""
    inception: Path | None = None
    """Folder of what `ecinn inception` wrote, as ATTRIBUTE.safetensors."""
    beta: Path | None = None
    """Folder of what `ecinn beta` wrote; None: what ships of it, if anything."""
    device: str = "cpu"
    observe: Callable[[str, int, int], None] = lambda what, done, total: None

    @cached_property
    def model(self) -> Callable[[str], Model]:
        """A shipped model by its name, read once."""
        return cache(lambda name: load(name, self.device))

    @cached_property
    def data(self) -> Callable[[str, Split], Dataset]:
        """The images of a data set, read once."""
        return cache(lambda dataset, split: load_dataset(dataset, split, self.celeba))


@dataclass(frozen=True)
class Made:
    """What came out, by the stem of the file it is written to."""

    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Written as PDF and PNG."""
    books: Mapping[str, Sequence[Figure]] = field(default_factory=dict)
    """Written as PDF, a page for every figure."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Markdown."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Written as JSON: what a figure shows, or a table's numbers."""
    captions: Mapping[str, str] = field(default_factory=dict)
    """What stands below a figure in the list of all that was made; Markdown."""
    skipped: Mapping[str, Need] = field(default_factory=dict)
    """Parts that were left out, and what they lack."""


@dataclass(frozen=True)
class Artefact:
    """One figure, table or supplement."""

    name: str
    """As in `ecinn paper NAME`."""
    title: str
    """What it shows, in a line."""
    make: Callable[[Context], Made]
    needs: frozenset[Need] = frozenset()
    reported: str = ""
    """What the paper shows and says there, in a sentence or two."""
