"""`ecinn train`, then `ecinn explain` with the trained model."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ecinn.classifier.checkpoint import load_checkpoint
from ecinn.classifier.recipes import MNIST, RECIPES, FineTuning, Recipe
from ecinn.cli.progress import load_images
from ecinn.data.dataset import Dataset
from ecinn.data.framing import Framing, Intensity
from ecinn.flow.network import Architecture, Stage
from ecinn.web.catalogue import load_catalogue
from helpers.command_line import fails, run


def test_unknown_recipes_and_unwritable_folders(tmp_path: Path) -> None:
    assert "mnist" in fails("train", "resnet", "--out", tmp_path)
    (tmp_path / "file").touch()
    assert "cannot write" in fails("train", "mnist", "--out", tmp_path / "file" / "sub")


def test_options_of_a_missing_second_stage_are_refused(tmp_path: Path) -> None:
    assert "no fine-tuning" in fails("train", "mnist-beta", "--out", tmp_path, "--faithfulness", 1)
    assert "mnist-finetuned is not a face model" in fails(
        "train", "mnist-finetuned", "--out", tmp_path, "--background", 4
    )


@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--learning-rate"])
def test_options_of_a_skipped_first_stage_are_refused(option: str, tmp_path: Path) -> None:
    assert "skips the first stage" in fails(
        "train", "mnist-finetuned", "--out", tmp_path, "--refine-from", "mnist", option, 1
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small_teacher")
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
        "--finetune-distillation", 0.25,
    )  # fmt: skip
    assert code == 0, stderr
    record = json.loads((refined / "training.json").read_text())
    assert record["settings"]["finetuning"]["faithfulness"] == 2.5
    assert record["settings"]["finetuning"]["distillation_weight"] == 0.25
    assert record["command"] == (
        "ecinn train mnist-finetuned --out DIR --refine-from MODEL "
        "--limit 128 --faithfulness 2.5 --finetune-epochs 1 --finetune-distillation 0.25"
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


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Plan a tiny network instead; return what was asked for."""
    asked: list[dict[str, Any]] = []

    def plan_recipe(data: Dataset, device: torch.device, **options: Any) -> SimpleNamespace:
        asked.append({"images": len(data), "device": device, **options})
        architecture = Architecture(
            data.images.shape[1], *data.images.shape[2:], len(data.class_names),
            (Stage(1, 4), Stage(1, 4)), dense_width=0, pixel_margin=0.02,
        )  # fmt: skip
        recipe = Recipe(
            options["name"], "own", architecture, 1.0, epochs=2, batch_size=16, ema_decay=0.0,
            framing=options["framing"],
        )  # fmt: skip
        recipe = dataclasses.replace(recipe, **options["overrides"])
        return SimpleNamespace(recipe=recipe, reasons=(("epochs", "2", "a test"),))

    module = SimpleNamespace(plan_recipe=plan_recipe)
    monkeypatch.setitem(sys.modules, "ecinn.training.plan", module)
    return asked


def scans(folder: Path) -> Path:
    """Dark and light pictures of 12 bits by two cameras, with a table."""
    random = np.random.default_rng(1)
    folder.mkdir()
    rows = ["path,label,camera"]
    for n in range(120):
        values = random.integers(0, 2000, (16, 16)) + 2000 * (n % 2)
        Image.fromarray(values.astype(np.uint16)).save(folder / f"{n}.png")
        rows.append(f"{n}.png,{'light' if n % 2 else 'dark'},{'AB'[n % 3 > 0]}")
    (folder / "scans.csv").write_text("\n".join(rows))
    return folder / "scans.csv"


@pytest.mark.slow
def test_your_own_pictures_from_table_to_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    table, run_folder = scans(tmp_path / "scans"), tmp_path / "run"
    code, stdout, stderr = run(
        "train", table, "--out", run_folder, "--epochs", 3, "--minutes", 5, "--size", 16,
        "--device", "cpu",
    )  # fmt: skip
    assert code == 0, stderr
    assert "a test" in stdout
    assert "120 grey pictures of 2 classes at 16×16: 96 for training" in stderr
    framing = Framing("stretch", Intensity(0.0, 4095.0, "12 bits"))
    (asked,) = plan
    assert asked["images"] == 96
    assert asked["overrides"] == {"epochs": 3}
    assert (asked["name"], asked["minutes"], asked["framing"]) == ("run", 5.0, framing)
    assert load_checkpoint(run_folder).recipe.framing == framing
    record = json.loads((run_folder / "training.json").read_text())
    assert record["command"] == "ecinn train SOURCE --out DIR --size 16 --minutes 5 --epochs 3"
    assert record["metrics"]["n"] == 12
    assert "already holds a run" in fails("train", table, "--out", run_folder)
    code, stdout, stderr = run("evaluate", run_folder, "--json", "--device", "cpu")
    assert code == 0, stderr
    assert json.loads(stdout)["error"] == record["metrics"]["error"]
    code, stdout, stderr = run("models", run_folder)
    assert "values of 0 to 4095 (12 bits) are black to white" in stdout
    assert "ecinn train SOURCE --out DIR" in stdout
    (served,) = load_catalogue(
        [str(run_folder)], load=lambda recipe, path: load_images(recipe, "test", model=path)
    ).values()
    assert len(served.samples) == 12
    page = tmp_path / "audit.html"
    code, stdout, stderr = run("audit", run_folder, "--split", "train", "--out", page,
                               "--json", "--device", "cpu")  # fmt: skip
    assert code == 0, stderr
    names = [group["name"] for group in json.loads(stdout)["subgroups"]]
    assert names == ["camera: A", "camera: B"]
    assert "camera: B" in page.read_text()
    (tmp_path / "scans").rename(tmp_path / "elsewhere")
    assert "--data" in fails("evaluate", run_folder, "--device", "cpu")
    code, stdout, stderr = run("evaluate", run_folder, "--json", "--device", "cpu",
                               "--data", tmp_path / "elsewhere" / "scans.csv")  # fmt: skip
    assert json.loads(stdout)["error"] == record["metrics"]["error"]
    code, stdout, stderr = run(
        "explain", tmp_path / "elsewhere" / "1.png", "--model", run_folder,
        "--out", tmp_path / "o", "--json", "--sample", 0,
        "--data", tmp_path / "elsewhere" / "scans.csv",
    )  # fmt: skip
    assert code == 0, stderr
    assert "0 to 4095 (12 bits)" in stdout
    assert "--data is for models of your own" in fails("evaluate", "mnist", "--data", table)


@pytest.mark.slow
def test_an_interrupted_run_of_your_own_pictures_keeps_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    table, run_folder = scans(tmp_path / "scans"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("ecinn.training.loop.calibrate", _interrupt)
        code, _, stderr = run("train", table, "--out", run_folder, "--device", "cpu",
                              "--learning-rate", 0.01, "--channels", 1)  # fmt: skip
        assert code == 130, stderr
    assert "leave these out" in fails(
        "train", table, "--out", run_folder, "--resume", "--size", 16
    )
    assert "leave out --minutes" in fails(
        "train", table, "--out", run_folder, "--resume", "--minutes", 3
    )
    lines = table.read_text().splitlines()
    fewer = table.with_name("fewer.csv")
    fewer.write_text("\n".join(lines[:-4]) + "\n")
    code, _, stderr = run("train", fewer, "--out", run_folder, "--resume", "--device", "cpu")
    assert code == 2
    assert "training pictures with which the run in" in stderr
    assert "there is no run in" in fails("train", table, "--out", tmp_path / "typo", "--resume")
    assert not (tmp_path / "typo").exists()
    monkeypatch.setenv("ECINN_CACHE", str(table))
    code, _, stderr = run("train", table, "--out", tmp_path / "new")
    assert code == 1
    assert "set ECINN_CACHE" in stderr.splitlines()[-1]
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    code, _, stderr = run("train", table, "--out", run_folder, "--resume", "--device", "cpu",
                          "--channels", 1)  # fmt: skip
    assert code == 0, stderr
    assert len(plan) == 1
    assert load_checkpoint(run_folder).recipe.learning_rate == 0.01


@pytest.mark.slow
def test_a_run_that_learned_nothing_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: list[dict[str, Any]]
) -> None:
    """Ctrl-C before the end of the first epoch leaves only the plan."""
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    table, run_folder = scans(tmp_path / "scans"), tmp_path / "run"
    command = ("train", table, "--out", run_folder, "--device", "cpu", "--channels", 1)
    with monkeypatch.context() as patch:
        patch.setattr("ecinn.training.loop._Run.train", _interrupt)
        code, _, stderr = run(*command)
    assert code == 130
    assert "start again" in stderr
    assert [file.name for file in run_folder.iterdir()] == ["data.json"]
    code, _, stderr = run(*command, "--size", 16)
    assert code == 0, stderr
    assert len(plan) == 2


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_wrong_options_for_your_own_pictures(tmp_path: Path, plan: list[dict[str, Any]]) -> None:
    table, out = scans(tmp_path / "scans"), tmp_path / "run"
    assert "for pictures of your own" in fails("train", "mnist", "--out", out, "--size", 16)
    assert "for pictures of your own" in fails("train", "mnist", "--out", out, "--minutes", 1)
    assert "file or folder 'nowhere'" in fails("train", "nowhere", "--out", out)
    for option, value, says in (
        ("--size", 17, "multiple of 4"),
        ("--fit", "zoom", "'zoom'"),
        ("--window", "3", "LOW,HIGH"),
        ("--window", "3,2", "LOW,HIGH"),
        ("--channels", 2, "1 (grey) or 3"),
        ("--label-column", "no", "no column 'no'"),
    ):
        assert says in fails("train", table, "--out", out, option, value)
    assert not out.exists()
    assert not plan
