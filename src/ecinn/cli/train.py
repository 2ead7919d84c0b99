"""`ecinn train` and `ecinn mix`: train a model, or average the weights of two."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ecinn.cli.app import Device, app, out, plain
from ecinn.cli.progress import CelebA
from ecinn.errors import InputError

if TYPE_CHECKING:
    from ecinn.progress import Observer


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="Like mnist or celeba-smile; an unknown name lists all.")
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the state and the model.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    init_from: Annotated[
        str | None, typer.Option(help="Initialise the layers from this model.")
    ] = None,
    refine_from: Annotated[
        str | None, typer.Option(help="Skip the first stage and fine-tune this model.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Overrides the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Overrides the recipe's.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="Overrides the recipe's.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(min=0.0, help="Weight of classification against likelihood.")
    ] = None,
    finetune_epochs: Annotated[
        int | None, typer.Option(min=0, help="Epochs of the second stage; 0 skips it.")
    ] = None,
    finetune_learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="Learning rate of the second stage.")
    ] = None,
    proximity: Annotated[
        float | None, typer.Option(min=0.0, help="Second stage: weight of small changes.")
    ] = None,
    faithfulness: Annotated[
        float | None,
        typer.Option(min=0.0, help="Second stage: weight of reaching the requested confidence."),
    ] = None,
    realism: Annotated[
        float | None, typer.Option(min=0.0, help="Second stage: weight of the critic.")
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Teacher for distillation, from `ecinn teacher`.")
    ] = None,
    distillation_weight: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the teacher's prediction in the targets."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first training and test images.")
    ] = None,
    celeba: CelebA = None,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events.")] = False,
    device: Device = "auto",
) -> None:
    """Train a model; Ctrl-C keeps the last finished epoch, and --resume continues from there."""
    import dataclasses
    import json

    from ecinn.classifier.checkpoint import MODEL_FILE
    from ecinn.classifier.recipes import find_recipe
    from ecinn.cli.evaluate import print_evaluation
    from ecinn.cli.progress import load_images
    from ecinn.files import atomic_write, output_folder
    from ecinn.training.loop import train as train_model

    settings = _replace(
        find_recipe(recipe),
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        beta=beta,
        distillation_weight=distillation_weight,
    )
    changes = {
        "epochs": finetune_epochs,
        "learning_rate": finetune_learning_rate,
        "proximity": proximity,
        "faithfulness": faithfulness,
        "realism": realism,
    }
    if settings.finetuning is not None:
        finetuning = _replace(settings.finetuning, **changes)
        settings = dataclasses.replace(
            settings, finetuning=finetuning if finetuning.epochs else None
        )
    elif any(value is not None for value in changes.values()):
        raise InputError(f"{recipe} has no second stage: leave its options out")
    output_folder(out_dir)
    data = load_images(settings, "train", celeba).first(limit)
    test = load_images(settings, "test", celeba).first(limit)
    with _observers(out_dir, tensorboard=tensorboard) as observe:
        checkpoint = train_model(
            settings,
            data,
            out_dir,
            test=test,
            device=device,
            resume=resume,
            init_from=init_from,
            refine_from=refine_from,
            teacher=teacher,
            observe=observe,
        )
    inputs = {
        " --init-from MODEL": init_from,
        " --refine-from MODEL": refine_from,
        " --teacher FILE": teacher,
    }
    # Without the paths of this computer.
    options = "".join(text for text, value in inputs.items() if value is not None)
    record = {
        "command": f"ecinn train {recipe} --out DIR{options}",
        "settings": dataclasses.asdict(settings),
        **checkpoint.training,
        "metrics": checkpoint.metrics,
    }
    atomic_write(out_dir / "training.json", (json.dumps(record, indent=1) + "\n").encode())
    out.print(f"wrote {plain(str(out_dir / MODEL_FILE))}")
    print_evaluation(checkpoint.metrics)


@app.command("mix")
def mix_models(
    first: Annotated[str, typer.Argument(help="A model's name or path.")],
    second: Annotated[str, typer.Argument(help="Another model, fine-tuned from the same one.")],
    out_file: Annotated[Path, typer.Option("--out", help="File for the average.")],
    share: Annotated[float, typer.Option(help="Share of the second model, from 0 to 1.")] = 0.5,
    celeba: CelebA = None,
    device: Device = "auto",
) -> None:
    """Average the weights of two models without training; takes minutes on a CPU."""
    from ecinn.classifier.checkpoint import load_checkpoint, save_checkpoint
    from ecinn.cli.evaluate import print_evaluation
    from ecinn.cli.progress import bars, load_images
    from ecinn.files import output_folder
    from ecinn.flow.device import resolve_device
    from ecinn.training.calibration import mix
    from ecinn.training.evaluation import with_metrics

    if out_file.is_dir():
        raise InputError(f"{out_file} is a folder: --out must name a file")
    output_folder(out_file.parent)
    target = resolve_device(device)
    models = [load_checkpoint(name) for name in (first, second)]
    dataset = models[0].recipe.dataset
    data, test = (load_images(dataset, split, celeba) for split in ("train", "test"))
    checkpoint = mix(models[0], models[1], share, data, target)
    with bars() as observe:
        checkpoint = with_metrics(checkpoint, test, target, observe)
    save_checkpoint(checkpoint, out_file)
    out.print(f"wrote {plain(str(out_file))}")
    print_evaluation(checkpoint.metrics)


def _replace(settings: Any, **changes: Any) -> Any:  # noqa: ANN401
    """Replace the settings that were given on the command line."""
    import dataclasses

    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(settings, **given)


@contextmanager
def _observers(folder: Path, *, tensorboard: bool) -> "Iterator[Observer]":
    """Show progress, and write TensorBoard events on request."""
    from ecinn.cli.progress import bars
    from ecinn.progress import Progress

    writer: Any = None
    if tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("--tensorboard needs: pip install 'ecinn[tensorboard]'") from None
        writer = SummaryWriter(str(folder / "tensorboard"))
    try:
        with bars() as show:

            def observe(progress: Progress) -> None:
                show(progress)
                if writer is not None:
                    for name, value in progress.figures.items():
                        writer.add_scalar(f"{progress.task}/{name}", value, progress.done)

            yield observe
    finally:
        if writer is not None:
            writer.close()
