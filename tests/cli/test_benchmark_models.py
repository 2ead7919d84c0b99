"""`ecinn benchmark heatmaps`: the files it writes, and its errors."""

import json
import sys

import pytest

from ecinn.cli import benchmark_models as command
from ecinn.errors import EcinnError
from ecinn.studies.benchmark import heatmaps
from ecinn.studies.inception import training as inception
from helpers.builders import random_images, small_model
from helpers.command_line import fails, run
from helpers.heatmap_benchmark import SEED


def test_missing_captum_is_one_line_before_anything_is_read(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    assert "pip install 'ecinn[heatmaps]'" in fails("benchmark", "heatmaps", "--model", "none")


@pytest.fixture
def small_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    small_model().save("some.safetensors")
    data = {"test": random_images(12, 1, 3, 1), "train": random_images(40, 1, 3, 2)}
    monkeypatch.setattr(command, "load_images", lambda name, split, folder, **_: data[split])
    return ("benchmark", "heatmaps", "--model", "some.safetensors", "--seed", SEED)


@pytest.mark.slow
def test_command_writes_tables_figures_and_a_sheet(small_command, tmp_path) -> None:
    code, stdout, stderr = run(
        *small_command, "--n", 2, "--out", tmp_path, "--methods", "deep_lift"
    )
    assert code == 0, stderr
    assert "**" not in stdout
    page = (tmp_path / "heatmaps-tiny.md").read_text()
    options = "--methods deep_lift --n 2 --seed 5 --baseline mean"
    assert f"--model some.safetensors {options}" in page
    assert (tmp_path / "heatmaps-tiny.webp").read_bytes().startswith(b"RIFF")
    written = json.loads((tmp_path / "heatmaps-tiny.json").read_text())
    assert (written["n"], written["complete"]) == (2, True)
    assert written["record"]["baseline"] == written["baseline"] == "mean"
    figure = written["blocks"][0]["rows"][1]["figures"]["total variation"]
    assert "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**figure) in page
    black = ("--methods", "", "--json", "--baseline", "black")
    _, stdout, _ = run(*small_command, "--n", 2, "--out", tmp_path, *black)
    assert json.loads(stdout)["dataset"] == "tiny"
    assert json.loads(stdout)["record"]["baseline"] == "black"


@pytest.mark.slow
def test_finished_results_are_kept_when_the_rest_fails(
    small_command, monkeypatch, tmp_path
) -> None:
    def fail(*_) -> None:
        raise EcinnError("the lights went out")

    monkeypatch.setattr(heatmaps.Bench, "logit_row", fail)
    options = ("--n", 2, "--out", tmp_path, "--methods", "gradient_shap")
    code, _, stderr = run(*small_command, *options)
    assert (code, stderr.splitlines()[-1]) == (1, "error: the lights went out")
    written = json.loads((tmp_path / "heatmaps-tiny.json").read_text())
    assert [block["network"] for block in written["blocks"]] == ["INN"]
    assert written["complete"] is False


@pytest.mark.slow
def test_command_refuses_in_one_line(small_command, monkeypatch, tmp_path) -> None:
    here = ("--out", tmp_path / "new")
    assert "n must be from 2 to 12" in fails(*small_command, "--n", 13, *here)
    assert "no method is called 'lime'" in fails(*small_command, "--methods", "lime", *here)
    assert "cannot read" in fails(*small_command, "--cnn", tmp_path / "none", *here)
    assert "needs a face model, and some.safetensors is not one" in fails(
        *small_command, "--cnn", "residual", *here
    )

    def of_other_classes(path, device, class_names) -> None:
        raise EcinnError(f"{path} must tell {' from '.join(class_names)}")

    monkeypatch.setattr(inception, "load_inception", of_other_classes)
    assert "f must tell a from b from c" in run(*small_command, "--cnn", "f", *here)[2]
    assert not (tmp_path / "new").exists()
