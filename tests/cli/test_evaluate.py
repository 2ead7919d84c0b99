"""`ecinn evaluate`."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ecinn.data.mnist import load_mnist
from ecinn.model import Model
from helpers.command_line import fails, run


def test_evaluate_prints_a_json_object_or_a_table() -> None:
    code, stdout, _ = run("evaluate", "mnist", "--limit", 4, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["n"] == 4
    for key in ("model", "error", "bits_per_dim", "bits_per_dim_paper", "reached_q"):
        assert key in result
    code, stdout, _ = run("evaluate", "mnist", "--limit", 2)
    assert code == 0
    assert "bits per dim" in stdout


def test_calibration_error_is_that_of_the_posteriors(mnist: Model) -> None:
    code, stdout, stderr = run(
        "evaluate", "mnist", "--limit", 30, "--split", "validation", "--json"
    )
    assert code == 0, stderr
    data = load_mnist("validation").first(30)
    sure, predicted = (column.numpy() for column in mnist.predict(data.images).max(1))
    surplus = sure - (predicted == data.labels.numpy())
    sums, _ = np.histogram(sure, 15, (0, 1), weights=surplus)
    measured = json.loads(stdout)
    assert measured["calibration_error"] == pytest.approx(np.abs(sums).sum() / 30, abs=1e-5)
    assert 0 < measured["calibration_error_by_chance"] < 0.2


def test_reliability_is_drawn_into_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "new" / "reliability.png"
    code, stdout, stderr = run("evaluate", "mnist", "--limit", 4, "--reliability", picture)
    assert code == 0, stderr
    assert "calibration error" in stdout
    assert f"wrote {picture}" in stdout.replace("\n", "")
    with Image.open(picture) as image:
        assert image.format == "PNG"
    assert ".png" in fails("evaluate", "mnist", "--reliability", tmp_path / "plot.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "ecinn.drawing.reliability", raising=False)
    line = fails("evaluate", "mnist", "--limit", 2, "--reliability", picture)
    assert "pip install 'ecinn[paper]'" in line


def test_wrong_arguments() -> None:
    assert "--limit" in fails("evaluate", "mnist", "--limit", 0)
    assert "mnist" in fails("evaluate", "resnet")
