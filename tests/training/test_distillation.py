"""Distillation of a classifier whose every answer is a formula, and its report."""

import copy
import io
import json
import re
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

import ecinn
from ecinn import equations
from ecinn.blackbox.classifier import BlackBox
from ecinn.blackbox.preprocessing import Preprocessing
from ecinn.classifier.recipes import MNIST, SGD, FineTuning, Recipe
from ecinn.classifier.tensor_files import read_tensors
from ecinn.data.dataset import Dataset, Splits
from ecinn.data.face_crop import CELEBA_CROP
from ecinn.data.framing import Framing
from ecinn.errors import EcinnError, InputError, InterruptedRunError
from ecinn.flow.network import Architecture, Stage
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.progress import Progress
from ecinn.training import fitting
from ecinn.training.agreement import Agreement, classifier_accuracy, measure_agreement
from ecinn.training.answers import ANSWERS_FILE
from ecinn.training.calibration import fit_tau
from ecinn.training.distillation import REPORT_FILE, distill_classifier, fit_tau_on_paths
from ecinn.training.finetuning import BlackBoxTeacher, FineTuningStep, second_stage
from ecinn.training.fitting import stored_images
from ecinn.training.state import TrainingState
from ecinn.training.step import OptimisationStep
from ecinn.training.student import (
    CONFIDENCE,
    CONTINUED,
    ON_THE_PATH,
    continued_epochs,
    path_settings,
    queries_needed,
    student_recipe,
)
from helpers.builders import random_images, small_model, with_default

NAMES = ("left", "right")
CPU = torch.device("cpu")


def halves(x: Tensor) -> Tensor:
    """Logits: eight times the brightness of either half."""
    return 8 * torch.stack([x[..., :4].mean((1, 2, 3)), x[..., 4:].mean((1, 2, 3))], 1)


def data(n: int, seed: int) -> Dataset:
    """Noise whose left or right half is brighter."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    bright = torch.rand((n, 1, 1, 1), generator=g) * 90 + 60
    half = (torch.arange(8) // 4 == labels[:, None])[:, None, None]
    images = torch.rand((n, 1, 8, 8), generator=g) * 100 + half * bright
    return Dataset(images.byte(), labels, NAMES)


def recipe(epochs: int = 2) -> Recipe:
    architecture = Architecture(1, 8, 8, 2, (Stage(2, 8), Stage(2, 8)), dense_width=16, seed=1)
    tuning = FineTuning(1, faithfulness=1.0, distillation_weight=1.0, batch_size=32)
    return replace(
        MNIST, name="halves", dataset="own", architecture=architecture, epochs=epochs,
        batch_size=32, learning_rate=1e-2, tau=0.1, finetuning=tuning, stored_bits=16,
        augmentation=ecinn.Augmentation(), mnist_framing=False, label_smoothing=0.0,
    )  # fmt: skip


def step_of(kind: type, box: BlackBox, images: Dataset) -> tuple[OptimisationStep, Tensor]:
    answers = box.predict(images.images)
    settings = second_stage(recipe()) if kind is FineTuningStep else recipe()
    state = TrainingState.start(settings, CPU)
    state.teacher = BlackBoxTeacher(box, torch.zeros(1))
    return kind(settings, replace(images, answers=answers), state, CPU), answers


def test_the_first_stage_learns_the_answers_instead_of_labels() -> None:
    images = data(40, 0)
    step, answers = step_of(OptimisationStep, BlackBox(halves, NAMES), images)
    step.begin_epoch(0)
    step.batch.copy_(torch.arange(32).flip(0))
    _, targets = step._targets(to_pixels(images.images[:32]))
    assert torch.equal(targets, answers[:32].flip(0))


def test_a_black_box_is_asked_after_a_step_about_what_the_step_made() -> None:
    images = data(64, 1)
    box = BlackBox(halves, NAMES)
    step, answers = step_of(FineTuningStep, box, images)
    order = step.begin_epoch(0)
    assert torch.equal(step.asked, images.images[:16])
    assert torch.equal(step.answer, answers[:16])
    box.queries = 0
    step(order[:32], 0.0, 0)
    assert box.queries == 16  # half of the batch
    assert not torch.equal(step.asked, images.images[:16])
    torch.testing.assert_close(step.answer, halves(step.asked.float() / 255).softmax(1))
    made = step.asked.clone()
    pixels, said = step._answered(torch.zeros_like(made))  # what the next step learns
    assert torch.equal(pixels, to_pixels(made))
    assert torch.equal(said, step.answer)
    step.begin_epoch(1)
    assert torch.equal(step.asked, images.images[:16])
    assert torch.equal(data(64, 1).images, images.images)  # the data are not written to


def test_temperature_is_fitted_to_answers(uniform) -> None:
    """Answers of a posterior with τ₀ give τ₀ back."""
    z, mu = 3 * uniform(4000, 5), 2 * uniform(3, 5)
    for tau in (0.2, 0.7):
        answers = equations.log_posterior(z, mu, torch.tensor(tau).double()).exp()
        assert float(fit_tau([z], answers, mu)) == pytest.approx(tau, rel=0.02)


@pytest.mark.parametrize("seed", [0, 1])
def test_accuracy_chance_and_another_order_of_outputs(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(
        torch.tensor([0.5, 0.3, 0.1, 0.1]), 2000, replacement=True, generator=g
    )
    wrong = torch.rand(2000, generator=g) < 0.2
    given = torch.where(wrong, torch.randint(4, (2000,), generator=g), labels)
    order = torch.randperm(4, generator=g)
    while torch.equal(order, torch.arange(4)):
        order = torch.randperm(4, generator=g)
    right = classifier_accuracy(torch.eye(4)[given], labels)
    assert right.accuracy.mean == pytest.approx(float((given == labels).float().mean()))
    assert right.better_order is None
    assert right.above_chance
    shuffled = [given[torch.randperm(2000, generator=g)] for _ in range(50)]
    by_chance = torch.stack([(s == labels).float().mean() for s in shuffled]).mean()
    assert right.chance == pytest.approx(float(by_chance), abs=0.01)
    swapped = classifier_accuracy(torch.eye(4)[order[given]], labels)
    assert swapped.better_order == tuple(order.tolist())
    assert swapped.reordered == pytest.approx(right.accuracy.mean)
    guesses = classifier_accuracy(torch.eye(4)[torch.zeros(2000, dtype=torch.long)], labels)
    assert guesses.accuracy.mean > 0.4
    assert not guesses.above_chance  # always the same answer


def test_a_reader_that_changes_its_mind_is_reported() -> None:
    student = small_model(classes=3)
    generator = torch.Generator().manual_seed(0)
    box = BlackBox(lambda x: torch.randn((len(x), 3), generator=generator), student.class_names)
    images = random_images(60, 1, 3, 0).images
    report = measure_agreement(student, box, images, box.predict(images), n=60)
    assert report.agreement.n == 60
    assert report.flipped.n < 60  # without those that now are their target
    assert len(report.random) == 10


def test_agreement_is_measured_on_data_and_on_stored_counterfactuals() -> None:
    student = small_model(classes=3)
    g = torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, 1, 8, 8), generator=g).byte()
    box = BlackBox(lambda x: student.predict(x), student.class_names)  # a twin of the student
    box.preprocessing = replace(box.preprocessing, scale=1 / 256, mean=(-0.5 / 256,))
    answers = box.predict(images)
    twin = measure_agreement(student, box, images, answers, n=10)
    assert twin.agreement.mean == twin.flipped_after.mean == 1.0
    assert twin.difference.mean < 1e-5
    assert twin.path_difference.mean < 1e-5
    assert twin.flipped.n == 10
    assert twin.report_queries == box.queries - 40
    assert (len(twin.random), len(twin.worst)) == (10, 10)
    assert twin.not_explained.mean == 0.0
    of_q = twin.worst.convincing_certificate.answer.gather(2, twin.worst.q[..., None]).flatten()
    assert torch.equal(of_q, of_q.sort().values)
    assert {*twin.to_dict()} == {field.name for field in fields(Agreement)} - {"random", "worst"}
    # At 99 %, half of them might have been read as the target and not as requested.
    unsure = BlackBox(lambda x: 0.6 * student.predict(x) + 0.4 / 3, student.class_names)
    unsure.preprocessing = box.preprocessing
    sure = with_default(student, 0.99)
    weak = measure_agreement(sure, unsure, images, unsure.predict(images), n=10)
    assert weak.flipped_after.mean == 1.0
    assert weak.not_explained.mean == 1.0  # 73 % is the most that it ever gives
    assert weak.sure.mean == 0.0
    assert twin.sure.mean == 1.0  # α₁ requests no confidence
    half = measure_agreement(student, box, images, answers, n=10, confidence=0.85)
    assert half.sure.mean == pytest.approx(float((answers.amax(1) >= 0.8).float().mean()))
    against_b = torch.tensor([0.0, -8.0, 0.0])  # is read further along than the student says
    late = BlackBox(lambda x: student.predict(x).log() + against_b, student.class_names)
    late.preprocessing = box.preprocessing
    slow = measure_agreement(student, late, images, late.predict(images), n=10)
    ten = slow.random  # all of them
    first, last = ten.verification.uncorrected.argmax(2), ten.convincing_certificate.winner
    assert slow.flipped.mean == pytest.approx(float((first == ten.q).float().mean()))
    assert slow.flipped_after.mean == pytest.approx(float((last == ten.q).float().mean()))
    assert slow.flipped.mean < slow.flipped_after.mean
    turned = answers[:, [1, 2, 0]]
    other = BlackBox(lambda x: student.predict(x)[:, [1, 2, 0]], student.class_names)
    other.preprocessing = box.preprocessing
    rotated = measure_agreement(student, other, images, turned, n=10)
    assert rotated.agreement.mean == 0.0
    expected = (student.predict(images) - turned).abs().mean()
    assert rotated.difference.mean == pytest.approx(float(expected))
    counts = turned.argmax(1).bincount(minlength=3).tolist()
    assert [interval.n for interval in rotated.by_class.values()] == counts


def test_a_student_agrees_and_every_query_is_counted(tmp_path: Path) -> None:
    splits = Splits(data(160, 2), data(40, 3), data(40, 4))
    box = BlackBox(halves, NAMES)
    told: list[str] = []
    result = distill_classifier(box, splits, recipe(6), tmp_path, device="cpu", tell=told.append)
    assert result.agreement.agreement.mean >= 0.9
    assert result.agreement.flipped_after.mean >= 0.9
    assert "100.0 % of 40" in told[0]
    _, per_epoch = queries_needed(recipe(), splits)
    assert per_epoch == 5 * 16
    assert result.queries == box.queries == 240 + 1 + per_epoch + result.agreement.report_queries
    assert result.to_dict()["queries"] == result.queries
    assert (tmp_path / REPORT_FILE).is_file()
    explanation = result.model.explain(splits.test.images[:3])
    assert explanation.verification.classifier == "classifier"
    assert torch.equal(explanation.p, box.predict(splits.test.images[:3]).argmax(1))
    # A run that starts again in this folder knows the answers and what they cost.
    again = BlackBox(lambda x: 1 / 0, NAMES)
    with pytest.raises(InputError, match="already holds a run"):
        distill_classifier(again, splits, recipe(), tmp_path, device="cpu")
    assert again.queries == box.queries - 3 - 3 - int(explanation.verification.queries.sum())
    with pytest.raises(InputError, match="other images"):
        distill_classifier(
            BlackBox(halves, NAMES), replace(splits, test=data(40, 9)), recipe(), tmp_path
        )
    assert (tmp_path / ANSWERS_FILE).is_file()


def test_a_budget_shortens_the_path_or_is_refused(tmp_path: Path) -> None:
    splits = Splits(data(160, 2), data(20, 3), data(20, 4))
    tuning = replace(recipe().finetuning, epochs=5)
    on_data, per_epoch = queries_needed(replace(recipe(), finetuning=tuning), splits)
    with pytest.raises(InputError, match="too few"):
        distill_classifier(
            BlackBox(halves, NAMES, budget=on_data), splits, recipe(), tmp_path / "a", device="cpu"
        )
    box = BlackBox(halves, NAMES, budget=on_data + 2 * per_epoch)
    result = distill_classifier(
        box, splits, replace(recipe(1), finetuning=tuning), tmp_path / "b", device="cpu"
    )
    assert result.model.recipe.finetuning.epochs == 2
    assert result.queries <= box.budget


def test_a_budget_without_a_path_is_refused_before_the_first_query(tmp_path: Path) -> None:
    splits = Splits(data(160, 2), data(20, 3), data(20, 4))
    settings = replace(recipe(), finetuning=None)
    needed, per_epoch = queries_needed(settings, splits)
    assert per_epoch == 0
    box = BlackBox(halves, NAMES, budget=needed - 1)
    with pytest.raises(InputError, match=rf"report need {needed}: allow {needed}, or use fewer"):
        distill_classifier(box, splits, settings, tmp_path, device="cpu")
    assert box.queries == 0


def test_a_report_that_is_interrupted_can_be_made_with_more_queries(tmp_path: Path) -> None:
    """Its questions are asked again: a resumed run says how many there are in all."""
    splits = Splits(data(64, 2), data(20, 3), data(20, 4))
    settings = replace(recipe(1), finetuning=None)
    needed, _ = queries_needed(settings, splits, report_images=20)

    def press_ctrl_c(progress: Progress) -> None:
        if progress.task == "comparing with the classifier":
            raise KeyboardInterrupt

    def distil(budget: int, **options: Any) -> BlackBox:
        box = BlackBox(halves, NAMES, budget=budget)
        distill_classifier(
            box, splits, settings, tmp_path, device="cpu", report_images=20, **options
        )
        return box

    with pytest.raises(InterruptedRunError, match="--resume"):
        distil(needed, observe=press_ctrl_c)
    with pytest.raises(InputError, match=r"(\d+) were asked before, .* need (\d+): allow") as said:
        distil(needed, resume=True)
    before, more, total = map(int, re.findall(r"\d+", str(said.value))[1:4])
    assert before + more == total > needed
    assert distil(total, resume=True).queries <= total


def test_an_interrupted_run_resumes_with_its_plan_and_asks_nothing_twice(tmp_path: Path) -> None:
    splits = Splits(data(64, 2), data(20, 3), data(20, 4))
    tuning = replace(recipe().finetuning, epochs=3)
    settings = replace(recipe(1), finetuning=tuning)
    on_data, per_epoch = queries_needed(settings, splits)
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(len(x))
        return halves(x)

    def stop(progress: Progress) -> None:
        if progress.task == "fine-tuning" and progress.figures["epoch"] == 2:
            raise KeyboardInterrupt

    budget = on_data + 2 * per_epoch
    box = BlackBox(counted, NAMES, budget=budget)
    with pytest.raises(InterruptedRunError):
        distill_classifier(box, splits, settings, tmp_path, device="cpu", observe=stop)
    box = BlackBox(counted, NAMES, budget=2 * budget)
    result = distill_classifier(box, splits, settings, tmp_path, device="cpu", resume=True)
    assert result.model.recipe.finetuning.epochs == 2  # as planned, although there is more now
    assert calls.count(64) == 1
    assert result.queries == box.queries == sum(calls)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: -3 * torch.ones((len(x), 2)), "no better than chance"),
        (lambda x: halves(x).flip(1), "--classes right,left"),
        (lambda x: halves(x) + float("nan"), "NaN"),
    ],
)
def test_classifiers_that_cannot_be_explained_are_refused(
    tmp_path: Path, call, message: str
) -> None:
    splits = Splits(data(64, 2), data(40, 3), data(40, 4))
    box = BlackBox(call, NAMES)
    with pytest.raises(EcinnError, match=message):
        distill_classifier(box, splits, recipe(), tmp_path, device="cpu")
    assert box.queries <= 40  # before anything else is asked
    # Another try with other settings may use the same folder.
    other = BlackBox(call, NAMES, preprocessing=Preprocessing(scale=1 / 128))
    with pytest.raises(EcinnError, match=message):
        distill_classifier(other, splits, recipe(), tmp_path, device="cpu")
    assert other.queries == 40


def test_distill_takes_any_callable_and_anything_like_an_array() -> None:
    images = data(100, 5)
    seen = []

    def predict(x: Tensor) -> list:
        seen.append(x)
        return halves(x).softmax(1).tolist()

    model = ecinn.distill(
        predict, images.images[:, 0].numpy(), images.labels.tolist(), recipe=recipe(1),
        device="cpu", random_state=3,
    )  # fmt: skip
    assert model.class_names == ("0", "1")
    assert model.recipe.seed == 3
    assert seen[0].shape == (1, 1, 8, 8)
    assert 0 <= float(seen[1].min()) < float(seen[1].max()) <= 1
    assert model.explain(images.images[:2]).verification is not None
    assert model.student.explain(images.images[:2]).verification is None


def test_distill_names_classes_shows_progress_and_takes_a_generator(monkeypatch) -> None:
    """Without names, the sorted labels are the names of the outputs."""
    images = data(100, 5)
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(fitting, "Console", lambda stderr: console)
    models = [
        ecinn.distill(
            lambda x: halves(x).softmax(1).numpy(),
            list(images.images),
            [("a", "b")[label] for label in images.labels.tolist()],
            recipe=recipe(1),
            device="cpu",
            random_state=np.random.default_rng(4),
        )
        for _ in range(2)
    ]
    assert models[0].class_names == ("a", "b")
    assert models[0].recipe.seed == models[1].recipe.seed != 0
    assert "asking classifier: 80/80" in console.file.getvalue()
    said = len(console.file.getvalue())
    ecinn.distill(halves, images.images, recipe=recipe(1), device="cpu", verbose=False)
    assert len(console.file.getvalue()) == said


@pytest.mark.parametrize(
    ("predict", "labels", "options", "message"),
    [
        (halves, [0, 1], {}, "100 images and 2 labels"),
        (
            halves,
            list("abc") * 33 + ["a"],
            {},
            "labels name 3 classes, but predict answers with 2",
        ),
        (halves, [1, 2] * 50, {"class_names": "ab"}, "labels from 0 to 1"),
        (lambda x: torch.zeros(len(x), 3), [1, 2, 3, 4] * 25, {}, "4 classes, .* with 3"),
        (lambda x: [0.2] * 3, list("abc") * 33 + ["a"], {}, r"\(3,\), not \(10, 3\)"),
        (lambda x: None, list("abc") * 33 + ["a"], {}, "array of numbers, not NoneType"),
        (lambda x: 100 * halves(x).softmax(1), None, {}, "rows all sum to 100"),
        (halves, [None] * 100, {}, "missing"),
        (halves, None, {"class_names": "abc"}, r"\(10, 2\), not \(10, 3\)"),
        (halves, None, {"random_state": -1}, "random_state"),
        (halves, None, {"queries": 30}, "30 queries are too few"),
        ("net.onnx", None, {}, "not str"),
        (lambda x: None, None, {}, "array of numbers, not NoneType"),
        (lambda x: [[0.5], [0.2, 0.3]], None, {}, "array of numbers, not list"),
        (lambda x: halves(x).argmax(1), None, {}, "class numbers"),
        (lambda x: halves(x)[:1], None, {}, r"\(1, 2\), not \(10, 2\)"),
        (lambda x: halves(x) * float("nan"), None, {}, "NaN"),
        (lambda x: 1 // 0, None, {}, "ZeroDivisionError"),
    ],
)
def test_distill_refuses_wrong_input_in_one_line(predict, labels, options, message) -> None:
    undecorated = getattr(ecinn.distill, "__wrapped__", ecinn.distill)
    settings = {"recipe": recipe(1), "device": "cpu", "verbose": False} | options
    with pytest.raises(EcinnError, match=message) as error:
        undecorated(predict, data(100, 5).images, labels, **settings)
    assert "\n" not in str(error.value)


def test_answers_survive_ctrl_c_before_the_first_epoch(tmp_path: Path) -> None:
    asked = []

    def counted(x: Tensor) -> Tensor:
        asked.append(len(x))
        return halves(x)

    def press_ctrl_c(progress: Progress) -> None:
        if progress.task == "training":
            raise KeyboardInterrupt

    given = {"recipe": recipe(1), "device": "cpu", "folder": tmp_path / "student"}
    images = data(100, 5).images
    with pytest.raises(InterruptedRunError, match="resume=True, which keeps the answers"):
        ecinn.distill(counted, images, observe=press_ctrl_c, **given)
    before = len(asked)
    ecinn.distill(counted, images, resume=True, verbose=False, **given)
    assert 80 in asked[:before]
    assert 80 not in asked[before:]


def test_a_classifier_that_changes_meanwhile_is_asked_again(tmp_path: Path) -> None:
    """The answers are stored under the hash of the file that gave them."""
    source = tmp_path / "classifier.pt"
    source.write_bytes(b"first")
    splits = Splits(data(64, 2), data(20, 3), data(20, 4))
    folder = tmp_path / "student"

    def export_again(progress: Progress) -> None:
        if progress.task == "training":
            source.write_bytes(b"second")
            raise KeyboardInterrupt

    def distil(**options: Any) -> BlackBox:
        box = BlackBox(halves, NAMES)
        distill_classifier(box, splits, recipe(1), folder, source=source, device="cpu", **options)
        return box

    with pytest.raises(InterruptedRunError):
        distil(observe=export_again)
    assert read_tensors(folder / ANSWERS_FILE)[1]["sha256"] == sha256(b"first").hexdigest()
    assert distil().queries > 64 + 20 + 20  # all of them again


def test_ctrl_c_in_distill_says_what_is_kept_and_resumes(tmp_path: Path) -> None:
    def press_ctrl_c(progress: Progress) -> None:
        if progress.figures.get("epoch") == 2:
            raise KeyboardInterrupt

    images, settings = data(100, 5).images, {"recipe": recipe(2), "device": "cpu"}
    with pytest.raises(InterruptedRunError, match="nothing is kept"):
        ecinn.distill(halves, images, observe=press_ctrl_c, **settings)
    kept = {"folder": tmp_path / "kept"} | settings
    with pytest.raises(InterruptedRunError, match="resume"):
        ecinn.distill(halves, images, observe=press_ctrl_c, **kept)
    resumed = ecinn.distill(halves, images, resume=True, verbose=False, **kept)
    whole = ecinn.distill(halves, images, verbose=False, **settings)
    for name, value in whole.classifier.state_dict().items():
        assert torch.equal(value, resumed.classifier.state_dict()[name]), name


def test_a_corrected_classifier_is_asked_again(tmp_path: Path) -> None:
    known = data(100, 5)
    settings = {"recipe": recipe(1), "device": "cpu", "folder": tmp_path, "verbose": False}
    with pytest.raises(InputError, match="--classes 1,0"):
        ecinn.distill(lambda x: halves(x).flip(1), known.images, known.labels, **settings)
    student = ecinn.distill(halves, known.images, known.labels, **settings)
    assert json.loads((tmp_path / REPORT_FILE).read_text())["accuracy"]["mean"] == 1
    assert student.class_names == ("0", "1")


def test_arrays_become_stored_images_channels_first() -> None:
    images = torch.arange(2 * 6 * 5 * 3).reshape(2, 6, 5, 3).byte()
    assert torch.equal(stored_images(images.numpy()), images.permute(0, 3, 1, 2))
    assert stored_images(images[..., 0]).shape == (2, 1, 6, 5)
    for wrong in (images.float(), images[0, 0], images[:, :, :, :2]):
        with pytest.raises(InputError):
            stored_images(wrong)


def test_a_students_recipe_needs_no_labels_and_no_other_model() -> None:
    chosen = student_recipe(data(4, 0), CPU, recipe="mnist")
    assert chosen.finetuning is not None
    assert chosen.default_confidence == CONFIDENCE
    assert student_recipe(data(4, 0), CPU, recipe="celeba-smile").default_confidence == CONFIDENCE
    own = replace(recipe(), default_confidence=0.8)
    assert student_recipe(data(4, 0), CPU, recipe=own).default_confidence == 0.8
    framed = student_recipe(data(4, 0), CPU, recipe="mnist", framing=Framing("pad"))
    assert (framed.dataset, framed.framing, framed.mnist_framing) == ("own", Framing("pad"), False)
    assert (chosen.distillation_weight, chosen.init_from) == (0, None)
    assert chosen.label_smoothing == MNIST.label_smoothing > 0
    # A small network is not trained on the path, unless it is asked for; a large one is.
    planned = student_recipe(random_images(60, 1, 2, 1), CPU)
    assert planned.finetuning is None
    assert path_settings(planned).batch_size == planned.batch_size < ON_THE_PATH.batch_size
    assert path_settings(planned, continued=True) == CONTINUED
    with pytest.raises(InputError, match="no recipe"):
        student_recipe(data(4, 0), CPU, recipe="resnet")
    moved = replace(recipe(), augmentation=ecinn.Augmentation(shift=2.0))
    for count, augmentation in ((19_999, moved.augmentation), (20_000, ecinn.Augmentation())):
        some = Dataset(torch.zeros((count, 1, 8, 8)).byte(), torch.zeros(count).long(), NAMES)
        assert student_recipe(some, CPU, recipe=moved).augmentation == augmentation


def test_a_student_starts_from_another_model_whose_classes_may_be_others(tmp_path: Path) -> None:
    """Without training it has the other model's layers, and class means of the answers."""
    start = small_model(classes=3).checkpoint
    splits = Splits(data(80, 2), data(20, 3), data(20, 4))
    settings = student_recipe(splits.train, CPU, init_from=start)
    assert settings.architecture.classes == 2
    still = replace(settings, stored_bits=32, epochs=0)
    box = BlackBox(halves, NAMES)
    student = distill_classifier(box, splits, still, tmp_path, init_from=start, device="cpu").model
    weights = start.classifier.state_dict()
    for name, value in student.classifier.state_dict().items():
        assert name in ("mu", "tau") or torch.equal(value, weights[name]), name
    z = start.classifier.encode(to_pixels(splits.train.images))
    answers = halves(splits.train.images / 255).argmax(1)
    of_answers = torch.stack([z[answers == label].mean(0) for label in (0, 1)])
    nearest = torch.cdist(z, of_answers).argmin(1)  # μ̄ groups by the student's predictions
    mu_bar = torch.stack([z[nearest == label].mean(0) for label in (0, 1)])
    torch.testing.assert_close(student.mu_bar, mu_bar, rtol=1e-4, atol=1e-4)
    assert student.checkpoint.training["init_from"] == "tiny"
    stored = ecinn.load(tmp_path, "cpu")
    assert torch.equal(stored.tau, student.tau)
    assert stored.checkpoint.metrics["n"] == 20
    on_data, on_path = queries_needed(still, splits)
    assert on_path == 0
    assert 160 < box.queries <= on_data  # the path of every validation image, and the report


@pytest.mark.parametrize(
    ("images", "side", "epochs"),
    [(10, 28, 20), (600, 28, 17), (3000, 28, 4), (60_000, 28, 1), (500, 64, 4), (25_000, 64, 1)],
)
def test_epochs_of_a_student_that_starts_from_another_model(
    images: int, side: int, epochs: int
) -> None:
    """About 10,000 small images or 2,000 large ones, at least one epoch and at most 20."""
    channels = 1 if side == 28 else 3
    pixels = torch.zeros((1, channels, side, side)).byte().expand(images, -1, -1, -1)
    assert continued_epochs(Dataset(pixels, torch.zeros(images).long(), NAMES)) == epochs


def test_the_layers_of_another_model_are_trained_unless_there_are_no_epochs() -> None:
    start = Model(small_model(classes=2).checkpoint, "cpu")
    splits = data(120, 2)
    before = start.classifier.state_dict()
    for epochs in (0, 1):
        made = ecinn.distill(
            halves, splits.images, init_from=start, epochs=epochs, device="cpu", verbose=False
        )
        assert made.recipe.epochs == epochs
        changed = [
            not torch.allclose(value, before[name], atol=1e-3)
            for name, value in made.classifier.state_dict().items()
            if name not in ("mu", "tau")
        ]
        assert any(changed) == bool(epochs)
    for wrong, options in ((-1, {"init_from": start}), (0, {})):
        with pytest.raises(InputError, match="0 to keep the layers"):
            ecinn.distill(halves, splits.images, epochs=wrong, device="cpu", **options)


def test_settings_of_a_student_that_starts_from_another_model() -> None:
    start = small_model(classes=2).checkpoint
    own = replace(start.recipe, epochs=50, default_confidence=0.99, face_crop=CELEBA_CROP)
    own = replace(own, sgd=SGD((0.5,)))
    start = replace(start, recipe=own)
    chosen = student_recipe(data(4, 0), CPU, init_from=start)
    assert chosen.architecture == own.architecture
    assert (chosen.augmentation, chosen.face_crop) == (own.augmentation, own.face_crop)
    assert (chosen.epochs, chosen.finetuning, chosen.sgd) == (20, None, None)
    assert chosen.default_confidence == CONFIDENCE
    framed = student_recipe(data(4, 0), CPU, init_from=start, framing=Framing("pad"))
    assert (framed.dataset, framed.face_crop) == ("own", None)
    assert student_recipe(data(4, 0), CPU, init_from=start, recipe=recipe(7)).epochs == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_from": "mnist"}, "cannot start from mnist: .* 1×28×28 .* 1×8×8"),
        ({"init_from": "resnet"}, "no model 'resnet'"),
        ({"init_from": small_model(), "recipe": recipe()}, "its architecture differs"),
        ({"recipe": recipe(), "minutes": 2.0}, "minutes cannot be combined"),
    ],
)
def test_models_that_no_student_can_start_from_are_one_line(options, message) -> None:
    with pytest.raises(InputError, match=message) as error:
        ecinn.distill(halves, data(100, 5).images, device="cpu", verbose=False, **options)
    assert "\n" not in str(error.value)


def test_temperature_is_fitted_on_paths() -> None:
    """A classifier that is the student with another τ gives this τ back."""
    student = small_model(classes=3)
    images = random_images(200, 1, 3, 5).images
    for tau in (0.01, 0.05):
        twin = copy.deepcopy(student.checkpoint)
        twin.classifier.tau.fill_(tau)
        reader = Model(twin, "cpu")
        box = BlackBox(lambda x, m=reader: m.predict(x), student.class_names)
        box.preprocessing = replace(box.preprocessing, scale=1 / 256, mean=(-0.5 / 256,))
        answers = box.predict(images)
        box.queries = 0
        fitted = fit_tau_on_paths(copy.deepcopy(student.checkpoint), box, images, answers, CPU)
        assert float(fitted.classifier.tau) == pytest.approx(tau, rel=0.05)
        assert box.queries == 200  # one point of each path
