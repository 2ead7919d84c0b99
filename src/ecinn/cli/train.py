"""`ecinn train`: train a model."""

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
    epochs: Annotated[int | None, typer.Option(min=1, help="Of the first stage.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of the first stage.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="Of the first stage.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(min=0.0, help="Weight of classification against likelihood.")
    ] = None,
    finetune_epochs: Annotated[
        int | None, typer.Option(min=0, help="Epochs of fine-tuning; 0 skips it.")
    ] = None,
    finetune_learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="Learning rate of fine-tuning.")
    ] = None,
    faithfulness: Annotated[
        float | None,
        typer.Option(min=0.0, help="Fine-tuning: weight of reaching the requested confidence."),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(help="Teacher, from `ecinn teacher`; trained first if needed and not given."),
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

    first_stage = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    both_stages = {"beta": beta, "distillation_weight": distillation_weight}
    settings = _replace(find_recipe(recipe), **first_stage, **both_stages)
    if refine_from is not None and any(value is not None for value in first_stage.values()):
        raise InputError(
            "--refine-from skips the first stage: leave out --epochs, --batch-size and "
            "--learning-rate, or use those of fine-tuning"
        )
    changes = {
        "epochs": finetune_epochs,
        "learning_rate": finetune_learning_rate,
        "faithfulness": faithfulness,
    }
    if settings.finetuning is not None:
        finetuning = _replace(settings.finetuning, **changes)
        settings = dataclasses.replace(
            settings, finetuning=finetuning if finetuning.epochs else None
        )
    elif any(value is not None for value in changes.values()):
        raise InputError(f"{recipe} has no fine-tuning: leave its options out")
    output_folder(out_dir)
    data = load_images(settings, "train", celeba).first(limit)
    held_out = load_images(settings, "validation", celeba).first(limit)
    test = load_images(settings, "test", celeba).first(limit)
    with _observers(out_dir, tensorboard=tensorboard) as observe:
        checkpoint = train_model(
            settings,
            data,
            out_dir,
            held_out=held_out,
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
    numbers = first_stage | both_stages | {"limit": limit, "faithfulness": faithfulness}
    numbers |= {"finetune_epochs": finetune_epochs}
    numbers |= {"finetune_learning_rate": finetune_learning_rate}
    options += "".join(
        f" --{name.replace('_', '-')} {value:g}"
        for name, value in numbers.items()
        if value is not None
    )
    record = {
        "command": f"ecinn train {recipe} --out DIR{options}",
        "settings": dataclasses.asdict(settings),
        **checkpoint.training,
        "metrics": checkpoint.metrics,
    }
    atomic_write(out_dir / "training.json", (json.dumps(record, indent=1) + "\n").encode())
    out.print(f"wrote {plain(str(out_dir / MODEL_FILE))}")
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
