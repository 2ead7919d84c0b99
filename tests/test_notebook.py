"""The tour runs from top to bottom, uses public names only, and keeps its outputs."""

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


def test_it_is_short_and_its_outputs_are_kept(notebook) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert 10 <= len(notebook.cells) <= 15
    assert all(cell.outputs for cell in code)
    assert sum("image/png" in o.get("data", {}) for cell in code for o in cell.outputs) >= 4
    assert not any(o.output_type == "error" for cell in code for o in cell.outputs)
    assert not re.search(r"/(home|root|tmp|work)/", PATH.read_text())


def test_only_public_names_are_used(notebook) -> None:
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


def test_it_runs_and_says_what_it_said(notebook) -> None:
    again = nbformat.read(PATH, as_version=4)
    NotebookClient(again, timeout=600, kernel_name="python3").execute()

    def said(cells) -> str:
        texts = [o.text for c in cells if c.cell_type == "code" for o in c.outputs if "text" in o]
        return re.sub(r"[-+.\de]+", "0", "".join(texts))

    assert "the same image: True" in "".join(
        o.text for c in again.cells if c.cell_type == "code" for o in c.outputs if "text" in o
    )
    assert said(again.cells) == said(notebook.cells)
