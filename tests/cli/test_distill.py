"""`ecinn distill`, then `ecinn explain` on the classifier that was distilled."""

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import ecinn
from ecinn.classifier.recipes import MNIST, RECIPES, FineTuning
from ecinn.data.mnist import load_mnist
from ecinn.flow.network import Stage
from helpers.command_line import fails, run
from helpers.students import NearestMean, save_script


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_script(NearestMean(), tmp_path_factory.mktemp("script") / "nearest.pt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--size", "12x"), "--size is like"),
        (("--mean", "half"), "--mean is like"),
        (("--channels", "CMYK"), "RGB, BGR or grey"),
        (("--settings", "absent.toml"), "cannot read"),
        ((), "no classifier"),
    ],
)
def test_wrong_options_are_one_line(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    absent = tmp_path / "absent.onnx"
    assert message in fails(
        "distill", "--classifier", absent, "--data", "mnist", "--out", tmp_path, *options
    )


def test_a_classifier_of_another_size_is_one_line(script: Path, tmp_path: Path) -> None:
    code, _, stderr = run(
        "distill", "--classifier", script, "--data", "mnist", "--limit", 50, "--out", tmp_path,
        "--device", "cpu", "--size", "14",
    )  # fmt: skip
    assert code == 1
    (error,) = (line for line in stderr.splitlines() if line.startswith("error:"))
    assert "nearest.pt failed with" in error
    assert "50×1×14×14" in error
    assert "TorchScript interpreter" not in error
    assert "same number of columns" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--init-from", "resnet"), "no model 'resnet'"),
        (("--init-from", __file__), "not a safetensors file"),
        (("--init-from", "celeba-smile"), "cannot start from celeba-smile"),
        (("--epochs", "0"), "name it with --init-from"),
    ],
)
def test_wrong_models_to_start_from_are_one_line(
    script: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    where = ("--data", "mnist", "--limit", 20, "--out", tmp_path, "--device", "cpu")
    assert message in fails("distill", "--classifier", script, *where, *options)


class Hanging(nn.Module):
    """Computes for ever, outside of Python."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sum()
        while bool(y == y):
            y = y * 1.0
        return x.mean((2, 3))


@pytest.mark.slow
def test_a_classifier_that_hangs_is_one_line_and_the_command_ends(tmp_path: Path) -> None:
    """Threads that torch still uses would abort the process at its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Hanging()).save(tmp_path / "hang.pt")
    command = [
        sys.executable, "-m", "ecinn", "distill", "--classifier", tmp_path / "hang.pt", "--data",
        "mnist", "--limit", "10", "--out", tmp_path / "out", "--device", "cpu", "--timeout", "0.5",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: hang.pt gave no answer within 0.5 s")


@pytest.mark.slow
def test_distill_then_explain_is_verified_on_the_classifier(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(
        MNIST,
        architecture=dataclasses.replace(
            MNIST.architecture, stages=(Stage(1, 8), Stage(1, 8)), dense_width=32
        ),
        learning_rate=1e-2,
        batch_size=25,
        finetuning=FineTuning(1, 1.0, 1.0, batch_size=50),
    )
    monkeypatch.setitem(RECIPES, "mnist", small)
    folder = tmp_path / "student"
    code, stdout, stderr = run(
        "distill", "--classifier", script, "--data", "mnist", "--limit", 80, "--out", folder,
        "--epochs", 3, "--device", "cpu", "--queries", 5000, "--json",
    )  # fmt: skip
    assert code == 0, stderr
    assert "labelled images" in stderr
    report = json.loads(stdout)
    assert report == json.loads((folder / "distillation.json").read_text())
    assert 240 < report["queries"] <= 5000
    assert report["agreement"]["n"] == 80
    digit = tmp_path / "digit.png"
    Image.fromarray(load_mnist("test").images[0][0].numpy()).save(digit)
    where = ("--model", folder, "--out", tmp_path / "e", "--target", "3")
    code, stdout, stderr = run("explain", digit, *where)
    assert code == 0, stderr
    assert "Read by nearest.pt" in stdout
    code, stdout, stderr = run("explain", digit, *where, "--no-classifier", "--json")
    assert code == 0, stderr
    assert "is not queried" in stderr
    assert "classifier" not in json.loads(stdout)
    (folder / "classifier.pt").unlink()
    assert "--no-classifier" in fails("explain", digit, *where)


class Brighter(nn.Module):
    """Logits of pictures whose left or right half is brighter."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = (half.mean((1, 2, 3)) for half in x.split(8, dim=3))
        return 30 * torch.stack([left, right], 1)


class Negative(nn.Module):
    """Logits of the opposite."""

    def forward(self, x: Tensor) -> Tensor:
        return -x


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))


def half_bright(folder: Path, sides: tuple[int, int]) -> Path:
    """Write 120 pictures of noise whose left or right half is brighter, and what tells which."""
    generator = torch.Generator().manual_seed(0)
    height, width = sides
    for number in range(120):
        side, half = number % 2, width // 2
        values = torch.randint(60, (height, width), generator=generator)
        values[:, half * side : half * (side + 1)] += int(
            torch.randint(40, 180, (), generator=generator)
        )
        path = folder / "pictures" / ("left", "right")[side] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.byte().numpy()).save(path)
    save_script(Brighter(), folder / "brighter.pt", 16)
    return folder / "pictures"


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_student_of_a_folder_knows_its_pictures(tmp_path: Path) -> None:
    pictures, folder = half_bright(tmp_path, (16, 16)), tmp_path / "student"
    command = (
        "distill", "--classifier", tmp_path / "brighter.pt", "--data", pictures, "--out", folder,
        "--device", "cpu", "--epochs", 3, "--finetune-epochs", 1,
    )  # fmt: skip
    # A first try with a wrong order of the outputs leaves nothing that is in the way.
    code, _, stderr = run(*command, "--classes", "right,left")
    assert code == 2, stderr
    # Nor does another classifier in a file of the same name.
    good = (tmp_path / "brighter.pt").read_bytes()
    save_script(nn.Sequential(Brighter(), Negative()), tmp_path / "brighter.pt", 16)
    assert "--classes right,left" in run(*command)[2]
    (tmp_path / "brighter.pt").write_bytes(good)
    code, stdout, stderr = run(*command)
    assert code == 0, stderr
    page = (folder / "distillation.html").read_text()
    report = json.loads((folder / "distillation.json").read_text())
    assert f"{100 * report['agreement']['mean']:.1f} % [" in page
    assert "--data SOURCE --out DIR --epochs 3 --finetune-epochs 1" in page
    assert str(tmp_path) not in page
    stored = json.loads((folder / "data.json").read_text())
    assert stored["recipe"]["default_confidence"] == 0.95
    assert sum(stored["data"]["counts"]) == 120
    code, stdout, stderr = run("evaluate", folder, "--device", "cpu", "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["n"] == report["agreement"]["n"] == stored["data"]["counts"][2]
    code, _, stderr = run("audit", folder, "--out", tmp_path / "audit.html", "--device", "cpu")
    assert code == 0, stderr
    assert "already holds a run" in run(*command)[2]
    # A resumed run keeps pictures and recipe, and refuses other pictures.
    code, stdout, stderr = run(*command, "--resume", "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["agreement"] == report["agreement"]
    Image.new("L", (16, 16), 77).save(pictures / "left" / "new.png")
    assert "other images" in run(*command, "--resume")[2]
    assert json.loads((folder / "data.json").read_text()) == stored


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_student_of_a_folder_starts_from_another_model_and_resumes(tmp_path: Path) -> None:
    """Pictures are read as that model's were, and a resumed run needs the same model."""
    pictures, folder = half_bright(tmp_path, (16, 20)), tmp_path / "student"
    base, cpu = tmp_path / "base", ("--device", "cpu")
    code, _, stderr = run(
        "train", pictures, "--out", base, "--epochs", 2, "--fit", "crop", "--size", 16, *cpu
    )
    assert code == 0, stderr
    data = ("--classifier", tmp_path / "brighter.pt", "--data", pictures)
    command = ("distill", *data, "--out", folder, *cpu, "--report", 10)
    code, stdout, stderr = run(*command, "--init-from", base, "--epochs", 0, "--json")
    assert code == 0, stderr
    report = json.loads(stdout)
    start, student = ecinn.load(base, "cpu"), ecinn.load(folder, "cpu")
    assert student.recipe.framing == start.recipe.framing
    assert student.recipe.framing.fit == "crop"
    for name, value in start.classifier.state_dict().items():
        same = torch.equal(value, student.classifier.state_dict()[name])
        assert same or name in ("mu", "tau"), name
    assert "the same --init-from" in run(*command, "--resume")[2]
    code, stdout, stderr = run(*command, "--init-from", base, "--resume", "--json")
    assert code == 0, stderr
    again = json.loads(stdout)
    assert again["agreement"] == report["agreement"]
    # Answers on the pictures are known, those about counterfactuals are asked for again.
    assert report["queries"] < again["queries"] < 2 * report["queries"] - 100
