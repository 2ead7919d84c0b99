"""Importing the package and running its commands load no module that is not needed."""

import subprocess
import sys
from pathlib import Path

import pytest

EXTRAS = {"matplotlib", "captum", "fastapi", "torchvision", "h5py", "tensorboard"}
HEAVY = EXTRAS | {"torch", "numpy", "PIL", "jinja2"}


def loaded_by(program: str, *arguments: object) -> set[str]:
    """Run a program in a fresh interpreter; return the modules it has loaded at its end."""
    tail = "\nprint(*sorted(sys.modules), sep='\\n', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}{tail}", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.splitlines())


def run_command(*arguments: object) -> set[str]:
    program = "from ecinn.cli import main\ntry: main()\nexcept SystemExit as e: assert not e.code"
    return loaded_by(program, *arguments)


def test_importing_the_package_loads_neither_pytorch_nor_studies() -> None:
    modules = loaded_by("import ecinn")
    assert not modules & HEAVY
    assert not any(name.startswith("ecinn.studies") for name in modules)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["explain", "--help"]])
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    modules = run_command(*arguments)
    assert "ecinn.cli.app" in modules
    assert not modules & HEAVY
    assert not any(name.startswith("ecinn.studies") for name in modules)


@pytest.mark.slow
def test_explain_loads_no_study_and_no_extra(tmp_path: Path) -> None:
    modules = run_command("explain", "--sample", 0, "--target", 1, "--out", tmp_path / "o")
    assert "ecinn.model" in modules
    assert not modules & EXTRAS
    assert not any(name.startswith("ecinn.studies") for name in modules)


@pytest.mark.slow
def test_public_names_are_callable_after_their_modules_are_imported() -> None:
    """No submodule shadows a public function, whatever is imported first."""
    loaded_by(
        "import ecinn, ecinn.explanation.result, ecinn.auditing.measurement\n"
        "import ecinn.attribution.heatmaps, ecinn.training.loop\n"
        "for name in ('explain', 'audit', 'attribute', 'train', 'evaluate', 'load'):\n"
        "    assert callable(getattr(ecinn, name)), name"
    )
