"""`ecinn benchmark heatmaps`, `faces` and `rounding`: measure attributions and models."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ecinn.cli.app import Device, Json, err, plain, print_json
from ecinn.cli.benchmark import (
    RESULTS,
    Images,
    ModelName,
    Out,
    Seed,
    benchmark,
    command_line,
    finish,
    names_of,
    print_tables,
    require_images,
    say_written,
    write_results,
)
from ecinn.cli.evaluate import SplitName
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder

FACE_MODELS = "celeba-smile,celeba-cheekbones,celeba-lipstick,celeba-makeup"
Limit = Annotated[int | None, typer.Option(min=1, help="First test images only.")]


class BaselineName(StrEnum):
    """Reference of Integrated Gradients and DeepLift."""

    MEAN = "mean"
    BLACK = "black"


@benchmark.command("heatmaps")
def heatmaps_benchmark(
    model: ModelName = "celeba-smile",
    cnn: Annotated[
        Path | None, typer.Option(help="A file of `ecinn inception` to explain as well.")
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
    from ecinn.attribution.heatmaps import METHODS
    from ecinn.drawing.pictures import webp_bytes
    from ecinn.model import load
    from ecinn.studies.benchmark.heatmap_measures import HeatmapBenchmark
    from ecinn.studies.benchmark.heatmap_tables import heatmap_tables, sheet
    from ecinn.studies.benchmark.heatmaps import measure_heatmaps, require_methods
    from ecinn.studies.benchmark.record import document, jsonable, provenance, write_json
    from ecinn.studies.inception.training import load_inception

    asked = require_methods(METHODS if methods is None else names_of(methods))
    explainer = load(model, device)
    network = None if cnn is None else load_inception(cnn, explainer.device, explainer.class_names)
    dataset = explainer.recipe.dataset
    data, training = (load_images(dataset, split, celeba) for split in ("test", "train"))
    require_images(n, len(data))
    line = command_line(
        "heatmaps",
        model=model,
        methods=",".join(asked),
        n=n,
        seed=seed,
        baseline=baseline.value,
        cnn=None if cnn is None else "FILE",
    )
    record = provenance(line, explainer) | {"baseline": baseline.value}
    if network is not None:
        record["cnn"] = {"errors": dict(network.errors), **network.record}
    stem = output_folder(out_dir) / f"heatmaps-{explainer.name}"
    numbers, picture = (stem.with_name(f"{stem.name}{end}") for end in (".json", ".webp"))

    def keep(result: HeatmapBenchmark) -> None:
        write_json(numbers, {"record": record, "complete": False, **jsonable(result)})

    with bars() as observe:
        result, shown = measure_heatmaps(
            explainer,
            data,
            training,
            cnn=None if network is None else network.classifier,
            methods=asked,
            n=n,
            seed=seed,
            batch_size=batch_size,
            baseline=baseline.value,
            observe=observe,
            keep=keep,
        )
    tables = heatmap_tables(result)
    page = document(f"Heatmaps side by side: {model}", tables, record)
    page += f"\n![images]({picture.name})\n"
    atomic_write(picture, webp_bytes(sheet(result, shown, explainer.class_names)))
    values = {"record": record, "complete": True, **jsonable(result)}
    finish(stem, page, values, tables, [picture], json_output=json_output)


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
    n: Annotated[int, typer.Option("--n", min=1, max=20, help="Faces per picture.")] = 10,
    limit: Limit = None,
    seed: Seed = 0,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Measure models of faces; draw random faces and the least likely counterfactuals."""
    from ecinn.drawing.pictures import webp_bytes
    from ecinn.model import load
    from ecinn.studies.benchmark import faces
    from ecinn.studies.benchmark.record import document, jsonable, provenance

    names = names_of(models)
    loaded = {name: load(name, device) for name in names}
    for name, model in loaded.items():
        if not model.recipe.dataset.startswith("celeba/"):
            raise InputError(f"{name} is not a model of faces: leave it out")
    if len({model.name for model in loaded.values()}) < len(loaded):
        raise InputError("two of these models have the same recipe: measure them one at a time")
    errors = {name: faces.inception_error(inception, model) for name, model in loaded.items()}
    networks = {name: faces.inception_network(inception, model) for name, model in loaded.items()}
    for name, network in networks.items():
        if inception is not None and network is None:
            err.print(f"{plain(name)}: no .safetensors in --inception to classify counterfactuals")
    folder = output_folder(out_dir)
    line = command_line(
        "faces",
        celeba="DIR",
        models=",".join(names),
        n=n,
        inception=None if inception is None else "DIR",
        seed=seed,
        limit=limit,
    )
    results: dict[str, faces.FaceResult] = {}
    record: dict[str, Any] = {}
    pages: list[str] = []
    for name, model in loaded.items():
        data = load_images(model.recipe.dataset, "test", celeba).first(limit)
        label = model.name
        with bars() as observe:
            results[label], sheets = faces.measure_faces(
                model,
                data,
                n=n,
                seed=seed,
                inception_error=errors[name],
                inception=networks[name],
                observe=observe,
            )
        record[label] = provenance(line, model)
        for kind, sheet, words in (
            ("random", sheets.random, "random test faces"),
            ("worst", sheets.worst, "least likely counterfactuals"),
        ):
            atomic_write(folder / f"{label}-{kind}.webp", webp_bytes(sheet))
            pages.append(f"## {label}: {words}\n\n![{words}]({label}-{kind}.webp)\n")
        # After every model, so that an interrupted run keeps its results.
        page = document("Faces", faces.face_tables(results), record[label])
        values = {"record": record, "results": jsonable(results)}
        paths = write_results(folder / "celeba", "\n".join([page, *pages]), values)
    if json_output:
        print_json(values)
    else:
        print_tables(faces.face_tables(results))
        say_written(*paths)


@benchmark.command("rounding")
def rounding_benchmark(
    models: Annotated[
        list[str], typer.Option("--model", help="Name or path of a model; repeatable.")
    ],
    split: Annotated[SplitName, typer.Option(help="Images to measure on.")] = SplitName.TEST,
    draws: Annotated[int, typer.Option(min=2, help="Number of further rounding errors.")] = 5,
    unrounded: Annotated[
        list[str] | None,
        typer.Option("--unrounded", help="One of the models before rounding; repeatable."),
    ] = None,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Seed of the errors.")] = 0,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Estimate the cost of rounding the weights by rounding them once more."""
    from ecinn.model import Model, load
    from ecinn.studies.benchmark.record import document, jsonable, provenance
    from ecinn.studies.benchmark.rounding import (
        RoundingCost,
        match_unrounded,
        measure_rounding,
        require_rounded,
        rounding_tables,
    )

    loaded: dict[str, Model] = {}
    for name in models:
        model = load(name, device)
        require_rounded(model)
        if model.name in loaded:
            raise InputError(f"{model.name} is given twice: measure one at a time")
        loaded[model.name] = model
    before = match_unrounded({file: load(file, device) for file in unrounded or []}, loaded)
    stem = "rounding" if split is SplitName.TEST else f"rounding-{split.value}"
    folder = output_folder(out_dir)
    of_faces = any(model.recipe.dataset.startswith("celeba/") for model in loaded.values())
    line = command_line(
        "rounding",
        model=" --model ".join(models),
        split=split.value,
        draws=draws,
        seed=seed,
        unrounded=" --unrounded ".join(["FILE"] * len(before)) or None,
        limit=limit,
        celeba="DIR" if of_faces else None,
    )
    results: dict[str, RoundingCost] = {}
    record: dict[str, Any] = {}
    for label, model in loaded.items():
        images = load_images(model.recipe.dataset, split.value, celeba)
        with bars() as observe:
            results[label] = measure_rounding(
                model,
                images.first(limit),
                draws=draws,
                seed=seed,
                unrounded=before.get(label),
                observe=observe,
            )
        record[label] = provenance(line, model)
        # After every model, so that an interrupted run keeps its results.
        tables = rounding_tables(results, split.value)
        sums = "…, ".join(each["model_sha256"] for each in record.values())
        together = {**record[label], "model": ", ".join(record), "model_sha256": sums}
        page = document("The cost of rounding the weights", tables, together)
        values = {"record": record, "results": jsonable(results)}
        paths = write_results(folder / stem, page, values)
    if json_output:
        print_json(values)
    else:
        print_tables(tables)
        say_written(*paths)
