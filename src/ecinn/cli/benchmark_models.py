"""`ecinn benchmark heatmaps`, `faces` and `controls`: attributions and models."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ecinn.cli.app import Device, Json, command_line, err, plain
from ecinn.cli.benchmark import (
    RESULTS,
    Images,
    JudgesName,
    ModelName,
    Out,
    Seed,
    SplitOption,
    benchmark,
    names_of,
    show,
    suffix,
)
from ecinn.cli.evaluate import SplitName
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder

FACE_MODELS = "celeba-smile,celeba-cheekbones,celeba-lipstick,celeba-makeup"


class BaselineName(StrEnum):
    """Reference of Integrated Gradients and DeepLift."""

    MEAN = "mean"
    BLACK = "black"


@benchmark.command("heatmaps")
def heatmaps_benchmark(
    model: ModelName = "celeba-smile",
    cnn: Annotated[
        str | None,
        typer.Option(
            help="Also explain this network: residual (a shipped face judge) or a file that "
            "`ecinn inception` wrote."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Names separated by commas; default: all. ecinn is always included."),
    ] = None,
    n: Images = 500,
    seed: Seed = 0,
    baseline: Annotated[
        BaselineName,
        typer.Option(
            help="Reference of Integrated Gradients and DeepLift: mean of training images, or "
            "black, which puts them at a disadvantage."
        ),
    ] = BaselineName.MEAN,
    batch_size: Annotated[
        int | None,
        typer.Option(min=2, help="Images per batch with gradients; 100 take 10 GB on a GPU."),
    ] = None,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Compare heatmaps: replaced pixels, localisation, noise, stability, cost."""
    line = command_line("benchmark heatmaps", locals())
    from ecinn.attribution.heatmaps import METHODS
    from ecinn.drawing.pictures import webp_bytes
    from ecinn.model import load
    from ecinn.studies.benchmark.heatmap_measures import HeatmapBenchmark
    from ecinn.studies.benchmark.heatmap_tables import heatmap_tables, sheet
    from ecinn.studies.benchmark.heatmaps import measure_heatmaps, require_methods
    from ecinn.studies.benchmark.record import Results, provenance, write_json
    from ecinn.studies.face_judges import RESIDUAL, load_face_judges
    from ecinn.studies.inception.training import load_inception

    asked = require_methods(METHODS if methods is None else names_of(methods))
    explainer = load(model, device)
    recipe = explainer.recipe
    network: Any = None
    about: dict[str, Any] = {}
    if cnn == RESIDUAL:
        attribute = recipe.dataset.removeprefix("celeba/")
        if attribute == recipe.dataset:
            raise InputError(f"--cnn {RESIDUAL} needs a face model, and {model} is not one")
        judges = load_face_judges(device=explainer.device)
        network, errors = judges.classifier(attribute), judges.record["errors"]
        about = {
            "network": RESIDUAL,
            "errors with mirror images": {s: errors[s][RESIDUAL][attribute] for s in errors},
        }
    elif cnn is not None:
        trained = load_inception(Path(cnn), explainer.device, explainer.class_names)
        network, about = trained.classifier, {"errors": dict(trained.errors), **trained.record}
    data, training = (
        load_images(recipe, split, celeba, model=model) for split in ("test", "train")
    )
    record = provenance(line, explainer) | {"baseline": baseline.value}
    if cnn is not None:
        record["cnn"] = about
    stem = output_folder(out_dir) / f"heatmaps-{explainer.name}"
    numbers, picture = (stem.with_name(f"{stem.name}{end}") for end in (".json", ".webp"))

    def keep(result: HeatmapBenchmark) -> None:
        write_json(numbers, {"record": record, "complete": False, **vars(result)})

    with bars() as observe:
        result, shown = measure_heatmaps(
            explainer,
            data,
            training,
            cnn=network,
            methods=asked,
            n=n,
            seed=seed,
            batch_size=batch_size,
            baseline=baseline.value,
            observe=observe,
            keep=keep,
        )
    atomic_write(picture, webp_bytes(sheet(result, shown, explainer.class_names)))
    values = {"record": record, "complete": True, **vars(result)}
    title = f"Heatmaps side by side: {model}"
    results = Results(title, heatmap_tables(result), values, [record], {picture.name: "images"})
    show(results, stem, json_output=json_output)


@benchmark.command("faces")
def faces_benchmark(
    models: Annotated[str, typer.Option(help="Names or paths separated by commas.")] = FACE_MODELS,
    inception: Annotated[
        Path | None,
        typer.Option(
            help="Folder written by `ecinn inception`: ATTRIBUTE.json, and ATTRIBUTE.safetensors "
            "to classify counterfactuals."
        ),
    ] = None,
    judges: JudgesName = None,
    split: SplitOption = SplitName.TEST,
    hardest: Annotated[
        Path | None,
        typer.Option(help="celeba.json of an earlier run: draw the hardest faces of that run."),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, max=20, help="Faces per picture.")] = 10,
    limit: Annotated[int | None, typer.Option(min=1, help="First test images only.")] = None,
    seed: Seed = 0,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Measure models of faces; draw random faces and the most difficult ones."""
    line = command_line("benchmark faces", locals())
    from ecinn.drawing.pictures import webp_bytes
    from ecinn.model import load
    from ecinn.studies.benchmark import faces
    from ecinn.studies.benchmark.face_quality import (
        REFERENCE,
        REFERENCE_FACES,
        JudgePanel,
        find_face_judges,
    )
    from ecinn.studies.benchmark.record import Results, provenance

    loaded = {name: load(name, device) for name in names_of(models)}
    for name, model in loaded.items():
        if not model.recipe.dataset.startswith("celeba/"):
            raise InputError(f"{name} is not a model of faces: leave it out")
    if len({model.name for model in loaded.values()}) < len(loaded):
        raise InputError("two of these models have the same recipe: measure them one at a time")
    networks = (
        {}
        if inception is None
        else {name: faces.read_inception(inception, model) for name, model in loaded.items()}
    )
    loaded_judges = find_face_judges(judges, split.value, device)
    same = {} if hardest is None else faces.read_hardest(hardest)
    for name, (_, network) in networks.items():
        if network is None:
            err.print(f"{plain(name)}: no .safetensors in --inception to classify counterfactuals")
    stem = output_folder(out_dir) / f"celeba{suffix(split)}"
    measured: dict[str, faces.FaceResult] = {}
    record: dict[str, Any] = {}
    captions: dict[str, str] = {}
    for name, model in loaded.items():
        dataset = model.recipe.dataset
        data = load_images(model.recipe, split.value, celeba).first(limit)
        reference = load_images(model.recipe, REFERENCE[split.value], celeba)
        error, network = networks.get(name, (None, None))
        attribute = dataset.removeprefix("celeba/")
        with bars() as observe:
            measured[model.name], sheets = faces.measure_faces(
                model,
                data,
                JudgePanel(attribute, loaded_judges, network, model.device),
                reference.first(limit or REFERENCE_FACES),
                n=n,
                seed=seed,
                inception_error=error,
                hardest=same.get(model.name),
                observe=observe,
            )
        record[model.name] = provenance(line, model)
        for kind, sheet in sheets.items():
            file = f"{model.name}{suffix(split)}-{kind}.webp"
            captions[file] = f"{model.name}: {faces.SHEETS[kind]}"
            atomic_write(stem.with_name(file), webp_bytes(sheet))
        values = {"record": record, "judges": loaded_judges.record, "results": measured}
        tables = faces.face_tables(measured, split.value)
        results = Results("Faces", tables, values, [*record.values()], captions)
        results.write(stem)  # an interrupted run keeps its results
    show(results, stem, json_output=json_output)


@benchmark.command("controls")
def controls_benchmark(
    doses: Annotated[
        str, typer.Option(help="Shares of pictures whose cue agrees with the label, in per cent.")
    ] = "50,75,100",
    n: Annotated[
        int, typer.Option("--n", min=200, help="Digits that every student learns from.")
    ] = 3000,
    epochs: Annotated[
        int, typer.Option(min=1, help="Epochs of each student before training on the path.")
    ] = 10,
    seed: Seed = 0,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Distil classifiers whose reasons are known: a planted shortcut, and none at all."""
    line = command_line("benchmark controls", locals())
    from ecinn.data.mnist import load_mnist
    from ecinn.flow.device import resolve_device
    from ecinn.studies.benchmark import controls
    from ecinn.studies.benchmark.record import Results, provenance

    try:
        shares = [float(dose) / 100 for dose in names_of(doses)]
    except ValueError:
        shares = []
    if not shares or not all(0.5 <= share <= 1 for share in shares):
        raise InputError(f"--doses are numbers from 50 to 100, such as 50,75,100, not {doses!r}")
    stem = output_folder(out_dir) / "controls"
    with bars() as observe:
        size = controls.Size(images=n, epochs=epochs)
        study = controls.Study(size, seed, resolve_device(device), observe)
        result, students = controls.run_controls(load_mnist("train"), study, shares)
    records = [provenance(line, student) for student in students]
    values = {"records": records, "holds": result.holds, **vars(result)}
    picture = stem.with_name("controls.png")
    tables = controls.control_tables(result)
    captions = {picture.name: "dose and response"}
    results = Results("Controls of distillation", tables, values, records, captions)
    try:
        atomic_write(picture, controls.dose_figure(result.shortcuts))
    finally:  # tables are shown even if the figure cannot be drawn
        show(results, stem, json_output=json_output)
