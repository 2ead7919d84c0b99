"""The plan of a training run: it builds, has reasons, keeps to a time, and can be overridden."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.flow.network import Stage
from ecinn.progress import Progress
from ecinn.training import plan as planning
from ecinn.training.plan import images_per_second, plan_recipe

CPU = torch.device("cpu")


def noisy(
    counts: tuple[int, ...], height: int = 16, width: int | None = None, channels: int = 1
) -> Dataset:
    """Images without black or white, so many of each class."""
    generator = torch.Generator().manual_seed(1)
    shape = (sum(counts), channels, height, width or height)
    images = torch.randint(1, 255, shape, generator=generator).byte()
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return Dataset(images, labels, tuple(f"class {i}" for i in range(len(counts))))


def reasons(plan: planning.Plan) -> dict[str, tuple[str, str]]:
    return {setting: (value, reason) for setting, value, reason in plan.reasons}


@pytest.mark.parametrize(
    ("height", "width", "halvings"),
    [
        (8, 8, 1),
        (16, 16, 2),
        (18, 18, 1),
        (28, 28, 2),
        (32, 32, 2),
        (48, 48, 3),
        (64, 64, 3),
        (100, 100, 2),
        (96, 128, 4),
        (128, 128, 4),
    ],
)
def test_networks_of_all_sizes_are_built_and_inverted(height, width, halvings) -> None:
    for channels in (1, 3):
        data = noisy((3, 3), height, width, channels)
        assert len(planning._choose(data, planning.LARGE, {}, None)["stages"][0]) == halvings
        small = plan_recipe(data, CPU, name="own").recipe.architecture
        assert len(small.stages) == halvings
        classifier = GenerativeClassifier(small).eval()
        x = torch.rand((1, channels, height, width))
        with torch.no_grad():
            torch.testing.assert_close(
                classifier.decode(classifier.encode(x)), x, atol=1e-4, rtol=0
            )


def test_every_setting_has_a_reason_and_is_the_one_used() -> None:
    plan = plan_recipe(noisy((300, 200, 100)), CPU, name="mine")
    recipe, told = plan.recipe, reasons(plan)
    assert (recipe.name, recipe.dataset) == ("mine", "own")
    assert all(value and reason for value, reason in told.values())
    for name in ("beta", "tau", "batch_size", "learning_rate", "epochs", "ema_decay", "noise"):
        assert float(told[name][0]) == getattr(recipe, name)
    assert told["images"][0] == "600 of 16×16, grey, 3 classes"
    assert "GPU" in told["device"][1]
    # 600 images: more would not fit into forty steps of an epoch, and no epoch repeats 100 times.
    assert (recipe.batch_size, recipe.epochs) == (32, 100)
    steps = 100 * (600 // 32)
    assert recipe.ema_decay == pytest.approx(1 - 8 / steps, abs=5e-4)


@pytest.mark.parametrize(
    ("counts", "balanced"), [((30, 20), False), ((31, 20), True), ((20, 20, 50), True)]
)
def test_classes_of_unequal_size_are_balanced(counts, balanced) -> None:
    plan = plan_recipe(noisy(counts), CPU, name="own")
    assert plan.recipe.balanced is balanced
    assert f"{min(counts)} to {max(counts)} images" in reasons(plan)["balanced"][1]


def test_black_backgrounds_get_noise() -> None:
    data = noisy((40, 40))
    assert plan_recipe(data, CPU, name="own").recipe.noise == 0
    images = data.images.clone()
    images[:, :, :2] = 0  # an eighth
    plan = plan_recipe(dataclasses.replace(data, images=images), CPU, name="own")
    assert plan.recipe.noise == 0.005
    assert reasons(plan)["noise"][1].startswith("12%")


def test_given_settings_replace_the_chosen_ones() -> None:
    given = {
        "epochs": 3,
        "tau": 0.5,
        "stages": (Stage(1, 8), Stage(2, 8)),
        "clamp": 0.4,
        "augmentation": Augmentation(flip=True),
        "seed": 7,
        "balanced": True,
    }
    plan = plan_recipe(noisy((60, 60)), CPU, name="own", overrides=given)
    recipe, told = plan.recipe, reasons(plan)
    assert {told[name][1] for name in given} == {"given"}
    assert told["augmentation"][0] == "mirror"
    assert told["stages"][0] == "1 couplings of width 8, 2 couplings of width 8"
    for name, value in given.items():
        owner = recipe.architecture if name in ("stages", "clamp") else recipe
        assert getattr(owner, name) == value
    assert recipe.architecture.seed == 7


def test_settings_may_be_numbers_of_numpy() -> None:
    overrides = {"epochs": np.int64(3), "beta": np.float64(2.5)}
    recipe = plan_recipe(noisy((4, 4)), CPU, name="own", overrides=overrides).recipe
    assert (type(recipe.epochs), recipe.epochs) == (int, 3)
    assert (type(recipe.beta), recipe.beta) == (float, 2.5)


def test_wishes_that_cannot_be_planned_are_refused() -> None:
    data = noisy((4, 4))
    for says, options in (
        ("no setting 'epoch'", {"overrides": {"epoch": 3}}),
        ("not both", {"overrides": {"epochs": 3}, "minutes": 2.0}),
        ("more than 0 minutes", {"minutes": 0.0}),
        ("epochs is a whole number of at least 1, not 0", {"overrides": {"epochs": 0}}),
        ("batch_size is a whole number", {"overrides": {"batch_size": "64"}}),
        ("epochs is a whole number of at least 1, not True", {"overrides": {"epochs": True}}),
    ):
        with pytest.raises(InputError, match=says):
            plan_recipe(data, CPU, name="own", **options)
    for shape in ((4, 4), (27, 28), (130, 130)):
        with pytest.raises(InputError, match=f"{shape[0]}×{shape[1]}"):
            plan_recipe(noisy((2, 2), *shape), CPU, name="own")
    with pytest.raises(InputError, match="2 classes"):
        plan_recipe(noisy((4,)), CPU, name="own")


@pytest.mark.parametrize(
    ("minutes", "rates", "size", "epochs"),
    [
        # 600 s · 0.95 · 101/s / 1,000 images − 1 epoch; the large network would do 4 of 100.
        (10.0, (10.0, 101.0), planning.SMALL, 56),
        (10.0, (1000.0, 9999.0), planning.LARGE, 100),
        (10.0, (101.0, 9999.0), planning.LARGE, 56),
        (0.2, (1.0, 10.0), planning.SMALL, 1),
    ],
)
def test_minutes_set_size_and_epochs(minutes, rates, size, epochs, monkeypatch) -> None:
    """With speeds of the large and the small network that the test sets."""
    answers = iter(rates)
    monkeypatch.setattr(planning, "images_per_second", lambda *args: next(answers))
    plan = plan_recipe(noisy((500, 500)), CPU, name="own", minutes=minutes)
    assert plan.recipe.architecture.stages == size.stages[1]
    assert plan.recipe.epochs == epochs
    reason = reasons(plan)["epochs"][1]
    assert f"{minutes:g} minutes" in reason
    assert ("would give 10 epochs" in reason) == (epochs == 1)


def test_the_measurement_is_part_of_the_time(monkeypatch) -> None:
    """Two of 150 s leave 300 s of ten minutes: 300 · 0.95 · 101 / 1,000 − 1 epochs."""
    now = [0.0]

    def measured(recipe: Recipe, *rest: object) -> float:
        now[0] += 150.0
        return 101.0 if recipe.architecture.stages == planning.SMALL.stages[1] else 1.0

    monkeypatch.setattr(planning, "images_per_second", measured)
    monkeypatch.setattr(planning.time, "monotonic", lambda: now[0])
    plan = plan_recipe(noisy((500, 500)), CPU, name="own", minutes=10.0)
    assert plan.recipe.epochs == 27


@pytest.mark.parametrize(("tick", "steps"), [(0.01, 12), (2.0, 4)])
def test_speed_is_that_of_real_steps(tick, steps, monkeypatch) -> None:
    """With a clock that counts steps; it takes ten steps after the first two, or 3 seconds."""
    stages = {"stages": (Stage(1, 8), Stage(1, 8)), "batch_size": 40}
    recipe = plan_recipe(noisy((50, 50)), CPU, name="own", overrides=stages).recipe
    taken: list[int] = []
    original = planning.OptimisationStep.__call__

    def counted(step: planning.OptimisationStep, *inputs: object) -> None:
        taken.append(1)
        original(step, *inputs)

    monkeypatch.setattr(planning.OptimisationStep, "__call__", counted)
    monkeypatch.setattr(planning.time, "perf_counter", lambda: tick * len(taken))
    seen: list[Progress] = []
    before = torch.get_rng_state()
    rate = images_per_second(recipe, noisy((50, 50)), CPU, seen.append)
    assert rate == pytest.approx(40 / tick)
    assert len(taken) == steps
    assert torch.equal(torch.get_rng_state(), before)
    assert (seen[-1].done, seen[-1].total) == (12, 12)


def test_fewer_images_than_a_batch_are_measured() -> None:
    data, stages = noisy((3, 2)), {"stages": (Stage(1, 8), Stage(1, 8))}
    recipe = plan_recipe(data, CPU, name="own", overrides=stages).recipe
    rate = images_per_second(recipe, data, CPU)
    assert math.isfinite(rate)
    assert rate > 0
