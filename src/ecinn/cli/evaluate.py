"""`ecinn evaluate`: measure a model on its test images."""

import dataclasses
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from ecinn.cli.app import Device, Json, app, device_name, err, out, print_json
from ecinn.cli.progress import CelebA, load_images
from ecinn.model import load
from ecinn.training.evaluation import evaluate as evaluate_model


class SplitName(StrEnum):
    """The images to measure on."""

    TEST = "test"
    VALIDATION = "validation"
    TRAIN = "train"


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model's name or path.")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many images.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the random targets.")] = 0,
    split: Annotated[SplitName, typer.Option(help="Which images.")] = SplitName.TEST,
    celeba: CelebA = None,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Measure a model on its test images: error, bits/dim, reached targets, exact inverse."""
    loaded = load(model, device_name(device))
    data = load_images(loaded.checkpoint.recipe.dataset, split.value, celeba).first(limit)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("evaluating", total=len(data))
        result = evaluate_model(
            loaded, data, seed=seed, observe=lambda done: bar.update(task, completed=done)
        )
    if json_output:
        print_json(dataclasses.asdict(result))
    else:
        print_evaluation(dataclasses.asdict(result))


def print_evaluation(metrics: Any) -> None:  # noqa: ANN401
    """The figures of an evaluation as a table."""
    table = Table("measure", "value", box=None)
    for name, value in metrics.items():
        share = name in (
            "error",
            "reached_q",
            "reached_q_corrected",
            "tipping_third_class",
            "typical",
        )
        shown = f"{100 * value:.2f} %" if share else value
        if name.startswith("bits_per_dim"):
            shown = f"{value:.3f}"
        if name == "passes_corrected":
            shown = f"{value:.6g}"
        if name == "round_trip_error":
            shown = f"{value:.1e}"
        table.add_row(name.replace("_", " "), str(shown))
    out.print(table)
