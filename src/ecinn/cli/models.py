"""`ecinn models`: what ships, and the card of a model."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ecinn.classifier.card import ModelCard, card
from ecinn.classifier.checkpoint import MODEL_FILE, SHIPPED, load_checkpoint, shipped_models
from ecinn.cli.app import Json, app, out, plain, print_json
from ecinn.errors import InputError


@app.command("models")
def models(
    model: Annotated[
        str | None, typer.Argument(help="A model's name or path, for its card.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the card as Markdown.")
    ] = False,
    json_output: Json = False,
) -> None:
    """List the models that come with the package, or show all that is known of one."""
    if markdown and json_output:
        raise InputError("--markdown and --json are two ways to print a card: leave one out")
    if model is None:
        if markdown:
            raise InputError("--markdown prints the card of a model: name one")
        _list(json_output=json_output)
        return
    about = card(load_checkpoint(model), _file(model).stat().st_size, model)
    if json_output:
        print_json(dataclasses.asdict(about))
    elif markdown:
        sys.stdout.write(about.markdown())
    else:
        _print_card(about)


def _file(model: str) -> Path:
    """The file that `load_checkpoint` read."""
    if model in shipped_models():
        return SHIPPED / f"{model}.safetensors"
    path = Path(model)
    return path / MODEL_FILE if path.is_dir() else path


def _list(*, json_output: bool) -> None:
    rows = []
    for name in shipped_models():
        checkpoint = load_checkpoint(name)
        rows.append(
            {
                "name": name,
                "data": checkpoint.recipe.dataset,
                "classes": list(checkpoint.class_names),
                "bytes": _file(name).stat().st_size,
                "beta": checkpoint.recipe.beta,
                "metrics": dict(checkpoint.metrics),
            }
        )
    if json_output:
        print_json(rows)
        return
    columns = ("model", "data", "error", "bits/dim", "reached q", "size")
    table = Table(*columns, box=None, padding=(0, 1, 0, 0))  # fits into 80 columns
    for column in table.columns[:2]:
        column.no_wrap = True  # what people type next
    for row in rows:
        metrics: Any = row["metrics"]
        table.add_row(
            f"[bold]{row['name']}[/]",
            str(row["data"]),
            f"{100 * metrics['error']:.2f} %" if "error" in metrics else "–",
            f"{metrics['bits_per_dim']:.2f}" if "bits_per_dim" in metrics else "–",
            f"{100 * metrics['reached_q']:.2f} %" if "reached_q" in metrics else "–",
            f"{int(row['bytes']) / 2**20:.1f} MiB",  # type: ignore[call-overload]
        )
    out.print(table)


def _print_card(about: ModelCard) -> None:
    """The sections of `ModelCard.markdown` as a terminal shows them."""
    out.print(f"[bold]{plain(about.name)}[/]\n{plain(about.summary)}")
    for section in about.sections:
        out.print(f"\n[bold]{plain(section.title)}[/]")
        sentences = Table.grid(padding=(0, 1))
        for sentence in section.sentences:
            sentences.add_row("•", plain(sentence))
        if section.sentences:
            out.print(sentences)
        if section.table:
            header, *rows = section.table
            table = Table(*header, box=None)
            for row in rows:
                table.add_row(*map(plain, row))
            out.print(table)
        for line in section.code:
            out.print(f"  {plain(line)}")
