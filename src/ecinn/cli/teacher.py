"""`ecinn teacher`: train the networks that teach the models of faces."""

from pathlib import Path
from typing import Annotated

import typer

from ecinn.cli.app import Device, Json, app, out, plain, print_json
from ecinn.cli.progress import CelebA
from ecinn.errors import InputError, InterruptedRunError

DATASET = "celeba/Smiling"
"""The attribute does not matter: all of them are learned."""
SHOWN = ("Smiling", "High_Cheekbones", "Wearing_Lipstick", "Heavy_Makeup")
"""The attributes of the paper."""


@app.command()
def teacher(
    out_file: Annotated[Path, typer.Option("--out", help="The file to write.")],
    members: Annotated[int, typer.Option(min=1, help="Number of networks.")] = 2,
    epochs: Annotated[int, typer.Option(min=1)] = 40,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and augmentation.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Use only the first images of every split.")
    ] = None,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Train networks that predict all forty attributes of CelebA; minutes on a GPU."""
    import json
    from dataclasses import asdict

    from ecinn.cli.progress import bars, load_images
    from ecinn.data.celeba import ATTRIBUTES
    from ecinn.files import atomic_write, output_folder
    from ecinn.training.teacher import TeacherSettings, train_teacher

    record_file = out_file.with_suffix(".json")
    if out_file.is_dir() or record_file == out_file:
        raise InputError(f"--out must name a file like teacher.safetensors, not {out_file}")
    settings = TeacherSettings(members=members, epochs=epochs, seed=seed)
    data = load_images(DATASET, "train", celeba).first(limit)
    validation = load_images(DATASET, "validation", celeba).first(limit)
    output_folder(out_file.parent)
    try:
        with bars() as observe:
            result = train_teacher(data, validation, settings, device=device, observe=observe)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted: nothing was written; start again") from None
    result.save(out_file)
    command = f"ecinn teacher --out FILE --members {members} --epochs {epochs} --seed {seed}"
    errors = {
        name: dict(zip(ATTRIBUTES, rates, strict=True))
        for name, rates in result.record["errors"].items()
    }
    record = {
        "command": command if limit is None else f"{command} --limit {limit}",
        "settings": asdict(result.settings),
        **result.record,
        "errors": errors,
    }
    atomic_write(record_file, (json.dumps(record, indent=1) + "\n").encode())
    if json_output:
        print_json({"file": str(out_file), **record})
        return
    out.print(f"errors on {len(validation):,} validation images (of a single network):")
    means = {name: sum(rates.values()) / len(rates) for name, rates in errors.items()}
    for label, ensemble, single in (
        *((name, errors["ensemble"][name], errors["single"][name]) for name in SHOWN),
        (f"mean of {len(ATTRIBUTES)}", means["ensemble"], means["single"]),
    ):
        out.print(f"  {label:<16} {100 * ensemble:5.2f} %  ({100 * single:.2f} %)")
    seconds, rate = record["seconds"], record["images_per_second"]
    out.print(f"trained in {seconds:.0f} s, {rate:,} images/s, on {record['device']}")
    for path in (out_file, record_file):
        out.print(f"wrote {plain(str(path))}")
