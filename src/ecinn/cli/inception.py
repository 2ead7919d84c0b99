"""`ecinn inception`: train the network that the paper compares heatmaps with."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from ecinn.cli.app import Device, Json, app, device_name, err, out, plain, print_json
from ecinn.cli.progress import CelebA, load_images, training_bar
from ecinn.data.augmentation import Augmentation
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import atomic_write, output_folder
from ecinn.studies.inception.training import (
    InceptionSettings,
    Observe,
    save_inception,
    train_inception,
)
from ecinn.training.plain_networks import NetworkProgress

AUGMENTATION = Augmentation(shift=3.0, whole_pixels=True, flip=True)
"""As the INN of the faces; the paper does not say."""


@app.command()
def inception(
    dataset: Annotated[str, typer.Argument(help="Like celeba/Smiling.")],
    out_file: Annotated[Path, typer.Option("--out", help="The file to write.")],
    epochs: Annotated[int, typer.Option(min=1)] = 9,
    seed: Annotated[int, typer.Option(help="Of weights, order and augmentation.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many images of every split.")
    ] = None,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Train Inception-V3 on a label of CelebA by the paper's recipe; minutes on a GPU."""
    chosen = torch.device(device_name(device))
    record_file = out_file.with_suffix(".json")
    if out_file.is_dir() or record_file == out_file:
        raise InputError(f"--out names a file like smiling.safetensors, not {out_file}")
    if not dataset.startswith("celeba/"):
        raise InputError(
            f"Inception-V3 is trained on a label of CelebA, not on {dataset}: "
            "give celeba/Smiling or another attribute"
        )
    settings = InceptionSettings(dataset, epochs, seed=seed, augmentation=AUGMENTATION)
    train = load_images(dataset, "train", celeba).first(limit)
    validation = load_images(dataset, "validation", celeba).first(limit)
    test = load_images(dataset, "test", celeba).first(limit)
    output_folder(out_file.parent)
    try:
        with _bar() as observe:
            result = train_inception(train, test, settings, chosen, observe, validation=validation)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted: nothing was written; start again") from None
    save_inception(result, out_file)
    command = f"ecinn inception {dataset} --out FILE --epochs {epochs} --seed {seed}"
    record = {
        "command": command if limit is None else f"{command} --limit {limit}",
        "settings": asdict(settings),
        "errors": dict(result.errors),
        **result.record,
    }
    atomic_write(record_file, (json.dumps(record, indent=1) + "\n").encode())
    if json_output:
        print_json({"file": str(out_file), **record})
        return
    for name, error in result.errors.items():
        out.print(f"{100 * error:.2f} % wrong on {result.record['images'][name]:,} {name} images")
    seconds, rate = result.record["seconds"], result.record["images_per_second"]
    out.print(f"trained in {seconds:.0f} s, {rate:,} images/s, on {result.record['device']}")
    for path in (out_file, record_file):
        out.print(f"wrote {plain(str(path))}")


@contextmanager
def _bar() -> Iterator[Observe]:
    """Epoch, loss, error and speed under a bar."""
    with training_bar() as show:

        def observe(p: NetworkProgress) -> None:
            words = (
                f"epoch {p.epoch}/{p.epochs}  loss {p.loss:.3f}  error {100 * p.error:.2f} %  "
                f"{p.images_per_second:,.0f} images/s"
            )
            ended = p.step * p.epochs == p.epoch * p.steps
            show(words, p.step, p.steps, p.seconds_left if ended else None)
            if p.step == p.steps:
                err.print("measuring on validation and test images …")

        yield observe
