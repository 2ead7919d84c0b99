"""`ecinn serve`: serve the page and the API."""

import os
from typing import Annotated

import typer

from ecinn.cli.app import app, err, out, plain
from ecinn.cli.progress import CelebA, load_images

TOKEN = "ECINN_TOKEN"


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model's name or path; repeatable [default: all shipped models]."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all network interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8000,
    classifier: Annotated[
        bool,
        typer.Option(help="Verify distilled models on the classifiers that they explain."),
    ] = True,
    celeba: CelebA = None,
) -> None:
    """Serve a page to explore counterfactuals, and an API; Ctrl-C stops it.

    If the environment variable ECINN_TOKEN is set, the API requires it as a bearer token.
    """
    import torch

    from ecinn.web.app import create_app
    from ecinn.web.catalogue import DEFAULT_MODELS, load_catalogue
    from ecinn.web.server import LOOPBACK, is_loopback, listen, run
    from ecinn.web.settings import Settings

    token = os.environ.get(TOKEN) or None
    local = is_loopback(host)
    with listen(host, port) as listening:
        # The service has threads of its own, one per core.
        torch.set_num_threads(1)
        catalogue = load_catalogue(
            model or DEFAULT_MODELS,
            celeba,
            ask_classifiers=classifier,
            load=lambda recipe, path: load_images(recipe, "test", celeba, model=path),
        )
        for name, served in catalogue.items():
            reader = served.model.reader  # is loaded here, so that a missing file is noticed now
            if reader is not None:
                said = f"{name} explains {reader.name}, which reads every counterfactual"
                err.print(plain(said))
        if not classifier:
            err.print("classifiers are not asked: this explains their students only")
        if not local and token is None:
            err.print(f"[yellow]anybody who can reach {plain(host)} can use it: set {TOKEN}[/]")
        settings = Settings(hosts=(*LOOPBACK, host) if local else ())
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}"
        out.print(f"serving {', '.join(catalogue)} on {plain(address)}")
        out.file.flush()
        run(create_app(catalogue, settings, token=token), listening, settings)
