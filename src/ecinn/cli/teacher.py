"""`ecinn teacher`: train the networks that tell a flow what they see in augmented faces."""

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
from ecinn.data.celeba import ATTRIBUTES
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import atomic_write, output_folder
from ecinn.training.teacher_training import (
    Observe,
    TeacherProgress,
    TeacherSettings,
    save_teacher,
    train_teacher,
)

DATASET = "celeba/Smiling"
"""Whichever label: all attributes are learned."""
SHOWN = ("Smiling", "High_Cheekbones", "Wearing_Lipstick", "Heavy_Makeup")
"""The labels of the paper."""


@app.command()
def teacher(
    out_file: Annotated[Path, typer.Option("--out", help="The file to write.")],
    members: Annotated[int, typer.Option(min=1, help="Networks, each from its own seed.")] = 2,
    epochs: Annotated[int, typer.Option(min=1)] = 40,
    seed: Annotated[int, typer.Option(help="Of weights, order and augmentation.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many images of every split.")
    ] = None,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Train networks that read all forty attributes of CelebA; minutes on a GPU."""
    chosen = torch.device(device_name(device))
    record_file = out_file.with_suffix(".json")
    if out_file.is_dir() or record_file == out_file:
        raise InputError(f"--out names a file like teacher.safetensors, not {out_file}")
    settings = TeacherSettings(members=members, epochs=epochs, seed=seed)
    train = load_images(DATASET, "train", celeba).first(limit)
    validation = load_images(DATASET, "validation", celeba).first(limit)
    output_folder(out_file.parent)
    try:
        with _bar() as observe:
            result = train_teacher(train, settings, chosen, observe, validation)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted: nothing was written; start again") from None
    save_teacher(result, out_file)
    command = f"ecinn teacher --out FILE --members {members} --epochs {epochs} --seed {seed}"
    errors = {
        who: dict(zip(ATTRIBUTES, shares, strict=True))
        for who, shares in result.record["errors"].items()
    }
    record = {
        "command": command if limit is None else f"{command} --limit {limit}",
        "settings": asdict(settings),
        **result.record,
        "errors": errors,
    }
    atomic_write(record_file, (json.dumps(record, indent=1) + "\n").encode())
    if json_output:
        print_json({"file": str(out_file), **record})
        return
    out.print(f"wrong on {len(validation):,} validation images (one network alone):")
    for name in SHOWN:
        _print_error(name, errors["ensemble"][name], errors["single"][name])
    means = [sum(errors[who].values()) / len(ATTRIBUTES) for who in ("ensemble", "single")]
    _print_error(f"mean of {len(ATTRIBUTES)}", *means)
    seconds, rate = record["seconds"], record["images_per_second"]
    out.print(f"trained in {seconds:.0f} s, {rate:,} images/s, on {record['device']}")
    for path in (out_file, record_file):
        out.print(f"wrote {plain(str(path))}")


def _print_error(name: str, ensemble: float, single: float) -> None:
    out.print(f"  {name:<16} {100 * ensemble:5.2f} %  ({100 * single:.2f} %)")


@contextmanager
def _bar() -> Iterator[Observe]:
    """Network, epoch, loss, error and speed under a bar."""
    with training_bar() as show:

        def observe(teachers: TeacherProgress) -> None:
            p, member, members = teachers.network, teachers.member, teachers.members
            words = (
                f"network {member}/{members}  epoch {p.epoch}/{p.epochs}  "
                f"loss {p.loss:.3f}  error {100 * p.error:.2f} %  "
                f"{p.images_per_second:,.0f} images/s"
            )
            done = (member - 1) * p.steps + p.step
            ended = p.step * p.epochs == p.epoch * p.steps
            show(words, done, members * p.steps, teachers.seconds_left if ended else None)
            if done == members * p.steps:
                err.print("measuring on validation images …")

        yield observe
