"""`ecinn judges`: train the networks that assess counterfactuals."""

from pathlib import Path
from typing import Annotated

import typer

from ecinn.cli.app import Device, Json, app, out, plain, print_json
from ecinn.errors import InputError, InterruptedRunError


@app.command()
def judges(
    dataset: Annotated[str, typer.Argument(help="Like mnist or fakemnist.")],
    out_file: Annotated[Path, typer.Option("--out", help="The file to write.")],
    seed: Annotated[int, typer.Option(help="Use another one than for the models.")] = 100,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first training images.")
    ] = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Train judges of counterfactuals: two oracles, a feature network and autoencoders."""
    from rich.table import Table

    from ecinn.cli.progress import bars, load_images
    from ecinn.files import output_folder
    from ecinn.studies.judges import train_judges

    if out_file.is_dir():
        raise InputError(f"{out_file} is a folder: --out must name a file")
    data, test = load_images(dataset, "train").first(limit), load_images(dataset, "test")
    output_folder(out_file.parent)
    try:
        with bars() as observe:
            trained = train_judges(data, test, seed=seed, device=device, observe=observe)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted: nothing was written; start again") from None
    trained.save(out_file)
    if json_output:
        print_json({"file": str(out_file), **dict(trained.record)})
        return
    table = Table("judge", "on test images", box=None)
    for name, accuracy in trained.record["accuracy"].items():
        table.add_row(name, f"{100 * accuracy:.2f} % correct")
    for name, error in trained.record["reconstruction_error"].items():
        table.add_row(f"autoencoder {name}", f"squared error {error:.5f} per pixel")
    out.print(table)
    out.print(f"wrote {plain(str(out_file))}")
