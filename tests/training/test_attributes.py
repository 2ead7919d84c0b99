"""Attributes as an auxiliary task, distillation, and initialisation from another model."""

import dataclasses
import math
import shutil
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint
from ecinn.classifier.quantisation import stored_precision
from ecinn.classifier.recipes import CELEBA_ATTRIBUTES, RECIPES, FineTuning, Recipe
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError, InterruptedRunError
from ecinn.flow.network import Architecture, Stage
from ecinn.progress import Progress
from ecinn.training import loop, teacher
from ecinn.training.loop import train
from ecinn.training.state import TrainingState
from ecinn.training.step import OptimisationStep, batch_loss
from ecinn.training.teacher import targets_hash

CPU = torch.device("cpu")


@pytest.fixture
def recipe() -> Recipe:
    architecture = Architecture(
        3, 8, 8, 2, (Stage(1, 8), Stage(1, 8)), dense_width=0, mixing="cosine", dropout=0.1
    )
    return dataclasses.replace(
        CELEBA_ATTRIBUTES,
        architecture=architecture,
        augmentation=Augmentation(flip=True),
        epochs=2,
        batch_size=16,
        learning_rate=5e-3,
        attribute_weight=3.0,
    )


@pytest.fixture
def data(generator: torch.Generator) -> Dataset:
    """Images whose red, green and blue encode the class and two attributes."""
    attributes = torch.randint(2, (96, 3), generator=generator, dtype=torch.uint8)
    noise = torch.randint(60, (96, 3, 8, 8), generator=generator, dtype=torch.uint8)
    images = noise + 120 * attributes[:, :, None, None]
    return Dataset(images, attributes[:, 0].long(), ("dull", "red"), attributes[:, 1:])


def _equal(one: Checkpoint, other: Checkpoint) -> bool:
    weights = other.classifier.state_dict()
    return all(torch.equal(v, weights[n]) for n, v in one.classifier.state_dict().items())


def test_attributes_are_read_from_the_latents(recipe: Recipe, data: Dataset) -> None:
    """The loss is Eq. 9 plus the weighted mean cross-entropy of every attribute."""
    state = TrainingState.start(recipe, CPU, attributes=2)
    assert state.attribute_head is not None
    step = OptimisationStep(recipe, data, state, CPU)
    order = step.begin_epoch(0)
    step.load_batch(order[:16])
    with torch.no_grad():
        weight = torch.randn(
            state.attribute_head.weight.shape, generator=torch.Generator().manual_seed(1)
        )
        state.attribute_head.weight.copy_(0.1 * weight)

    torch.manual_seed(5)
    with_attributes = step._batch_loss()
    torch.manual_seed(5)  # the same dropout
    labels = data.labels[step.batch]
    alone = batch_loss(state.classifier, with_attributes.x, labels, recipe)
    assert data.attributes is not None
    odds = with_attributes.z @ state.attribute_head.weight.T
    truth = data.attributes[step.batch].bool()
    cross_entropy = -torch.where(truth, F.logsigmoid(odds), F.logsigmoid(-odds)).mean()
    assert torch.allclose(with_attributes.loss, alone.loss + 3.0 * cross_entropy, atol=1e-5)


@pytest.fixture
def taught(data: Dataset) -> Dataset:
    assert data.attributes is not None
    every = torch.cat([data.attributes, data.labels[:, None].to(torch.uint8)], 1)
    return dataclasses.replace(data, attributes=every, attribute=2)


class ColourTeacher(torch.nn.Module):
    """A teacher whose log-odds are the mean colours: green, blue, and red, which is the class."""

    def forward(self, x: Tensor) -> Tensor:
        return (4 * x.mean((2, 3)) - 2).roll(-1, 1)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_targets_are_mixed_with_the_teachers_predictions(
    recipe: Recipe, taught: Dataset, share: float
) -> None:
    """Labels and predictions are mixed for class and attributes; then the class is smoothed."""
    still = dataclasses.replace(recipe.architecture, dropout=0.0)
    recipe = dataclasses.replace(
        recipe,
        architecture=still,
        distillation_weight=share,
        label_smoothing=0.1,
        tau=0.7,
        noise=0.2,
    )
    state = TrainingState.start(recipe, CPU, attributes=3)
    state.teacher = ColourTeacher()
    assert state.attribute_head is not None
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(state.attribute_head.weight.shape, generator=generator)
        state.attribute_head.weight.copy_(0.1 * weight)
    step = OptimisationStep(recipe, taught, state, CPU)
    step.load_batch(step.begin_epoch(0)[:16])
    loss = step._batch_loss()
    assert loss.x.min() < -0.1
    seen = loss.x.clamp(0, 1)  # the teacher knows no other pixels
    predicted, labels = torch.sigmoid(ColourTeacher()(seen)), taught.attributes[step.batch]
    wanted = share * predicted + (1 - share) * labels
    smoothed = 0.9 * wanted[:, 2] + 0.05
    z, log_det = state.classifier.encode_with_log_det(loss.x)
    log_p = equations.log_posterior(z, state.classifier.mu, recipe.tau)
    cross_entropy = -(smoothed * log_p[:, 1] + (1 - smoothed) * log_p[:, 0]).mean()
    log_x = equations.log_likelihood(z, log_det, state.classifier.mu).logsumexp(1) - math.log(2)
    odds = z @ state.attribute_head.weight.T
    attributes = -(wanted * F.logsigmoid(odds) + (1 - wanted) * F.logsigmoid(-odds)).mean()
    expected = cross_entropy - log_x.mean() / z.shape[1] + 3.0 * attributes
    assert torch.allclose(loss.loss, expected, atol=1e-4)


def test_a_teachers_logits_become_class_probabilities(recipe, taught, generator) -> None:
    """Of classes the softmax; of attributes p and 1 − p of the one that is the label."""
    logits = torch.randn((5, 3), generator=generator)
    for data in (taught, dataclasses.replace(taught, attributes=None, attribute=None)):
        step = OptimisationStep(recipe, data, TrainingState.start(recipe, CPU), CPU)
        odds = logits.exp()
        expected = odds / odds.sum(1, keepdim=True)
        if data.attribute is not None:
            expected = torch.stack([1 / (1 + odds[:, 2]), odds[:, 2] / (1 + odds[:, 2])], 1)
        torch.testing.assert_close(step._class_probabilities(logits), expected)


class OppositeTeacher(ColourTeacher):
    """A teacher with opposite log-odds; a buffer distinguishes it from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mark", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["training", "fine-tuning"])
def test_a_teacher_changes_the_weights_and_is_required_to_resume(
    recipe: Recipe, taught: Dataset, tmp_path: Path, stage: str
) -> None:
    """Another teacher gives other weights; a run resumes with its own teacher only."""
    recipe = dataclasses.replace(recipe, distillation_weight=0.5)
    if stage == "fine-tuning":
        recipe = dataclasses.replace(recipe, finetuning=FineTuning(2, 1.0, 1.0, batch_size=16))
    whole = train(recipe, taught, tmp_path / "a", device=CPU, teacher=ColourTeacher())
    other = train(recipe, taught, tmp_path / "b", device=CPU, teacher=OppositeTeacher())
    assert not _equal(whole, other)
    assert whole.training["teacher"] != other.training["teacher"]

    def stop(progress: Progress) -> None:
        if progress.figures["epoch"] == 2 and progress.task == stage:
            raise KeyboardInterrupt

    folder = tmp_path / "c"
    with pytest.raises(InterruptedRunError):
        train(
            recipe,
            taught,
            folder,
            device=CPU,
            teacher=ColourTeacher(),
            observe=stop,
            save_every=0.0,
        )
    with pytest.raises(InputError, match="was started with teacher"):
        train(recipe, taught, folder, device=CPU, teacher=OppositeTeacher(), resume=True)
    resumed = train(recipe, taught, folder, device=CPU, teacher=ColourTeacher(), resume=True)
    assert _equal(resumed, whole)


def test_a_teacher_of_other_attributes_is_refused(recipe, taught, tmp_path) -> None:
    recipe = dataclasses.replace(recipe, distillation_weight=0.5)
    fewer = dataclasses.replace(taught, attributes=taught.attributes[:, :2])
    with pytest.raises(InputError, match="predicts 3 classes or attributes and the dataset has 2"):
        train(recipe, fewer, tmp_path / "run", device=CPU, teacher=ColourTeacher())


@pytest.mark.parametrize("second", [None, FineTuning(1, 1.0, 1.0, batch_size=16)])
def test_the_unrounded_model_is_stored_too(recipe, taught, tmp_path, second) -> None:
    recipe = dataclasses.replace(recipe, epochs=1, finetuning=second)
    teacher = None if second is None else ColourTeacher()
    rounded = train(recipe, taught, tmp_path, device=CPU, teacher=teacher)
    exact = load_checkpoint(tmp_path / "unrounded.safetensors")
    assert exact.recipe == dataclasses.replace(rounded.recipe, stored_bits=32)
    assert exact.training == load_checkpoint(tmp_path / "model.safetensors").training
    weights = rounded.classifier.state_dict()
    for name, value in stored_precision(exact.classifier.state_dict(), 8).items():
        # Means are measured with the weights as stored.
        assert name == "mu" or torch.equal(value, weights[name]), name
    assert not _equal(exact, rounded)
    assert not torch.equal(exact.mu_bar, rounded.mu_bar)
    assert exact.ood.log_p == pytest.approx(rounded.ood.log_p)  # of the rounded model


def test_files_of_an_earlier_run_are_not_used(recipe, taught, tmp_path) -> None:
    """The first-stage model of an abandoned run does not replace that of a new one."""
    recipe = dataclasses.replace(recipe, finetuning=FineTuning(1, 1.0, 1.0, batch_size=16))
    (tmp_path / "first-stage.safetensors").write_bytes(b"of another run")
    seen: list[str] = []
    observe = lambda p: seen.append(p.task)  # noqa: E731
    train(recipe, taught, tmp_path, device=CPU, teacher=ColourTeacher(), observe=observe)
    assert seen[0] == "training"
    assert seen[-1] == "fine-tuning"


def test_a_teacher_without_a_use_is_refused(recipe, taught, tmp_path) -> None:
    with pytest.raises(InputError, match="needs no teacher"):
        train(recipe, taught, tmp_path / "run", device=CPU, teacher=ColourTeacher())


def test_attributes_are_learned(recipe: Recipe, data: Dataset) -> None:
    state = TrainingState.start(recipe, CPU, attributes=2)
    step = OptimisationStep(recipe, data, state, CPU)
    for epoch in range(6):
        order = step.begin_epoch(epoch)
        for number in range(6):
            step(order[number * 16 : (number + 1) * 16], 0.3, 6 * epoch + number)
    assert state.attribute_head is not None
    assert data.attributes is not None
    with torch.no_grad():
        z = state.classifier.eval().encode((data.images.float() + 0.5) / 256)
        right = (state.attribute_head(z) > 0) == data.attributes.bool()
    assert right.float().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["training", "fine-tuning"])
def test_a_run_with_attributes_resumes_to_the_same_weights(
    recipe: Recipe, taught: Dataset, tmp_path: Path, stage: str
) -> None:
    if stage == "fine-tuning":
        recipe = dataclasses.replace(recipe, finetuning=FineTuning(2, 1.0, 1.0, batch_size=16))
    teacher = ColourTeacher() if recipe.needs_teacher else None
    run = partial(train, device=CPU, teacher=teacher)
    whole = run(recipe, taught, tmp_path / "whole")

    def stop(progress: Progress) -> None:
        if progress.figures["epoch"] == 2 and progress.task == stage:
            raise KeyboardInterrupt

    folder = tmp_path / "interrupted"
    with pytest.raises(InterruptedRunError):
        run(recipe, taught, folder, observe=stop, save_every=0.0)
    resumed = run(recipe, taught, folder, resume=True)
    assert _equal(resumed, whole)
    # Guard: the attributes did take part.
    none = dataclasses.replace(recipe, attribute_weight=0.0)
    assert not _equal(run(none, taught, tmp_path / "none"), whole)


def test_data_without_attributes_is_refused(recipe, data, tmp_path) -> None:
    with pytest.raises(InputError, match="the dataset has none"):
        train(recipe, dataclasses.replace(data, attributes=None), tmp_path / "run", device=CPU)


def test_a_run_starts_from_the_layers_of_init_from(recipe, data, tmp_path) -> None:
    first = train(recipe, data, tmp_path / "first", device=CPU)
    still = dataclasses.replace(recipe, epochs=1, learning_rate=0.0, stored_bits=32)
    begun = train(still, data, tmp_path / "begun", device=CPU, init_from=first)
    weights = first.classifier.state_dict()
    for name, value in begun.classifier.state_dict().items():
        assert name == "mu" or torch.allclose(value, weights[name], atol=1e-6), name
    assert begun.training["init_from"] == "celeba-attributes"


def test_layers_of_another_architecture_are_refused(recipe, data, tmp_path) -> None:
    first = train(recipe, data, tmp_path / "first", device=CPU)
    deeper = dataclasses.replace(recipe.architecture, stages=(Stage(2, 8),))
    other = dataclasses.replace(recipe, architecture=deeper)
    with pytest.raises(InputError, match="its architecture differs"):
        train(other, data, tmp_path / "other", device=CPU, init_from=first)


class OwnTeacher(types.SimpleNamespace):
    """Stands for a trained teacher and its file, which names the images it learned."""

    ensemble = ColourTeacher()

    @property
    def record(self) -> dict[str, str]:
        return {"targets": self.targets}

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.targets)


@pytest.fixture
def trained(monkeypatch) -> list[tuple[int, int]]:
    """Replace the training of teachers; return the numbers of images of each."""
    calls: list[tuple[int, int]] = []

    def own_teacher(data: Dataset, held_out: Dataset | None, device, observe) -> OwnTeacher:
        calls.append((len(data), len(held_out or ())))
        return OwnTeacher(targets=targets_hash(data))

    monkeypatch.setattr(teacher, "train_teacher", own_teacher)
    for module in (loop, teacher):
        monkeypatch.setattr(
            module, "load_teacher", lambda path, device: OwnTeacher(targets=path.read_text())
        )
    return calls


@pytest.fixture
def last(recipe, monkeypatch) -> Recipe:
    """A recipe that needs a teacher and starts from the model of another recipe, "first"."""
    monkeypatch.setitem(RECIPES, "first", dataclasses.replace(recipe, name="first", epochs=1))
    return dataclasses.replace(recipe, epochs=1, init_from="first", distillation_weight=0.5)


def test_a_run_trains_its_teacher_and_the_model_it_starts_from(
    last, taught, tmp_path, trained
) -> None:
    """Once: a second start finds both in the folder."""
    run = partial(train, last, taught, tmp_path, held_out=taught.first(20), device=CPU)

    def stop(progress: Progress) -> None:
        if (tmp_path / "first" / "model.safetensors").exists():
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        run(observe=stop)
    assert (tmp_path / "teacher.safetensors").exists()
    written = (tmp_path / "first" / "model.safetensors").stat().st_mtime_ns
    model = run(resume=True)
    assert model.training["init_from"] == "first"
    assert trained == [(96, 20)]
    assert (tmp_path / "first" / "model.safetensors").stat().st_mtime_ns == written
    given = load_checkpoint(tmp_path / "first")
    again = train(
        last, taught, tmp_path / "b", held_out=taught.first(20), device=CPU,
        teacher=ColourTeacher(), init_from=given,
    )  # fmt: skip
    assert _equal(again, model)


def test_a_start_may_have_a_start_of_its_own(last, taught, tmp_path, trained, monkeypatch) -> None:
    """As celeba-makeup's has; one teacher serves all, and a second start trains none of them."""
    middle = dataclasses.replace(last, name="middle")
    monkeypatch.setitem(RECIPES, "middle", middle)
    recipe = dataclasses.replace(last, init_from="middle")
    run = partial(train, recipe, taught, tmp_path, device=CPU)

    def stop(progress: Progress) -> None:
        if (tmp_path / "middle" / "model.safetensors").exists():
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        run(observe=stop)
    first = tmp_path / "middle" / "first" / "model.safetensors"
    written = first.stat().st_mtime_ns
    model = run(resume=True)
    assert model.training["init_from"] == "middle"
    assert load_checkpoint(tmp_path / "middle").training["init_from"] == "first"
    assert first.stat().st_mtime_ns == written
    assert trained == [(96, 0)]
    assert not (tmp_path / "middle" / "teacher.safetensors").exists()


def test_a_teacher_or_start_of_other_images_is_refused(last, taught, tmp_path, trained) -> None:
    """They may be left in the folder by another run."""
    fewer = taught.first(64)
    train(last, fewer, tmp_path / "fewer", device=CPU)
    turned = dataclasses.replace(taught, attributes=1 - taught.attributes)
    train(last, turned, tmp_path / "turned", device=CPU)
    run = partial(train, last, taught, device=CPU)
    for name in ("fewer", "turned"):
        folder = tmp_path / f"after {name}"
        OwnTeacher(targets=(tmp_path / name / "teacher.safetensors").read_text()).save(
            folder / "teacher.safetensors"
        )
        with pytest.raises(InputError, match="trained on other images"):
            run(folder)
    shutil.copytree(tmp_path / "fewer" / "first", tmp_path / "started" / "first")
    with pytest.raises(InputError, match="other images or another teacher"):
        run(tmp_path / "started")


@pytest.mark.parametrize("change", ["recipe", "teacher"])
def test_a_start_of_another_recipe_or_teacher_is_refused(
    change, last, taught, tmp_path, monkeypatch
) -> None:
    distilled = dataclasses.replace(RECIPES["first"], distillation_weight=0.3)
    monkeypatch.setitem(RECIPES, "first", distilled)
    train(last, taught, tmp_path / "a", device=CPU, teacher=ColourTeacher())
    shutil.copytree(tmp_path / "a" / "first", tmp_path / "b" / "first")
    train(last, taught, tmp_path / "b", device=CPU, teacher=ColourTeacher())
    shutil.copytree(tmp_path / "a" / "first", tmp_path / "c" / "first")
    if change == "recipe":
        monkeypatch.setitem(RECIPES, "first", dataclasses.replace(distilled, beta=0.5))
    teacher = ColourTeacher() if change == "recipe" else OppositeTeacher()
    with pytest.raises(InputError, match="another recipe, other images or another teacher"):
        train(last, taught, tmp_path / "c", device=CPU, teacher=teacher)


@pytest.mark.parametrize("left_out", ["teacher", "init_from"])
def test_what_a_run_was_given_is_not_trained_to_resume_it(
    left_out, last, taught, tmp_path, trained
) -> None:
    """The network would be trained for nothing: the run could not use it."""
    first = train("first", taught, tmp_path / "first", device=CPU)
    given = {"teacher": ColourTeacher(), "init_from": first}
    train(last, taught, tmp_path / "run", device=CPU, **given)
    (tmp_path / "run" / "model.safetensors").unlink()
    run = partial(train, last, taught, tmp_path / "run", device=CPU, resume=True)
    seen: list[Progress] = []
    given[left_out] = None
    with pytest.raises(InputError, match="was given a"):
        run(observe=seen.append, **given)
    assert not seen
    assert not trained


def test_resuming_the_fine_tuning_of_a_given_model_does_not_train_a_start(
    last, taught, tmp_path
) -> None:
    tuned = dataclasses.replace(last, finetuning=FineTuning(1, 1.0, 1.0, batch_size=16))
    first = train("first", taught, tmp_path / "first", device=CPU)
    run = partial(train, tuned, taught, tmp_path / "run", device=CPU, teacher=ColourTeacher())

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="--resume instead of --refine-from"):
        run(refine_from=first, observe=stop)
    run(resume=True)
    assert not (tmp_path / "run" / "first").exists()


def test_starts_that_do_not_fit_are_refused_before_anything_is_trained(
    last, taught, tmp_path, trained, monkeypatch
) -> None:
    with pytest.raises(InputError, match="no model"):
        train(last, taught, tmp_path, device=CPU, init_from="nowhere")
    deeper = dataclasses.replace(last.architecture, stages=(Stage(2, 8),))
    other = dataclasses.replace(RECIPES["first"], architecture=deeper)
    monkeypatch.setitem(RECIPES, "first", other)
    with pytest.raises(InputError, match="its architecture differs"):
        train(last, taught, tmp_path, device=CPU)
    assert not trained


def test_ctrl_c_while_a_teacher_is_trained(last, taught, tmp_path, monkeypatch) -> None:
    def press_ctrl_c(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(teacher, "train_teacher", press_ctrl_c)
    with pytest.raises(InterruptedRunError, match="start again"):
        train(last, taught, tmp_path, device=CPU)


def test_a_teacher_of_attributes_needs_to_know_the_label(last, taught, tmp_path, trained) -> None:
    """Otherwise distillation would do nothing."""
    unknown = dataclasses.replace(taught, attribute=None)
    with pytest.raises(InputError, match="attribute to the column of the label"):
        train(last, unknown, tmp_path, device=CPU)


def test_a_teacher_answers_in_evaluation_mode(recipe, taught, tmp_path) -> None:
    class Uncertain(ColourTeacher):
        """Has dropout, as networks of users do."""

        def __init__(self) -> None:
            super().__init__()
            self.modes: set[bool] = set()

        def forward(self, x: Tensor) -> Tensor:
            self.modes.add(self.training)
            return super().forward(x)

    recipe = dataclasses.replace(recipe, epochs=1, distillation_weight=0.5)
    teacher = Uncertain()
    train(recipe, taught, tmp_path, device=CPU, teacher=teacher)
    assert teacher.modes == {False}
