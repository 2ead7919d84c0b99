"""The notebook runs from top to bottom, uses public names only, and keeps its outputs."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import ecinn

PATH = Path(__file__).parent.parent / "notebooks" / "ecinn.ipynb"


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(PATH, as_version=4)


def test_is_short_and_keeps_its_outputs(notebook) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert 10 <= len(notebook.cells) <= 17
    assert all(cell.outputs for cell in code)
    assert sum("image/png" in o.get("data", {}) for cell in code for o in cell.outputs) >= 4
    assert not any(o.output_type == "error" for cell in code for o in cell.outputs)
    assert not re.search(r"/(home|root|tmp|work)/", PATH.read_text())


def test_uses_public_names_only(notebook) -> None:
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.module == "ecinn"
            assert [alias.name for alias in node.names] == ["equations"]
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"torch", "ecinn"}
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
            if isinstance(node.value, ast.Name) and node.value.id == "ecinn":
                assert node.attr in ecinn.__all__


def printed(notebook) -> str:
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    return "".join(output.text for output in outputs if "text" in output)


@pytest.mark.slow
def test_runs_and_prints_the_same_text(notebook) -> None:
    executed = nbformat.read(PATH, as_version=4)
    NotebookClient(executed, timeout=600, kernel_name="python3").execute()
    numbers = re.compile(r"[-+.\de]+")
    assert "the same image: True" in printed(executed)
    assert numbers.sub("0", printed(executed)) == numbers.sub("0", printed(notebook))
