"""Train a model: a loop that can be interrupted and resumed to the same weights."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ecinn.classifier.checkpoint import MODEL_FILE, Checkpoint, load_checkpoint, save_checkpoint
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import (
    Recipe,
    find_recipe,
    require_fitting,
    require_learnable,
)
from ecinn.data.celeba import relabelled
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import output_folder
from ecinn.flow.precision import exact_convolutions
from ecinn.progress import Observer, ignore
from ecinn.training.calibration import calibrate
from ecinn.training.epochs import run_epochs
from ecinn.training.evaluation import with_metrics
from ecinn.training.finetuning import FineTuningStep, second_stage
from ecinn.training.networks import digest, seeded, timing_record
from ecinn.training.ranks import Ranks, joined, require_divisible
from ecinn.training.state import STATE_FILES, TrainingState, as_json
from ecinn.training.step import OptimisationStep
from ecinn.training.teacher import load_teacher, own_teacher, prepare_teacher

FIRST_STAGE_FILE = "first-stage.safetensors"
"""The model that the second stage starts from."""
UNROUNDED_FILE = "unrounded.safetensors"
"""The final model before its weights were rounded to 8 bits."""


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
    observe: Observer = ignore,
    save_every: float = 30.0,
) -> Checkpoint:
    """Train a model and write it to the folder, with its metrics if test images are given.

    Ctrl-C keeps the last finished epoch; `resume=True` continues from there. In processes that
    torchrun started, each takes its rows of every batch, and the first one writes the files.

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
        save_every: seconds between saved states; states are saved at the end of an epoch.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    folder = Path(folder)
    for images in (data, held_out, test):
        if images is not None:
            require_fitting(images, recipe)
    require_learnable(data, recipe)
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
    prerequisite = None
    if recipe.init_from is not None and started is None and refined is None:
        prerequisite = find_recipe(recipe.init_from)
    start = prerequisite if started is None else started.recipe
    if (start is not None and not start.architecture.same_layers(recipe.architecture)) or (
        refined is not None and refined.recipe.architecture != recipe.architecture
    ):
        raise InputError(
            f"cannot start from this model: its architecture differs from {recipe.name!r}"
        )
    with joined(device) as ranks:
        if data.answers is not None and ranks.size > 1:
            raise InputError("distil a classifier in one process: start it without torchrun")
        require_divisible(recipe, len(data), ranks)
        observe = observe if ranks.leads else ignore
        if isinstance(teacher, str | Path):
            teacher = load_teacher(Path(teacher), ranks.device).ensemble
        try:
            if teacher is None and recipe.needs_teacher:
                with ranks.first_alone():
                    teacher = own_teacher(data, held_out, folder, ranks.device, observe)
            teacher, origin = prepare_teacher(teacher, recipe, data, ranks.device)
            run = _Run(data, held_out, folder, ranks, resume, observe, save_every, teacher, origin)
            if prerequisite is not None:
                started = run.prerequisite(prerequisite)
            models = run.train(recipe, started, refined)
            if test is not None and ranks.leads:
                models[0] = with_metrics(models[0], test, ranks.device, observe)
        except KeyboardInterrupt:
            resumable = any((folder / name).exists() for name in (*STATE_FILES, FIRST_STAGE_FILE))
            raise InterruptedRunError(
                f"interrupted; continue with {how} (resume=True in Python)"
                if resumable
                else "interrupted before the first epoch was finished; start again"
            ) from None
        if ranks.leads:
            for model, name in zip(models, (MODEL_FILE, UNROUNDED_FILE), strict=False):
                save_checkpoint(model, folder / name)
        ranks.wait()
        return models[0] if ranks.leads else load_checkpoint(folder)


@dataclass(frozen=True)
class _Run:
    """The inputs of both stages."""

    data: Dataset
    held_out: Dataset | None
    folder: Path
    ranks: Ranks
    resume: bool
    observe: Observer
    save_every: float
    teacher: nn.Module | None
    origin: dict[str, str]
    """Identifies the teacher, if there is one."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.ranks.device

    def prerequisite(self, recipe: Recipe) -> Checkpoint:
        """Return the model that a run starts from, trained unless an earlier start did so."""
        own = self.folder / recipe.name
        if (own / MODEL_FILE).exists():
            model = load_checkpoint(own)
            expected: dict[str, int | str] = {"training_images": len(self.data)}
            if recipe.needs_teacher:
                expected |= self.origin
            if model.recipe != recipe or not expected.items() <= model.training.items():
                raise InputError(
                    f"{own} was trained with another recipe, other images or another teacher: "
                    "choose another folder"
                )
            return model
        if (self.folder / STATE_FILES[0]).exists():
            raise InputError(
                f"the run in {self.folder} was given a model to start from: give the same"
            )
        held_out = self.held_out
        return train(
            recipe,
            relabelled(self.data, recipe.dataset),
            own,
            held_out=None if held_out is None else relabelled(held_out, recipe.dataset),
            device=self.device,
            resume=True,
            teacher=self.teacher if recipe.needs_teacher else None,
            observe=self.observe,
        )

    def train(
        self, recipe: Recipe, init_from: Checkpoint | None, refine_from: Checkpoint | None
    ) -> list[Checkpoint]:
        """Run the stages; return the model and, if it is stored in 8 bits, the unrounded model.

        Only the first process returns models.
        """
        first = self.folder / FIRST_STAGE_FILE
        if not self.resume and self.ranks.leads:
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
            if models:
                plain = replace(models[0].recipe, finetuning=None)
                refine_from = replace(models[0], recipe=plain)
        else:
            models = [refine_from]
        if recipe.finetuning is None:
            return models
        if self.ranks.leads and refine_from is not None:
            save_checkpoint(refine_from, first)
        self.ranks.wait()
        refine_from = refine_from or load_checkpoint(first)
        stage = second_stage(recipe)
        tuned = TrainingState.start(stage, self.device, attributes)
        for network in (tuned.classifier, tuned.average):
            network.load_state_dict(refine_from.classifier.state_dict() | {"tau": network.tau})
        if recipe.finetuning.rounds:
            tuned.maker = copy.deepcopy(tuned.average)
        if recipe.finetuning.realism:
            tuned.add_critic(stage, self.device)
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
        state.images, state.labels = len(self.data), digest(self.data.labels).hex()[:16]
        state.origin |= self.origin
        with seeded(self.device):
            if self.resume and state_file.exists():
                state.restore(state_file, stage)
            state.teacher = self.teacher
            self.ranks.require_same(
                (self.folder.absolute(), state.epoch),
                "the processes of a run need one folder: choose one that all of them can read",
            )
            self.ranks.copy_from_first(state.tensors().values())
            step = step_class(stage, self.data, state, self.device, self.ranks)
            run_epochs(step, state_file, self.observe, self.save_every)
        seen = state.epoch * (len(self.data) // step.batch_size) * step.batch_size
        del step  # calibration needs its memory
        if not self.ranks.leads:
            return []
        record = {
            **state.origin,
            **timing_record(len(self.data), seen, state.seconds, self.device),
            "curve": state.curve,
        }
        if self.ranks.size > 1:
            record["processes"] = self.ranks.size
        if state.restarts:
            record["restarts"] = state.restarts
        weights = state.average.state_dict()

        def calibrated(bits: int, ood: OODDetector | None = None) -> Checkpoint:
            stored = replace(stage, stored_bits=bits)
            return calibrate(stored, self.data, weights, self.device, record, self.held_out, ood)

        model = calibrated(stage.stored_bits)
        return [model] if stage.stored_bits > 8 else [model, calibrated(32, model.ood)]
