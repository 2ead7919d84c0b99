"""What all commands share: the app, its consoles, how it fails, which device it runs on."""

import json
import os
import re
import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ecinn.errors import EcinnError, InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Counterfactual explanations of images in two network evaluations.",
)
# Results go to stdout; progress, remarks and errors to stderr.
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto for a GPU where there is one.")]


def main() -> None:
    """Run the command line; whatever goes wrong ends in one line and an exit code."""
    try:
        app()
    except EcinnError as error:
        _fail(str(error), error.exit_code)
    except Exception as error:  # the last resort: no traceback for people who did not ask
        if os.environ.get("ECINN_DEBUG"):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        _fail(f"{reason} (set ECINN_DEBUG=1 to see where)", 1)


def _fail(message: str, code: int) -> None:
    err.print(f"[bold red]error:[/] {plain(' '.join(message.split()))}", soft_wrap=True)
    sys.exit(code)


def plain(words: str) -> str:
    """Text that Rich prints as it stands."""
    return re.sub(r"\[", r"\\[", words)


def device_name(name: str) -> str:
    """The device of that name, where there is one; auto prefers a GPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device is cpu, cuda or auto, not {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no usable GPU here: leave --device out, or say cpu")
    return name


def print_json(value: Any) -> None:  # noqa: ANN401
    """JSON on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
