"""`ecinn distill`: a student that explains somebody's classifier."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ecinn.cli.app import Device, Json, app, command_line, err, out, plain, print_json
from ecinn.cli.own import keep_run, load_run
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import atomic_write

if TYPE_CHECKING:
    from ecinn.classifier.checkpoint import Checkpoint
    from ecinn.classifier.recipes import Recipe
    from ecinn.data.dataset import Splits


@app.command()
def distill(
    classifier: Annotated[
        Path, typer.Option(help="The classifier: .onnx, torch.export's .pt2 or TorchScript's .pt.")
    ],
    data: Annotated[str, typer.Option(help="A folder or file of pictures, or a dataset's name.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the student.")],
    queries: Annotated[
        int | None,
        typer.Option(min=1, help="The most pictures that the classifier may be asked about."),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="TOML file with the settings below, instead of options."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Input of the classifier: 224, or 192x256 (height, width).")
    ] = None,
    channels: Annotated[str | None, typer.Option(help="RGB, BGR or grey.")] = None,
    layout: Annotated[str | None, typer.Option(help="NCHW or NHWC.")] = None,
    scale: Annotated[
        float | None, typer.Option(help="Factor of 8-bit values; default 1/255.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Subtracted after scaling; one value, or one per channel.")
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Divides after that; one value, or one per channel.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Class names in the order of the outputs: cat,dog.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="logits or probabilities; recognised by default.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds that a batch may take; default 60.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Settings of the student; planned for the data by default.")
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option(help="Start from the layers of this model of similar pictures."),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=0, help="Epochs of the first stage; 0 keeps the layers of --init-from."),
    ] = None,
    finetune_epochs: Annotated[
        int | None,
        typer.Option(
            min=0, help="Epochs on the path; by default 0 with --init-from and on a CPU."
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Plan for so much time.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=10, help="Use only the first N images of every split.")
    ] = None,
    report: Annotated[
        int, typer.Option(min=1, help="Test images whose counterfactuals are in the report.")
    ] = 300,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    celeba: CelebA = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Distil any classifier into a student that explains it; explanations are verified on it."""
    from ecinn.auditing.page import render_distillation
    from ecinn.blackbox.files import PREPROCESSING, open_classifier, read_options
    from ecinn.blackbox.preprocessing import Preprocessing
    from ecinn.classifier.checkpoint import load_checkpoint
    from ecinn.data.own import OwnData
    from ecinn.flow.device import resolve_device
    from ecinn.training.distillation import distill_classifier
    from ecinn.training.student import path_settings, queries_needed, student_recipe

    options = {} if settings is None else read_options(settings)
    given: dict[str, Any] = {
        "size": _size(size),
        "channels": channels,
        "layout": layout,
        "scale": scale,
        "mean": _numbers("--mean", mean),
        "std": _numbers("--std", std),
        "classes": None if classes is None else tuple(classes.split(",")),
        "output": output,
        "timeout": timeout,
    }
    options |= {name: value for name, value in given.items() if value is not None}
    # Before the data are read, which may take long.
    Preprocessing(**{name: options[name] for name in PREPROCESSING if name in options})
    if not classifier.is_file():
        raise InputError(f"there is no classifier {classifier}")
    start = None if init_from is None else load_checkpoint(init_from)
    if epochs == 0 and start is None:
        raise InputError("--epochs 0 keeps the layers of another model: name it with --init-from")
    splits, stored = _load(data, out_dir, limit, celeba, start, resume=resume)
    framing = splits.framing if isinstance(splits, OwnData) else None
    target = resolve_device(device)
    black_box = open_classifier(
        classifier, splits.train.class_names, options, budget=queries, device=target
    )
    with bars() as observe:
        chosen = stored or student_recipe(
            splits.train,
            target,
            recipe=recipe or (_recipe_of(data) if start is None else None),
            init_from=start,
            minutes=minutes,
            observe=observe,
            framing=framing,
        )
        chosen = replace(chosen, epochs=chosen.epochs if epochs is None else epochs)
        if finetune_epochs is not None:
            path = chosen.finetuning or path_settings(chosen, continued=start is not None)
            tuning = replace(path, epochs=finetune_epochs)
            chosen = replace(chosen, finetuning=tuning if finetune_epochs else None)
        if isinstance(splits, OwnData) and stored is None:
            keep_run(out_dir, splits, chosen)
        on_data, per_epoch = queries_needed(chosen, splits, report_images=report)
        on_path = per_epoch * (chosen.finetuning.epochs if chosen.finetuning else 0)
        err.print(
            f"{plain(black_box.name)} will be asked about {on_data + on_path:,} pictures"
            + (f", at most {queries:,}" if queries is not None else "")
        )
        result = distill_classifier(
            black_box,
            splits,
            chosen,
            out_dir,
            source=classifier,
            init_from=start,
            report_images=report,
            order_given="classes" in options,
            device=target,
            resume=resume,
            tell=lambda sentence: err.print(plain(sentence)),
            observe=observe,
        )
    named = data if framing is None else "SOURCE"
    inputs = {"classifier": black_box.name, "data": named, "out": "DIR", **options}
    inputs |= {"queries": queries, "recipe": recipe, "epochs": epochs, "minutes": minutes}
    inputs |= {"finetune_epochs": finetune_epochs, "limit": limit, "report": report}
    command = command_line("distill", inputs | {"init_from": init_from})
    page = out_dir / "distillation.html"
    atomic_write(page, render_distillation(result, command).encode())
    if json_output:
        print_json(result.to_dict())
        return
    for sentence in result.agreement.sentences():
        out.print(plain(sentence))
    out.print(f"{result.queries:,} queries in all")
    out.print(f"wrote {plain(str(page))}")
    out.print(
        f"wrote {plain(str(out_dir))}: try `ecinn explain FILE --model {plain(str(out_dir))}`"
    )


def _load(
    source: str,
    folder: Path,
    limit: int | None,
    celeba: Path | None,
    start: "Checkpoint | None",
    *,
    resume: bool,
) -> "tuple[Splits, Recipe | None]":
    """Load all splits of a dataset, or of your own pictures with the recipe of a resumed run.

    Your own pictures are read as those of the model to start from were, if there is one.
    """
    from ecinn.data.dataset import Split, Splits
    from ecinn.data.framing import Framing
    from ecinn.data.own_record import OwnDataOptions

    path = Path(source)
    if _recipe_of(source) is None and path.exists():
        options = None
        if start is not None and not resume:
            a, framing = start.recipe.architecture, start.recipe.framing or Framing()
            values = framing.intensity
            window = None if values is None else (values.low, values.high)
            options = OwnDataOptions(a.height, a.channels, framing.fit, window)
        own, recipe = load_run(path, folder, options, resume=resume)
        return own.first(limit), recipe
    splits = Splits(*(load_images(source, split, celeba) for split in get_args(Split)))
    return splits.first(limit), None


def _recipe_of(source: str) -> str | None:
    """Return the first recipe of a dataset that is known by name."""
    from ecinn.classifier.recipes import RECIPES

    return next((name for name, recipe in RECIPES.items() if recipe.dataset == source), None)


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() for side in sides):
        raise InputError(f"--size is like 224, or 192x256 for height and width, not {text!r}")
    return int(sides[0]), int(sides[-1])


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} is like 0.5, or 0.485,0.456,0.406, not {text!r}") from None
