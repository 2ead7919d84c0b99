"""`ecinn train` and `ecinn mix` on a network that is small enough for a test."""

import dataclasses
import json
from pathlib import Path

import pytest

from ecinn.classifier import recipes
from ecinn.classifier.checkpoint import load_checkpoint
from ecinn.classifier.recipes import MNIST
from ecinn.cli import progress
from ecinn.data.mnist import load_mnist
from ecinn.errors import InterruptedRunError
from ecinn.flow.network import Stage
from ecinn.training import loop
from helpers.command_line import fails, run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = dataclasses.replace(
        MNIST.architecture, stages=(Stage(1, 8), Stage(1, 8)), dense_width=32
    )
    recipe = dataclasses.replace(MNIST, architecture=architecture, learning_rate=1e-2)
    monkeypatch.setattr(recipes, "RECIPES", {"mnist": recipe})
    monkeypatch.setattr(
        progress,
        "load_images",
        lambda dataset, split, celeba: load_mnist(split).first(1000 if split == "train" else 200),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_train_then_fine_tune_then_mix(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, stdout, stderr = run(
        "train", "mnist", "--out", folder, "--epochs", 3, "--limit", 1000,
        "--batch-size", 32, "--device", "cpu", "--tensorboard", "--finetune-epochs", 0,
    )  # fmt: skip
    assert code == 0, stderr
    assert "training" in stderr
    assert "wrote" in stdout
    record = json.loads((folder / "training.json").read_text())
    assert record["settings"]["epochs"] == 3
    assert len(record["curve"]) == 3
    assert record["metrics"]["n"] == 200
    assert load_checkpoint(folder).metrics == record["metrics"]
    assert list((folder / "tensorboard").iterdir())
    assert "already holds a run" in fails("train", "mnist", "--out", folder)
    tuned = tmp_path / "tuned"
    code, _, stderr = run(
        "train", "mnist", "--out", tuned, "--refine-from", folder, "--finetune-epochs", 1,
        "--limit", 128, "--batch-size", 32, "--device", "cpu", "--proximity", 2.5,
    )  # fmt: skip
    assert code == 0, stderr
    record = json.loads((tuned / "training.json").read_text())
    assert record["settings"]["finetuning"]["proximity"] == 2.5
    assert record["command"] == "ecinn train mnist --out DIR --refine-from MODEL"
    assert len(record["first_stage"]["curve"]) == 3
    assert len(record["curve"]) == 1
    assert record["metrics"]["n"] == 128
    mixture = tmp_path / "mixture.safetensors"
    code, stdout, stderr = run("mix", folder, tuned, "--out", mixture, "--device", "cpu")
    assert code == 0, stderr
    assert load_checkpoint(mixture).metrics["n"] == 200
    assert "reached q" in stdout


@pytest.mark.usefixtures("small")
def test_options_without_a_second_stage_are_refused(tmp_path: Path, monkeypatch) -> None:
    once = dataclasses.replace(recipes.RECIPES["mnist"], finetuning=None)
    monkeypatch.setattr(recipes, "RECIPES", {"mnist": once})
    assert "no second stage" in fails("train", "mnist", "--out", tmp_path, "--realism", 1)


@pytest.mark.usefixtures("small")
def test_an_interrupted_training_exits_with_130(tmp_path: Path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise InterruptedRunError("interrupted; continue with --resume")

    monkeypatch.setattr(loop, "train", interrupted)
    assert "--resume" in fails("train", "mnist", "--out", tmp_path, code=130)
