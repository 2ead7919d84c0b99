"""Run the command line in this process."""

import sys

from ecinn import cli
from ecinn.cli import app


def run(*arguments: object) -> tuple[int, str, str]:
    """In this process: exit code, stdout, stderr."""
    import contextlib
    import io

    stdout, stderr = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["ecinn", *map(str, arguments)]
    app.out.width = app.err.width = 200
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    return code, stdout.getvalue(), stderr.getvalue()


def fails(*arguments: object, code: int = 2) -> str:
    """Runs what must fail; returns its one line."""
    actual, stdout, stderr = run(*arguments)
    assert actual == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    return lines[0]
