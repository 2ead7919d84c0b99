"""`ecinn benchmark`: how good counterfactuals are, beside other methods'."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from ecinn.cli.app import Device, Json, app, device_name, out, plain, print_json
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.drawing.pictures import png_bytes
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder
from ecinn.model import load
from ecinn.studies.benchmark import tables
from ecinn.studies.benchmark.authors import DATASETS, AuthorsResult, score_authors
from ecinn.studies.benchmark.authors_files import BenchmarkName, load_authors
from ecinn.studies.benchmark.autoencoders import load_autoencoders
from ecinn.studies.benchmark.consistency import measure_consistency
from ecinn.studies.benchmark.figure import cost_figure, sheet
from ecinn.studies.benchmark.methods import METHODS, require_known
from ecinn.studies.benchmark.quality import CUES, find_judges
from ecinn.studies.benchmark.record import jsonable, provenance, write_json, write_text
from ecinn.studies.benchmark.side_by_side import Made, Pairs, SideBySide, compare_methods

benchmark = typer.Typer(
    no_args_is_help=True, help="Measure counterfactuals beside other methods and the authors'."
)
app.add_typer(benchmark, name="benchmark")

ModelName = Annotated[str, typer.Option(help="A model's name or path.")]
JudgesName = Annotated[
    str | None, typer.Option("--judges", help="Judges' name or path; by default the data set's.")
]
Seed = Annotated[int, typer.Option(help="Draws the random images and targets.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
RESULTS = Path("results")


@benchmark.command("authors")
def authors_benchmark(
    data: Annotated[Path, typer.Option(help="A copy of EvaluatingCounterfactuals.")],
    model: ModelName = "mnist",
    fake_model: Annotated[str, typer.Option(help="The model of FakeMNIST.")] = "fakemnist",
    limit: Annotated[
        int | None, typer.Option(min=2, help="Only the first so many images; no control then.")
    ] = None,
    curve: Annotated[bool, typer.Option(help="Also over asked confidences.")] = True,
    judges_name: JudgesName = None,
    out_dir: Out = RESULTS,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Score the authors' published counterfactuals again, and ours of the same images."""
    chosen = device_name(device)
    names: dict[BenchmarkName, str] = {"mnist": model, "fake_mnist": fake_model}
    # All input is read before anything is written: what is missing leaves no files.
    benchmarks = {name: load_authors(data, name) for name in names}
    models = {name: load(given, chosen) for name, given in names.items()}
    for name, dataset in DATASETS.items():
        if models[name].checkpoint.recipe.dataset != dataset:
            raise InputError(f"{names[name]} is no model of {dataset}: give one that is")
    autoencoders = {name: load_autoencoders(benchmarks[name].autoencoders) for name in names}
    judges = find_judges(judges_name, "mnist").to(torch.device(chosen))
    folder = output_folder(out_dir)
    command = f"ecinn benchmark authors --data DIR --model {model} --fake-model {fake_model}"
    command += f" --limit {limit}" if limit is not None else ""
    command += "" if curve else " --no-curve"
    command += f" --judges {judges_name}" if judges_name is not None else ""
    results: dict[str, Any] = {}
    pages: list[str] = []
    for name in names:
        record = provenance(command, models[name], judges)
        with bars() as observe:
            result = score_authors(
                benchmarks[name],
                models[name],
                autoencoders[name],
                judges,
                limit=limit,
                with_curve=curve,
                observe=observe,
            )
        laid_out = tables.authors_tables(result, record)
        title = f"The authors' benchmark: {name.replace('_', ' ')}"
        pages.append(tables.document(title, laid_out, record))
        results[name] = {"record": record, **_authors_json(result)}
        write_json(folder / "authors.json", results)
        write_text(folder / "authors.md", "\n".join(pages))
        if not json_output:
            print_tables(laid_out)
    if json_output:
        print_json(jsonable(results))
    else:
        say_written(folder / "authors.md", folder / "authors.json")


def _authors_json(result: AuthorsResult) -> dict[str, Any]:
    control = [
        {**jsonable(figure), "digits": jsonable(figure.digits)} for figure in result.control
    ]
    about = {"reproduced": result.reproduced, "control_line": tables.control_line(result)}
    return {**about, **jsonable(result), "control": control}


@benchmark.command("counterfactuals")
def counterfactuals_benchmark(
    model: ModelName = "mnist",
    methods: Annotated[str, typer.Option(help="Names with commas between.")] = ",".join(METHODS),
    n: Annotated[int, typer.Option("--n", help="Random test images.")] = 500,
    seed: Seed = 0,
    judges_name: JudgesName = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="nearest-image: the first so many training images.")
    ] = None,
    out_dir: Out = RESULTS,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Run methods on the same random images and targets, and measure all of them alike."""
    asked = [name.strip() for name in methods.split(",") if name.strip()]
    require_known(asked)
    explainer = load(model, device_name(device))
    recipe = explainer.checkpoint.recipe
    judges = find_judges(judges_name, recipe.dataset).to(explainer.device)
    data = recipe.load("test")
    if not 2 <= n <= len(data):
        raise InputError(f"--n lies between 2 and the {len(data)} test images, not at {n}")
    folder = output_folder(out_dir)
    command = f"ecinn benchmark counterfactuals --model {model} --methods {','.join(asked)}"
    command += f" --n {n} --seed {seed}"
    command += f" --candidates {candidates}" if candidates is not None else ""
    command += f" --judges {judges_name}" if judges_name is not None else ""
    record = provenance(command, explainer, judges)
    stem = f"counterfactuals-{recipe.name}"
    picture = functools.partial(
        sheet,
        judges=judges,
        class_names=explainer.class_names,
        cue=CUES.get(recipe.dataset),
    )

    def keep(so_far: SideBySide, pairs: Pairs, made: Mapping[str, Made]) -> None:
        laid_out = tables.side_by_side_tables(so_far, record)
        write_json(folder / f"{stem}.json", {"record": record, **jsonable(so_far)})
        write_text(
            folder / f"{stem}.md",
            tables.document(f"Counterfactuals side by side: {model}", laid_out, record)
            + f"\n![quality against cost]({stem}.png)\n\n![images]({stem}-images.png)\n",
        )
        atomic_write(folder / f"{stem}-images.png", png_bytes(picture(so_far, pairs, made)))

    with bars() as observe:
        result = compare_methods(
            explainer,
            data,
            judges,
            asked,
            lambda: recipe.load("train").first(candidates),
            n=n,
            seed=seed,
            observe=observe,
            keep=keep,
        )
    if json_output:
        print_json(jsonable({"record": record, **jsonable(result)}))
    else:
        print_tables(tables.side_by_side_tables(result, record))
        say_written(*(folder / f"{stem}{end}" for end in (".md", ".json", "-images.png")))
    atomic_write(folder / f"{stem}.png", cost_figure(result))
    if not json_output:
        say_written(folder / f"{stem}.png")


@benchmark.command("consistency")
def consistency_benchmark(
    model: ModelName = "mnist",
    classes: Annotated[str, typer.Option(help="Two classes by number or name.")] = "0,1",
    n: Annotated[int, typer.Option("--n", help="Random test images.")] = 100,
    seed: Seed = 0,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Ask for confidences of .05 to .95 and compare with what the stored image gets."""
    explainer = load(model, device_name(device))
    pair = _two_classes(classes, explainer.class_names)
    data = load_images(explainer.checkpoint.recipe.dataset, "test", celeba)
    folder = output_folder(out_dir)
    with bars() as observe:
        result = measure_consistency(
            explainer,
            data,
            pair,
            n=n,
            seed=seed,
            observe=lambda done: observe("asking and reading", done, n),
        )
    command = f"ecinn benchmark consistency --model {model} --classes {classes} --n {n}"
    record = provenance(f"{command} --seed {seed}", explainer)
    laid_out = tables.consistency_tables(result)
    stem = f"consistency-{explainer.checkpoint.recipe.name}"
    write_json(folder / f"{stem}.json", {"record": record, **jsonable(result)})
    title = f"Confidence consistency: {model}"
    write_text(folder / f"{stem}.md", tables.document(title, laid_out, record))
    if json_output:
        print_json({"record": record, **jsonable(result)})
    else:
        print_tables(laid_out)
        say_written(folder / f"{stem}.md", folder / f"{stem}.json")


def _two_classes(given: str, names: Sequence[str]) -> tuple[int, int]:
    words = [word.strip() for word in given.split(",")]
    try:
        one, other = (names.index(word) if word in names else int(word) for word in words)
    except ValueError:
        raise InputError(
            f"--classes are two of {', '.join(names)} with a comma between, not {given!r}"
        ) from None
    return one, other


def print_tables(laid_out: Sequence[tables.Table]) -> None:
    """Tables for a terminal, as wide as they need to be."""
    for table in laid_out:
        out.print(f"\n[bold]{plain(table.title)}[/]")
        shown = RichTable(box=None, padding=(0, 1, 0, 0))
        shown.add_column(plain(table.head[0]), no_wrap=True)
        for name in table.head[1:]:
            shown.add_column(plain(name), justify="right")
        for row in table.rows:
            shown.add_row(*(plain(cell) for cell in row))
        # A narrow terminal breaks lines; it never cuts figures.
        least = Measurement.get(out, out.options.update(max_width=1000), shown).minimum
        Console(width=max(out.width, least), highlight=False).print(shown)
        for note in table.notes:
            words = plain(note.replace("**", ""))
            bold = note.startswith("**")
            out.print(f"[bold]{words}[/]" if bold else f"[dim]{words}[/]")


def say_written(*paths: Path) -> None:
    """Where the results are."""
    for path in paths:
        out.print(f"wrote {plain(str(path))}")
