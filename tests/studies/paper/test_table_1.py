"""Table 1: the paper's figures as printed, ours from checkpoints, the control from its record."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecinn.classifier.recipes import MNIST_PAPER, Recipe
from ecinn.files import rebuild
from ecinn.studies.paper import table_1
from ecinn.studies.paper.artefact import Context

PRINTED = r"""
FakeMNIST              & 1.4265  & 1.77  & 0\%   & -
MNIST                  & 1.4265  & 1.89  & 0.85\%   & -
Smile           & 1 & 3.32 & 7.42\%  & 6.62\%
High cheekbones & 1 & 3.09 & 14.38\% & 13.74\%
Lipstick        & 1 & 3.06 & 4.87\%  & 5.70\%
Heavy makeup    & 1 & 3.08 & 12.68\% & 10.84\%
"""


def checkpoint(name: str) -> SimpleNamespace:
    """Figures that differ for every model."""
    k = len(name)
    metrics = {
        "n": 1000,
        "error": k / 1000,
        "bits_per_dim": 2.0 + k / 100,
        "bits_per_dim_paper": 1.0 + k / 100,
    }
    return SimpleNamespace(recipe=SimpleNamespace(beta=0.25 * k), metrics=metrics)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    recipe, inception = tmp_path / "recipe.json", tmp_path / "inception.json"
    metrics = {"n": 10000, "error": 0.0091, "bits_per_dim": 3.21, "bits_per_dim_paper": 1.56}
    recipe.write_text(json.dumps({"settings": {"beta": 1.5}, "metrics": metrics}))
    inception.write_text(json.dumps({"Smiling": 0.1031, "Heavy_Makeup": 0.12}))
    return recipe, inception


def test_the_papers_rows_are_as_printed(files: tuple[Path, Path]) -> None:
    rows = [row for row in table_1.rows(checkpoint, *files) if row.source == "paper"]
    printed = [[cell.strip() for cell in line.split("&")] for line in PRINTED.split("\n") if line]
    assert len(rows) == len(printed)
    for row, (name, beta, bits, error, inception) in zip(rows, printed, strict=True):
        assert row.name == name
        assert row.beta == float(beta)
        assert row.bits_per_dim_paper == float(bits)
        assert row.bits_per_dim is None
        assert 100 * row.error == pytest.approx(float(error.removesuffix(r"\%")))
        expected = None if inception == "-" else float(inception.removesuffix(r"\%")) / 100
        assert row.inception_error == (None if expected is None else pytest.approx(expected))


def test_our_rows_are_what_was_measured(files: tuple[Path, Path]) -> None:
    rows = table_1.rows(checkpoint, *files)
    ours = {row.name: row for row in rows if row.source == "ours"}
    assert ours["MNIST"].error == 0.005
    assert ours["MNIST"].beta == 1.25
    assert ours["Lipstick"].bits_per_dim == pytest.approx(2.15)
    assert ours["Lipstick"].bits_per_dim_paper == pytest.approx(1.15)
    assert ours["Smile"].inception_error == 0.1031
    assert ours["Heavy makeup"].inception_error == 0.12
    assert ours["Lipstick"].inception_error is None
    (control,) = [row for row in rows if row.source == "recipe"]
    assert (control.name, control.beta, control.error) == ("MNIST", 1.5, 0.0091)
    assert rows.index(control) == rows.index(ours["MNIST"]) + 1
    low, high = control.interval
    assert low < 0.0091 < high < 0.012
    words = table_1.table(rows)
    bracket = f"0.91 ({100 * low:.2f} to {100 * high:.2f})"
    assert [row[5] for row in words.rows if "re-run" in row[1]] == [bracket]
    assert bracket in table_1.latex(rows)
    assert "Errors are measured on 1,000 or 10,000 test images" in words.notes[0]


def test_models_that_were_not_run_are_marked(tmp_path: Path) -> None:
    rows = table_1.rows(checkpoint, tmp_path / "none.json", tmp_path / "neither.json")
    words = table_1.table(rows).markdown()
    (line,) = [line for line in words.splitlines() if "re-run |" in line]
    assert line.count("not run") == 3
    assert "| MNIST | the paper | 1.4265 | – | 1.89 | 0.85 | – |" in words
    assert "| 0.50 (" in words
    assert "not run" in table_1.latex(rows)


def test_latex_has_as_many_cells_in_every_line(files: tuple[Path, Path]) -> None:
    words = table_1.latex(table_1.rows(checkpoint, *files))
    lines = [line for line in words.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + 13
    assert {line.count("&") for line in lines} == {6}
    assert words.count("%") == words.count(r"\%")
    assert "–" not in words


def test_the_constant_in_the_notes(files: tuple[Path, Path]) -> None:
    """log₂ 2π − log₂ 2 = 1.6515: facts of the conventions, not of our models."""
    notes = " ".join(table_1.table(table_1.rows(checkpoint, *files)).notes)
    assert "1.65 bits for digits and about 0.65 for faces" in notes
    assert "would be 3.54 instead of 1.89" in notes
    assert "still differ from the authors' code" in notes


def test_the_table_of_the_shipped_models() -> None:
    made = table_1.make(Context())
    assert "```latex" in made.pages["table-1"]
    numbers = made.data["table-1"]
    json.dumps(numbers)
    errors = {row["name"]: row["error"] for row in numbers if row["source"] == "ours"}
    assert errors["MNIST"] < 0.0085
    assert errors["FakeMNIST"] == 0
    assert len(errors) == 6


def test_the_control_was_trained_with_the_current_recipe() -> None:
    record = json.loads(table_1.RECIPE.read_text())
    assert rebuild(Recipe, record["settings"]) == MNIST_PAPER
    assert (record["training_images"], record["metrics"]["n"]) == (58_000, 10_000)
    (control,) = [
        row for row in table_1.make(Context()).data["table-1"] if row["source"] == "recipe"
    ]
    assert control["error"] == record["metrics"]["error"]
