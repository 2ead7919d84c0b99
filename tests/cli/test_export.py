"""`ecinn export`."""

import json
import sys
from pathlib import Path

import onnxruntime
import pytest

from helpers.builders import small_model
from helpers.command_line import fails, run

NAMES = ["decode.onnx", "encode.onnx", "explain.onnx", "model.json"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    small_model().save(path)
    return path


def test_export_writes_files_that_run(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    code, stdout, stderr = run("export", model, "--onnx", folder)
    assert code == 0, stderr
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert all(name in stdout for name in NAMES)
    assert "student" not in stdout
    session = onnxruntime.InferenceSession(folder / "encode.onnx")
    assert session.get_inputs()[0].shape == ["batch", 1, 8, 8]
    empty = tmp_path / "empty"
    empty.mkdir()
    code, stdout, stderr = run("export", model, "--onnx", empty, "--json")
    assert code == 0, stderr
    report = json.loads(stdout)
    sizes = {path.name: path.stat().st_size for path in empty.glob("*.onnx")}
    assert {row["file"]: row["bytes"] for row in report["files"]} == sizes
    assert all(row["difference"] < 1e-4 for row in report["files"])


def test_export_says_that_the_classifier_of_a_student_stays_behind(tmp_path: Path) -> None:
    small_model().save(tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "classifier.toml").write_text("")  # not read
    code, stdout, stderr = run("export", tmp_path / "run", "--onnx", tmp_path / "onnx")
    assert code == 0, stderr
    assert "Only the student is exported" in stdout


def test_export_says_what_is_wrong_in_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--onnx DIR" in fails("export", model)
    assert "no model 'nobody'" in fails("export", "nobody", "--onnx", tmp_path / "new")
    assert "exists already" in fails("export", model, "--onnx", tmp_path)
    assert "exists already" in fails("export", model, "--onnx", model)
    for package in ("onnx", "onnxruntime"):
        with monkeypatch.context() as patch:
            for loaded in [name for name in sys.modules if name.startswith("ecinn.export")]:
                patch.delitem(sys.modules, loaded)
            patch.setitem(sys.modules, package, None)
            line = fails("export", model, "--onnx", tmp_path / "new")
            assert f"this needs {package}: pip install 'ecinn[onnx]'" in line
    assert not (tmp_path / "new").exists()
