"""`ecinn export`: a model for other runtimes."""

from pathlib import Path
from typing import Annotated

import typer

from ecinn.cli.app import Json, app, out, plain, print_json
from ecinn.errors import InputError


@app.command("export")
def export(
    model: Annotated[str, typer.Argument(help="A model's name or path.")],
    onnx: Annotated[
        Path | None, typer.Option("--onnx", metavar="DIR", help="New folder for the ONNX files.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Write a model for other runtimes: encode, decode and explain as ONNX files."""
    if onnx is None:
        raise InputError("give the folder to write to: --onnx DIR")
    from ecinn.export.onnx_files import DESCRIPTION, export_onnx
    from ecinn.model import load

    loaded = load(model, "cpu")
    student = loaded.student is not loaded
    files = export_onnx(loaded, onnx)
    rows = [
        {"file": f"{name}.onnx", "bytes": len(file.content), "difference": file.difference}
        for name, file in files.items()
    ]
    if json_output:
        print_json({"folder": str(onnx), "description": DESCRIPTION, "files": rows})
        return
    for row, file in zip(rows, files.values(), strict=True):
        size = f"{len(file.content) / 2**20:.1f} MiB"
        out.print(f"{row['file']}: {size}, at most {file.difference:.0e} from torch")
    out.print(f"Written to {plain(str(onnx))}, with {DESCRIPTION}")
    if student:
        out.print("Only the student is exported: its classifier is not asked in other runtimes.")
