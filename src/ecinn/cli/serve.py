"""`ecinn serve`: the page and the API."""

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from ecinn.cli.app import app, err, out, plain
from ecinn.cli.progress import CelebA, load_images
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError

TOKEN = "ECINN_TOKEN"


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model's name or path, repeatable; by default all that ship."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    celeba: CelebA = None,
) -> None:
    """Serve a page where people explore counterfactuals, and an API; Ctrl-C ends it.

    With the environment variable ECINN_TOKEN set, the API asks for it as a bearer token.
    """
    try:
        from ecinn.web.app import create_app
        from ecinn.web.catalogue import DEFAULT_MODELS, load_catalogue
        from ecinn.web.server import LOOPBACK, is_loopback, listen, run
        from ecinn.web.settings import Settings
    except ImportError as error:
        raise InputError(f"serving needs: pip install 'ecinn[serve]' ({error})") from None
    token = os.environ.get(TOKEN) or None
    local = is_loopback(host)
    listening = listen(host, port)
    # One core per thread of our own: threads inside of an operation would wait for each other.
    torch.set_num_threads(1)

    def read(dataset: str, folder: Path | None) -> Dataset:
        return load_images(dataset, "test", folder)

    catalogue = load_catalogue(model or DEFAULT_MODELS, celeba, read=read)
    if not local and token is None:
        err.print(f"[yellow]anybody who reaches {plain(host)} can use it: set {TOKEN}[/]")
    settings = Settings(hosts=(*LOOPBACK, host) if local else ())
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}"
    out.print(f"serving {', '.join(catalogue)} on {plain(address)}")
    out.file.flush()
    run(create_app(catalogue, settings, token=token), listening, settings)
