"""The app that all commands join: its consoles, shared options and error handling."""

import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

import ecinn
from ecinn.errors import EcinnError, InputError, InterruptedRunError
from ecinn.progress import plain as plain

if TYPE_CHECKING:
    from ecinn.explanation.result import Confidence

PANELS = {
    "Commands": (
        "explain", "bulk", "models", "train", "distill", "evaluate", "audit", "serve", "site",
        "export",
    ),
    "Studies": ("paper", "benchmark", "judges", "inception", "teacher", "beta"),
}  # fmt: skip
"""Commands in the order and under the headings of `ecinn --help`."""

EXTRAS = {
    "captum": "heatmaps",
    "fastapi": "serve",
    "h5py": "benchmark",
    "huggingface_hub": "hub",
    "matplotlib": "paper",
    "multipart": "serve",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "prometheus_client": "serve",
    "pyarrow": "bulk",
    "pydicom": "dicom",
    "python_multipart": "serve",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "torchvision": "inception",
    "uvicorn": "serve",
}
"""Optional dependencies: module to import, extra to install."""

INTERRUPTED = InterruptedRunError.exit_code


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """Return all command names, ordered and grouped as in `PANELS`."""
        listed = [name for names in PANELS.values() for name in names if name in self.commands]
        for panel, names in PANELS.items():
            for name in names:
                command = self.commands.get(name)
                if isinstance(command, TyperCommand | TyperGroup):
                    command.rich_help_panel = panel
        return listed + [name for name in self.commands if name not in listed]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        """Return the command; torchrun can start only one of them."""
        found = super().resolve_command(ctx, args)
        if _in_many_processes() and found[0] != "train":
            _leave_to_the_first_process(InputError.exit_code)
            raise InputError(f"`ecinn {found[0]}` works in one process: start it without torchrun")
        return found


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401
        """Print text without line breaks of its own; tables still fit the terminal."""
        if all(isinstance(value, str) for value in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)


# Results go to stdout; progress, remarks and errors to stderr.
out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one, otherwise the CPU.")
]
OwnSource = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Pictures of your own: where those of the model are now, or others to test on.",
    ),
]
Correct = Annotated[
    bool, typer.Option("--correct", help="Correct alpha until the stored images are as requested.")
]
Check = Annotated[bool, typer.Option(help="Let the classifier read the stored 8-bit images.")]
AskClassifier = Annotated[
    bool, typer.Option(help="Verify a distilled model on the classifier that it explains.")
]
RequestedConfidence = Annotated[
    str | None,
    typer.Option(
        help="Probability of the target, above 0 and below 1, or alpha_1 for the paper's point.",
        show_default="the model's",
    ),
]


def parse_confidence(text: str | None) -> "Confidence | None":
    """Read the option --confidence; None is the model's default."""
    if text is None:
        return None
    if text == "alpha_1":
        return "alpha_1"
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"--confidence is a number above 0 and below 1, or alpha_1, not {text!r}"
        ) from None


def _print_version(asked: bool) -> bool:
    if asked:
        out.print(f"ecinn {ecinn.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Counterfactual explanations of images in two network evaluations."""


def _in_many_processes() -> bool:
    """Return whether torchrun started this process and others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"


def _leave_to_the_first_process(code: int) -> None:
    """Exit silently if another process fails for the same reason and says so."""
    if _in_many_processes() and os.environ.get("RANK") != "0":
        time.sleep(1)  # torchrun ends all processes with the first
        sys.exit(code)


def in_every_process(command: Callable[..., None]) -> Callable[..., None]:
    """Run a command in all processes that torchrun started; only the first one prints."""

    @functools.wraps(command)
    def run(*arguments: Any, device: str, **options: Any) -> None:  # noqa: ANN401
        if not _in_many_processes():
            return command(*arguments, device=device, **options)
        from ecinn.training.ranks import joined

        with joined(device) as ranks:
            out.quiet = err.quiet = not ranks.leads
            try:
                command(*arguments, device=device, **options)
                ranks.wait()  # all leave together
            finally:
                out.quiet = err.quiet = False  # an error may be this process's

    return run


def main(commands: typer.Typer = app) -> None:
    """Run the command line; every failure ends in one line on stderr and an exit code."""
    try:
        code = commands(standalone_mode=False)
    except EcinnError as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    except Exception as error:
        if hasattr(error, "format_message"):
            _fail_usage(error)
        if type(error).__name__ == "Abort":  # typer's Ctrl-C; older versions return 130 instead
            fail("interrupted", INTERRUPTED)
        fail_unexpected(error)
    if code == INTERRUPTED:
        fail("interrupted", INTERRUPTED)
    sys.exit(code or 0)


def fail(message: str, code: int) -> NoReturn:
    """Print an error as one line on stderr and exit."""
    err.print(f"[bold red]error:[/] {plain(' '.join(message.split()))}")
    sys.exit(code)


def fail_unexpected(error: Exception) -> NoReturn:
    """Exit after an exception that no command expects; ECINN_DEBUG=1 shows its traceback."""
    if os.environ.get("ECINN_DEBUG"):
        raise error
    reason = str(error) or type(error).__name__
    if isinstance(error, ImportError):
        module = (error.name or "").partition(".")[0]
        if module in EXTRAS:
            fail(f"this needs {module}: pip install 'ecinn[{EXTRAS[module]}]' ({reason})", 2)
        reason = f"cannot import {module or 'a package'}: {reason}; reinstall it"
    fail(f"{reason} (set ECINN_DEBUG=1 to see the traceback)", 1)


def _fail_usage(error: Any) -> NoReturn:  # noqa: ANN401
    """Exit after wrong arguments: one line, or the help if there were no arguments at all."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    _leave_to_the_first_process(error.exit_code)
    context = getattr(error, "ctx", None)
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    fail(f"{error.format_message().rstrip('.')}{hint}", error.exit_code)


def print_json(value: Any) -> None:  # noqa: ANN401
    """Print a value as JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def command_line(name: str, options: Mapping[str, object]) -> str:
    """Return the command that makes the results again, with a word in capitals for local paths."""
    words = ["ecinn", *name.split()]
    for option, value in options.items():
        flag = option.replace("_", "-")
        if value is None or option in ("out_dir", "device", "json_output"):
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        for item in value if isinstance(value, list) else [value]:
            text = str(item).removesuffix(".0")
            if isinstance(item, tuple):
                text = ("x" if option == "size" else ",").join(map(str, item))
            elif isinstance(item, Path):
                text = "FILE" if item.is_file() else "DIR"
            elif option in ("init_from", "refine_from") and Path(text).exists():
                text = "MODEL"
            words += [f"--{flag}", text]
    return shlex.join(words)
