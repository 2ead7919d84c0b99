"""What was made, as files: each there whole or not at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ecinn.files import atomic_write
from ecinn.studies.benchmark.record import write_json, write_text
from ecinn.studies.paper import style
from ecinn.studies.paper.artefact import Artefact, Context, Made


def make(artefact: Artefact, context: Context) -> Made:
    """Make it in the style of all others."""
    with style.styled():
        return artefact.make(context)


def command(names: str, context: Context) -> str:
    """What makes the same again; folders are the user's."""
    given = {"celeba": context.celeba, "inception": context.inception, "beta": context.beta}
    options = "".join(f" --{name} DIR" for name, folder in given.items() if folder is not None)
    return f"ecinn paper {names} --out OUT{options} --seed {context.seed}"


def write(artefact: Artefact, made: Made, folder: Path, context: Context) -> list[Path]:
    """PDF and PNG of figures, PDF of books, Markdown of pages, and JSON of what they show."""
    files: list[tuple[Path, bytes]] = []
    for stem, figure in made.figures.items():
        files.append((folder / f"{stem}.pdf", style.pdf_bytes(figure)))
        files.append((folder / f"{stem}.png", style.png_bytes(figure)))
    for stem, figures in made.books.items():
        files.append((folder / f"{stem}.pdf", style.pdf_bytes(figures)))
    # All is drawn before anything is written.
    for path, data in files:
        atomic_write(path, data)
    for stem, text in made.pages.items():
        write_text(folder / f"{stem}.md", text)
    for stem, numbers in made.data.items():
        write_json(
            folder / f"{stem}.json", _record(artefact, made, stem, context) | {"data": numbers}
        )
    pages = [folder / f"{stem}.md" for stem in made.pages]
    return [path for path, _ in files] + pages + [folder / f"{stem}.json" for stem in made.data]


def _record(artefact: Artefact, made: Made, stem: str, context: Context) -> dict[str, Any]:
    return {
        "title": artefact.title,
        "caption": made.captions.get(stem, ""),
        "paper": artefact.reported,
        "command": command(artefact.name, context),
        "torch": torch.__version__,
    }


def contents(
    made: Sequence[tuple[Artefact, Made]], skipped: Mapping[str, str], made_with: str
) -> str:
    """All that was made on one page of Markdown, each beside what the paper reports."""
    parts = ["# The paper, made with our models", f"`{made_with}`"]
    for artefact, one in made:
        parts.append(f"## {_heading(artefact)}")
        for stem in one.figures:
            parts.append(f"![{artefact.title}]({stem}.png)")
            parts.append(f"{one.captions.get(stem, '')} ([PDF]({stem}.pdf))".strip())
        for stem in one.books:
            parts.append(f"[{stem}.pdf]({stem}.pdf): {one.captions.get(stem, artefact.title)}")
        parts += [f"[{stem}.md]({stem}.md)" for stem in one.pages]
        if artefact.reported:
            parts.append(f"**In the paper:** {artefact.reported}")
    if skipped:
        parts += ["## Not made", *(f"- {name}: {why}" for name, why in skipped.items())]
    return "\n\n".join(parts) + "\n"


def _heading(artefact: Artefact) -> str:
    kind = artefact.name.replace("-", " ").capitalize()
    return f"{kind}: {artefact.title.removeprefix(f'{kind}: ')}"
