"""`ecinn train`: train a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ecinn.cli.app import Device, app, command_line, in_every_process, out, plain
from ecinn.cli.evaluate import print_evaluation
from ecinn.cli.own import keep_run, load_run
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder, rebuild, write_json
from ecinn.progress import Observer, Progress

if TYPE_CHECKING:
    from ecinn.classifier.checkpoint import Checkpoint
    from ecinn.classifier.recipes import Recipe
    from ecinn.data.dataset import Splits
    from ecinn.data.own import OwnData
    from ecinn.data.own_record import OwnDataOptions


PICTURES = (
    "size", "channels", "fit", "window", "group", "path_column", "label_column", "split_column",
    "skip_damaged",
)  # fmt: skip
"""Options about pictures of your own."""
FIRST_STAGE = ("epochs", "batch_size", "learning_rate")
BOTH_STAGES = ("beta", "distillation_weight")
FINE_TUNING = {
    "faithfulness": "faithfulness",
    "proximity": "proximity",
    "background": "background",
    "realism": "realism",
    "finetune_epochs": "epochs",
    "finetune_learning_rate": "learning_rate",
    "finetune_distillation": "distillation_weight",
}
"""Options of fine-tuning, and the settings that they replace."""
RECORDED = (
    "init_from", "refine_from", "teacher", *PICTURES, "minutes", *FIRST_STAGE, *BOTH_STAGES,
    "limit", *FINE_TUNING,
)  # fmt: skip
"""Options that determine the model."""


class FitName(StrEnum):
    """Ways to fit pictures that are not square."""

    STRETCH = "stretch"
    CROP = "crop"
    PAD = "pad"


@app.command()
@in_every_process
def train(
    source: Annotated[
        str,
        typer.Argument(
            help="A recipe like mnist or celeba-smile (an unknown name lists all), or your own "
            "pictures: a folder with a folder for each class, a zip archive of one, a .csv or "
            ".parquet table, a .npz file, or a folder of Hugging Face datasets.",
        ),
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the state and the model.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    init_from: Annotated[
        str | None, typer.Option(help="Initialise the layers from this model.")
    ] = None,
    refine_from: Annotated[
        str | None, typer.Option(help="Skip the first stage and fine-tune this model.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of the first stage.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Batch size of the first stage.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="Learning rate of the first stage.")
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
    finetune_distillation: Annotated[
        float | None,
        typer.Option(min=0.0, help="Fine-tuning: weight of what the teacher reads."),
    ] = None,
    proximity: Annotated[
        float | None,
        typer.Option(min=0.0, help="Fine-tuning: weight of changing little."),
    ] = None,
    background: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Fine-tuning of faces: weight of a change outside the face, relative to inside.",
        ),
    ] = None,
    realism: Annotated[
        float | None,
        typer.Option(min=0.0, help="Fine-tuning: weight of looking real to a critic."),
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
        int | None, typer.Option(min=1, help="Use only the first N images of every split.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="Your pictures: side in pixels, 16 to 128.")
    ] = None,
    channels: Annotated[
        int | None, typer.Option(help="Your pictures: 1 for grey, 3 for colour.")
    ] = None,
    fit: Annotated[
        FitName | None,
        typer.Option(help="Pictures that are not square.", show_default="stretch"),
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="LOW,HIGH: the raw values that are black and white.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Keep pictures together whose paths have the same first group of this regular "
            "expression, or rows with the same value in this column."
        ),
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out pictures that cannot be read.")
    ] = False,
    path_column: Annotated[
        str | None, typer.Option(help="Column of a table that names the pictures.")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Column of a table that holds the classes.")
    ] = None,
    split_column: Annotated[
        str | None, typer.Option(help="Column of a table with train, validation or test.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Time to train your pictures in."),
    ] = None,
    celeba: CelebA = None,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events.")] = False,
    device: Device = "auto",
) -> None:
    """Train a model; Ctrl-C keeps the last finished epoch, and --resume continues from there."""
    options = {n: v for n, v in locals().items() if v is not None and v is not False}
    from ecinn.classifier.checkpoint import MODEL_FILE
    from ecinn.classifier.recipes import RECIPES
    from ecinn.data.dataset import Split, Splits
    from ecinn.training.loop import train as train_model
    from ecinn.training.ranks import joined

    if resume and not (out_dir.is_dir() and any(out_dir.iterdir())):
        raise InputError(f"there is no run in {out_dir}: check the folder, or leave out --resume")
    if resume and minutes is not None:
        raise InputError("--resume keeps the plan of the first start: leave out --minutes")
    own_options = {name: options[name] for name in PICTURES if name in options}
    overrides = {n: options[n] for n in (*FIRST_STAGE, *BOTH_STAGES) if n in options}
    tuning = {field: options[name] for name, field in FINE_TUNING.items() if name in options}
    own = None
    if source not in RECIPES:
        if not Path(source).exists():
            names = ", ".join(RECIPES)
            raise InputError(f"no recipe, file or folder {source!r}; recipes are: {names}")
        output_folder(out_dir)
        with joined(device) as ranks, ranks.first_alone():
            own, settings = _own_run(
                Path(source),
                out_dir,
                own_options,
                overrides,
                minutes,
                device,
                resume=resume or not ranks.leads,  # the first process has planned this run
            )
    elif own_options or minutes is not None:
        option = [*own_options, "minutes"][0].replace("_", "-")
        raise InputError(
            f"--{option} is for pictures of your own, but {source!r} is a recipe: leave it out, "
            f"or name a folder as ./{source}"
        )
    else:
        settings = replace(RECIPES[source], **overrides)
    if refine_from is not None and overrides.keys() & FIRST_STAGE:
        raise InputError(
            "--refine-from skips the first stage: leave out --epochs, --batch-size and "
            "--learning-rate, or use those of fine-tuning"
        )
    if settings.finetuning is not None:
        finetuning = replace(settings.finetuning, **tuning)
        settings = replace(settings, finetuning=finetuning if finetuning.epochs else None)
    elif tuning:
        raise InputError(f"{source} has no fine-tuning: leave its options out")
    output_folder(out_dir)
    with joined(device) as ranks, ranks.first_alone():
        splits = own or Splits(*(load_images(settings, s, celeba) for s in get_args(Split)))
        splits = splits.first(limit)
    with _observers(out_dir, tensorboard=tensorboard and ranks.leads) as observe:
        checkpoint = train_model(
            settings,
            splits.train,
            out_dir,
            held_out=splits.validation,
            test=splits.test,
            device=device,
            resume=resume,
            init_from=init_from,
            refine_from=refine_from,
            teacher=teacher,
            observe=observe,
        )
    if not ranks.leads:
        return
    recorded = {"out": "DIR"} | {name: options[name] for name in RECORDED if name in options}
    record = {
        "command": command_line(f"train {source if own is None else 'SOURCE'}", recorded),
        "settings": asdict(settings),
        **checkpoint.training,
        "metrics": checkpoint.metrics,
    }
    write_json(out_dir / "training.json", record)
    out.print(f"wrote {plain(str(out_dir / MODEL_FILE))}")
    print_evaluation(checkpoint.metrics)
    if own is not None:
        _print_verdict(checkpoint, splits, out_dir, record["command"], device)


def _print_verdict(
    checkpoint: "Checkpoint",
    splits: "Splits",
    folder: Path,
    command: str,
    device: str,
) -> None:
    """Judge whether the model is good enough to explain with; write the verdict as a page, too."""
    from rich.table import Table

    from ecinn.auditing.page import render_verdict
    from ecinn.auditing.verdict import assess
    from ecinn.model import Model
    from ecinn.training.evaluation import Evaluation

    evaluation = rebuild(Evaluation, checkpoint.metrics)
    with bars() as observe:
        model = Model(checkpoint, device)
        verdict = assess(model, splits.train, splits.test, evaluation=evaluation, observe=observe)
    page = folder / "verdict.html"
    atomic_write(page, render_verdict(verdict, command).encode())
    atomic_write(folder / "verdict.json", (verdict.to_json() + "\n").encode())
    table = Table("measure", "value", "", box=None)
    for finding in verdict.findings:
        table.add_row(finding.name, finding.value, finding.grade)
    out.print("Is it good enough to explain?", table, verdict.answer)
    for finding in verdict.findings:
        if finding.grade != "good":
            out.print(f"- {finding.name}: {finding.advice}")
    out.print(f"wrote {plain(str(page))}")


def _own_run(
    source: Path,
    out_dir: Path,
    given: dict[str, Any],
    overrides: dict[str, Any],
    minutes: float | None,
    device: str,
    *,
    resume: bool,
) -> "tuple[OwnData, Recipe]":
    """Load pictures of your own and plan their training; a resumed run keeps both."""
    from rich.table import Table

    from ecinn.flow.device import resolve_device
    from ecinn.training.plan import plan_recipe

    own, recipe = load_run(source, out_dir, _own_options(given) if given else None, resume=resume)
    if recipe is not None:
        return own, replace(recipe, **overrides)
    with bars() as observe:
        plan = plan_recipe(
            own.train,
            resolve_device(device),
            name=out_dir.absolute().name,
            minutes=minutes,
            framing=own.framing,
            overrides=overrides,
            observe=observe,
        )
    table = Table("setting", "value", "reason", box=None)
    for row in plan.reasons:
        table.add_row(*map(plain, row))
    out.print(table)
    keep_run(out_dir, own, plan.recipe)
    return own, plan.recipe


def _own_options(given: dict[str, Any]) -> "OwnDataOptions":
    """Read the options about pictures of your own."""
    from ecinn.data.own_record import OwnDataOptions
    from ecinn.data.sources import Columns

    columns = {name: given.get(f"{name}_column") for name in ("path", "label", "split")}
    given = {name: value for name, value in given.items() if not name.endswith("_column")}
    if "fit" in given:
        given["fit"] = given["fit"].value
    if window := given.pop("window", None):
        try:
            low, high = (float(value) for value in window.split(","))
        except ValueError:
            raise InputError(f"--window is LOW,HIGH, such as 0,4095, not {window!r}") from None
        given["window"] = (low, high)
    return OwnDataOptions(**given, columns=Columns(**columns))


@contextmanager
def _observers(folder: Path, *, tensorboard: bool) -> Iterator[Observer]:
    """Show progress, and write TensorBoard events on request."""
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
