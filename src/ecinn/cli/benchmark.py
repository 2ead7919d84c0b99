"""`ecinn benchmark authors`, `counterfactuals` and `consistency`, and helpers of them all."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ecinn.cli.app import Device, Json, app, out, plain, print_json
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.drawing.table import Table
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder

benchmark = typer.Typer(
    no_args_is_help=True, help="Compare counterfactuals and heatmaps with other methods."
)
app.add_typer(benchmark, name="benchmark")

ModelName = Annotated[str, typer.Option(help="Name or path of a model.")]
JudgesName = Annotated[
    str | None, typer.Option("--judges", help="Name or path of judges; default: the dataset's.")
]
Seed = Annotated[int, typer.Option(help="Seed of random images and targets.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Images = Annotated[int, typer.Option("--n", help="Number of random test images.")]
RESULTS = Path("results")


@benchmark.command("authors")
def authors_benchmark(
    data: Annotated[Path, typer.Option(help="A copy of EvaluatingCounterfactuals.")],
    model: ModelName = "mnist",
    fake_model: Annotated[str, typer.Option(help="The model of FakeMNIST.")] = "fakemnist",
    limit: Annotated[
        int | None, typer.Option(min=2, help="First images only; skips the control.")
    ] = None,
    curve: Annotated[bool, typer.Option(help="Also measure at asked confidences.")] = True,
    judges_name: JudgesName = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Score the authors' published counterfactuals again, and ours of the same images."""
    from ecinn.model import load
    from ecinn.studies.benchmark import authors, authors_tables
    from ecinn.studies.benchmark.authors_files import (
        DATASETS,
        BenchmarkName,
        load_authors,
        load_autoencoders,
    )
    from ecinn.studies.benchmark.quality import find_judges
    from ecinn.studies.benchmark.record import document, jsonable, provenance

    names: dict[BenchmarkName, str] = {"mnist": model, "fake_mnist": fake_model}
    # All input is read before anything is written.
    benchmarks = {name: load_authors(data, name) for name in names}
    models = {name: load(given, device) for name, given in names.items()}
    for name, dataset in DATASETS.items():
        if models[name].recipe.dataset != dataset:
            raise InputError(f"{names[name]} is not a model of {dataset}: give one that is")
    autoencoders = {name: load_autoencoders(benchmarks[name].autoencoders) for name in names}
    judges = find_judges(judges_name, "mnist").to(models["mnist"].device)
    folder = output_folder(out_dir)
    line = command_line("authors", data="DIR", model=model, fake_model=fake_model, limit=limit)
    line += "" if curve else " --no-curve"
    line += "" if judges_name is None else f" --judges {judges_name}"
    results: dict[str, Any] = {}
    pages: list[str] = []
    for name in names:
        record = provenance(line, models[name], judges)
        with bars() as observe:
            result = authors.score_authors(
                benchmarks[name],
                models[name],
                autoencoders[name],
                judges,
                limit=limit,
                with_curve=curve,
                observe=observe,
            )
        tables = authors_tables.authors_tables(result, record)
        pages.append(document(f"The authors' benchmark: {name.replace('_', ' ')}", tables, record))
        control = [{**jsonable(each), "digits": jsonable(each.digits)} for each in result.control]
        results[name] = {
            "record": record,
            "reproduced": result.reproduced,
            "control_line": authors_tables.control_line(result),
            **jsonable(result),
            "control": control,
        }
        paths = write_results(folder / "authors", "\n".join(pages), results)
        if not json_output:
            print_tables(tables)
    if json_output:
        print_json(jsonable(results))
    else:
        say_written(*paths)


@benchmark.command("counterfactuals")
def counterfactuals_benchmark(
    model: ModelName = "mnist",
    methods: Annotated[
        str | None, typer.Option(help="Names separated by commas; default: all.")
    ] = None,
    n: Images = 500,
    seed: Seed = 0,
    judges_name: JudgesName = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="nearest-image: first training images only.")
    ] = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Compare methods of counterfactuals on the same random images and targets."""
    from ecinn.drawing.pictures import png_bytes
    from ecinn.model import load
    from ecinn.studies.benchmark import side_by_side_report as report
    from ecinn.studies.benchmark.quality import CUES, find_judges
    from ecinn.studies.benchmark.record import document, jsonable, provenance
    from ecinn.studies.benchmark.side_by_side import (
        METHODS,
        Made,
        Pairs,
        SideBySide,
        compare_methods,
        require_known,
    )

    asked = list(METHODS) if methods is None else names_of(methods)
    require_known(asked, tuple(METHODS))
    explainer = load(model, device)
    recipe = explainer.recipe
    judges = find_judges(judges_name, recipe.dataset).to(explainer.device)
    data = recipe.load("test")
    require_images(n, len(data))
    stem = output_folder(out_dir) / f"counterfactuals-{recipe.name}"
    line = command_line(
        "counterfactuals",
        model=model,
        methods=",".join(asked),
        n=n,
        seed=seed,
        candidates=candidates,
        judges=judges_name,
    )
    record = provenance(line, explainer, judges)
    picture = functools.partial(
        report.sheet,
        judges=judges,
        class_names=explainer.class_names,
        cue=CUES.get(recipe.dataset),
    )
    images, figure = (stem.with_name(f"{stem.name}{end}.png") for end in ("-images", ""))

    def keep(result: SideBySide, pairs: Pairs, made: Mapping[str, Made]) -> None:
        tables = report.side_by_side_tables(result, record)
        page = document(f"Counterfactuals side by side: {model}", tables, record)
        page += f"\n![quality against cost]({figure.name})\n\n![images]({images.name})\n"
        atomic_write(images, png_bytes(picture(result, pairs, made)))
        write_results(stem, page, {"record": record, **jsonable(result)})

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
        print_json({"record": jsonable(record), **jsonable(result)})
    else:
        print_tables(report.side_by_side_tables(result, record))
        say_written(stem.with_suffix(".md"), stem.with_suffix(".json"), images)
    atomic_write(figure, report.cost_figure(result))
    if not json_output:
        say_written(figure)


@benchmark.command("consistency")
def consistency_benchmark(
    model: ModelName = "mnist",
    classes: Annotated[str, typer.Option(help="Two classes by number or name.")] = "0,1",
    n: Images = 100,
    seed: Seed = 0,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Compare asked confidences of .05 to .95 with those of the stored images."""
    from ecinn.model import load
    from ecinn.studies.benchmark.consistency import consistency_tables, measure_consistency
    from ecinn.studies.benchmark.record import document, jsonable, provenance

    explainer = load(model, device)
    pair = _two_classes(classes, explainer.class_names)
    data = load_images(explainer.recipe.dataset, "test", celeba)
    stem = output_folder(out_dir) / f"consistency-{explainer.name}"
    with bars() as observe:
        result = measure_consistency(explainer, data, pair, n=n, seed=seed, observe=observe)
    line = command_line("consistency", model=model, classes=classes, n=n, seed=seed)
    record = provenance(line, explainer)
    tables = consistency_tables(result)
    page = document(f"Confidence consistency: {model}", tables, record)
    values = {"record": record, **jsonable(result)}
    finish(stem, page, values, tables, json_output=json_output)


def _two_classes(given: str, names: Sequence[str]) -> tuple[int, int]:
    words = names_of(given)
    try:
        first, second = (names.index(word) if word in names else int(word) for word in words)
    except ValueError:
        raise InputError(
            f"--classes must be two of {', '.join(names)} separated by a comma, not {given!r}"
        ) from None
    return first, second


def command_line(name: str, **options: object) -> str:
    """Return the command that makes the results again; options of value None are left out."""
    given = [
        f" --{option.replace('_', '-')} {value}"
        for option, value in options.items()
        if value is not None
    ]
    return f"ecinn benchmark {name}{''.join(given)}"


def names_of(text: str) -> list[str]:
    """Split names that are separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def require_images(n: int, available: int) -> None:
    """Raise an error unless --n images can be drawn."""
    if not 2 <= n <= available:
        raise InputError(f"--n must lie between 2 and the {available} test images, not at {n}")


def write_results(stem: Path, page: str, values: Mapping[str, Any]) -> list[Path]:
    """Write a page and its numbers as STEM.md and STEM.json."""
    from ecinn.studies.benchmark.record import write_json, write_text

    paths = [stem.with_name(f"{stem.name}{end}") for end in (".md", ".json")]
    write_text(paths[0], page)
    write_json(paths[1], values)
    return paths


def finish(
    stem: Path,
    page: str,
    values: Mapping[str, Any],
    tables: Sequence[Table],
    pictures: Sequence[Path] = (),
    *,
    json_output: bool,
) -> None:
    """Write the results and print them as JSON or as tables."""
    from ecinn.studies.benchmark.record import jsonable

    paths = write_results(stem, page, values)
    if json_output:
        print_json(jsonable(values))
    else:
        print_tables(tables)
        say_written(*paths, *pictures)


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables on the terminal, as wide as their figures need."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable

    for table in tables:
        out.print(f"\n[bold]{plain(table.title)}[/]")
        shown = RichTable(box=None, padding=(0, 1, 0, 0))
        for number, name in enumerate(table.head):
            shown.add_column(
                plain(name), justify="right" if number else "left", no_wrap=not number
            )
        for row in table.rows:
            shown.add_row(*(plain(cell.replace("**", "")) for cell in row))
        # A narrow terminal breaks lines; it never cuts figures.
        least = Measurement.get(out, out.options.update(max_width=1000), shown).minimum
        Console(width=max(out.width, least), highlight=False).print(shown)
        for note in table.notes:
            style = "bold" if note.startswith("**") else "dim"
            out.print(f"[{style}]{plain(note.replace('**', ''))}[/]")


def say_written(*paths: Path) -> None:
    """Print the files that were written."""
    for path in paths:
        out.print(f"wrote {plain(str(path))}")
