"""`ecinn serve`: serve the page and the API."""

import dataclasses
import os
from typing import Annotated

import typer

from ecinn.cli.app import app, err, out, plain
from ecinn.cli.progress import CelebA, load_images


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model's name or path; repeatable.", show_default="all but celeba-smile-plain"
        ),
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
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name of the service besides the address; repeatable."),
    ] = None,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address of a proxy whose X-Forwarded-For is believed; repeatable."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, also as environment variable ECINN_SERVE_NAME; repeatable."
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, max=256, help="Number of processes; one per core for many visitors."),
    ] = 1,
) -> None:
    """Serve a page to explore counterfactuals, and an API; Ctrl-C stops it.

    If the environment variable ECINN_TOKEN is set, the API requires it as a bearer token.
    """
    from ecinn.web.server import fork_workers, is_loopback, listen, run
    from ecinn.web.settings import TOKEN, read_settings

    given = list(limit or [])
    for name, values in (("hosts", allow_host), ("trusted_proxies", trust_proxy)):
        given += [f"{name}={','.join(values)}"] if values else []
    settings = read_settings(given, os.environ)
    settings = dataclasses.replace(
        settings,
        hosts=(*settings.hosts, f"[{host}]" if ":" in host else host),
        # Twice as many as cores, so that a request alone has more than one of them.
        threads=min(settings.threads, -(-2 * settings.threads // workers)),
    )
    token = os.environ.get(TOKEN) or None
    local = is_loopback(host)
    with listen(host, port) as listening:
        import torch

        from ecinn.web.app import create_app
        from ecinn.web.catalogue import DEFAULT_MODELS, load_catalogue

        # The service has threads of its own, one per core.
        torch.set_num_threads(1)
        # Workers share the memory of the models, unless these may be on a GPU, which cannot be
        # used by a process that was forked after its first use.
        shared = not torch.version.cuda and not torch.version.hip
        worker = fork_workers(workers) if workers > 1 and not shared else 0
        catalogue = load_catalogue(
            model or DEFAULT_MODELS,
            celeba,
            ask_classifiers=classifier,
            load=lambda recipe, path: load_images(recipe, "test", celeba, model=path),
        )
        if workers > 1 and shared:  # before classifiers start threads, which a fork loses
            for served in catalogue.values():
                served.model.fuse()
            worker = fork_workers(workers)
        if worker:
            err.quiet = out.quiet = True  # the first one speaks for all
        for name, served in catalogue.items():
            reader = served.model.reader  # is loaded here, so that a missing file is noticed now
            if reader is not None:
                said = f"{name} explains {reader.name}, which reads every counterfactual"
                err.print(plain(said))
        if not classifier:
            err.print("explaining the students only; their classifiers are not queried")
        if not local and token is None:
            err.print(f"[yellow]anybody who can reach {plain(host)} can use it: set {TOKEN}[/]")
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}"
        out.print(f"serving {', '.join(catalogue)} on {plain(address)}")
        out.file.flush()
        app = create_app(catalogue, settings, token=token)
        app.state.metrics.name_worker(worker, workers)
        run(app, listening, settings)
