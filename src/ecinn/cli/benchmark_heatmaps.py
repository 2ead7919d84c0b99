"""`ecinn benchmark heatmaps`: ECINNh beside the methods that people explain networks with."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ecinn.attribution.heatmaps import METHODS
from ecinn.cli.app import Device, Json, device_name, print_json
from ecinn.cli.benchmark import (
    RESULTS,
    ModelName,
    Out,
    Seed,
    benchmark,
    print_tables,
    say_written,
)
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.drawing.pictures import webp_bytes
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder
from ecinn.model import load
from ecinn.studies.benchmark import tables
from ecinn.studies.benchmark.heatmap_results import HeatmapBenchmark
from ecinn.studies.benchmark.heatmap_tables import heatmap_tables, sheet
from ecinn.studies.benchmark.heatmaps import measure_heatmaps, require_methods
from ecinn.studies.benchmark.record import jsonable, provenance, write_json, write_text
from ecinn.studies.inception.training import load_inception


class BaselineName(StrEnum):
    """What Integrated Gradients and DeepLift compare with."""

    MEAN = "mean"
    BLACK = "black"


@benchmark.command("heatmaps")
def heatmaps_benchmark(
    model: ModelName = "celeba-smile",
    cnn: Annotated[
        Path | None, typer.Option(help="A file of `ecinn inception`, explained besides.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Names with commas between; ecinn is always measured.")
    ] = ",".join(METHODS),
    n: Annotated[int, typer.Option("--n", help="Random test images.")] = 500,
    seed: Seed = 0,
    baseline: Annotated[
        BaselineName,
        typer.Option(
            help="What Integrated Gradients and DeepLift compare with: the mean of some training "
            "images, or black, which handicaps them."
        ),
    ] = BaselineName.MEAN,
    batch_size: Annotated[
        int | None,
        typer.Option(min=2, help="Images at once with gradients; 100 take 10 GB on a GPU."),
    ] = None,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Measure heatmaps: pixels replaced, where they point, noise, stability, cost."""
    asked = require_methods([name.strip() for name in methods.split(",") if name.strip()])
    explainer = load(model, device_name(device))
    network = None if cnn is None else load_inception(cnn, explainer.device, explainer.class_names)
    dataset = explainer.checkpoint.recipe.dataset
    data, training = (load_images(dataset, split, celeba) for split in ("test", "train"))
    if not 2 <= n <= len(data):
        raise InputError(f"--n lies between 2 and the {len(data)} test images, not at {n}")
    folder = output_folder(out_dir)
    command = f"ecinn benchmark heatmaps --model {model} --methods {','.join(asked)}"
    command += f" --n {n} --seed {seed} --baseline {baseline.value}" + (
        "" if network is None else " --cnn FILE"
    )
    record = provenance(command, explainer)
    record["baseline"] = baseline.value
    if network is not None:
        record["cnn"] = {"errors": dict(network.errors), **network.record}
    stem = f"heatmaps-{explainer.checkpoint.recipe.name}"
    paths = [folder / f"{stem}{end}" for end in (".md", ".json", ".webp")]

    def keep(so_far: HeatmapBenchmark, *, complete: bool = False) -> None:
        write_json(paths[1], {"record": record, "complete": complete, **jsonable(so_far)})

    with bars() as observe:
        result, shown = measure_heatmaps(
            explainer,
            data,
            training,
            cnn=None if network is None else network.classifier,
            methods=asked,
            n=n,
            seed=seed,
            batch_size=batch_size,
            baseline=baseline.value,
            observe=observe,
            keep=keep,
        )
    keep(result, complete=True)
    laid_out = heatmap_tables(result)
    page = tables.document(f"Heatmaps side by side: {model}", laid_out, record)
    write_text(paths[0], f"{page}\n![images]({stem}.webp)\n")
    atomic_write(paths[2], webp_bytes(sheet(result, shown, explainer.class_names)))
    if json_output:
        print_json(jsonable({"record": record, **jsonable(result)}))
        return
    print_tables([_for_terminal(table) for table in laid_out])
    say_written(*paths)


def _for_terminal(table: tables.Table) -> tables.Table:
    """Cells without Markdown's signs."""
    rows = tuple(
        tuple(cell.replace("**", "").replace("\\|", "|") for cell in row) for row in table.rows
    )
    return replace(table, rows=rows)
