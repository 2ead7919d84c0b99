"""Figures, tables and claims of the paper: name, needs, and the files they become.

They are listed in `artefacts.toml`. Modules that draw are imported when an artefact is made, so
that the list needs no matplotlib.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ecinn.data.dataset import Dataset, Split, load_dataset
from ecinn.drawing.words import fill, read_toml
from ecinn.files import atomic_write
from ecinn.model import Model, load
from ecinn.progress import Observer, ignore
from ecinn.studies.benchmark.record import write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any

ABOUT = read_toml(Path(__file__).with_name("artefacts.toml"))
"""Titles, captions and notes of all artefacts."""
Need = Literal["faces", "beta"]
"""Data that may be missing: pictures of CelebA, and results of `ecinn beta`."""


@dataclass(frozen=True)
class Context:
    """Settings and data that all artefacts are made from."""

    seed: int = 0
    celeba: Path | None = None
    inception: Path | None = None
    """Folder of the networks that `ecinn inception` wrote, as ATTRIBUTE.safetensors; None for a
    shipped judge of faces in their place."""
    beta: Path | None = None
    """Folder that `ecinn beta` wrote; None for the shipped results."""
    device: str = "cpu"
    observe: Observer = ignore
    paper_models: tuple[Path, ...] = ()
    """Models that judge the claims as the paper's recipe, at most one of each dataset."""
    limit: int | None = None
    """Images per claim at most."""

    @cached_property
    def model(self) -> Callable[[str], Model]:
        """Load a model by its name or path, once."""
        return cache(lambda name: load(name, self.device))

    @cached_property
    def data(self) -> Callable[[str, Split], Dataset]:
        """Load the images of a dataset, once."""
        return cache(lambda dataset, split: load_dataset(dataset, split, self.celeba))

    def tested(self, name: str) -> tuple[Model, Dataset]:
        """Return a shipped model and its test images."""
        model = self.model(name)
        return model, self.data(model.recipe.dataset, "test")

    def generator(self, figure: int) -> torch.Generator:
        """Return the random draws of one figure, the same whether or not others are made."""
        return torch.Generator().manual_seed(1000 * self.seed + figure)


@dataclass(frozen=True)
class Made:
    """The content of an artefact, by the stem of the file it is written to."""

    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Written as PDF and PNG."""
    books: Mapping[str, Sequence[Figure]] = field(default_factory=dict)
    """Written as PDF, a page for every figure."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Written as Markdown."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Numbers behind a figure or table, written as JSON."""
    captions: Mapping[str, str] = field(default_factory=dict)
    """Markdown below a figure in the list of all artefacts."""

    @classmethod
    def single(
        cls, stem: str, content: Figure | Sequence[Figure], numbers: object, **values: object
    ) -> "Made":
        """One figure, or a book of several, with its numbers, and its caption filled in."""
        made = cls(data={stem: numbers}, captions={stem: caption(stem, **values)})
        if isinstance(content, Sequence):
            return replace(made, books={stem: content})
        return replace(made, figures={stem: content})


@dataclass(frozen=True)
class Artefact:
    """One figure, table or supplement."""

    name: str
    """As in `ecinn paper NAME`."""
    title: str
    make: Callable[[Context], Made]
    needs: frozenset[Need] = frozenset()
    reported: str = ""
    """Content of the figure or table in the paper."""


def caption(name: str, **values: Any) -> str:  # noqa: ANN401
    """Fill in the caption of an artefact."""
    return fill(ABOUT[name]["caption"], values)


def _make(function: str, context: Context) -> Made:
    made: Made = pkgutil.resolve_name(f"ecinn.studies.paper.{function}")(context)
    return made


ARTEFACTS = tuple(
    Artefact(
        name,
        about["title"],
        partial(_make, about["make"]),
        frozenset(about.get("needs", ())),
        about.get("reported", ""),
    )
    for name, about in ABOUT.items()
    if "make" in about
)
"""All artefacts in the order of the paper."""


def command(names: str, context: Context) -> str:
    """Return the command that makes the same files again, without the user's folders."""
    given = {"celeba": context.celeba, "inception": context.inception, "beta": context.beta}
    options = "".join(f" --{name} DIR" for name, folder in given.items() if folder is not None)
    options += " --paper-model FILE" * len(context.paper_models)
    options += "" if context.limit is None else f" --limit {context.limit}"
    return f"ecinn paper {names} --out OUT{options} --seed {context.seed}"


def write(artefact: Artefact, made: Made, folder: Path, context: Context) -> list[Path]:
    """Write figures as PDF and PNG, books as PDF, pages as Markdown, and the numbers as JSON."""
    files: dict[str, bytes] = {}
    if made.figures or made.books:
        from ecinn.studies.paper import style

        for stem, figure in made.figures.items():
            files[f"{stem}.pdf"] = style.pdf_bytes(figure)
            files[f"{stem}.png"] = style.png_bytes(figure)
        files |= {f"{stem}.pdf": style.pdf_bytes(pages) for stem, pages in made.books.items()}
    files |= {f"{stem}.md": text.encode() for stem, text in made.pages.items()}
    # Everything is drawn before anything is written.
    for name, data in files.items():
        atomic_write(folder / name, data)
    for stem, numbers in made.data.items():
        record = {
            "title": artefact.title,
            "caption": made.captions.get(stem, ""),
            "paper": artefact.reported,
            "command": command(artefact.name, context),
            "torch": torch.__version__,
            "data": numbers,
        }
        write_json(folder / f"{stem}.json", record)
    return [folder / name for name in (*files, *(f"{stem}.json" for stem in made.data))]


def contents(
    made: Sequence[tuple[Artefact, Made]], skipped: Mapping[str, str], made_with: str
) -> str:
    """List everything that was made on one Markdown page, with what the paper reports."""
    parts = ["# The paper, made with our models", f"`{made_with}`"]
    for artefact, content in made:
        kind = artefact.name.replace("-", " ").capitalize()
        parts.append(f"## {kind}: {artefact.title.removeprefix(f'{kind}: ')}")
        for stem in content.figures:
            parts.append(f"![{artefact.title}]({stem}.png)")
            parts.append(f"{content.captions.get(stem, '')} ([PDF]({stem}.pdf))".strip())
        for stem in content.books:
            caption = content.captions.get(stem, artefact.title)
            parts.append(f"[{stem}.pdf]({stem}.pdf): {caption}")
        parts += [f"[{stem}.md]({stem}.md)" for stem in content.pages]
        if artefact.reported:
            parts.append(f"**In the paper:** {artefact.reported}")
    if skipped:
        parts += ["## Not made", *(f"- {name}: {reason}" for name, reason in skipped.items())]
    return "\n\n".join(parts) + "\n"
