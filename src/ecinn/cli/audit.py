"""`ecinn audit`: write a page about what a model looks at."""

from pathlib import Path
from typing import Annotated

import typer

from ecinn.cli.app import (
    Device,
    Json,
    OwnSource,
    RequestedConfidence,
    app,
    command_line,
    out,
    parse_confidence,
    plain,
    print_json,
)
from ecinn.cli.evaluate import SplitName
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder


@app.command()
def audit(
    model: Annotated[str, typer.Argument(help="A model's name or path.")],
    others: Annotated[
        list[str] | None,
        typer.Option("--with", help="Another model to compare with; repeatable."),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=2, help="Number of random images.")] = 500,
    confidence: RequestedConfidence = None,
    seed: Annotated[int, typer.Option(help="Seed of the images and their targets.")] = 0,
    split: Annotated[SplitName, typer.Option(help="Split of the dataset.")] = SplitName.TEST,
    celeba: CelebA = None,
    source: OwnSource = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="The HTML file.", show_default="MODEL-audit.html"),
    ] = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Show what a model looks at and where it errs, over many images."""
    from ecinn.auditing import audit as audit_model
    from ecinn.classifier.checkpoint import model_name
    from ecinn.model import load

    requested = parse_confidence(confidence)
    loaded = load(model, device)
    compared = {model_name(other): load(other, device) for other in others or ()}
    if len(compared) < len(others or ()):
        raise InputError("two of the models to compare with have the same name: rename a file")
    page = out_file or Path(f"{model_name(model)}-audit.html")
    if page.is_dir():
        raise InputError(f"{page} is a folder: give --out the name of a file")
    data = load_images(loaded.recipe, split.value, celeba, model=model, source=source)
    output_folder(page.parent)
    with bars() as observe:
        result = audit_model(
            loaded,
            data,
            others=compared,
            n=n,
            confidence=requested,
            seed=seed,
            split=split.value,
            observe=observe,
        )
    faces = "DIR" if loaded.recipe.dataset.startswith("celeba/") else None
    options = {"with": [*compared], "split": split, "n": n, "seed": seed}
    options |= {"confidence": confidence, "celeba": faces}
    command = command_line(f"audit {model_name(model)}", options)
    atomic_write(page, result.html(command).encode())
    if json_output:
        print_json(result.to_dict() | {"file": str(page)})
        return
    for caution in result.cautions:
        out.print(f"[bold]Caution:[/] {plain(caution)}")
    out.print(f"wrote {plain(str(page))}")
