"""`ecinn audit`: what a model looks at, as a page to read."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from ecinn.auditing.cautions import find_cautions
from ecinn.auditing.measurement import Audit, Flips, Reading
from ecinn.auditing.measurement import audit as audit_model
from ecinn.auditing.page import report
from ecinn.cli.app import Device, Json, app, device_name, out, plain, print_json
from ecinn.cli.evaluate import SplitName
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder
from ecinn.metrics.statistics import Interval
from ecinn.model import load


@app.command()
def audit(
    model: Annotated[str, typer.Argument(help="A model's name or path.")],
    others: Annotated[
        list[str] | None,
        typer.Option("--with", help="A model to compare with; may be given several times."),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=2, help="How many random images.")] = 500,
    seed: Annotated[int, typer.Option(help="Draws the images and their targets.")] = 0,
    split: Annotated[SplitName, typer.Option(help="Which images.")] = SplitName.TEST,
    celeba: CelebA = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="The page; by default MODEL-audit.html.")
    ] = None,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Show what a model looks at over many images, where it errs, and beside other models."""
    chosen = device_name(device)
    loaded = load(model, chosen)
    compared = {_name(other): load(other, chosen) for other in others or ()}
    if len(compared) < len(others or ()):
        raise InputError("two of the models to compare with are called the same: rename a file")
    page = out_file or Path(f"{_name(model)}-audit.html")
    if page.is_dir():
        raise InputError(f"{page} is a folder: give a file's name to --out")
    data = load_images(loaded.checkpoint.recipe.dataset, split.value, celeba)
    output_folder(page.parent)
    with bars() as observe:
        result = audit_model(
            loaded, data, others=compared, n=n, seed=seed, split=split.value, observe=observe
        )
    compared_with = "".join(f" --with {name}" for name in compared)
    faces = " --celeba DIR" if loaded.checkpoint.recipe.dataset.startswith("celeba/") else ""
    command = (
        f"ecinn audit {_name(model)}{compared_with} --split {split.value} --n {n} --seed {seed}"
    )
    atomic_write(page, report(result, command + faces).encode())
    if json_output:
        print_json(numbers(result) | {"file": str(page)})
        return
    for caution in find_cautions(result):
        out.print(f"[bold]Take care:[/] {plain(caution)}")
    out.print(f"wrote {plain(str(page))}")


def numbers(result: Audit) -> dict[str, Any]:
    """All that was measured but the pictures."""
    measured: dict[str, Any] = _without_pictures(result)
    grid, cautions = result.grid.tolist(), list(find_cautions(result))
    return measured | {"n": len(result.images), "grid": grid, "cautions": cautions}


def _without_pictures(value: Any) -> Any:  # noqa: ANN401
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        left_out = (Tensor, Flips, Reading)
        kept = {name: each for name, each in fields.items() if not isinstance(each, left_out)}
        return {name: _without_pictures(each) for name, each in kept.items()}
    if isinstance(value, Interval):
        return dataclasses.asdict(value)
    return [_without_pictures(each) for each in value] if isinstance(value, tuple) else value


def _name(model: str) -> str:
    """A shipped model's name, or what its file is called, or its folder."""
    path = Path(model)
    return path.parent.name if path.name == "model.safetensors" else path.name.split(".")[0]
