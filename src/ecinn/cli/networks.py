"""`ecinn teacher`, `ecinn inception` and `ecinn judges`: train networks that are not flows."""

from collections.abc import Callable
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ecinn.cli.app import Device, Json, app, command_line, out, plain, print_json
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import output_folder, write_json
from ecinn.progress import Observer

FACES = "celeba/Smiling"
"""Dataset of teacher and judges; the attribute does not matter: they learn all of them."""
SHOWN = ("Smiling", "High_Cheekbones", "Wearing_Lipstick", "Heavy_Makeup")
"""The attributes of the paper."""


class Bits(StrEnum):
    """Bits per stored weight."""

    EIGHT = "8"
    SIXTEEN = "16"


OutFile = Annotated[Path, typer.Option("--out", help="The file to write.")]
Epochs = Annotated[int, typer.Option(min=1, help="Epochs of the network.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, order and augmentation.")]
Limit = Annotated[
    int | None, typer.Option(min=2, help="Use only the first N images of every split.")
]


@app.command()
def teacher(
    dataset: Annotated[str, typer.Argument(help="mnist, fakemnist or celeba.")],
    out_file: OutFile,
    members: Annotated[int | None, typer.Option(min=1, help="Number of networks.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of each network.")] = None,
    seed: Seed = 0,
    limit: Limit = None,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Train networks that predict classes, or CelebA's attributes, for distillation."""
    from ecinn.data.celeba import ATTRIBUTES
    from ecinn.training.teacher import default_settings, train_teacher

    _require_file(out_file, "teacher.safetensors")
    name = FACES if dataset == "celeba" else dataset
    data = load_images(name, "train", celeba).first(limit)
    held_out = load_images(name, "validation", celeba).first(limit)
    settings = default_settings(data)
    settings = replace(
        settings,
        members=members or settings.members,
        epochs=epochs or settings.epochs,
        seed=seed,
    )
    result = _train(
        out_file,
        lambda observe: train_teacher(data, held_out, settings, device=device, observe=observe),
    )
    outputs = ("classes",) if data.attributes is None else ATTRIBUTES
    errors = {
        kind: dict(zip(outputs, rates, strict=True))
        for kind, rates in result.record["errors"].items()
    }
    shown = outputs if data.attributes is None else SHOWN
    rows = [(output, errors["ensemble"][output], errors["single"][output]) for output in shown]
    if data.attributes is not None:
        means = [sum(errors[kind].values()) / len(outputs) for kind in ("ensemble", "single")]
        rows.append((f"mean of {len(outputs)}", means[0], means[1]))
    lines = [f"errors on {len(held_out):,} validation images (of a single network):"]
    lines += [f"  {row:<16} {100 * all_:5.2f} %  ({100 * one:.2f} %)" for row, all_, one in rows]
    numbers = {"members": settings.members, "epochs": settings.epochs, "seed": seed}
    command = command_line(f"teacher {dataset}", {"out": "FILE", **numbers, "limit": limit})
    record = {**result.record, "errors": errors}
    _report(out_file, command, result.settings, record, lines, json_output)


@app.command()
def inception(
    dataset: Annotated[str, typer.Argument(help="Like celeba/Smiling.")],
    out_file: OutFile,
    epochs: Epochs = 9,
    seed: Seed = 0,
    bits: Annotated[Bits, typer.Option(help="Bits per stored weight.")] = Bits.SIXTEEN,
    limit: Limit = None,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Train Inception-V3 on an attribute of CelebA by the paper's recipe; minutes on a GPU."""
    from ecinn.data.augmentation import Augmentation
    from ecinn.studies.inception.training import InceptionSettings, train_inception

    _require_file(out_file, "smiling.safetensors")
    if not dataset.startswith("celeba/"):
        raise InputError(
            f"Inception-V3 is trained on an attribute of CelebA, not on {dataset}: "
            "give celeba/Smiling or another attribute"
        )
    # The augmentation of the INN of faces; the paper does not specify it.
    augmentation = Augmentation(shift=3.0, whole_pixels=True, flip=True)
    settings = InceptionSettings(
        dataset, epochs, seed=seed, augmentation=augmentation, stored_bits=int(bits)
    )
    data, validation, test = (
        load_images(dataset, split, celeba).first(limit)
        for split in ("train", "validation", "test")
    )
    held_out = {"test": test, "validation": validation}
    result = _train(
        out_file,
        lambda observe: train_inception(data, held_out, settings, device=device, observe=observe),
    )
    lines = [
        f"{100 * error:.2f} % wrong on {len(held_out[name]):,} {name} images"
        for name, error in result.errors.items()
    ]
    numbers = {"epochs": epochs, "seed": seed, "bits": bits, "limit": limit}
    command = command_line(f"inception {dataset}", {"out": "FILE", **numbers})
    record = {"errors": dict(result.errors), **result.record}
    _report(out_file, command, settings, record, lines, json_output)


@app.command()
def judges(
    dataset: Annotated[str, typer.Argument(help="mnist, fakemnist or celeba.")],
    out_file: OutFile,
    seed: Annotated[int, typer.Option(help="Use another one than for the models.")] = 100,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N training images.")
    ] = None,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Train judges of counterfactuals: two networks, for digits also features and autoencoders."""
    from rich.table import Table

    if out_file.is_dir():
        raise InputError(f"{out_file} is a folder: --out must name a file")
    faces = dataset == "celeba"
    train = _face_judges(celeba, seed, limit) if faces else _digit_judges(dataset, seed, limit)
    record = _train(out_file, lambda observe: train(device=device, observe=observe)).record
    if json_output:
        print_json({"file": str(out_file), **record})
        return
    table = Table("judge", "on test images", box=None)
    if faces:
        for family, errors in record["errors"]["test"].items():
            for name in SHOWN:
                table.add_row(f"{family}, {name}", f"{100 * (1 - errors[name]):.2f} % correct")
    else:
        for name, accuracy in record["accuracy"].items():
            table.add_row(name, f"{100 * accuracy:.2f} % correct")
        for name, error in record["reconstruction_error"].items():
            table.add_row(f"autoencoder {name}", f"squared error {error:.5f} per pixel")
    out.print(table)
    out.print(f"wrote {plain(str(out_file))}")


def _digit_judges(dataset: str, seed: int, limit: int | None) -> Callable[..., Any]:
    """Load the images, and return the training of their judges."""
    from ecinn.studies.judges import train_judges

    data, test = load_images(dataset, "train").first(limit), load_images(dataset, "test")
    return partial(train_judges, data, test, seed=seed)


def _face_judges(celeba: Path | None, seed: int, limit: int | None) -> Callable[..., Any]:
    """Load all splits of the faces, and return the training of their judges."""
    from ecinn.studies.face_judges import FaceJudgeSettings, train_face_judges

    data = load_images(FACES, "train", celeba).first(limit)
    validation, test = load_images(FACES, "validation", celeba), load_images(FACES, "test", celeba)
    held_out = {"validation": validation, "test": test}
    settings = FaceJudgeSettings()
    settings = replace(settings, training=replace(settings.training, seed=seed))
    return partial(train_face_judges, data, held_out, settings)


def _require_file(out_file: Path, example: str) -> None:
    if out_file.is_dir() or out_file.suffix == ".json":
        raise InputError(f"--out must name a file like {example}, not {out_file}")


def _train(out_file: Path, train: Callable[[Observer], Any]) -> Any:  # noqa: ANN401
    """Train with progress bars, and save the result."""
    output_folder(out_file.parent)
    try:
        with bars() as observe:
            result = train(observe)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted: nothing was written; start again") from None
    result.save(out_file)
    return result


def _report(
    out_file: Path,
    command: str,
    settings: Any,  # noqa: ANN401
    record: dict[str, Any],
    lines: list[str],
    json_output: bool,
) -> None:
    """Write the training record as JSON, and print it or these lines."""
    record = {"command": command, "settings": asdict(settings), **record}
    record_file = out_file.with_suffix(".json")
    write_json(record_file, record)
    if json_output:
        print_json({"file": str(out_file), **record})
        return
    speed = f"{record['seconds']:.0f} s, {record['images_per_second']:,} images/s"
    for line in (*lines, f"trained in {speed}, on {record['device']}"):
        out.print(line)
    for path in (out_file, record_file):
        out.print(f"wrote {plain(str(path))}")
