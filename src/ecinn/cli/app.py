"""What all commands share: the app, its consoles, how it fails, which device it runs on."""

import json
import os
import re
import sys
from typing import Annotated, Any, NoReturn

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


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401
        """Sentences are left in one line, for the terminal to break and for others to search."""
        if all(isinstance(each, str) for each in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)


# Results go to stdout; progress, remarks and errors to stderr.
out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)

INTERRUPTED = 130
"""What shells expect after Ctrl-C."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto for a GPU where there is one.")]


def main() -> None:
    """Run the command line; whatever goes wrong ends in one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except EcinnError as error:
        _fail(str(error), error.exit_code)
    except Exception as error:  # the last resort: no traceback for people who did not ask
        if hasattr(error, "format_message"):
            _refuse(error)
        if type(error).__name__ == "Abort":
            _fail("interrupted", INTERRUPTED)
        if os.environ.get("ECINN_DEBUG"):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        _fail(f"{reason} (set ECINN_DEBUG=1 to see where)", 1)
    if code == INTERRUPTED:
        _fail("interrupted", INTERRUPTED)
    sys.exit(code or 0)


def _refuse(error: Any) -> NoReturn:  # noqa: ANN401
    """What was typed is no command: in one line, or with help where nothing was said at all."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    context = getattr(error, "ctx", None)
    where = f" (see `{context.command_path} --help`)" if context is not None else ""
    _fail(f"{error.format_message().rstrip('.')}{where}", error.exit_code)


def _fail(message: str, code: int) -> NoReturn:
    err.print(f"[bold red]error:[/] {plain(' '.join(message.split()))}")
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
