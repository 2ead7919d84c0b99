"""`ecinn evaluate`: measure a model on its test images."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from ecinn.cli.app import Device, Json, app, out, print_json
from ecinn.cli.progress import CelebA

SHARES = ("error", "reached_q", "reached_q_corrected", "tipping_third_class", "typical")
"""Metrics to print in per cent."""


class SplitName(StrEnum):
    """The images to measure on."""

    TEST = "test"
    VALIDATION = "validation"
    TRAIN = "train"


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model's name or path.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first images.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the random targets.")] = 0,
    split: Annotated[SplitName, typer.Option(help="The images to use.")] = SplitName.TEST,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Measure a model on its test images: error, bits/dim, reached targets, exact inverse."""
    import dataclasses

    from ecinn.cli.progress import bars, load_images
    from ecinn.flow.device import resolve_device
    from ecinn.model import load
    from ecinn.training.evaluation import evaluate as evaluate_model

    loaded = load(model, resolve_device(device))
    data = load_images(loaded.checkpoint.recipe, split.value, celeba).first(limit)
    with bars() as observe:
        metrics = dataclasses.asdict(evaluate_model(loaded, data, seed=seed, observe=observe))
    if json_output:
        print_json(metrics)
    else:
        print_evaluation(metrics)


def print_evaluation(metrics: Mapping[str, Any]) -> None:
    """Print the metrics of an evaluation as a table."""
    from rich.table import Table

    table = Table("measure", "value", box=None)
    for name, value in metrics.items():
        if name in SHARES:
            shown = f"{100 * value:.2f} %"
        elif name.startswith("bits_per_dim"):
            shown = f"{value:.3f}"
        elif name == "passes_corrected":
            shown = f"{value:.6g}"
        elif name == "round_trip_error":
            shown = f"{value:.1e}"
        else:
            shown = str(value)
        table.add_row(name.replace("_", " "), shown)
    out.print(table)
