"""Distil any classifier into an invertible student, which then explains it."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.blackbox.classifier import TIMEOUT, BlackBox, Output
from ecinn.blackbox.files import save_classifier
from ecinn.blackbox.preprocessing import Preprocessing
from ecinn.classifier.checkpoint import MODEL_FILE
from ecinn.classifier.recipes import RECIPES, FineTuning, Recipe
from ecinn.classifier.tensor_files import read_tensors, write_tensors
from ecinn.data.dataset import Dataset
from ecinn.data.framing import Framing
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import atomic_write, output_folder
from ecinn.flow.device import resolve_device
from ecinn.model import Model
from ecinn.progress import Observer, counter, ignore
from ecinn.training.agreement import (
    QUERIES_PER_IMAGE,
    Agreement,
    ClassifierAccuracy,
    classifier_accuracy,
    measure_agreement,
)
from ecinn.training.finetuning import BlackBoxTeacher
from ecinn.training.fitting import RandomState, class_numbers, seed_from, shown, stored_images
from ecinn.training.loop import STATE_FILES, train
from ecinn.training.plan import plan_recipe
from ecinn.training.state import Answers

ANSWERS_FILE = "answers.safetensors"
"""The classifier's answers on the data, so that a resumed run does not ask again."""
REPORT_FILE = "distillation.json"
ON_THE_PATH = FineTuning(epochs=6, faithfulness=4.0, distillation_weight=0.5)
"""Fine-tuning of a student whose recipe has none; the numbers are those of digits."""
REPORT_IMAGES = 300
_ASK = 2048
"""Images that are asked between two reports of progress."""


@dataclass(frozen=True)
class Splits:
    """Images to learn the answers on, to fit the temperature on, and to compare on."""

    train: Dataset
    validation: Dataset
    test: Dataset

    def items(self) -> dict[str, Dataset]:
        """Every split by its name; validation is asked first."""
        return {"validation": self.validation, "train": self.train, "test": self.test}


@dataclass(frozen=True)
class Distilled:
    """A student that explains its classifier, with how well it does."""

    model: Model
    accuracy: ClassifierAccuracy | None
    """The classifier's on labelled images; None if there are no labels."""
    agreement: Agreement
    queries: int
    """All pictures that the classifier was asked about, by this run and those it resumed."""

    def to_dict(self) -> dict[str, Any]:
        """Return every number as plain Python values."""
        accuracy = None if self.accuracy is None else self.accuracy.accuracy
        return {
            "classifier": self.agreement.classifier,
            "queries": self.queries,
            "accuracy": None if accuracy is None else vars(accuracy),
            "chance": None if self.accuracy is None else self.accuracy.chance,
            **self.agreement.to_dict(),
        }


def distill_classifier(
    black_box: BlackBox,
    data: Splits,
    recipe: Recipe,
    folder: Path,
    *,
    source: Path | None = None,
    labelled: bool = True,
    order_given: bool = False,
    device: str | torch.device = "auto",
    resume: bool = False,
    tell: Callable[[str], object] = lambda _: None,
    observe: Observer = ignore,
) -> Distilled:
    """Train a student on a classifier's answers, on the data and along paths, and compare them.

    Args:
        source: the classifier's file, which is copied into the folder.
        labelled: the labels are true, so that the classifier's accuracy can be measured.
        order_given: the user has named the outputs: another order is mentioned, but not an error.
        tell: is told the classifier's accuracy and the plan, in sentences.
    """
    output_folder(folder)
    device = resolve_device(device)
    answers, planned = _known_answers(black_box, data, folder)
    accuracy = None
    try:
        if "validation" not in answers:
            answers["validation"] = _ask(black_box, data.validation, observe)
        if labelled:
            labels = data.validation.labels
            accuracy = classifier_accuracy(answers["validation"], labels)
            tell(_require_skill(accuracy, black_box, order_given=order_given))
        if planned is None:
            recipe = affordable(recipe, black_box, data, answers)
        elif recipe.finetuning is not None:  # as planned before the interruption
            recipe = replace(recipe, finetuning=replace(recipe.finetuning, epochs=planned))
        planned = recipe.finetuning.epochs if recipe.finetuning is not None else None
        for name in ("train", "test"):
            if name not in answers:
                answers[name] = _ask(black_box, data.items()[name], observe)
        _require_all_classes(answers["train"], data.train.class_names)
        _keep(black_box, data, answers, planned, folder)
        test = data.test if labelled else _relabelled(data.test, answers["test"])
        identity = torch.frombuffer(bytearray(_digest(answers["train"])), dtype=torch.uint8)
        checkpoint = train(
            recipe,
            _relabelled(data.train, answers["train"]),
            folder,
            held_out=_relabelled(data.validation, answers["validation"]),
            test=test,
            device=device,
            resume=resume,
            teacher=BlackBoxTeacher(black_box, identity) if recipe.finetuning else None,
            answers=Answers(answers["train"], answers["validation"]),
            observe=observe,
        )
        student = Model(checkpoint, device)
        agreement = measure_agreement(
            student, black_box, data.test.images, answers["test"], n=REPORT_IMAGES, observe=observe
        )
    finally:
        _keep(black_box, data, answers, planned, folder)
    if source is not None:
        save_classifier(black_box, source, folder)
    result = Distilled(
        Model(checkpoint, device, black_box), accuracy, agreement, black_box.queries
    )
    text = json.dumps(result.to_dict(), indent=1, ensure_ascii=False) + "\n"
    atomic_write(folder / REPORT_FILE, text.encode())
    return result


def distill(
    predict: Callable[[Tensor], Any],
    images: Any,  # noqa: ANN401
    labels: Any = None,  # noqa: ANN401
    *,
    class_names: Sequence[str] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    recipe: Recipe | str | None = None,
    preprocessing: Preprocessing | None = None,
    output: Output | None = None,
    queries: int | None = None,
    timeout: float | None = TIMEOUT,
    minutes: float | None = None,
    device: str | torch.device = "auto",
    random_state: RandomState = 0,
    observe: Observer | None = None,
    verbose: bool = True,
) -> Model:
    """Distil a classifier into an invertible student whose explanations are verified on it.

    Args:
        predict: any callable from a batch of pictures, float32 tensors in [0, 1] of shape
            (n, channels, height, width) unless `preprocessing` says otherwise, to probabilities
            or logits, one row per picture.
        images: pictures as for `ecinn.fit`: array-like, 8-bit or floats in [0, 1].
        labels: class names or numbers, to check that the classifier is better than chance;
            optional.
        class_names: the names of the outputs, in order; by default the sorted labels, if there
            are as many, or numbers.
        folder: where the model and the report are written; by default nothing is kept.
        resume: continue an interrupted run in that folder.
        queries: the largest number of pictures that the classifier may be asked about.
        random_state: as for `ecinn.fit`; splits the images into 80 % to learn on, 10 % and 10 %.
        observe: called with progress, instead of showing it.
        verbose: show bars, or lines where bars cannot be shown.
    """
    stored = stored_images(images)
    seed = seed_from(random_state)
    if not callable(predict):
        raise InputError(
            f"predict is a function from pictures to probabilities, not {type(predict).__name__}"
        )
    asked = class_names is None
    if class_names is None:
        outputs = _outputs(predict, stored, preprocessing, timeout)
        class_names = () if labels is None else class_numbers(labels)[1]
        if len(class_names) != outputs:
            class_names = [str(c) for c in range(outputs)]
    black_box = BlackBox(
        predict,
        class_names,
        preprocessing=preprocessing,
        output=output,
        budget=queries,
        timeout=timeout,
    )
    black_box.queries += asked  # to count the outputs
    known = labels is not None
    label = class_numbers(labels, black_box.class_names)[0] if known else None
    if label is None:
        label = torch.zeros(len(stored)).long()
    if len(label) != len(stored):
        raise InputError(f"there are {len(stored):,} images and {len(label):,} labels")
    order = torch.randperm(len(stored), generator=torch.Generator().manual_seed(seed))
    tenth = len(order) // 10
    if tenth < 1:
        raise InputError(f"a student needs at least 10 images, not {len(order)}")
    names = black_box.class_names
    parts = [
        Dataset(stored[rows], label[rows], names)
        for rows in (order[2 * tenth :], order[:tenth], order[tenth : 2 * tenth])
    ]
    target = resolve_device(device)
    with tempfile.TemporaryDirectory() as temporary, shown(observe, verbose=verbose) as show:
        chosen = student_recipe(parts[0], target, recipe=recipe, minutes=minutes, observe=show)
        try:
            return distill_classifier(
                black_box,
                Splits(*parts),
                replace(chosen, seed=seed),
                Path(folder or temporary),
                labelled=known,
                device=target,
                resume=resume,
                observe=show,
            ).model
        except InterruptedRunError:
            if folder is not None:
                raise
            raise InterruptedRunError(
                "interrupted: nothing is kept; give a folder to keep the answers"
            ) from None


def student_recipe(
    data: Dataset,
    device: torch.device,
    *,
    recipe: Recipe | str | None = None,
    minutes: float | None = None,
    framing: Framing | None = None,
    observe: Observer = ignore,
) -> Recipe:
    """Return the student's settings: a recipe, or a plan for this data, with fine-tuning.

    What a recipe says about labels, attributes and other models is left out.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise InputError(f"there is no recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    if recipe is None:
        plan = plan_recipe(
            data, device, name="student", minutes=minutes, framing=framing, observe=observe
        )
        recipe = plan.recipe
    return replace(
        recipe,
        name=f"{recipe.name}-student" if not recipe.name.endswith("student") else recipe.name,
        finetuning=recipe.finetuning or ON_THE_PATH,
        label_smoothing=0.0,
        attribute_weight=0.0,
        distillation_weight=0.0,
        init_from=None,
    )


def queries_needed(recipe: Recipe, data: Splits, known: Sequence[str] = ()) -> tuple[int, int]:
    """Return the queries for the data and the report, and those of an epoch on the path."""
    on_data = sum(len(part) for name, part in data.items().items() if name not in known)
    on_data += QUERIES_PER_IMAGE * min(REPORT_IMAGES, len(data.test)) + 1
    if recipe.finetuning is None:
        return on_data, 0
    batch = min(recipe.finetuning.batch_size, len(data.train))
    return on_data, len(data.train) // batch * (batch - batch // 2)


def affordable(
    recipe: Recipe, black_box: BlackBox, data: Splits, known: Sequence[str] | dict[str, Any] = ()
) -> Recipe:
    """Shorten fine-tuning until its queries fit into the budget."""
    if recipe.finetuning is None or black_box.budget is None:
        return recipe
    on_data, per_epoch = queries_needed(recipe, data, list(known))
    epochs = int((black_box.left - on_data) // per_epoch)
    if epochs < 1:
        raise InputError(
            f"{black_box.budget:,} queries are too few: the images and the report need "
            f"{on_data:,}, an epoch on the path {per_epoch:,}; allow "
            f"{black_box.queries + on_data + per_epoch:,}, or use fewer images"
        )
    shorter = replace(recipe.finetuning, epochs=min(epochs, recipe.finetuning.epochs))
    return replace(recipe, finetuning=shorter)


def _outputs(
    predict: Callable[[Tensor], Any],
    images: Tensor,
    preprocessing: Preprocessing | None,
    timeout: float | None,
) -> int:
    """Ask about one image to count the classes; what is no array is reported later."""
    found: list[Any] = []

    def call(x: Tensor) -> Tensor:
        found.append(predict(x))
        return torch.tensor([[0.5, 0.5]])

    BlackBox(call, "ab", preprocessing=preprocessing, timeout=timeout).predict(images[:1])
    try:
        shape = np.shape(found[-1])
    except ValueError:
        shape = ()
    return max(shape[-1], 2) if len(shape) > 1 else 2


def _ask(black_box: BlackBox, data: Dataset, observe: Observer) -> Float[Tensor, "images classes"]:
    report = counter(observe, f"asking {black_box.name}", len(data))
    parts = []
    for start in range(0, len(data), _ASK):
        parts.append(black_box.predict(data.images[start : start + _ASK]))
        report(min(start + _ASK, len(data)))
    return torch.cat(parts)


def _require_skill(accuracy: ClassifierAccuracy, black_box: BlackBox, *, order_given: bool) -> str:
    """Say how accurate the classifier is; refuse one that guesses, or is in another order."""
    names, reached = black_box.class_names, 100 * accuracy.accuracy.mean
    said = (
        f"{black_box.name} classifies {reached:.1f} % of {accuracy.accuracy.n:,} labelled images "
        f"as labelled (by chance {100 * accuracy.chance:.1f} %)"
    )
    if accuracy.better_order is not None and not order_given:
        classes = list(black_box.classes)
        for label, answer in enumerate(accuracy.better_order):
            classes[black_box.classes.index(names[answer])] = names[label]
        raise InputError(
            f"{said}; with another order of its outputs it would be "
            f"{100 * accuracy.reordered:.1f} %: give --classes {','.join(classes)} (class_names "
            f"in Python), or --classes {','.join(black_box.classes)} if the order is right"
        )
    if not accuracy.above_chance:
        raise InputError(
            f"{said}, which is no better than chance: there is nothing to explain; check --size, "
            "--channels, --layout, --scale, --mean, --std and --classes (in Python, preprocessing "
            "and class_names)"
        )
    return said


def _require_all_classes(answers: Tensor, names: Sequence[str]) -> None:
    counts = answers.argmax(1).bincount(minlength=len(names))
    never = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
    if never:
        raise InputError(
            f"the classifier never answers {', '.join(never)} on the training images: use images "
            "of all classes"
        )


def _relabelled(data: Dataset, answers: Tensor) -> Dataset:
    """Return the images with the classifier's predictions as labels, and nothing else to learn."""
    return replace(data, labels=answers.argmax(1), attributes=None, attribute=None)


def _digest(*values: Tensor) -> bytes:
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _fingerprint(black_box: BlackBox, data: Splits) -> dict[str, Any]:
    """Identify data and classifier well enough to notice others."""
    some = [part.images[:100] for part in data.items().values()]
    return {
        "classifier": black_box.name,
        "preprocessing": repr((black_box.preprocessing, black_box.classes)),
        "images": [len(part) for part in data.items().values()],
        "first": _digest(*some).hex()[:16],
    }


def _keep(
    black_box: BlackBox,
    data: Splits,
    answers: dict[str, Tensor],
    planned: int | None,
    folder: Path,
) -> None:
    about = {
        "kind": "answers",
        "queries": black_box.queries,
        "output": black_box.output,
        "finetuning_epochs": planned,
        **_fingerprint(black_box, data),
    }
    if answers:
        write_tensors(folder / ANSWERS_FILE, answers, about)


def _known_answers(
    black_box: BlackBox, data: Splits, folder: Path
) -> tuple[dict[str, Tensor], int | None]:
    """Return the answers and planned epochs of an earlier start here; count its queries."""
    path = folder / ANSWERS_FILE
    if not path.is_file():
        return {}, None
    tensors, about = read_tensors(path)
    expected = {"kind": "answers", **_fingerprint(black_box, data)}
    if any(about.get(name) != value for name, value in expected.items()):
        if not any((folder / name).exists() for name in (*STATE_FILES, MODEL_FILE)):
            return {}, None  # nothing was learned from them
        raise InputError(
            f"{path} holds the answers of another classifier or to other images: choose another "
            "folder"
        )
    black_box.output = black_box.output or about["output"]
    black_box.queries += about["queries"]
    return tensors, about["finetuning_epochs"]
