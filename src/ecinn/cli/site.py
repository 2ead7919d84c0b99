"""`ecinn site`: the page as static files, without a server."""

from pathlib import Path
from typing import Annotated

import typer

from ecinn.cli.app import Json, app, out, plain, print_json


@app.command()
def site(
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write, or to write again.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model of digits or dots; repeatable.", show_default="the shipped ones"
        ),
    ] = None,
    ort: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Unpacked onnxruntime-web; by default npm fetches it once."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of the site, for link previews elsewhere."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Write the page as static files that run the network in the visitor's browser."""
    from ecinn.web.site import MODELS, build_site

    files = build_site(folder, model or MODELS, ort=ort, url=url)
    if json_output:
        print_json({"folder": str(folder), "files": files})
        return
    size = f"{sum(files.values()) / 1e6:.0f} MB"
    out.print(f"Written to {plain(str(folder))}: {len(files)} files, {size}")
    out.print(f"Try it: python -m http.server --directory {plain(str(folder))}")
