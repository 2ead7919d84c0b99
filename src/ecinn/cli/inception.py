"""`ecinn inception`: train the network of the paper's comparison of heatmaps."""

from pathlib import Path
from typing import Annotated

import typer

from ecinn.cli.app import Device, Json, app, out, plain, print_json
from ecinn.cli.progress import CelebA
from ecinn.errors import InputError, InterruptedRunError


@app.command()
def inception(
    dataset: Annotated[str, typer.Argument(help="Like celeba/Smiling.")],
    out_file: Annotated[Path, typer.Option("--out", help="The file to write.")],
    epochs: Annotated[int, typer.Option(min=1)] = 9,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and augmentation.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Use only the first images of every split.")
    ] = None,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Train Inception-V3 on an attribute of CelebA by the paper's recipe; minutes on a GPU."""
    import json
    from dataclasses import asdict

    from ecinn.cli.progress import bars, load_images
    from ecinn.data.augmentation import Augmentation
    from ecinn.files import atomic_write, output_folder
    from ecinn.studies.inception.training import InceptionSettings, train_inception

    record_file = out_file.with_suffix(".json")
    if out_file.is_dir() or record_file == out_file:
        raise InputError(f"--out must name a file like smiling.safetensors, not {out_file}")
    if not dataset.startswith("celeba/"):
        raise InputError(
            f"Inception-V3 is trained on an attribute of CelebA, not on {dataset}: "
            "give celeba/Smiling or another attribute"
        )
    # The augmentation of the INN of faces; the paper does not specify it.
    augmentation = Augmentation(shift=3.0, whole_pixels=True, flip=True)
    settings = InceptionSettings(dataset, epochs, seed=seed, augmentation=augmentation)
    data, validation, test = (
        load_images(dataset, split, celeba).first(limit)
        for split in ("train", "validation", "test")
    )
    output_folder(out_file.parent)
    try:
        with bars() as observe:
            result = train_inception(
                data, test, settings, validation=validation, device=device, observe=observe
            )
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted: nothing was written; start again") from None
    result.save(out_file)
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
