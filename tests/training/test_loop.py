"""Training on the CPU: it learns, survives interruptions and resumes to the same weights."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint
from ecinn.classifier.recipes import MNIST, RECIPES, FineTuning, Recipe, find_recipe
from ecinn.classifier.tensor_files import read_tensors, write_tensors
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.errors import EcinnError, InputError, InterruptedRunError
from ecinn.flow.network import Architecture, Stage
from ecinn.model import load
from ecinn.progress import Progress
from ecinn.training import loop as training
from ecinn.training import step as optimisation
from ecinn.training.evaluation import evaluate
from ecinn.training.loop import train
from ecinn.training.state import TrainingState
from helpers.builders import RowTeacher

STATE_FILE = training.STATE_FILES[0]

CPU = torch.device("cpu")


@pytest.fixture
def recipe() -> Recipe:
    """A tiny network with everything switched on that draws random numbers."""
    return dataclasses.replace(
        MNIST,
        architecture=Architecture(
            1, 28, 28, 10, (Stage(1, 8), Stage(2, 8)), dense_width=16, clamp=1.5, dropout=0.1
        ),
        augmentation=Augmentation(shift=1.0, rotate=5.0, share=0.5),
        epochs=3,
        batch_size=32,
        learning_rate=5e-3,
        finetuning=None,
        mnist_framing=False,  # without the shape score, which takes longer than the training
    )


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_mnist("train").first(640)


class InterruptError(Exception):
    """Stands for Ctrl-C, a killed machine, a power cut."""


@pytest.mark.slow
def test_it_learns_and_reports(recipe: Recipe, data: Dataset, tmp_path: Path) -> None:
    seen: list[Progress] = []
    recipe = dataclasses.replace(recipe, epochs=4)
    checkpoint = train(recipe, data, tmp_path, device=CPU, observe=seen.append)
    assert {progress.task for progress in seen} == {"training"}
    assert seen[-1].done == seen[-1].total == 4 * 20
    first, last = seen[0].figures, seen[-1].figures
    assert last["loss"] < first["loss"] - 1
    assert last["error"] < 0.6
    assert last["bits_per_dim"] < first["bits_per_dim"]
    assert (last["epoch"], last["epochs"]) == (4, 4)
    assert last["images_per_second"] > 0
    assert len(checkpoint.training["curve"]) == 4
    assert load_checkpoint(tmp_path).training == checkpoint.training


@pytest.mark.slow
def test_resumed_run_ends_at_the_same_weights(
    recipe: Recipe, data: Dataset, tmp_path: Path
) -> None:
    data, recipe = data.first(256), dataclasses.replace(recipe, mnist_framing=True)
    whole = train(recipe, data, tmp_path / "whole", device=CPU)

    def stop_in_second_epoch(progress: Progress) -> None:
        if progress.figures["epoch"] == 2:
            raise InterruptError

    interrupted = tmp_path / "interrupted"
    with pytest.raises(InterruptError):
        train(recipe, data, interrupted, device=CPU, observe=stop_in_second_epoch, save_every=0.0)
    with pytest.raises(InputError, match="was started with"):
        train(recipe, data.first(len(data) // 2), interrupted, device=CPU, resume=True)
    torch.rand(17)  # what the process did in between must not matter
    resumed = train(recipe, data, interrupted, device=CPU, resume=True)
    weights = whole.classifier.state_dict()
    for name, value in resumed.classifier.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert torch.equal(resumed.mu_bar, whole.mu_bar)
    assert (resumed.ood.log_p, resumed.ood.distance) == (whole.ood.log_p, whole.ood.distance)
    for one, other in zip(resumed.ood.shape, whole.ood.shape, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
    # Guard: the run did depend on its random numbers.
    other = dataclasses.replace(recipe, seed=1)
    another = train(other, data, tmp_path / "other", device=CPU).classifier.state_dict()
    assert not torch.equal(another["mu"], weights["mu"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["training", "fine-tuning"])
def test_ctrl_c_keeps_the_last_finished_epoch(
    stage: str, recipe: Recipe, data: Dataset, tmp_path: Path
) -> None:
    """Although the last state on disk is older: `save_every` never comes due."""
    data = data.first(128)
    if stage == "fine-tuning":
        recipe = dataclasses.replace(recipe, epochs=1, finetuning=FineTuning(3, 3.0, 1.0, 32))
    teacher = RowTeacher() if recipe.finetuning else None
    whole = train(recipe, data, tmp_path / "whole", device=CPU, teacher=teacher)

    def press_ctrl_c(progress: Progress) -> None:
        if progress.task == stage and progress.figures["epoch"] == 3:
            raise KeyboardInterrupt

    stopped = tmp_path / "stopped"
    options = {"device": CPU, "save_every": 1e9, "teacher": teacher}
    with pytest.raises(InterruptedRunError, match="--resume") as error:
        train(recipe, data, stopped, observe=press_ctrl_c, **options)
    assert error.value.exit_code == 130
    name = training.STATE_FILES[stage == "fine-tuning"]
    assert read_tensors(stopped / name)[1]["epoch"] == 2
    resumed = train(recipe, data, stopped, resume=True, **options).classifier.state_dict()
    for name, value in whole.classifier.state_dict().items():
        assert torch.equal(resumed[name], value), name


def test_ctrl_c_in_the_first_epoch_leaves_nothing(recipe, data, tmp_path) -> None:
    def press_ctrl_c(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="start again"):
        train(recipe, data, tmp_path / "run", device=CPU, observe=press_ctrl_c)
    assert not (tmp_path / "run").exists()


def test_the_model_is_written_with_its_metrics(recipe, data, tmp_path) -> None:
    recipe = dataclasses.replace(recipe, epochs=1)
    test = load_mnist("test").first(60)
    folder = tmp_path / "run"
    seen: list[Progress] = []

    def observe(progress: Progress) -> None:
        assert not (folder / "model.safetensors").exists()
        seen.append(progress)

    checkpoint = train(recipe, data.first(64), folder, test=test, device=CPU, observe=observe)
    loaded = load_checkpoint(folder)
    assert loaded.metrics == checkpoint.metrics
    assert loaded.metrics == dataclasses.asdict(evaluate(load(folder, "cpu"), test))
    assert (seen[-1].task, seen[-1].done, seen[-1].total) == ("mnist: evaluating", 60, 60)


def test_names_and_strings_are_accepted(recipe, data, tmp_path, monkeypatch) -> None:
    data = data.first(64)
    monkeypatch.setitem(RECIPES, "tiny", dataclasses.replace(recipe, epochs=1))
    first = train("tiny", data, str(tmp_path / "first"), device="cpu")
    again = train("tiny", data, tmp_path / "again", init_from=str(tmp_path / "first"))
    assert again.training["init_from"] == first.recipe.name


def test_options_that_exclude_each_other_are_refused(recipe, data, tmp_path) -> None:
    model = train(
        dataclasses.replace(recipe, epochs=1), data.first(64), tmp_path / "a", device=CPU
    )
    tmp_path = tmp_path / "b"
    tuned = dataclasses.replace(recipe, finetuning=FineTuning(1, 1.0, 1.0))
    with pytest.raises(InputError, match="no fine-tuning"):
        train(recipe, data, tmp_path, refine_from=model)
    with pytest.raises(InputError, match="choose one"):
        train(tuned, data, tmp_path, refine_from=model, init_from=model)
    with pytest.raises(InputError, match="leave one out"):
        train(tuned, data, tmp_path, refine_from=model, resume=True)


def test_the_callers_random_numbers_are_left_alone(recipe, data, tmp_path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    recipe = dataclasses.replace(recipe, epochs=1)
    train(recipe, data.first(64), tmp_path, device=CPU)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e4, float("nan")])
def test_a_run_that_breaks_stops_and_keeps_the_last_good_state(
    rate: float, recipe: Recipe, data: Dataset, tmp_path: Path, monkeypatch
) -> None:
    """The learning rate goes wild in the second epoch; the first one's state survives."""
    original = optimisation.cosine_schedule
    steps = iter(range(10_000))
    monkeypatch.setattr(
        optimisation,
        "cosine_schedule",
        lambda done, w: rate if next(steps) >= 20 else original(done, w),
    )
    with pytest.raises(EcinnError, match="last good state") as error:
        train(recipe, data, tmp_path, device=CPU, save_every=0.0)
    assert error.value.exit_code == 1
    state = TrainingState.start(recipe, CPU)
    state.restore(tmp_path / STATE_FILE, recipe)
    assert state.epoch == 1
    assert all(bool(torch.isfinite(p).all()) for p in state.classifier.parameters())


def fragile(rate: float, **changes: float) -> Recipe:
    """Diverges from a learning rate of about 4 on."""
    architecture = Architecture(
        1, 28, 28, 10, (Stage(1, 8), Stage(1, 8)), dense_width=0, clamp=1.5
    )
    return dataclasses.replace(
        MNIST,
        architecture=architecture,
        augmentation=Augmentation(),
        epochs=3,
        batch_size=16,
        learning_rate=rate,
        **changes,
    )


def equal_weights(first: Checkpoint, second: Checkpoint) -> bool:
    others = second.classifier.state_dict()
    weights = first.classifier.state_dict().items()
    return all(torch.equal(value, others[name]) for name, value in weights)


def test_a_divergence_restarts_with_half_the_learning_rate(data, tmp_path) -> None:
    """In the first epoch that is a run with the lower rate from the beginning."""
    seen: list[Progress] = []
    data = data.first(128)
    model = train(fragile(5.0), data, tmp_path / "a", device=CPU, observe=seen.append)
    restarts = model.training["restarts"]
    rates = [5.0 / 2**n for n in range(1, len(restarts) + 1)]
    assert [restart["learning_rate"] for restart in restarts] == rates
    assert [restart["epoch"] for restart in restarts] == [1] * len(rates)
    told = [progress.figures for progress in seen if "diverged" in progress.task]
    assert [figures["learning_rate"] for figures in told] == rates
    assert [point["epoch"] for point in model.training["curve"]] == [1, 2, 3]
    lower = train(fragile(rates[-1]), data, tmp_path / "b", device=CPU)
    assert "restarts" not in lower.training
    assert equal_weights(model, lower)


def test_a_run_that_restarted_resumes_to_the_same_weights(data, tmp_path) -> None:
    """The rate rises until the end, so that the last epoch diverges and the others are kept."""
    data, recipe = data.first(128), fragile(14.0, warm_up=0.9)
    whole = train(recipe, data, tmp_path / "whole", device=CPU)
    restarts = whole.training["restarts"]
    assert restarts[0] == {"epoch": 3, "learning_rate": 7.0}
    assert [point["epoch"] for point in whole.training["curve"]] == [1, 2, 3]
    # A killed process whose state was saved before, and Ctrl-C with no state saved before.
    for save_every, stop, error in (
        (0.0, InterruptError, InterruptError),
        (1e9, KeyboardInterrupt, InterruptedRunError),
    ):
        seen: list[str] = []

        def stop_after_restart(
            progress: Progress, seen: list[str] = seen, stop: type[BaseException] = stop
        ) -> None:
            if len(set(seen)) == 2:
                raise stop
            seen.append(progress.task)

        run = tmp_path / f"run {save_every}"
        options = {"device": CPU, "save_every": save_every}
        with pytest.raises(error):
            train(recipe, data, run, observe=stop_after_restart, **options)
        about = read_tensors(run / STATE_FILE)[1]
        assert (about["epoch"], about["restarts"]) == (2, restarts[:1])
        resumed = train(recipe, data, run, device=CPU, resume=True)
        assert resumed.training["restarts"] == restarts
        assert equal_weights(whole, resumed)


def test_a_state_that_was_never_good_is_not_kept(data, tmp_path) -> None:
    """With one step per epoch, the second epoch's state shows that it is bad in the third."""
    recipe = dataclasses.replace(fragile(12.0, warm_up=0.95), batch_size=64, epochs=6)
    seen: list[float] = []

    def note(progress: Progress) -> None:
        seen.append(progress.figures["epoch"])

    model = train(recipe, data.first(64), tmp_path, device=CPU, observe=note)
    assert [restart["epoch"] for restart in model.training["restarts"]] == [3, 3]
    assert seen == [1, 2, 3, 2, 3, 2, 3, 4, 5, 6]  # the first two threes are the restarts
    assert [point["epoch"] for point in model.training["curve"]] == [1, 2, 3, 4, 5, 6]


def test_the_third_divergence_ends_the_run(data, tmp_path) -> None:
    seen: list[Progress] = []
    with pytest.raises(EcinnError, match="nothing was saved") as error:
        train(fragile(1e3), data.first(64), tmp_path / "run", device=CPU, observe=seen.append)
    assert "\n" not in str(error.value)
    assert sum("diverged" in progress.task for progress in seen) == 2


def test_a_balanced_epoch_draws_equally_many_of_every_class(generator) -> None:
    labels = torch.arange(3).repeat_interleave(torch.tensor([70, 25, 6]))
    labels = labels[torch.randperm(101, generator=generator)]
    order = optimisation.balanced_order(labels, torch.Generator().manual_seed(4))
    assert len(order) == 101
    assert sorted(labels[order].bincount().tolist()) == [33, 34, 34]
    times = order.bincount(minlength=101)
    for label in range(3):  # no image is drawn twice more than another of its class
        own = times[labels == label]
        assert int(own.max() - own.min()) <= 1
    assert not torch.equal(order, order.sort().values)
    first = [len(set(labels[order[i * 20 : i * 20 + 20]].tolist())) for i in range(5)]
    assert first == [3] * 5  # mixed
    again = optimisation.balanced_order(labels, torch.Generator().manual_seed(4))
    assert torch.equal(order, again)


@pytest.mark.parametrize("balanced", [True, False])
def test_the_order_depends_on_seed_and_epoch_only(balanced, recipe, data) -> None:
    recipe = dataclasses.replace(recipe, balanced=balanced)
    steps = [
        optimisation.OptimisationStep(recipe, data, TrainingState.start(recipe, CPU), CPU)
        for _ in range(2)
    ]
    steps[0].begin_epoch(0)
    orders = [step.begin_epoch(1) for step in steps]
    assert torch.equal(*orders)
    assert not torch.equal(orders[0], steps[1].begin_epoch(2))
    counts = data.labels[orders[0]].bincount()
    assert (len(set(counts.tolist())) == 1) == balanced  # 640 images of ten classes


def test_images_are_copied_batch_by_batch(recipe, data, monkeypatch) -> None:
    """A step reads the buffer: those of the dataset are neither copied nor moved."""
    state = TrainingState.start(recipe, CPU)
    step = optimisation.OptimisationStep(recipe, data, state, CPU)
    assert step.images.data_ptr() == data.images.data_ptr()
    batch = torch.randperm(640)[:32]
    step(batch, 0.5, 0)
    assert torch.equal(step.batch_images, data.images[batch])
    before = step.batch_images.data_ptr()
    step(batch.flip(0), 0.5, 1)
    assert torch.equal(step.batch_images, data.images[batch.flip(0)])
    assert step.batch_images.data_ptr() == before  # where a captured graph reads
    # A GPU with too little memory, and one with enough, which is not there.
    free = 4 * data.images.numel()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 1, free))
    gpu = torch.device("cuda")
    assert optimisation.resident(data.images, gpu) is data.images
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    with pytest.raises((RuntimeError, AssertionError)):
        optimisation.resident(data.images, gpu)


def test_a_folder_with_a_run_is_not_overwritten(recipe, data, tmp_path) -> None:
    recipe, data = dataclasses.replace(recipe, epochs=2), data.first(64)
    train(recipe, data, tmp_path, device=CPU)
    before = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(InputError, match="resume"):
        train(recipe, data, tmp_path, device=CPU)
    other = dataclasses.replace(recipe, learning_rate=1.0)
    with pytest.raises(InputError, match="other settings"):
        train(other, data, tmp_path, device=CPU, resume=True)
    assert (tmp_path / STATE_FILE).read_bytes() == before


def test_a_run_is_not_resumed_with_other_labels(recipe, data, tmp_path) -> None:
    recipe, data = dataclasses.replace(recipe, epochs=1), data.first(64)
    train(recipe, data, tmp_path, device=CPU)
    relabelled = dataclasses.replace(data, labels=data.labels.flip(0))
    assert not torch.equal(relabelled.labels, data.labels)
    with pytest.raises(InputError, match="other labels"):
        train(recipe, relabelled, tmp_path, device=CPU, resume=True)
    # A state that does not know its labels is resumed.
    tensors, about = read_tensors(tmp_path / STATE_FILE)
    del about["labels"]
    write_tensors(tmp_path / STATE_FILE, tensors, about)
    train(recipe, data, tmp_path, device=CPU, resume=True)


def test_a_state_may_be_older_than_a_setting(recipe, data, tmp_path) -> None:
    """A setting that the state does not know had its default."""
    recipe, data = dataclasses.replace(recipe, epochs=1), data.first(64)
    first = train(recipe, data, tmp_path, device=CPU)
    tensors, about = read_tensors(tmp_path / STATE_FILE)
    del about["recipe"]["balanced"]
    write_tensors(tmp_path / STATE_FILE, tensors, about)
    again = train(recipe, data, tmp_path, device=CPU, resume=True)
    assert again.training["curve"] == first.training["curve"]
    other = dataclasses.replace(recipe, balanced=True)
    with pytest.raises(InputError, match="other settings"):
        train(other, data, tmp_path, device=CPU, resume=True)


def test_a_finished_run_takes_another_default_confidence(recipe, data, tmp_path) -> None:
    """No step depends on it, so nothing is trained again."""
    recipe, data = dataclasses.replace(recipe, epochs=1), data.first(64)
    first = train(recipe, data, tmp_path, device=CPU)
    sure = dataclasses.replace(recipe, default_confidence=0.9)
    again = train(sure, data, tmp_path, device=CPU, resume=True)
    assert (first.recipe, again.recipe) == (recipe, sure)
    for name, value in first.classifier.state_dict().items():
        assert torch.equal(value, again.classifier.state_dict()[name])


def test_average_is_the_exponential_moving_average(recipe, data, tmp_path) -> None:
    """Recomputed from the weights after every step."""
    recipe = dataclasses.replace(recipe, epochs=1, ema_decay=0.8)
    state = TrainingState.start(recipe, CPU)
    expected = state.average.mu.clone()
    step = optimisation.OptimisationStep(recipe, data, state, CPU)
    order = step.begin_epoch(0)
    for number in range(20):
        step(order[number * 32 : (number + 1) * 32], number / 20, number)
        decay = min(0.8, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * state.classifier.mu.detach()
    torch.testing.assert_close(state.average.mu, expected)
    assert not torch.allclose(state.average.mu, state.classifier.mu)


def test_schedule_rises_then_falls_to_zero() -> None:
    values = [optimisation.cosine_schedule(step / 100, 0.1) for step in range(101)]
    assert values[0] == 0
    assert max(values) == pytest.approx(1)
    assert values.index(max(values)) == 10
    assert values[-1] == pytest.approx(0)
    assert values[55] == pytest.approx(0.5)


def test_weight_decay_spares_means_scales_and_shifts(recipe: Recipe) -> None:
    recipe = dataclasses.replace(recipe, tied=False)
    state = TrainingState.start(recipe, CPU)
    decayed, free = state.optimiser.param_groups
    assert decayed["weight_decay"] == recipe.weight_decay
    assert free["weight_decay"] == 0
    assert any(p is state.classifier.mu for p in free["params"])
    assert all(p.ndim > 1 for p in decayed["params"])
    total = len(list(state.classifier.parameters()))
    assert len(decayed["params"]) + len(free["params"]) == total


def test_tied_means_follow_the_latents_and_not_the_gradient(recipe: Recipe, data) -> None:
    """μ_y ← 0.98 μ_y + 0.02 m_y for the classes in the batch; the others stay."""
    recipe = dataclasses.replace(recipe, augmentation=Augmentation(), batch_size=6)
    state = TrainingState.start(recipe, CPU)
    step = optimisation.OptimisationStep(recipe, data, state, CPU)
    assert not state.classifier.mu.requires_grad
    step.begin_epoch(0)
    seen = []
    update = step._update_means
    step._update_means = lambda z: (seen.append(z.detach()), update(z))
    before = state.classifier.mu.clone()
    batch = torch.arange(6)
    step(batch, 0.5, 1)
    labels = data.labels[batch]
    for label in range(10):
        mean = seen[0][labels == label].mean(0) if (labels == label).any() else before[label]
        expected = 0.98 * before[label] + 0.02 * mean
        torch.testing.assert_close(state.classifier.mu[label], expected)
    free = dataclasses.replace(recipe, tied=False)
    state = TrainingState.start(free, CPU)
    step = optimisation.OptimisationStep(free, data, state, CPU)
    step.begin_epoch(0)
    step(batch, 0.5, 1)
    # Adam's first step moves every weight by the learning rate.
    moved = (state.classifier.mu.detach() - before).abs()
    assert moved.max() == pytest.approx(free.learning_rate * 0.5 * (1 + 0.173648), rel=0.2)


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="mnist"):
        find_recipe("cifar")


def test_data_that_does_not_fit_is_refused(recipe, data, tmp_path) -> None:
    def refuse(says: str, **changes: Tensor | tuple[str, ...]) -> None:
        other = copy.copy(data)
        for name, value in changes.items():
            object.__setattr__(other, name, value)  # past the check of types, as outside of tests
        with pytest.raises(InputError, match=says):
            train(recipe, other, tmp_path / "run", device=torch.device("cpu"))
        assert not (tmp_path / "run").exists()

    refuse("8-bit", images=data.images.float() / 255)
    refuse("needs images of", images=data.images[:, :, :-2])
    refuse("labels go from", labels=data.labels + 1)
    refuse("no training image has class 3, 8", labels=data.labels - (data.labels % 5 == 3).long())
    refuse("the dataset names 9", class_names=data.class_names[:9])
