"""`ecinn evaluate`: measure a model on images it was not trained on."""

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ecinn.cli.app import Device, Json, OwnSource, app, out, plain, print_json
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import atomic_write

if TYPE_CHECKING:
    from ecinn.data.dataset import Dataset
    from ecinn.model import Model

SHARES = (
    "error", "calibration_error", "calibration_error_by_chance", "reached_q",
    "reached_q_corrected", "tipping_third_class", "typical",
)  # fmt: skip
"""Metrics to print in per cent."""


class SplitName(StrEnum):
    """The images to measure on."""

    TEST = "test"
    VALIDATION = "validation"
    TRAIN = "train"


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model's name or path.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N images.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the random targets.")] = 0,
    split: Annotated[SplitName, typer.Option(help="The images to use.")] = SplitName.TEST,
    reliability: Annotated[
        Path | None, typer.Option(help="Draw accuracy against confidence into this PNG file.")
    ] = None,
    celeba: CelebA = None,
    source: OwnSource = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Measure a model: error, calibration, bits/dim, reached targets, exact inverse."""
    from ecinn.flow.device import resolve_device
    from ecinn.model import load
    from ecinn.training.evaluation import evaluate as evaluate_model

    if reliability is not None and reliability.suffix.lower() != ".png":
        raise InputError(f"--reliability must name a .png file, not {reliability}")
    loaded = load(model, resolve_device(device))
    images = load_images(loaded.recipe, split.value, celeba, model=model, source=source)
    data = images.first(limit)
    if reliability is not None:
        atomic_write(reliability, reliability_png(loaded, data, split.value, seed))
    with bars() as observe:
        metrics = asdict(evaluate_model(loaded, data, seed=seed, observe=observe))
    metrics["split"] = split.value
    if json_output:
        print_json(metrics)
        return
    print_evaluation(metrics)
    if reliability is not None:
        out.print(f"wrote {plain(str(reliability))}")


def reliability_png(model: "Model", data: "Dataset", split: str, seed: int) -> bytes:
    """Draw the accuracy of a model's predictions against their confidence."""
    import torch

    from ecinn.drawing.reliability import ReliabilityPoint, reliability_plot
    from ecinn.metrics import calibration

    posterior = torch.cat([model.predict(part).cpu() for part in data.images.split(500)])
    confidence, predicted = posterior.max(1)
    correct = predicted == data.labels
    points = [
        ReliabilityPoint(*bin.edges, bin.confidence, rate.mean, rate.low, rate.high, rate.n)
        for bin in calibration.reliability_curve(confidence, correct)
        for rate in [bin.accuracy]
    ]
    error = calibration.calibration_error(confidence, correct)
    chance = calibration.calibration_error_by_chance(
        confidence, generator=torch.Generator().manual_seed(seed)
    )
    note = (
        f"expected calibration error {100 * error:.2f} % "
        f"(perfectly calibrated: {100 * chance.mean:.2f} %)"
    )
    return reliability_plot(points, f"{model.name}, {len(data):,} {split} images", note)


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
