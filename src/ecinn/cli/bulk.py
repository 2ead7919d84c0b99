"""`ecinn bulk`: a whole dataset into Parquet files or WebDataset shards."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ecinn.cli.app import (
    AskClassifier,
    Check,
    Correct,
    Device,
    Json,
    RequestedConfidence,
    app,
    err,
    out,
    parse_confidence,
    plain,
    print_json,
)
from ecinn.cli.progress import bars


class Format(StrEnum):
    """Kinds of files that hold the rows."""

    PARQUET = "parquet"
    WEBDATASET = "webdataset"


class Engine(StrEnum):
    """Run in this process, or on a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


@app.command()
def bulk(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A folder of pictures, .tar shards or .parquet files; one of these; a .zip; "
            "or a .npy array.",
        ),
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the parts.")],
    model: Annotated[str, typer.Option(help="A model's name or path.")] = "mnist",
    target: Annotated[
        str, typer.Option(help="Classes to explain against, with commas, or all others.")
    ] = "all",
    column: Annotated[
        str | None,
        typer.Option(help="Column of Parquet that holds pictures.", show_default="image"),
    ] = None,
    confidence: RequestedConfidence = None,
    correct: Correct = False,
    check: Check = True,
    classifier: AskClassifier = True,
    tipping_point: Annotated[
        bool, typer.Option("--tipping-point", help="Also store tipping points as pictures.")
    ] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="Kind of the files that are written.")
    ] = Format.PARQUET,
    part_size: Annotated[
        int | None, typer.Option(min=1, help="Pictures of each part.", show_default="up to 1024")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="This process, or the workers of a Ray cluster.")
    ] = Engine.LOCAL,
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster.", show_default="a local one")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of Ray workers.", show_default="one per GPU or CPU"),
    ] = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Explain a whole dataset: a row for every picture and target; restart to continue."""
    from ecinn.bulk.run import explain_dataset

    with bars() as observe:
        summary = explain_dataset(
            source,
            out_dir,
            model=model,
            target=target,
            column=column,
            confidence=parse_confidence(confidence),
            check=check,
            correct=correct,
            classifier=classifier,
            tipping_point=tipping_point,
            format=format_.value,
            part_size=part_size,
            engine=engine.value,
            address=address,
            workers=workers,
            device=device,
            observe=observe,
            note=lambda sentence: err.print(plain(sentence)),
        )
    if json_output:
        print_json(asdict(summary) | {"out": str(out_dir)})
        return
    counts = f"{summary.rows:,} rows for {summary.pictures:,} pictures"
    if summary.continued:
        out.print(f"{summary.continued:,} of {summary.parts:,} parts were there already")
        out.print(f"All parts together: {counts} in {plain(str(out_dir))}")
    else:
        out.print(f"Wrote {counts} to {plain(str(out_dir))}")
    if summary.errors:
        out.print(f"Rows without a counterfactual: {summary.errors:,} (see the column error)")
