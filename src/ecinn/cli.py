"""The command line: models, explain, train, evaluate."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ecinn import training
from ecinn.checkpoints import SHIPPED, load_checkpoint, save_checkpoint, shipped_models
from ecinn.data.dataset import Dataset
from ecinn.errors import EcinnError, InputError, InterruptedRunError
from ecinn.evaluation import evaluate as evaluate_model
from ecinn.experiments import EXPERIMENTS, Experiment, find_experiment
from ecinn.explain import Targets
from ecinn.files import atomic_write, output_folder
from ecinn.pixels import to_pixels
from ecinn.pretrained import Model, load
from ecinn.reports import write_report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Counterfactual explanations of images in two network evaluations.",
)
# Results go to stdout; progress, remarks and errors to stderr.
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto for a GPU where there is one.")]


def main() -> None:
    """Run the command line; whatever goes wrong ends in one line and an exit code."""
    try:
        app()
    except EcinnError as error:
        _fail(str(error), error.exit_code)
    except Exception as error:  # the last resort: no traceback for people who did not ask
        if os.environ.get("ECINN_DEBUG"):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        _fail(f"{reason} (set ECINN_DEBUG=1 to see where)", 1)


def _fail(message: str, code: int) -> None:
    err.print(f"[bold red]error:[/] {_plain(' '.join(message.split()))}", soft_wrap=True)
    sys.exit(code)


def _plain(words: str) -> str:
    """Text that Rich prints as it stands."""
    return re.sub(r"\[", r"\\[", words)


@app.command("models")
def list_models(json_output: Json = False) -> None:
    """List the models that come with the package."""
    rows = []
    for name in shipped_models():
        checkpoint = load_checkpoint(name)
        size = (SHIPPED / f"{name}.safetensors").stat().st_size
        rows.append(
            {
                "name": name,
                "data": checkpoint.experiment.dataset,
                "classes": list(checkpoint.class_names),
                "bytes": size,
                "beta": checkpoint.experiment.beta,
                "metrics": dict(checkpoint.metrics),
            }
        )
    if json_output:
        _print_json(rows)
        return
    table = Table("model", "data", "classes", "error", "bits/dim", "reached q", "size", box=None)
    for row in rows:
        metrics: Any = row["metrics"]
        table.add_row(
            f"[bold]{row['name']}[/]",
            str(row["data"]),
            str(len(row["classes"])),  # type: ignore[arg-type]
            f"{100 * metrics['error']:.2f} %" if metrics else "–",
            f"{metrics['bits_per_dim']:.2f}" if metrics else "–",
            f"{100 * metrics['reached_q']:.2f} %" if metrics else "–",
            f"{int(row['bytes']) / 2**20:.1f} MiB",  # type: ignore[call-overload]
        )
    out.print(table)


@app.command()
def explain(
    images: Annotated[list[Path] | None, typer.Argument(help="Image files of any kind.")] = None,
    model: Annotated[str, typer.Option(help="A model's name or path.")] = "mnist",
    target: Annotated[str, typer.Option(help="Class to explain against, or 'all'.")] = "all",
    sample: Annotated[
        list[int] | None, typer.Option(help="Explain this image of the test set; repeatable.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the pictures.")] = Path(
        "explanations"
    ),
    verify: Annotated[
        bool, typer.Option(help="Ask the classifier what it says of the stored 8-bit images.")
    ] = True,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Show why each image is what it is, and not the target: pictures and raw counterfactuals."""
    explainer = load(model, _device(device))
    inputs = list(_inputs(explainer, images or [], sample or []))
    if not inputs:
        raise InputError("name an image file, or take a test image with --sample 0")
    targets = _parse_target(target, explainer)
    folder = output_folder(out_dir)
    # All are explained before anything is written: a target that fails leaves no files.
    explained = []
    for name, pixels, notes in inputs:
        try:
            explained.append((name, notes, explainer.explain(pixels, targets, verify=verify)))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    reports = [write_report(folder, name, notes, result) for name, notes, result in explained]
    if json_output:
        _print_json({"model": model, "explanations": reports})
        return
    for report in reports:
        _describe(report, explainer)


def _inputs(
    model: Model, paths: Sequence[Path], samples: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor, list[str]]]:
    """Name, pixels and remarks of every image that was asked for."""
    taken: set[str] = set()
    for path in paths:
        photograph = model.photograph(path)
        stem = re.sub(r"[^\w.-]+", "_", path.stem) or "image"
        name = next(n for n in _numbered(stem) if n not in taken)
        taken.add(name)
        yield name, to_pixels(photograph.image[None]), list(photograph.notes)
    if samples:
        data = model.checkpoint.experiment.load("test")
        for index in samples:
            if not 0 <= index < len(data):
                raise InputError(f"--sample {index}: the test images are 0 to {len(data) - 1}")
            label = data.class_names[int(data.labels[index])]
            name = next(n for n in _numbered(f"sample-{index}") if n not in taken)
            taken.add(name)
            yield name, to_pixels(data.images[index][None]), [f"label {label}"]


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1


def _parse_target(target: str, model: Model) -> Targets:
    """'all', a class by its name, or by its number."""
    if target == "all" or target in model.class_names:
        return model.targets(target)
    if re.fullmatch(r"[+-]?\d{1,9}", target):
        return int(target)
    return model.targets(target)


def _describe(report: dict[str, Any], model: Model) -> None:
    """One image's results in words."""
    predicted = report["predicted"]
    share = report["posterior"][predicted]
    out.print(f"[bold]{_plain(report['input'])}[/]: {predicted} ({100 * share:.1f} %)", end="")
    remarks = "; ".join(report["notes"])
    out.print(f"  [dim]{_plain(remarks)}[/]" if remarks else "")
    if report["typical"] is False:
        out.print("  [yellow]unlike the training images: take the explanation with caution[/]")
    for target in report["targets"]:
        convincing = target["convincing"]
        posterior = convincing["stored_posterior"] or convincing["posterior"]
        where = "stored image" if convincing["stored_posterior"] else "before rounding"
        verdict = f"{convincing['winner']} {100 * posterior[convincing['winner']]:.1f} % ({where})"
        colour = "green" if convincing["reached"] else "yellow"
        third = target["third_class"]
        note = f"  [dim]at the tipping point {third} wins[/]" if third else ""
        out.print(f"  not {target['target']}:  [{colour}]{verdict}[/]{note}", soft_wrap=True)
    out.print(f"  wrote {_plain(report['picture'])}", soft_wrap=True)
    out.print(f"  and {2 * len(report['targets'])} raw counterfactuals beside it")


@app.command()
def train(
    experiment: Annotated[str, typer.Argument(help=f"One of: {', '.join(EXPERIMENTS)}.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for state and model.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")] = False,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0.0)] = None,
    beta: Annotated[float | None, typer.Option(min=0.0, help="Weight of classification.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many training images.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard events.")] = False,
    device: Device = "auto",
) -> None:
    """Train a model; interrupted with Ctrl-C it can be resumed to the same weights."""
    changes: dict[str, Any] = {
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "beta": beta,
    }
    settings = dataclasses.replace(
        find_experiment(experiment), **{k: v for k, v in changes.items() if v is not None}
    )
    chosen = torch.device(_device(device))
    data = settings.load("train").first(limit)
    output_folder(out_dir)
    try:
        with _training_progress(out_dir, tensorboard=tensorboard) as observe:
            checkpoint = training.train(
                settings, data, out_dir, device=chosen, resume=resume, observe=observe
            )
    except KeyboardInterrupt:
        saved = (out_dir / training.STATE_FILE).exists()
        raise InterruptedRunError(
            "interrupted; go on with the same command and --resume"
            if saved
            else "interrupted before anything was saved; start again"
        ) from None
    result = evaluate_model(Model(checkpoint, chosen), _test_images(settings))
    checkpoint = dataclasses.replace(checkpoint, metrics=dataclasses.asdict(result))
    checkpoint.classifier.cpu()
    save_checkpoint(checkpoint, out_dir / training.MODEL_FILE)
    record = {
        "command": f"ecinn train {experiment} --out DIR",
        "settings": dataclasses.asdict(settings),
        **checkpoint.training,
        "metrics": checkpoint.metrics,
    }
    atomic_write(out_dir / "training.json", (json.dumps(record, indent=1) + "\n").encode())
    out.print(f"wrote {_plain(str(out_dir / training.MODEL_FILE))}")
    _print_evaluation(checkpoint.metrics)


@contextmanager
def _training_progress(folder: Path, *, tensorboard: bool) -> Iterator[Any]:
    """A bar with loss, bits/dim, error, speed and time left; TensorBoard on request."""
    writer = _summary_writer(folder) if tensorboard else None
    bar = Progress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=err,
    )
    task = bar.add_task("train", epoch="0", figures="starting")
    last = {"epoch": 0}

    def observe(p: training.Progress) -> None:
        figures = (
            f"loss {p.loss:.3f}  bits/dim {p.bits_per_dim:.3f}  "
            f"error {100 * p.error:.2f} %  {p.images_per_second:,.0f} images/s"
        )
        bar.update(
            task, total=p.steps, completed=p.step, epoch=f"{p.epoch}/{p.epochs}", figures=figures
        )
        if not err.is_terminal and p.epoch != last["epoch"]:
            err.print(f"epoch {p.epoch}/{p.epochs}  {figures}  {p.seconds_left:.0f} s left")
            last["epoch"] = p.epoch
        if writer is not None:
            for name in ("loss", "bits_per_dim", "error", "images_per_second"):
                writer.add_scalar(name, getattr(p, name), p.step)

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


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model's name or path.")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many images.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the random targets.")] = 0,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Measure a model on its test images: error, bits/dim, reached targets, exact inverse."""
    loaded = load(model, _device(device))
    data = _test_images(loaded.checkpoint.experiment).first(limit)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("evaluating", total=len(data))
        result = evaluate_model(
            loaded, data, seed=seed, observe=lambda done: bar.update(task, completed=done)
        )
    if json_output:
        _print_json(dataclasses.asdict(result))
    else:
        _print_evaluation(dataclasses.asdict(result))


def _test_images(experiment: Experiment) -> Dataset:
    return experiment.load("test")


def _print_evaluation(metrics: Any) -> None:  # noqa: ANN401
    table = Table("measure", "value", box=None)
    for name, value in metrics.items():
        share = name in ("error", "reached_q", "tipping_third_class", "typical")
        shown = f"{100 * value:.2f} %" if share else value
        if name.startswith("bits_per_dim"):
            shown = f"{value:.3f}"
        if name == "round_trip_error":
            shown = f"{value:.1e}"
        table.add_row(name.replace("_", " "), str(shown))
    out.print(table)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device is cpu, cuda or auto, not {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no usable GPU here: leave --device out, or say cpu")
    return name


def _print_json(value: Any) -> None:  # noqa: ANN401
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
