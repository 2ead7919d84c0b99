"""Training in two processes gives the model of one process, and they end together."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ecinn.classifier.checkpoint import load_checkpoint
from ecinn.classifier.recipes import RECIPES
from ecinn.classifier.tensor_files import read_tensors
from ecinn.cli import app
from ecinn.errors import EcinnError, InputError
from ecinn.progress import Progress
from ecinn.training import ranks
from ecinn.training.finetuning import FineTuningStep
from ecinn.training.ranks import Ranks, joined, require_divisible
from ecinn.training.state import STATE_FILES, TrainingState
from helpers import two_processes
from helpers.builders import random_images
from helpers.command_line import fails, run

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process: a whole one, and one that stopped in each stage."""
    folder = tmp_path_factory.mktemp("runs")
    two_processes.run(folder / "one")
    for stage in ("training", "fine-tuning"):

        def stop(progress: Progress, stage: str = stage) -> None:
            if progress.task == stage and progress.figures["epoch"] == 2:
                raise EcinnError("stopped")

        with pytest.raises(EcinnError, match="stopped"):
            two_processes.run(folder / f"{stage}-from-one", observe=stop, save_every=0.0)
    return folder


@pytest.fixture(scope="module")
def output(folder: Path) -> tuple[str, str]:
    """Output of two processes that did all they should, and then failed."""
    paths = [str(Path(two_processes.__file__).parents[2] / "src"), os.environ.get("PYTHONPATH")]
    ended = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", two_processes.__file__, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    return ended.stdout, ended.stderr


def assert_same_run(run: Path, one: Path) -> None:
    """Compare the models, and all that the optimisers know."""
    model, expected = load_checkpoint(run), load_checkpoint(one)
    close = {"rtol": 1e-5, "atol": 1e-6}
    weights = expected.classifier.state_dict()
    for name, value in model.classifier.state_dict().items():
        torch.testing.assert_close(value, weights[name], **close)
    torch.testing.assert_close(model.mu_bar, expected.mu_bar, **close)
    assert model.ood.log_p == pytest.approx(expected.ood.log_p, rel=1e-5)
    metrics, others = ({**found.metrics, "model": 0} for found in (model, expected))
    assert metrics == pytest.approx(others, rel=1e-3, abs=1e-5)
    for name in STATE_FILES:
        (state, about), (other, about_other) = (read_tensors(f / name) for f in (run, one))
        assert state.keys() == other.keys()
        for key, value in state.items():
            if key == "critic.score.bias":  # its gradient is rounding, which Adam enlarges
                continue
            how = {"rtol": 1e-4, "atol": 1e-4} if key.startswith("critic") else close
            torch.testing.assert_close(value, other[key], **how, msg=key)
        for point, same in zip(about["curve"], about_other["curve"], strict=True):
            del point["seconds"], same["seconds"]
            assert point == pytest.approx(same, rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("output")
@pytest.mark.parametrize("run", ["two", "training-from-one", "fine-tuning-from-one"])
def test_two_processes_train_the_model_of_one(run: str, folder: Path) -> None:
    """From the beginning, and from the state of one process in either stage."""
    assert load_checkpoint(folder / run).training["processes"] == 2
    assert "processes" not in load_checkpoint(folder / "one").training
    assert_same_run(folder / run, folder / "one")


@pytest.mark.slow
def test_only_the_first_process_prints(output: tuple[str, str], folder: Path) -> None:
    stdout, stderr = output
    assert stdout.count("wrote") == 1
    assert stderr.count("loading") == 3  # splits
    assert stderr.count("training: 3/3") == 1
    assert (folder / "cli" / "training.json").is_file()


@pytest.mark.slow
def test_one_error_ends_both_and_one_process_resumes(
    output: tuple[str, str], folder: Path
) -> None:
    """The first process keeps its finished epoch when the second one fails."""
    lines = [line for line in output[1].splitlines() if line.startswith("error")]
    assert lines == ["error: the second process fails"]
    assert read_tensors(folder / "from-two" / STATE_FILES[0])[1]["epoch"] == 1
    two_processes.run(folder / "from-two", resume=True)
    assert_same_run(folder / "from-two", folder / "one")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_row_of_a_batch_has_one_process(size: int) -> None:
    for start, stop in ((0, 5), (5, 11), (7, 7)):
        parts = [Ranks(rank, size).rows(start, stop) for rank in range(size)]
        assert torch.cat(parts).tolist() == list(range(start, stop))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_images_have_the_same_target_in_any_process() -> None:
    """With two classes, as above, there is only one target."""
    architecture = replace(two_processes.tiny_recipe().architecture, classes=3)
    recipe = replace(two_processes.tiny_recipe(), architecture=architecture)
    data, targets = random_images(45, 1, 3, seed=1), torch.zeros(2, 11, dtype=torch.long)
    for size in (1, 2):
        for rank in range(size):
            state, device = TrainingState.start(recipe, torch.device("cpu")), torch.device("cpu")
            step = FineTuningStep(recipe, data, state, device, Ranks(rank, size))
            step.generator.manual_seed(4)
            targets[size - 1, step.rows] = step._other_class(torch.zeros_like(step.rows))
    assert torch.equal(*targets)
    assert targets.unique().tolist() == [1, 2]


def test_what_needs_one_process_is_refused() -> None:
    recipe = two_processes.tiny_recipe()
    require_divisible(recipe, 45, Ranks(1, 5))
    with pytest.raises(InputError, match="batches of 11 images are too small for 6 processes"):
        require_divisible(recipe, 45, Ranks(1, 6))
    require_divisible(RECIPES["mnist-paper"], 1000, Ranks())
    with pytest.raises(InputError, match="BatchNorm"):
        require_divisible(RECIPES["mnist-paper"], 1000, Ranks(0, 2))


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torchrun started this process."""
    started = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    for name, value in (started | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_fails_first", lambda rank: True)
    monkeypatch.setattr(app.time, "sleep", lambda _: None)


@pytest.mark.usefixtures("second_of_two")
def test_a_gpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="there are 1: lower --nproc-per-node"), joined("cuda"):
        pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="not cuda:0"), joined("cuda:0"):
        pass


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize("wrong", [("evaluate", "mnist"), ("train", "mnist", "--nothing")])
def test_wrong_commands_are_told_by_the_first_process(wrong, monkeypatch) -> None:
    assert run(*wrong) == (2, "", "")
    monkeypatch.setenv("RANK", "0")
    told = fails(*wrong)
    assert ("without torchrun" in told) == (wrong[0] != "train")
