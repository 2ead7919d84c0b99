"""Training: a loop that can be interrupted, resumed to the same weights, and is fast on a GPU."""

import contextlib
import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ecinn.classifier.recipes import Recipe
from ecinn.data.dataset import Dataset
from ecinn.errors import EcinnError, InputError
from ecinn.files import output_folder
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import to_pixels
from ecinn.training.calibration import finish
from ecinn.training.finetuning import FineTuningStep, second_stage
from ecinn.training.state import EpochRecord, FineTuningState, TrainingState, as_json
from ecinn.training.step import OptimisationStep

State = TypeVar("State", bound=TrainingState)

MODEL_FILE = "model.safetensors"
STATE_FILES = ("state.safetensors", "finetuning.safetensors")
"""What each stage can go on from."""
FIRST_STAGE_FILE = "first-stage.safetensors"
"""The model that the second stage starts from."""
UNROUNDED_FILE = "unrounded.safetensors"
"""The last stage's model before its weights were rounded to 8 bits."""
EXPLODED = 1e3
"""A loss above this never comes back."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; figures are means since the last report."""

    stage: str
    """"training", then "refining" where there is a second stage."""
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    bits_per_dim: float
    error: float
    images_per_second: float
    seconds_left: float


def train(
    recipe: Recipe,
    data: Dataset,
    folder: Path,
    *,
    device: torch.device,
    resume: bool = False,
    pretrained: Checkpoint | None = None,
    start: Checkpoint | None = None,
    teacher: nn.Module | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
    save_every: float = 30.0,
) -> Checkpoint:
    """Train, save as it goes, and leave a finished model in the folder.

    Args:
        pretrained: a model to take instead of running the first stage.
        start: a model whose layers the first stage begins with, instead of untrained ones.
        teacher: gives the log-odds of all attributes of images, where the recipe has one.
        save_every: seconds between two saved states; a state is saved at the end of an epoch.
    """
    _require_fitting(data, recipe)
    output_folder(folder)
    if not resume and any((folder / name).exists() for name in (*STATE_FILES, MODEL_FILE)):
        raise InputError(f"{folder} holds a run already: resume it, or choose another folder")
    teacher, taught_by = _ready(teacher, recipe, data, device)
    how = _How(folder, device, resume, observe, save_every, teacher)
    first = folder / FIRST_STAGE_FILE
    if resume and first.exists():
        pretrained = load_checkpoint(first)
    elif not resume:
        # What an interrupted run of something else left must not be taken up later.
        first.unlink(missing_ok=True)
    finished: list[Checkpoint] = []
    if pretrained is None:
        state = _first_state(recipe, data, start, device)
        begun = {} if start is None else {"start": start.recipe.name}
        state.origin = begun | taught_by
        finished = _stage(recipe, data, state, OptimisationStep, STATE_FILES[0], how)
        pretrained = finished[0]
    else:
        _require_same_layers(pretrained, recipe)
        finished = [pretrained]
    if recipe.finetuning is not None:
        save_checkpoint(pretrained, first)
        stage = second_stage(recipe)
        refined = FineTuningState.refine(pretrained, stage, device, _attributes(stage, data))
        refined.origin = taught_by
        finished = _stage(stage, data, refined, FineTuningStep, STATE_FILES[1], how)
        first_stage = {"settings": as_json(pretrained.recipe), **pretrained.training}
        # How long the first stage was is what its model says, whatever was asked for since.
        recipe = replace(recipe, epochs=pretrained.recipe.epochs)
        finished = [
            replace(
                checkpoint,
                recipe=replace(recipe, stored_bits=checkpoint.recipe.stored_bits),
                training={"first_stage": first_stage, **checkpoint.training},
            )
            for checkpoint in finished
        ]
    for checkpoint, name in zip(finished, (MODEL_FILE, UNROUNDED_FILE), strict=False):
        save_checkpoint(checkpoint, folder / name)
    return finished[0]


def _require_fitting(data: Dataset, recipe: Recipe) -> None:
    """Images and labels that the recipe's network can learn."""
    a = recipe.architecture
    if data.images.dtype != torch.uint8:
        raise InputError(f"images are 8-bit (torch.uint8, 0 to 255), not {data.images.dtype}")
    shape, wanted = tuple(data.images.shape[1:]), (a.channels, a.height, a.width)
    if shape != wanted or not len(data):
        raise InputError(f"{recipe.name} learns images of {wanted}, not {len(data)} of {shape}")
    if int(data.labels.min()) < 0 or int(data.labels.max()) >= a.classes:
        raise InputError(
            f"{recipe.name} has classes 0 to {a.classes - 1}; labels go from "
            f"{int(data.labels.min())} to {int(data.labels.max())}"
        )


def _ready(
    teacher: nn.Module | None, recipe: Recipe, data: Dataset, device: torch.device
) -> tuple[nn.Module | None, dict[str, str]]:
    """The teacher on its device, tried on one image; and a name that tells it from others."""
    if not recipe.distillation_weight and teacher is None:
        return None, {}
    if data.attributes is None or data.attribute is None:
        raise InputError(f"{recipe.dataset} has no attributes to be taught: leave it out")
    if teacher is None:
        raise InputError(
            f"{recipe.name} learns from a teacher: give what `ecinn teacher` wrote (--teacher)"
        )
    if not recipe.distillation_weight:
        raise InputError(f"{recipe.name} learns from no teacher: leave it out")
    teacher = teacher.to(device)
    with torch.no_grad():
        answer = teacher(to_pixels(data.images[:1].to(device)))
    if answer.shape != (1, data.attributes.shape[1]):
        raise InputError(
            f"the teacher knows {answer.shape[-1]} attributes and the data has "
            f"{data.attributes.shape[1]}: train one on this data"
        )
    digest = hashlib.sha256()
    for value in teacher.state_dict().values():
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return teacher, {"teacher": digest.hexdigest()[:16]}


def _first_state(
    recipe: Recipe, data: Dataset, start: Checkpoint | None, device: torch.device
) -> TrainingState:
    state = TrainingState.start(recipe, device, _attributes(recipe, data))
    if start is not None:
        _require_same_layers(start, recipe)
        with exact_convolutions():
            state.begin_at(start.classifier, data)
    return state


def _attributes(recipe: Recipe, data: Dataset) -> int:
    """How many attributes are learned beside the class."""
    if not recipe.attribute_weight:
        return 0
    if data.attributes is None:
        raise InputError(f"{recipe.name} learns attributes beside: its data has none")
    return data.attributes.shape[1]


def _require_same_layers(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Weights can only be taken over where they have the same shapes and meaning."""
    if checkpoint.recipe.architecture != recipe.architecture:
        raise InputError(f"the model to start from is no {recipe.name!r}: its layers differ")


@dataclass(frozen=True)
class _How:
    """What is the same in both stages."""

    folder: Path
    device: torch.device
    resume: bool
    observe: Callable[[Progress], None]
    save_every: float
    teacher: nn.Module | None


def _stage(
    stage: Recipe,
    data: Dataset,
    state: State,
    step_class: Callable[[Recipe, Dataset, State, torch.device], OptimisationStep],
    name: str,
    how: _How,
) -> list[Checkpoint]:
    """Run one stage to its end and measure what came out; if it is rounded to 8 bits, also before.

    So that what rounding costs can be told.
    """
    state_file = how.folder / name
    state.images = len(data)
    with _own_randomness(how.device):
        if how.resume and state_file.exists():
            state.restore(state_file, stage)
        state.teacher = how.teacher
        step = step_class(stage, data, state, how.device)
        _run(stage, data, state, step, state_file, how)
        del step  # its memory is needed to measure all images
    record = {**state.origin, **_record(stage, data, state, how.device)}
    weights = state.average.state_dict()
    bits = [stage.stored_bits] if stage.stored_bits > 8 else [stage.stored_bits, 32]
    return [
        finish(replace(stage, stored_bits=each), data, weights, how.device, record)
        for each in bits
    ]


def _run(
    recipe: Recipe,
    data: Dataset,
    state: TrainingState,
    step: OptimisationStep,
    state_file: Path,
    how: _How,
) -> None:
    batch = step.batch_size
    steps_per_epoch = len(data) // batch
    steps = steps_per_epoch * recipe.epochs
    saved = began = time.monotonic()
    earlier_seconds, first_step = state.seconds, state.epoch * steps_per_epoch
    for epoch in range(state.epoch, recipe.epochs):
        # All randomness of an epoch comes from (seed, epoch): an epoch that is interrupted and
        # begun again is the same epoch.
        order = step.begin_epoch(epoch)
        sums = torch.zeros(3)
        for index in range(steps_per_epoch):
            number = epoch * steps_per_epoch + index
            step(order[index * batch : (index + 1) * batch], number / steps, number)
            last = index == steps_per_epoch - 1
            if last or (index + 1) % 50 == 0:
                figures = step.read_figures()
                sums += figures
                loss, bits, error = (figures / ((index % 50) + 1)).tolist()
                _stop_if_broken(loss, state_file)
                seconds = time.monotonic() - began
                rate = (number + 1 - first_step) / seconds
                how.observe(
                    Progress(
                        stage=step.stage,
                        epoch=epoch + 1,
                        epochs=recipe.epochs,
                        step=number + 1,
                        steps=steps,
                        loss=loss,
                        bits_per_dim=bits,
                        error=error,
                        images_per_second=rate * batch,
                        seconds_left=(steps - number - 1) / rate,
                    )
                )
        loss, bits, error = (sums / steps_per_epoch).tolist()
        now = time.monotonic()
        state.epoch, state.seconds = epoch + 1, earlier_seconds + now - began
        state.curve.append(EpochRecord(epoch + 1, loss, bits, error, state.seconds))
        if now - saved >= how.save_every or epoch + 1 == recipe.epochs:
            state.save(state_file, recipe)
            saved = now


def _record(
    recipe: Recipe, data: Dataset, state: TrainingState, device: torch.device
) -> dict[str, object]:
    """How the model was made, to be kept inside its checkpoint."""
    batch = min(recipe.batch_size, len(data))
    images = state.epoch * (len(data) // batch) * batch
    return {
        "training_images": len(data),
        "seconds": round(state.seconds, 1),
        "images_per_second": round(images / max(state.seconds, 1e-9)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "curve": [asdict(record) for record in state.curve],
    }


@contextlib.contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Dropout draws from the global generators: give the caller's back as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _stop_if_broken(loss: float, state_file: Path) -> None:
    if math.isfinite(loss) and loss < EXPLODED:
        return
    kept = f"the last good state is {state_file}" if state_file.exists() else "nothing was saved"
    raise EcinnError(
        f"training broke: the loss became {loss:.3g}; {kept}. "
        "Lower the learning rate or the clamp, or raise the weight decay"
    )
