"""Run the command line in this process."""

import contextlib
import io
import sys

import typer

from ecinn.cli import app


def run(*arguments: object, commands: typer.Typer = app.app) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["ecinn", *map(str, arguments)]
    app.out.width = app.err.width = 200
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            app.main(commands)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    return code, stdout.getvalue(), stderr.getvalue()


def fails(*arguments: object, code: int = 2, commands: typer.Typer = app.app) -> str:
    """Run a command that must fail, and return its one line on stderr."""
    actual, stdout, stderr = run(*arguments, commands=commands)
    assert actual == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    return lines[0]
