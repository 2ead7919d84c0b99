"""`ecinn train`: train or refine a model, with a bar."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ecinn.classifier.recipes import RECIPES, FineTuning, Recipe, find_recipe
from ecinn.cli.app import Device, app, device_name, err, out, plain
from ecinn.cli.evaluate import print_evaluation
from ecinn.cli.progress import CelebA, load_images
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import atomic_write, output_folder
from ecinn.model import Model
from ecinn.training import loop as training
from ecinn.training.evaluation import evaluate as evaluate_model
from ecinn.training.teacher_training import load_teacher
from ecinn.training.weight_averaging import mix


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help=f"One of: {', '.join(RECIPES)}.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for state and model.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")] = False,
    start: Annotated[
        str | None, typer.Option("--from", help="Skip the first stage: refine this model.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    refine_epochs: Annotated[
        int | None, typer.Option(min=0, help="Of the second stage; 0 leaves it out.")
    ] = None,
    refine_learning_rate: Annotated[float | None, typer.Option(min=0.0)] = None,
    proximity: Annotated[
        float | None, typer.Option(min=0.0, help="Weight of nearness in the second stage.")
    ] = None,
    faithfulness: Annotated[
        float | None, typer.Option(min=0.0, help="Weight of being read as was asked.")
    ] = None,
    realism: Annotated[
        float | None, typer.Option(min=0.0, help="Weight of the critic's view.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0.0)] = None,
    beta: Annotated[float | None, typer.Option(min=0.0, help="Weight of classification.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many training and test images.")
    ] = None,
    layers_of: Annotated[
        str | None, typer.Option("--start", help="Begin with the layers of this trained model.")
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(help="What `ecinn teacher` wrote, to learn from."),
    ] = None,
    distillation_weight: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of the teacher's answer.")
    ] = None,
    celeba: CelebA = None,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events.")] = False,
    device: Device = "auto",
) -> None:
    """Train a model; interrupted with Ctrl-C it can be resumed to the same weights."""
    settings = _changed(
        find_recipe(recipe),
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        beta=beta,
        distillation_weight=distillation_weight,
    )
    if settings.finetuning is not None:
        finetuning = _changed(
            settings.finetuning,
            epochs=refine_epochs,
            learning_rate=refine_learning_rate,
            proximity=proximity,
            faithfulness=faithfulness,
            realism=realism,
        )
        settings = dataclasses.replace(
            settings, finetuning=finetuning if finetuning.epochs else None
        )
    elif any(
        given is not None
        for given in (refine_epochs, refine_learning_rate, proximity, faithfulness, realism)
    ):
        raise InputError(f"{recipe} has no second stage: leave its options out")
    if start is not None and resume:
        raise InputError("--from begins a run, --resume goes on with one: leave one out")
    if start is not None and settings.finetuning is None:
        raise InputError("--from takes the place of the first stage: there must be a second")
    if start is not None and layers_of is not None:
        raise InputError("--start begins the first stage, --from leaves it out: choose one")
    chosen = torch.device(device_name(device))
    data = load_images(settings.dataset, "train", celeba).first(limit)
    output_folder(out_dir)
    try:
        with _training_progress(out_dir, tensorboard=tensorboard) as observe:
            checkpoint = training.train(
                settings,
                data,
                out_dir,
                device=chosen,
                resume=resume,
                pretrained=None if start is None else load_checkpoint(start),
                start=None if layers_of is None else load_checkpoint(layers_of),
                teacher=None if teacher is None else load_teacher(teacher, chosen).teachers,
                observe=observe,
            )
    except KeyboardInterrupt:
        saved = any((out_dir / name).exists() for name in training.STATE_FILES)
        raise InterruptedRunError(
            "interrupted; go on with the same command and --resume"
            if saved
            else "interrupted before anything was saved; start again"
        ) from None
    test = load_images(settings.dataset, "test", celeba).first(limit)
    err.print(f"measuring on {len(test):,} test images …")
    checkpoint = _measure_and_save(checkpoint, test, out_dir / training.MODEL_FILE, chosen)
    record = {
        "command": f"ecinn train {recipe} --out DIR{_given(start, layers_of, teacher)}",
        "settings": dataclasses.asdict(settings),
        **checkpoint.training,
        "metrics": checkpoint.metrics,
    }
    atomic_write(out_dir / "training.json", (json.dumps(record, indent=1) + "\n").encode())


def _given(start: str | None, layers_of: str | None, teacher: Path | None) -> str:
    """The files that a run was given, without the paths of this machine."""
    given = {" --from MODEL": start, " --start MODEL": layers_of, " --teacher FILE": teacher}
    return "".join(words for words, value in given.items() if value is not None)


@app.command("mix")
def mix_models(
    first: Annotated[str, typer.Argument(help="A model's name or path.")],
    second: Annotated[str, typer.Argument(help="Another, refined from the same start.")],
    out_file: Annotated[Path, typer.Option("--out", help="File for the mixture.")],
    share: Annotated[float, typer.Option(help="Of the second model, from 0 to 1.")] = 0.5,
    celeba: CelebA = None,
    device: Device = "auto",
) -> None:
    """Average the weights of two models, without training; measuring takes minutes on a CPU."""
    chosen = torch.device(device_name(device))
    if out_file.is_dir():
        raise InputError(f"{out_file} is a folder: --out names the file to write")
    output_folder(out_file.parent)
    one, other = load_checkpoint(first), load_checkpoint(second)
    data = load_images(one.recipe.dataset, "train", celeba)
    err.print(f"measuring class means on {len(data):,} training images, then all test images …")
    checkpoint = mix(one, other, share, data, chosen)
    test = load_images(one.recipe.dataset, "test", celeba)
    _measure_and_save(checkpoint, test, out_file, chosen)


def _measure_and_save(
    checkpoint: Checkpoint, test: Dataset, path: Path, device: torch.device
) -> Checkpoint:
    """Write the model with what the test images say of it, and print that."""
    result = evaluate_model(Model(checkpoint, device), test)
    checkpoint = dataclasses.replace(checkpoint, metrics=dataclasses.asdict(result))
    checkpoint.classifier.cpu()
    save_checkpoint(checkpoint, path)
    out.print(f"wrote {plain(str(path))}")
    print_evaluation(checkpoint.metrics)
    return checkpoint


Settings = TypeVar("Settings", Recipe, FineTuning)


def _changed(settings: Settings, **changes: Any) -> Settings:  # noqa: ANN401
    """With what was asked for on the command line."""
    asked = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(settings, **asked)


@contextmanager
def _training_progress(folder: Path, *, tensorboard: bool) -> Iterator[Any]:
    """A bar with loss, bits/dim, error, speed and time left; TensorBoard on request."""
    writer = _summary_writer(folder) if tensorboard else None
    bar = Progress(
        TextColumn("{task.fields[epoch]}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=err,
    )
    task = bar.add_task("train", epoch="training", figures="starting")
    last: dict[str, tuple[str, int]] = {"epoch": ("", 0)}

    def observe(p: training.Progress) -> None:
        figures = (
            f"loss {p.loss:.3f}  bits/dim {p.bits_per_dim:.3f}  "
            f"error {100 * p.error:.2f} %  {p.images_per_second:,.0f} images/s"
        )
        bar.update(
            task,
            total=p.steps,
            completed=p.step,
            epoch=f"{p.stage}, epoch {p.epoch}/{p.epochs}",
            figures=figures,
        )
        now = (p.stage, p.epoch)
        if not err.is_terminal and now != last["epoch"]:
            where = f"{p.stage}, epoch {p.epoch}/{p.epochs}"
            err.print(f"{where}  {figures}  {p.seconds_left:.0f} s left")
            last["epoch"] = now
        if writer is not None:
            for name in ("loss", "bits_per_dim", "error", "images_per_second"):
                writer.add_scalar(f"{p.stage}/{name}", getattr(p, name), p.step)

    try:
        if err.is_terminal:
            with bar:
                yield observe
        else:
            yield observe
    finally:
        if writer is not None:
            writer.close()


def _summary_writer(folder: Path) -> Any:  # noqa: ANN401
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs: pip install 'ecinn[tensorboard]'") from None
    return SummaryWriter(str(folder / "tensorboard"))
