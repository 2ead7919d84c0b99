"""The bookkeeping of `make bench`: passes, seconds, and what stays if something is missing."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecinn.attribution import search
from ecinn.pixels import to_pixels
from ecinn.studies.benchmark.side_by_side import Pairs
from helpers.builders import random_images, small_model
from helpers.paths import REPOSITORY


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return importlib.import_module("speed")


@pytest.mark.parametrize("method", [search.ecinn, search.latent_gradient, search.pixel_gradient])
@pytest.mark.parametrize("seed", range(3))
def test_the_network_counts_as_many_passes_as_the_method_reports(
    speed: Any, method: Any, seed: int
) -> None:
    model = speed.Counted(small_model().checkpoint, "cpu")
    x = to_pixels(random_images(1, 1, 3, seed).images)
    q = (model.predict(x).argmax(1)[:, None] + 1) % 3
    made = method(model, model.mu_bar, x, q)
    assert model.forward + model.backward == int(made.passes)
    assert (model.backward == 0) == (method is search.ecinn)
    assert model.forward > model.backward


@pytest.mark.parametrize("targets", [1, 2])
def test_an_explanation_passes_every_picture_once_each_way(speed: Any, targets: int) -> None:
    """Encode x, decode it and two pictures per target, encode those again."""
    model = speed.Counted(small_model().checkpoint, "cpu")
    x = to_pixels(random_images(1, 1, 3, 5).images)
    q = (model.predict(x).argmax(1)[:, None] + torch.arange(1, targets + 1)) % 3
    speed.METHODS["Model.explain"](model, x, q)
    assert (model.forward, model.backward) == (1 + 1 + 2 * targets + 2 * targets, 0)


class Clock:
    """A clock that only calls advance."""

    def __init__(self, *steps: float) -> None:
        self.now, self.steps = 0.0, iter(steps)

    def process_time(self) -> float:
        return self.now

    def call(self) -> None:
        self.now += next(self.steps)


def test_seconds_are_medians_without_the_warm_up(
    speed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(50, 7, 3, 9, 1, 8, 2, 10)
    monkeypatch.setattr(speed, "time", clock)
    assert speed.cpu_seconds(clock.call, clock.call, repeats=4) == [2, 9]
    monkeypatch.setattr(speed, "time", once := Clock(5))
    assert speed.cpu_seconds(once.call, repeats=1) == [5]


@pytest.mark.parametrize("interrupted", [False, True])
def test_digits_without_an_answer_stay_and_an_interrupted_method_keeps_the_others(
    speed: Any, *, interrupted: bool
) -> None:
    data = random_images(3, 1, 3, 2)
    q = torch.tensor([0, 1, 2])
    pairs = Pairs(torch.arange(3), data.images, (q + 1) % 3, q)
    model = speed.Counted(small_model().checkpoint, "cpu")

    def prepare(target: int) -> Any:
        def method(model: Any, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            if interrupted and target == 2:
                raise KeyboardInterrupt
            model.forward += 4 + target
            model.backward += 2
            return (torch.full_like(x, torch.nan) if target == 1 else 1 - x)[None]

        return method

    stored, row = speed.run_method(model, prepare, pairs, repeats=3)
    n = 2 if interrupted else 3
    kept = (q == 1)[:n, None, None, None]
    assert torch.equal(stored, torch.where(kept, data.images[:n], 255 - data.images[:n]))
    assert (row["digits"], row["found"]) == (n, n - 1)
    assert (row["forward"], row["backward"]) == (4.5 if interrupted else 5, 2)


@pytest.mark.slow
def test_the_other_rows_stay_without_alibi(
    speed: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(speed, "importlib", nothing)
    monkeypatch.setattr(speed, "METHODS", {"ecinn": speed.METHODS["ecinn"]})
    model = speed.Counted(speed.ecinn.load("mnist", "cpu").checkpoint, "cpu")
    measured = speed.side_by_side(model, 3, tmp_path / "digits.png")
    assert speed.NO_ALIBI in capsys.readouterr().out
    (row,) = measured["rows"]
    assert (row["method"], row["forward"], row["backward"]) == ("ecinn", 2, 0)
    assert row["model"][0] == 1
    ratio = row["seconds"] / measured["forward_seconds"]
    assert row["times_forward"] == pytest.approx(ratio, 0.01)
    assert (tmp_path / "digits.png").exists()
