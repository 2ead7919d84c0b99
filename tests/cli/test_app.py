"""The command line's infrastructure: help, version, start-up, errors and interruption."""

import io
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import ecinn
from ecinn.cli import app
from ecinn.errors import EcinnError, InputError, InterruptedRunError
from helpers.command_line import fails, run
from helpers.paths import REPOSITORY


def raising(error: BaseException) -> typer.Typer:
    """Build a command line whose only command raises."""
    commands = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @commands.command()
    def command() -> None:
        raise error

    return commands


def start(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh process: `python -m ecinn`, after `code`."""
    program = f"{code}\nimport runpy; runpy.run_module('ecinn', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        | {"COLUMNS": "300"}
        | environment,
    )


def panels(text: str) -> Iterator[tuple[str, list[str]]]:
    """Parse help: the title and the first words of each panel."""
    for title, body in re.findall(r"╭─ (\w+) ─.*?\n(.*?)╰", text, re.DOTALL):
        yield title, re.findall(r"^│ (\S+)", body, re.MULTILINE)


def test_help_lists_commands_before_studies() -> None:
    code, stdout, _ = run("--help")
    assert code == 0
    listed = dict(panels(stdout))
    assert listed.pop("Options") == ["--version", "--help"]
    assert list(listed.items()) == [(panel, list(names)) for panel, names in app.PANELS.items()]


def test_without_a_command_there_is_help() -> None:
    for arguments in ((), ("benchmark",)):
        code, stdout, stderr = run(*arguments)
        assert code == 2
        assert "Usage" in stdout + stderr
        assert "error:" not in stderr


def test_the_version_has_one_source() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ecinn.__version__"}
    assert run("--version") == (0, f"ecinn {ecinn.__version__}\n", "")


def test_waiting_threads_sleep_unless_the_user_decides_otherwise() -> None:
    """OpenMP reads the variable when torch is imported, so it must be set before that."""
    report = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            sys.exit('torch sees ' + os.environ.get('OMP_WAIT_POLICY', 'nothing'))\n"
        "sys.meta_path.insert(0, Finder())"
    )
    arguments = ("explain", "--sample", "0")
    assert start(*arguments, code=report).stderr == "torch sees PASSIVE\n"
    user = start(*arguments, code=report, OMP_WAIT_POLICY="ACTIVE")
    assert user.stderr == "torch sees ACTIVE\n"


def test_the_device_has_the_same_default_everywhere() -> None:
    def defaults(command: Any, path: str) -> Iterator[tuple[str, object]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from defaults(inner, f"{path} {name}")
        for parameter in command.params:
            if parameter.name == "device":
                yield path, parameter.default

    found = dict(defaults(typer.main.get_command(app.app), "ecinn"))
    assert len(found) > 10
    assert {path for path, default in found.items() if default != "auto"} == set()


def test_errors_are_one_line_with_their_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    line = fails(commands=raising(InputError("give [another]\nfile")), code=2)
    assert line == "error: give [another] file"
    assert "full disk" in fails(commands=raising(EcinnError("full disk")), code=1)
    unexpected = raising(RuntimeError("not enough\nmemory"))
    assert "not enough memory (set ECINN_DEBUG=1" in fails(commands=unexpected, code=1)
    monkeypatch.setenv("ECINN_DEBUG", "1")
    with pytest.raises(RuntimeError, match="not enough"):
        run(commands=unexpected)


@pytest.mark.parametrize(("module", "extra"), app.EXTRAS.items())
def test_a_missing_package_names_the_extra_to_install(module: str, extra: str) -> None:
    error = ModuleNotFoundError(f"No module named '{module}.x'", name=f"{module}.x")
    assert f"pip install 'ecinn[{extra}]'" in fails(commands=raising(error), code=2)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    distribution = "python-multipart" if "multipart" in module else module.replace("_", "-")
    installed = project["optional-dependencies"][extra]
    assert any(re.match(rf"{distribution}\b", requirement) for requirement in installed)


def test_import_error_prints_one_line() -> None:
    error = ImportError("libcudart.so.12: cannot open shared object file", name="torch._C")
    line = fails(commands=raising(error), code=1)
    assert "cannot import torch: libcudart.so.12" in line


@pytest.mark.parametrize("broken", ["rich.console", "torch"])
def test_an_import_that_fails_at_start_up_is_one_line(broken: str) -> None:
    done = start("explain", "--sample", "0", code=f"import sys; sys.modules['{broken}'] = None")
    assert done.returncode == 1
    assert re.fullmatch(rf"error: cannot .*{broken}.*ECINN_DEBUG=1.*\n", done.stderr)
    done = start("--help", code="import sys; sys.modules['rich.console'] = None", ECINN_DEBUG="1")
    assert "Traceback" in done.stderr


def test_an_interruption_is_one_line() -> None:
    line = fails(commands=raising(KeyboardInterrupt()), code=130)
    assert line == "error: interrupted"
    resumable = raising(InterruptedRunError("interrupted; continue with --resume"))
    assert "--resume" in fails(commands=resumable, code=130)


def test_an_interruption_during_start_up_is_one_line(tmp_path: Path) -> None:
    """Ctrl-C while the packages that the command line needs are being imported."""
    ready = tmp_path / "ready"
    slow = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it after &\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        f"            pathlib.Path({str(ready)!r}).touch(); time.sleep(60)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import runpy; runpy.run_module('ecinn', run_name='__main__')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", slow, "--help"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("explain", "--film", "mp4"), "'gif', 'webp'"),
        (("explain", "--nothing"), "--nothing"),
        (("nobody",), "nobody"),
        (("audit", "mnist", "--n", "few"), "--n"),
        (("train",), "SOURCE"),
    ],
)
def test_wrong_arguments_are_one_line_that_points_to_the_help(
    arguments: tuple[str, ...], named: str
) -> None:
    line = fails(*arguments)
    assert named.lower() in line.lower()
    assert "--help`)" in line


def test_text_is_not_wrapped() -> None:
    console = type(app.out)(width=40, file=io.StringIO())
    text = "a sentence that is longer than forty letters, as most are"
    console.print(text)
    assert console.file.getvalue() == text + "\n"
