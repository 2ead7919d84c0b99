"""`ecinn benchmark rounding`: what storing the weights with few bits costs, estimated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ecinn.cli.app import Device, Json, device_name, print_json
from ecinn.cli.benchmark import RESULTS, Out, benchmark, print_tables, say_written
from ecinn.cli.evaluate import SplitName
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import output_folder
from ecinn.model import Model, load
from ecinn.studies.benchmark import tables
from ecinn.studies.benchmark.record import jsonable, provenance, write_json, write_text
from ecinn.studies.benchmark.rounding import (
    RoundingCost,
    measure_rounding,
    require_rounded,
    rounding_tables,
    rounds_to,
)


@benchmark.command("rounding")
def rounding_benchmark(
    models: Annotated[
        list[str], typer.Option("--model", help="A model's name or path; may be given again.")
    ],
    split: Annotated[SplitName, typer.Option(help="Which images.")] = SplitName.TEST,
    draws: Annotated[int, typer.Option(min=2, help="How many further errors are drawn.")] = 5,
    unrounded: Annotated[
        list[str] | None,
        typer.Option(
            "--unrounded",
            help="What one of the models was before it was rounded; may be given again.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many images.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the errors.")] = 0,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Estimate what rounding the weights costs: round them once more and see what that does."""
    chosen = device_name(device)
    loaded: dict[str, Model] = {}
    for name in models:
        model = load(name, chosen)
        require_rounded(model)
        label = model.checkpoint.recipe.name
        if label in loaded:
            raise InputError(f"{label} is given twice: measure one at a time")
        loaded[label] = model
    before = _unrounded(unrounded or [], loaded, chosen)
    folder = output_folder(out_dir)
    command = " ".join(
        [
            "ecinn benchmark rounding",
            *(f"--model {name}" for name in models),
            f"--split {split.value} --draws {draws} --seed {seed}",
            *(["--unrounded FILE"] * len(before)),
            *([] if limit is None else [f"--limit {limit}"]),
            *(["--celeba DIR"] if any(_of_faces(model) for model in loaded.values()) else []),
        ]
    )
    stem = "rounding" if split is SplitName.TEST else f"rounding-{split.value}"
    results: dict[str, RoundingCost] = {}
    record: dict[str, Any] = {}
    for label, model in loaded.items():
        images = load_images(model.checkpoint.recipe.dataset, split.value, celeba)
        with bars() as observe:
            results[label] = measure_rounding(
                model,
                images.first(limit),
                draws=draws,
                seed=seed,
                unrounded=before.get(label),
                observe=observe,
            )
        record[label] = provenance(command, model)
        # After every model, so that an interrupted run leaves what it measured.
        laid_out = rounding_tables(results, split.value)
        write_json(folder / f"{stem}.json", {"record": record, "results": jsonable(results)})
        page = tables.document("What rounding the weights costs", laid_out, _all_of(record))
        write_text(folder / f"{stem}.md", page)
    if json_output:
        print_json({"record": record, "results": jsonable(results)})
    else:
        print_tables(rounding_tables(results, split.value))
        say_written(folder / f"{stem}.md", folder / f"{stem}.json")


def _of_faces(model: Model) -> bool:
    return model.checkpoint.recipe.dataset.startswith("celeba/")


def _unrounded(files: list[str], models: Mapping[str, Model], device: str) -> dict[str, Model]:
    """Each with the name of the model that it becomes when it is rounded."""
    found: dict[str, Model] = {}
    for file in files:
        model = load(file, device)
        bits = model.checkpoint.recipe.stored_bits
        if bits != 32:
            raise InputError(
                f"{Path(file).name} is itself stored with {bits} bits: --unrounded is what "
                "`ecinn train` leaves as unrounded.safetensors"
            )
        labels = [label for label, rounded in models.items() if rounds_to(model, rounded)]
        if not labels:
            raise InputError(
                f"{Path(file).name} is not what {' or '.join(models)} was rounded from: "
                "give the unrounded.safetensors of the same run"
            )
        found[labels[0]] = model
    return found


def _all_of(record: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One record that names all models."""
    one = next(iter(record.values()))
    sums = "…, ".join(each["model_sha256"] for each in record.values())
    return {**one, "model": ", ".join(record), "model_sha256": sums}
