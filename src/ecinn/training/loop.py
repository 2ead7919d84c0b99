"""Train a model: a loop that can be interrupted and resumed to the same weights."""

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecinn.classifier.checkpoint import MODEL_FILE, Checkpoint, load_checkpoint, save_checkpoint
from ecinn.classifier.recipes import Recipe, find_recipe
from ecinn.classifier.tensor_files import write_tensors
from ecinn.data.celeba import relabelled
from ecinn.data.dataset import Dataset
from ecinn.errors import EcinnError, InputError, InterruptedRunError
from ecinn.files import output_folder
from ecinn.flow.device import resolve_device
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import to_pixels
from ecinn.progress import Observer, Progress, ignore
from ecinn.training.calibration import calibrate
from ecinn.training.evaluation import with_metrics
from ecinn.training.finetuning import FineTuningStep, second_stage
from ecinn.training.networks import REPORT_EVERY, seeded, timing_record
from ecinn.training.state import Answers, TrainingState, as_json
from ecinn.training.step import OptimisationStep
from ecinn.training.teacher import load_teacher, targets_hash, train_teacher

STATE_FILES = ("state.safetensors", "finetuning.safetensors")
"""The resumable states of the two stages."""
FIRST_STAGE_FILE = "first-stage.safetensors"
"""The model that the second stage starts from."""
TEACHER_FILE = "teacher.safetensors"
"""The teacher that was trained because none was given."""
UNROUNDED_FILE = "unrounded.safetensors"
"""The final model before its weights were rounded to 8 bits."""
FIGURES = ("loss", "bits_per_dim", "error")
LARGEST_LOSS = 1e3
"""Training does not recover from a loss above this."""
MOST_RESTARTS = 2
"""Restarts from the last good state, each with half the learning rate, before training fails."""


def train(
    recipe: Recipe | str,
    data: Dataset,
    folder: str | Path,
    *,
    held_out: Dataset | None = None,
    test: Dataset | None = None,
    device: str | torch.device = "auto",
    resume: bool = False,
    init_from: Checkpoint | str | Path | None = None,
    refine_from: Checkpoint | str | Path | None = None,
    teacher: nn.Module | str | Path | None = None,
    answers: Answers | None = None,
    observe: Observer = ignore,
    save_every: float = 30.0,
) -> Checkpoint:
    """Train a model and write it to the folder, with its metrics if test images are given.

    Ctrl-C keeps the last finished epoch; `resume=True` continues from there.

    Args:
        recipe: a recipe or its name.
        held_out: images to fit the temperature on; training does not see them.
        test: images to evaluate the model on.
        device: "cpu", "cuda", or "auto" for a GPU if there is one.
        init_from: model whose layers initialise the first stage; if the recipe names one and none
            is given, it is trained first, into a folder inside this one.
        refine_from: model to fine-tune; the first stage is skipped.
        teacher: network that returns the logits of all attributes of images, or of all classes,
            or the file of a teacher; if the recipe needs one and none is given, it is trained.
        answers: class probabilities from another classifier, which replace the labels in the loss
            and in the fit of the temperature.
        save_every: seconds between saved states; states are saved at the end of an epoch.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    folder, device = Path(folder), resolve_device(device)
    for images in (data, held_out, test):
        if images is not None:
            _require_fitting(images, recipe)
    _require_learnable(data, recipe)
    if teacher is not None and not recipe.needs_teacher:
        raise InputError(f"{recipe.name} needs no teacher: leave it out")
    if refine_from is not None and resume:
        raise InputError("refine_from starts a new run, resume continues one: leave one out")
    if refine_from is not None and init_from is not None:
        raise InputError("init_from is for the first stage, which refine_from skips: choose one")
    if refine_from is not None and recipe.finetuning is None:
        raise InputError("refine_from skips the first stage, but there is no fine-tuning to do")
    output_folder(folder)
    if not resume and any((folder / name).exists() for name in (*STATE_FILES, MODEL_FILE)):
        raise InputError(f"{folder} already holds a run: resume it, or choose another folder")
    how = (
        "the same command and --resume"
        if refine_from is None
        else "--resume instead of --refine-from"
    )
    # Everything that can be refused is refused before the first network is trained.
    first = folder / FIRST_STAGE_FILE
    if resume and recipe.finetuning is not None and first.exists():
        init_from, refine_from = None, first
    started, refined = (
        load_checkpoint(start) if isinstance(start, str | Path) else start
        for start in (init_from, refine_from)
    )
    starts = [start.recipe for start in (started, refined) if start is not None]
    prerequisite = None
    if recipe.init_from is not None and not starts:
        prerequisite = find_recipe(recipe.init_from)
        starts = [prerequisite]
    if any(start.architecture != recipe.architecture for start in starts):
        raise InputError(
            f"cannot start from this model: its architecture differs from {recipe.name!r}"
        )
    if isinstance(teacher, str | Path):
        teacher = load_teacher(Path(teacher), device).ensemble
    try:
        if teacher is None and recipe.needs_teacher:
            teacher = _own_teacher(data, held_out, folder, device, observe)
        teacher, origin = _prepare_teacher(teacher, recipe, data, device)
        if prerequisite is not None:
            started = _prerequisite(
                prerequisite, data, held_out, folder, device, teacher, origin, observe
            )
        run = _Run(
            data, held_out, folder, device, resume, observe, save_every, teacher, origin, answers
        )
        models = run.train(recipe, started, refined)
        if test is not None:
            models[0] = with_metrics(models[0], test, device, observe)
    except KeyboardInterrupt:
        resumable = any((folder / name).exists() for name in (*STATE_FILES, FIRST_STAGE_FILE))
        raise InterruptedRunError(
            f"interrupted; continue with {how} (resume=True in Python)"
            if resumable
            else "interrupted before the first epoch was finished; start again"
        ) from None
    for model, name in zip(models, (MODEL_FILE, UNROUNDED_FILE), strict=False):
        save_checkpoint(model, folder / name)
    return models[0]


@dataclass(frozen=True)
class _Run:
    """The inputs of both stages."""

    data: Dataset
    held_out: Dataset | None
    folder: Path
    device: torch.device
    resume: bool
    observe: Observer
    save_every: float
    teacher: nn.Module | None
    origin: dict[str, str]
    """Identifies the teacher, if there is one."""
    answers: Answers | None = None

    def train(
        self, recipe: Recipe, init_from: Checkpoint | None, refine_from: Checkpoint | None
    ) -> list[Checkpoint]:
        """Run the stages; return the model and, if it is stored in 8 bits, the unrounded model."""
        first = self.folder / FIRST_STAGE_FILE
        if not self.resume:
            first.unlink(missing_ok=True)  # left by an interrupted run of something else
        attributes = 0
        if recipe.attribute_weight and self.data.attributes is not None:
            attributes = self.data.attributes.shape[1]
        if refine_from is None:
            state = TrainingState.start(recipe, self.device, attributes)
            if init_from is not None:
                with exact_convolutions():
                    state.init_from(init_from.classifier, self.data)
                state.origin["init_from"] = init_from.recipe.name
            models = self._stage(recipe, state, OptimisationStep, STATE_FILES[0])
            plain = replace(models[0].recipe, finetuning=None)
            refine_from = replace(models[0], recipe=plain)
        else:
            models = [refine_from]
        if recipe.finetuning is None:
            return models
        save_checkpoint(refine_from, first)
        stage = second_stage(recipe)
        tuned = TrainingState.start(stage, self.device, attributes)
        for network in (tuned.classifier, tuned.average):
            network.load_state_dict(refine_from.classifier.state_dict() | {"tau": network.tau})
        models = self._stage(stage, tuned, FineTuningStep, STATE_FILES[1])
        first_stage = {"settings": as_json(refine_from.recipe), **refine_from.training}
        # The length of the first stage is the stored model's, whatever the recipe says.
        recipe = replace(recipe, epochs=refine_from.recipe.epochs)
        return [
            replace(
                model,
                recipe=replace(recipe, stored_bits=model.recipe.stored_bits),
                training={"first_stage": first_stage, **model.training},
            )
            for model in models
        ]

    def _stage(
        self,
        stage: Recipe,
        state: TrainingState,
        step_class: type[OptimisationStep],
        name: str,
    ) -> list[Checkpoint]:
        """Run one stage and calibrate its model, also without rounding if it has 8 bits."""
        state_file = self.folder / name
        state.images = len(self.data)
        state.origin |= self.origin
        with seeded(self.device):
            if self.resume and state_file.exists():
                state.restore(state_file, stage)
            state.teacher = self.teacher
            state.answers = None if self.answers is None else self.answers.train.to(self.device)
            step = step_class(stage, self.data, state, self.device)
            self._run_epochs(stage, state, step, state_file)
        seen = state.epoch * (len(self.data) // step.batch_size) * step.batch_size
        del step  # calibration needs its memory
        record = {
            **state.origin,
            **timing_record(len(self.data), seen, state.seconds, self.device),
            "curve": state.curve,
        }
        if state.restarts:
            record["restarts"] = state.restarts
        weights = state.average.state_dict()
        all_bits = [stage.stored_bits] if stage.stored_bits > 8 else [stage.stored_bits, 32]
        return [
            calibrate(
                replace(stage, stored_bits=bits),
                self.data,
                weights,
                self.device,
                record,
                self.held_out,
                answers=None if self.answers is None else self.answers.held_out,
            )
            for bits in all_bits
        ]

    def _run_epochs(
        self, recipe: Recipe, state: TrainingState, step: OptimisationStep, state_file: Path
    ) -> None:
        """Train the remaining epochs; after a divergence, go back and halve the learning rate."""
        saved = time.monotonic()
        began = saved - state.seconds
        # A state is good once the first loss that follows from it has been read.
        good = latest = state.snapshot(recipe)
        unsaved = False
        try:
            while state.epoch < recipe.epochs:
                try:
                    for progress in _run_epoch(recipe, state, step, len(self.data)):
                        good = latest
                        self.observe(progress)
                except _DivergedError as error:
                    self._restart(recipe, state, step, state_file, good, error.loss)
                    good = latest = state.snapshot(recipe)
                    unsaved = state.epoch > 0
                    continue
                now = time.monotonic()
                state.seconds = now - began
                state.curve[-1]["seconds"] = state.seconds
                latest, unsaved = state.snapshot(recipe), True
                if now - saved >= self.save_every or state.epoch == recipe.epochs:
                    write_tensors(state_file, *latest)
                    unsaved, saved = False, now
        except KeyboardInterrupt:
            if unsaved:
                write_tensors(state_file, *latest)
            raise

    def _restart(
        self,
        recipe: Recipe,
        state: TrainingState,
        step: OptimisationStep,
        state_file: Path,
        good: tuple[dict[str, Tensor], dict[str, Any]],
        loss: float,
    ) -> None:
        """Return to the last good state with half the learning rate, or raise an `EcinnError`."""
        tensors, about = good
        failed = state.epoch + 1
        state.overwrite(tensors)
        state.epoch, state.curve = about["epoch"], list(about["curve"])
        stored = state_file.exists()
        if len(state.restarts) >= MOST_RESTARTS:
            kept = f"the last good state is {state_file}" if stored else "nothing was saved"
            raise EcinnError(
                f"training diverged: the loss became {loss:.3g} in spite of {MOST_RESTARTS} "
                f"restarts with half the learning rate; {kept}. "
                "Lower the learning rate or the clamp, or raise the weight decay"
            )
        rate = recipe.learning_rate / 2 ** (len(state.restarts) + 1)
        state.restarts.append({"epoch": failed, "learning_rate": rate})
        if stored:  # its state may be the one that led to this
            write_tensors(state_file, *state.snapshot(recipe))
        figures = {"epoch": failed, "learning_rate": rate}
        task = f"{step.stage} diverged and continues with half the learning rate"
        self.observe(Progress(task, 1, 1, figures))


class _DivergedError(Exception):
    """The mean loss since the last report is not a number, or too large to recover from."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


def _run_epoch(
    recipe: Recipe, state: TrainingState, step: OptimisationStep, images: int
) -> Iterator[Progress]:
    """Train one epoch and yield what to report; its randomness depends on (seed, epoch) only.

    So an epoch that was interrupted and is started again is the same.
    """
    batch, epoch = step.batch_size, state.epoch
    per_epoch = images // batch
    steps = per_epoch * recipe.epochs
    order = step.begin_epoch(epoch)
    began = time.monotonic()
    sums, reported = torch.zeros(3), 0
    for index in range(per_epoch):
        number = epoch * per_epoch + index
        step(order[index * batch : (index + 1) * batch], number / steps, number)
        # The loss of the first step tells whether the state before it was good.
        if 0 < index < per_epoch - 1 and (index + 1) % REPORT_EVERY:
            continue
        figures = step.read_figures()
        sums += figures
        means = (figures / (index + 1 - reported)).tolist()
        reported = index + 1
        if not -math.inf < means[0] < LARGEST_LOSS:
            raise _DivergedError(means[0])
        report = {"epoch": float(epoch + 1), "epochs": float(recipe.epochs)}
        report |= dict(zip(FIGURES, means, strict=True))
        report["images_per_second"] = (index + 1) * batch / (time.monotonic() - began)
        yield Progress(step.stage, number + 1, steps, report)
    state.epoch = epoch + 1
    point = dict(zip(FIGURES, (sums / per_epoch).tolist(), strict=True))
    state.curve.append({"epoch": epoch + 1, **point})


def _require_fitting(data: Dataset, recipe: Recipe) -> None:
    """Raise an `InputError` unless the recipe's network can learn these images and labels."""
    a = recipe.architecture
    if data.images.dtype != torch.uint8:
        raise InputError(f"images must be 8-bit (torch.uint8, 0 to 255), not {data.images.dtype}")
    shape, expected = tuple(data.images.shape[1:]), (a.channels, a.height, a.width)
    if shape != expected or not len(data):
        raise InputError(f"{recipe.name} needs images of {expected}, not {len(data)} of {shape}")
    if len(data.class_names) != a.classes:
        raise InputError(
            f"{recipe.name} has {a.classes} classes, but the dataset names {len(data.class_names)}"
        )
    low, high = int(data.labels.min()), int(data.labels.max())
    if low < 0 or high >= a.classes:
        raise InputError(
            f"{recipe.name} has classes 0 to {a.classes - 1}, but labels go from {low} to {high}"
        )


def _require_learnable(data: Dataset, recipe: Recipe) -> None:
    """Raise an `InputError` if training would fail on these images, or ignore what they lack."""
    missing = (data.labels.bincount(minlength=recipe.architecture.classes) == 0).nonzero()
    if len(missing):
        classes = ", ".join(str(int(label)) for label in missing)
        raise InputError(f"no training image has class {classes}: use more images")
    if data.attributes is None and (recipe.attribute_weight or recipe.distillation_weight):
        raise InputError(f"{recipe.name} needs attribute labels, but the dataset has none")
    if data.attributes is not None and data.attribute is None and recipe.needs_teacher:
        raise InputError(
            f"{recipe.name} asks a teacher of attributes: say which one is the label "
            "(Dataset.attribute)"
        )
    if recipe.finetuning and min(recipe.finetuning.batch_size, len(data)) < 2:
        raise InputError("fine-tuning halves its batches: it needs at least 2 images in each")


def _own_teacher(
    data: Dataset,
    held_out: Dataset | None,
    folder: Path,
    device: torch.device,
    observe: Observer,
) -> nn.Module:
    """Return the teacher of this run, trained unless an earlier start did so."""
    path = folder / TEACHER_FILE
    if path.exists():
        teacher = load_teacher(path, device)
        if teacher.record.get("targets") != targets_hash(data):
            raise InputError(f"{path} was trained on other images: choose another folder")
        return teacher.ensemble
    if any((folder / name).exists() for name in STATE_FILES):
        raise InputError(f"the run in {folder} was given a teacher: give the same to resume")
    teacher = train_teacher(data, held_out, device=device, observe=observe)
    teacher.save(path)
    return teacher.ensemble


def _prerequisite(
    recipe: Recipe,
    data: Dataset,
    held_out: Dataset | None,
    folder: Path,
    device: torch.device,
    teacher: nn.Module | None,
    origin: dict[str, str],
    observe: Observer,
) -> Checkpoint:
    """Return the model that a run starts from, trained unless an earlier start did so."""
    own = folder / recipe.name
    if (own / MODEL_FILE).exists():
        model = load_checkpoint(own)
        expected = {"training_images": len(data)} | (origin if recipe.needs_teacher else {})
        if model.recipe != recipe or not expected.items() <= model.training.items():
            raise InputError(
                f"{own} was trained with another recipe, other images or another teacher: "
                "choose another folder"
            )
        return model
    if (folder / STATE_FILES[0]).exists():
        raise InputError(f"the run in {folder} was given a model to start from: give the same")
    return train(
        recipe,
        relabelled(data, recipe.dataset),
        own,
        held_out=None if held_out is None else relabelled(held_out, recipe.dataset),
        device=device,
        resume=True,
        teacher=teacher if recipe.needs_teacher else None,
        observe=observe,
    )


def _prepare_teacher(
    teacher: nn.Module | None, recipe: Recipe, data: Dataset, device: torch.device
) -> tuple[nn.Module | None, dict[str, str]]:
    """Return the teacher on its device, tested on one image, and a hash that identifies it."""
    if teacher is None:
        return None, {}
    outputs = recipe.architecture.classes if data.attributes is None else data.attributes.shape[1]
    teacher = teacher.to(device).eval()
    with torch.no_grad():
        logits = teacher(to_pixels(data.images[:1].to(device)))
    if logits.shape != (1, outputs):
        raise InputError(
            f"the teacher predicts {logits.shape[-1]} classes or attributes and the dataset has "
            f"{outputs}: train a teacher on this dataset"
        )
    digest = hashlib.sha256()
    for value in teacher.state_dict().values():
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return teacher, {"teacher": digest.hexdigest()[:16]}
