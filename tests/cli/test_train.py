"""`ecinn train`, then `ecinn explain` with the trained model."""

import dataclasses
import json
from pathlib import Path

import pytest

from ecinn.classifier.checkpoint import load_checkpoint
from ecinn.classifier.recipes import MNIST, RECIPES, FineTuning
from ecinn.flow.network import Stage
from helpers.command_line import fails, run


def test_unknown_recipes_and_unwritable_folders(tmp_path: Path) -> None:
    assert "mnist" in fails("train", "resnet", "--out", tmp_path)
    (tmp_path / "file").touch()
    assert "cannot write" in fails("train", "mnist", "--out", tmp_path / "file" / "sub")


def test_options_of_a_missing_second_stage_are_refused(tmp_path: Path) -> None:
    assert "no fine-tuning" in fails("train", "mnist-beta", "--out", tmp_path, "--faithfulness", 1)


@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--learning-rate"])
def test_options_of_a_skipped_first_stage_are_refused(option: str, tmp_path: Path) -> None:
    assert "skips the first stage" in fails(
        "train", "mnist-finetuned", "--out", tmp_path, "--refine-from", "mnist", option, 1
    )


@pytest.mark.slow
def test_train_then_explain_with_the_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, three: Path
) -> None:
    """Everything through the command line, with a network small enough for a test."""
    small = dataclasses.replace(
        MNIST,
        architecture=dataclasses.replace(
            MNIST.architecture, stages=(Stage(1, 8), Stage(1, 8)), dense_width=32
        ),
        learning_rate=1e-2,
    )
    monkeypatch.setitem(RECIPES, "mnist", small)
    finetuning = FineTuning(3, 1.0, 1.0, batch_size=32)
    tuned = dataclasses.replace(small, name="mnist-finetuned", finetuning=finetuning)
    monkeypatch.setitem(RECIPES, "mnist-finetuned", tuned)
    run_folder = tmp_path / "run"
    code, stdout, stderr = run(
        "train", "mnist", "--out", run_folder, "--epochs", 3, "--limit", 200,
        "--batch-size", 8, "--device", "cpu", "--tensorboard",
    )  # fmt: skip
    assert code == 0, stderr
    assert "epoch 3/3" in stderr
    assert "wrote" in stdout
    record = json.loads((run_folder / "training.json").read_text())
    assert record["settings"]["epochs"] == 3
    assert len(record["curve"]) == 3
    assert record["metrics"]["n"] == 200
    assert load_checkpoint(run_folder).metrics == record["metrics"]
    assert list((run_folder / "tensorboard").iterdir())
    assert "already holds a run" in fails("train", "mnist", "--out", run_folder)
    code, _, stderr = run("explain", three, "--model", run_folder, "--out", tmp_path / "o")
    assert code == 0, stderr
    refined = tmp_path / "refined"
    code, _, stderr = run(
        "train", "mnist-finetuned", "--out", refined, "--refine-from", run_folder,
        "--finetune-epochs", 1, "--limit", 128, "--device", "cpu", "--faithfulness", 2.5,
    )  # fmt: skip
    assert code == 0, stderr
    record = json.loads((refined / "training.json").read_text())
    assert record["settings"]["finetuning"]["faithfulness"] == 2.5
    assert record["command"] == (
        "ecinn train mnist-finetuned --out DIR --refine-from MODEL "
        "--limit 128 --faithfulness 2.5 --finetune-epochs 1"
    )
    assert len(record["first_stage"]["curve"]) == 3
    assert len(record["curve"]) == 1
    assert record["metrics"]["n"] == 128
    assert (refined / "teacher.safetensors").is_file()
    assert "no fine-tuning" in fails(
        "train",
        "mnist-finetuned",
        "--out",
        tmp_path / "x",
        "--refine-from",
        run_folder,
        "--finetune-epochs",
        0,
    )
