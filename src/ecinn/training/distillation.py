"""Distil any classifier into an invertible student, which then explains it."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecinn import equations
from ecinn.blackbox.classifier import TIMEOUT, BlackBox, Output
from ecinn.blackbox.files import file_hash, save_classifier
from ecinn.blackbox.preprocessing import Preprocessing
from ecinn.classifier.checkpoint import (
    MODEL_FILE,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from ecinn.classifier.recipes import Recipe
from ecinn.data.dataset import Dataset, Splits
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import output_folder, write_json
from ecinn.flow.device import resolve_device
from ecinn.model import Model
from ecinn.pixels import StoredImages, to_pixels, to_uint8
from ecinn.progress import Observer, ignore
from ecinn.training.agreement import (
    Agreement,
    ClassifierAccuracy,
    classifier_accuracy,
    measure_agreement,
)
from ecinn.training.answers import ANSWERS_FILE, ask, keep_answers, known_answers
from ecinn.training.calibration import fit_tau
from ecinn.training.evaluation import random_offsets, with_metrics
from ecinn.training.finetuning import BlackBoxTeacher
from ecinn.training.fitting import RandomState, class_numbers, seed_from, shown, stored_images
from ecinn.training.loop import train
from ecinn.training.networks import digest
from ecinn.training.student import PATH_IMAGES, REPORT_IMAGES, affordable, student_recipe

REPORT_FILE = "distillation.json"
AROUND = (-0.35, 1.0)
"""Range of α, relative to the tipping point, of the path points that τ is fitted to: from before
the tie to beyond what a student requests. Chosen on validation digits and clothes."""
FARTHEST_FITTED = 2.0
"""Largest α of these points."""


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
    init_from: Checkpoint | None = None,
    report_images: int = REPORT_IMAGES,
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
        init_from: model whose layers initialise the student's; with 0 epochs they are kept.
        report_images: held-out images on whose paths student and classifier are compared.
        labelled: the labels are true, so that the classifier's accuracy can be measured.
        order_given: the user has named the outputs: another order is mentioned, but not an error.
        tell: is told the classifier's accuracy and the plan, in sentences.
    """
    output_folder(folder)
    device = resolve_device(device)
    start = None if init_from is None else init_from.recipe.name
    # Hashed once: the file may change while the student learns the answers of this one.
    sha256 = None if source is None else file_hash(source)
    answers, planned = known_answers(black_box, data, folder, start, sha256, resume=resume)
    accuracy = None
    try:
        if planned is None:
            recipe = affordable(recipe, black_box, data, answers, report_images)
        elif recipe.finetuning is not None:  # as planned before the interruption
            recipe = replace(recipe, finetuning=replace(recipe.finetuning, epochs=planned))
        planned = recipe.finetuning.epochs if recipe.finetuning is not None else None
        if "validation" not in answers:
            answers["validation"] = ask(black_box, data.validation, observe)
        if labelled:
            labels = data.validation.labels
            accuracy = classifier_accuracy(answers["validation"], labels)
            tell(_require_skill(accuracy, black_box, order_given=order_given))
        for name in ("train", "test"):
            if name not in answers:
                answers[name] = ask(black_box, getattr(data, name), observe)
        _require_all_classes(answers["train"], data.train.class_names)
        keep_answers(black_box, data, answers, planned, folder, start, sha256)
        test = data.test if labelled else _relabelled(data.test, answers["test"])
        test = test.first(report_images)
        on_path = recipe.finetuning is not None
        identity = torch.frombuffer(bytearray(digest(answers["train"])), dtype=torch.uint8)
        checkpoint = train(
            recipe,
            _relabelled(data.train, answers["train"]),
            folder,
            held_out=_relabelled(data.validation, answers["validation"]),
            test=test if on_path else None,
            device=device,
            resume=resume,
            init_from=init_from,
            teacher=BlackBoxTeacher(black_box, identity) if recipe.finetuning else None,
            observe=observe,
        )
        if not on_path:
            checkpoint = fit_tau_on_paths(
                checkpoint, black_box, data.validation.images, answers["validation"], device
            )
            checkpoint = with_metrics(checkpoint, test, device, observe)
            save_checkpoint(checkpoint, folder / MODEL_FILE)
        student = Model(checkpoint, device)
        agreement = measure_agreement(
            student, black_box, data.test.images, answers["test"], n=report_images, observe=observe
        )
    except KeyboardInterrupt:
        raise InterruptedRunError(
            "interrupted; continue with the same command and --resume (resume=True in Python)"
        ) from None
    finally:
        keep_answers(black_box, data, answers, planned, folder, start, sha256)
    if source is not None:
        save_classifier(black_box, source, folder)
    result = Distilled(
        Model(checkpoint, device, black_box), accuracy, agreement, black_box.queries
    )
    write_json(folder / REPORT_FILE, result.to_dict())
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
    init_from: Model | str | Path | None = None,
    epochs: int | None = None,
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
        recipe: the student's settings; planned for the images by default.
        init_from: a model of similar pictures, to whose layers the student's are set: a shipped
            name such as "mnist-finetuned", a path or a `Model`. Without a recipe, the settings
            are those of this model, and the layers are trained for a short time.
        epochs: of training on the images, planned by default; 0 keeps the layers of `init_from`.
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
    if epochs is not None and (epochs < 0 or (epochs == 0 and init_from is None)):
        raise InputError("epochs must be at least 1, or 0 to keep the layers of init_from")
    asked = class_names is None
    if class_names is None:
        outputs = _outputs(predict, stored, preprocessing, timeout)
        class_names = () if labels is None else class_numbers(labels)[1]
        if outputs is None:  # what is wrong is said when the images are asked about
            class_names = class_names or ("0", "1")
        elif len(class_names) > outputs:
            raise InputError(
                f"the labels name {len(class_names)} classes, but predict answers with {outputs}: "
                "let it answer with one value for each class"
            )
        elif len(class_names) < outputs:
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
    start = load_checkpoint(init_from) if isinstance(init_from, str | Path) else init_from
    start = start.checkpoint if isinstance(start, Model) else start
    with tempfile.TemporaryDirectory() as temporary, shown(observe, verbose=verbose) as show:
        chosen = student_recipe(
            parts[0], target, recipe=recipe, init_from=start, minutes=minutes, observe=show
        )
        try:
            return distill_classifier(
                black_box,
                Splits(*parts),
                replace(chosen, seed=seed, epochs=chosen.epochs if epochs is None else epochs),
                Path(folder or temporary),
                init_from=start,
                labelled=known,
                device=target,
                resume=resume,
                observe=show,
            ).model
        except InterruptedRunError:
            if folder is None:
                advice = "nothing is kept; give a folder to keep the answers"
            elif (Path(folder) / ANSWERS_FILE).exists():
                advice = "continue with resume=True, which keeps the answers"
            else:
                raise
            raise InterruptedRunError(f"interrupted: {advice}") from None


@torch.no_grad()
def fit_tau_on_paths(
    checkpoint: Checkpoint,
    black_box: BlackBox,
    images: StoredImages,
    answers: Tensor,
    device: torch.device,
    *,
    seed: int = 0,
) -> Checkpoint:
    """Fit τ to the answers on a stored point of the path of every held-out image.

    Explanations move along paths, where a student that was not trained on them is overconfident.
    In exchange, it becomes underconfident on the images themselves.
    """
    model = Model(checkpoint, device)
    few = min(PATH_IMAGES, len(images))
    images, answers = images[:few].to(device), answers[:few].to(device)
    p, classes = answers.argmax(1), answers.shape[1]
    q = (p + random_offsets(few, classes, seed).to(device)) % classes
    noise = torch.rand(few, generator=torch.Generator().manual_seed(seed)).to(device)
    latents, given = [], []
    for rows in torch.arange(few, device=device).split(100):
        z, _ = model.encode_with_log_det(to_pixels(images[rows]))
        mu_p, mu_q = model.mu[p[rows]], model.mu[q[rows]]
        alpha = equations.tipping_point_alpha(z, mu_q - mu_p, mu_p, mu_q)
        alpha = (alpha + AROUND[0] + (AROUND[1] - AROUND[0]) * noise[rows]).clamp(
            0.0, FARTHEST_FITTED
        )
        made = to_uint8(model.decode(equations.corrected_latent(z, alpha, mu_q - mu_p)))
        latents.append(model.encode_with_log_det(to_pixels(made))[0])
        given.append(black_box.predict(made).to(device))
    targets = torch.cat(given)
    checkpoint.classifier.tau.fill_(fit_tau(latents, targets, model.mu))
    checkpoint.classifier.cpu()  # the model moved it to the device
    return checkpoint


def _outputs(
    predict: Callable[[Tensor], Any],
    images: Tensor,
    preprocessing: Preprocessing | None,
    timeout: float | None,
) -> int | None:
    """Ask about one image to count the classes; None if the answer is no row of numbers."""
    found: list[Any] = []

    def call(x: Tensor) -> Tensor:
        found.append(predict(x))
        return torch.tensor([[0.5, 0.5]])

    BlackBox(call, "ab", preprocessing=preprocessing, timeout=timeout).predict(images[:1])
    try:
        shape = np.shape(found[-1])
    except ValueError:
        return None
    if shape in ((1,), (1, 1)):  # one value: of the second of two classes
        return 2
    return shape[1] if len(shape) == 2 and shape[0] == 1 else None


def _require_skill(accuracy: ClassifierAccuracy, black_box: BlackBox, *, order_given: bool) -> str:
    """Say how accurate the classifier is; refuse one that guesses, or is in another order."""
    names, reached = black_box.class_names, 100 * accuracy.accuracy.mean
    said = (
        f"{black_box.name} classifies {reached:.1f} % of {accuracy.accuracy.n:,} labelled images "
        f"as labelled (by chance {100 * accuracy.chance:.1f} %); its answers are read as "
        f"{black_box.output}"
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
    """Return the images with the classifier's answers, and nothing else to learn."""
    labels = answers.argmax(1)
    return replace(data, labels=labels, answers=answers, attributes=None, attribute=None)
