"""`ecinn models`: list the shipped models, or show the card of a model."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ecinn.cli.app import Json, app, out, plain, print_json
from ecinn.errors import InputError

if TYPE_CHECKING:
    from ecinn.classifier.card import ModelCard


@app.command("models")
def models(
    model: Annotated[
        str | None, typer.Argument(help="A model's name or path, to show its card.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the card as Markdown.")
    ] = False,
    json_output: Json = False,
) -> None:
    """List the models that come with the package, or show the card of one."""
    from ecinn.classifier.card import card
    from ecinn.classifier.checkpoint import load_checkpoint

    if markdown and json_output:
        raise InputError("--markdown and --json exclude each other: leave one out")
    if model is None:
        if markdown:
            raise InputError("--markdown prints the card of a model: give its name or path")
        _list(json_output=json_output)
        return
    about = card(load_checkpoint(model), _size(model), model)
    if json_output:
        print_json(asdict(about))
    elif markdown:
        sys.stdout.write(about.markdown())
    else:
        _print_card(about)


def _size(model: str) -> int:
    """Return the size in bytes of the file that `load_checkpoint` reads."""
    from ecinn.classifier.checkpoint import MODEL_FILE, SHIPPED
    from ecinn.classifier.tensor_files import find_file

    return find_file(model, SHIPPED, "model", MODEL_FILE).stat().st_size


def _list(*, json_output: bool) -> None:
    from rich.table import Table

    from ecinn.classifier.checkpoint import load_checkpoint, shipped_models

    rows: list[dict[str, Any]] = []
    for name in shipped_models():
        checkpoint = load_checkpoint(name)
        rows.append(
            {
                "name": name,
                "data": checkpoint.recipe.dataset,
                "classes": list(checkpoint.class_names),
                "bytes": _size(name),
                "beta": checkpoint.recipe.beta,
                "metrics": dict(checkpoint.metrics),
            }
        )
    if json_output:
        print_json(rows)
        return
    columns = ("model", "data", "error", "bits/dim", "reached q", "size")
    table = Table(*columns, box=None, padding=(0, 1, 0, 0))  # fits 80 columns
    for column in table.columns[:2]:
        column.no_wrap = True  # to copy names
    forms = {"error": ".2%", "bits_per_dim": ".2f", "reached_q": ".2%"}
    for row in rows:
        figures = [
            f"{row['metrics'][key]:{form}}".replace("%", " %") if key in row["metrics"] else "–"
            for key, form in forms.items()
        ]
        size = f"{row['bytes'] / 2**20:.1f} MiB"
        table.add_row(f"[bold]{row['name']}[/]", row["data"], *figures, size)
    out.print(table)


def _print_card(about: "ModelCard") -> None:
    """Print the sections of `ModelCard.markdown` for a terminal."""
    from rich.table import Table

    from ecinn.classifier.card import Section

    out.print(f"[bold]{plain(about.name)}[/]\n{plain(about.summary)}")
    for section in about.sections:
        out.print(f"\n[bold]{plain(section.title)}[/]")
        if isinstance(section, Section):
            table = Table.grid(padding=(0, 1))
            rows: Sequence[Sequence[str]] = [("•", line) for line in section.sentences]
        else:
            table, rows = Table(*section.head, box=None), section.rows
        for row in rows:
            table.add_row(*map(plain, row))
        out.print(table)
        for line in section.code if isinstance(section, Section) else ():
            out.print(f"  {plain(line)}")
