"""`ecinn benchmark authors`, `counterfactuals`, `consistency` and `ood`, and shared helpers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ecinn.cli.app import Device, Json, app, command_line, out, plain, print_json
from ecinn.cli.evaluate import SplitName
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.drawing.table import Table
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder

if TYPE_CHECKING:
    from ecinn.studies.benchmark.record import Results

benchmark = typer.Typer(
    no_args_is_help=True, help="Compare counterfactuals and heatmaps with other methods."
)
app.add_typer(benchmark, name="benchmark")

ModelName = Annotated[str, typer.Option(help="Name or path of a model.")]
JudgesName = Annotated[
    str | None, typer.Option(help="Name or path of judges; default: the dataset's.")
]
Seed = Annotated[int, typer.Option(help="Seed of random images and targets.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Images = Annotated[int, typer.Option("--n", help="Number of random images.")]
SplitOption = Annotated[
    SplitName, typer.Option("--split", help="Images to measure on; choices use validation.")
]
RESULTS = Path("results")


@benchmark.command("authors")
def authors_benchmark(
    data: Annotated[Path, typer.Option(help="A copy of EvaluatingCounterfactuals.")],
    model: ModelName = "mnist",
    fake_model: Annotated[str, typer.Option(help="The model of FakeMNIST.")] = "fakemnist",
    limit: Annotated[
        int | None, typer.Option(min=2, help="First images only; skips the control.")
    ] = None,
    curve: Annotated[bool, typer.Option(help="Also measure at requested confidences.")] = True,
    judges: JudgesName = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Score the authors' published counterfactuals again, and ours of the same images."""
    line = command_line("benchmark authors", locals())
    from ecinn.model import load
    from ecinn.studies.benchmark import authors, authors_files
    from ecinn.studies.benchmark.quality import find_judges
    from ecinn.studies.benchmark.record import Results, jsonable, provenance

    names: dict[authors_files.BenchmarkName, str] = {"mnist": model, "fake_mnist": fake_model}
    # All input is read before anything is written.
    benchmarks = {name: authors_files.load_authors(data, name) for name in names}
    models = {name: load(given, device) for name, given in names.items()}
    for name, dataset in authors_files.DATASETS.items():
        if models[name].recipe.dataset != dataset:
            raise InputError(f"{names[name]} is not a model of {dataset}: give one that is")
    autoencoders = {
        name: authors_files.load_autoencoders(benchmarks[name].autoencoders) for name in names
    }
    loaded_judges = find_judges(judges, "mnist").to(models["mnist"].device)
    stem = output_folder(out_dir) / "authors"
    values: dict[str, Any] = {}
    tables: list[Table] = []
    for name in names:
        record = provenance(line, models[name], loaded_judges)
        with bars() as observe:
            result = authors.score_authors(
                benchmarks[name],
                models[name],
                autoencoders[name],
                loaded_judges,
                limit=limit,
                with_curve=curve,
                observe=observe,
            )
        tables += authors.authors_tables(result, record)
        values[name] = {
            "record": record,
            "reproduced": result.reproduced,
            "control_line": authors.control_line(result),
            **vars(result),
            "control": [{**jsonable(each), "digits": each.digits} for each in result.control],
        }
        records = [value["record"] for value in values.values()]
        results = Results("The authors' benchmark", tables, values, records)
        results.write(stem)  # after every dataset: an interrupted run keeps its results
    show(results, stem, json_output=json_output)


@benchmark.command("counterfactuals")
def counterfactuals_benchmark(
    model: ModelName = "mnist",
    methods: Annotated[
        str | None, typer.Option(help="Names separated by commas; default: all.")
    ] = None,
    split: SplitOption = SplitName.TEST,
    n: Images = 500,
    seed: Seed = 0,
    judges: JudgesName = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="nearest-image: first training images only.")
    ] = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Compare methods of counterfactuals on the same random images and targets."""
    line = command_line("benchmark counterfactuals", locals())
    from ecinn.drawing.pictures import png_bytes
    from ecinn.model import load
    from ecinn.studies.benchmark import side_by_side
    from ecinn.studies.benchmark import side_by_side_report as report
    from ecinn.studies.benchmark.quality import find_judges
    from ecinn.studies.benchmark.record import Results, provenance

    asked = list(side_by_side.METHODS) if methods is None else names_of(methods)
    side_by_side.require_known(asked, tuple(side_by_side.METHODS))
    explainer = load(model, device)
    recipe = explainer.recipe
    loaded_judges = find_judges(judges, recipe.dataset, split.value).to(explainer.device)
    record = provenance(line, explainer, loaded_judges)
    stem = output_folder(out_dir) / f"counterfactuals-{recipe.name}{suffix(split)}"
    figure, images = (stem.with_name(f"{stem.name}{end}.png") for end in ("", "-images"))
    captions = {figure.name: "quality against cost", images.name: "images"}

    def results(result: side_by_side.SideBySide) -> Results:
        tables = report.side_by_side_tables(result, record)
        values = {"record": record, **vars(result)}
        title = f"Counterfactuals side by side: {model}"
        return Results(title, tables, values, [record], captions)

    def keep(
        result: side_by_side.SideBySide,
        pairs: side_by_side.Pairs,
        made: Mapping[str, side_by_side.Made],
    ) -> None:
        sheet = report.sheet(result, pairs, made, loaded_judges, explainer.class_names)
        atomic_write(images, png_bytes(sheet))
        results(result).write(stem)

    with bars() as observe:
        result = side_by_side.compare_methods(
            explainer,
            recipe.load(split.value),
            loaded_judges,
            asked,
            lambda: recipe.load("train").first(candidates),
            split=split.value,
            n=n,
            seed=seed,
            observe=observe,
            keep=keep,
        )
    try:
        atomic_write(figure, report.cost_figure(result))
    finally:  # tables are shown even if the figure cannot be drawn
        show(results(result), stem, json_output=json_output)


@benchmark.command("consistency")
def consistency_benchmark(
    model: ModelName = "mnist",
    classes: Annotated[str, typer.Option(help="Two classes by number or name.")] = "0,1",
    split: SplitOption = SplitName.TEST,
    n: Images = 100,
    seed: Seed = 0,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Compare requested confidences of .05 to .95 with those of the stored images."""
    line = command_line("benchmark consistency", locals())
    from ecinn.model import load
    from ecinn.studies.benchmark.consistency import consistency_tables, measure_consistency
    from ecinn.studies.benchmark.record import Results, provenance

    explainer = load(model, device)
    pair = _two_classes(classes, explainer.class_names)
    data = load_images(explainer.recipe, split.value, celeba, model=model)
    stem = output_folder(out_dir) / f"consistency-{explainer.name}{suffix(split)}"
    with bars() as observe:
        result = measure_consistency(
            explainer, data, pair, split=split.value, n=n, seed=seed, observe=observe
        )
    record = provenance(line, explainer)
    values = {"record": record, **vars(result)}
    tables = consistency_tables(result)
    results = Results(f"Confidence consistency: {model}", tables, values, [record])
    show(results, stem, json_output=json_output)


@benchmark.command("ood")
def ood_benchmark(
    model: ModelName = "mnist",
    fashion: Annotated[
        Path | None,
        typer.Option(help="Folder of Fashion-MNIST's idx files.", show_default="leave it out"),
    ] = None,
    split: SplitOption = SplitName.TEST,
    seed: Seed = 0,
    out_dir: Out = RESULTS,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Measure which letters, clothes and noise a digit model flags as out of distribution."""
    line = command_line("benchmark ood", locals())
    from ecinn.model import load
    from ecinn.studies.benchmark import ood
    from ecinn.studies.benchmark.record import Results, provenance

    detector = load(model, device)
    clothes = None if fashion is None else ood.load_fashion(fashion, split.value)
    digits = load_images(detector.recipe, split.value, None, model=model)
    stem = output_folder(out_dir) / f"ood-{detector.name}{suffix(split)}"
    with bars() as observe:
        result = ood.measure_detection(
            detector, digits, clothes, split=split.value, seed=seed, observe=observe
        )
    record = provenance(line, detector)
    values = {"record": record, **vars(result)}
    title = f"Out-of-distribution detection: {model}"
    results = Results(title, [ood.detection_table(result)], values, [record])
    show(results, stem, json_output=json_output)


def _two_classes(given: str, names: Sequence[str]) -> tuple[int, int]:
    words = names_of(given)
    try:
        first, second = (names.index(word) if word in names else int(word) for word in words)
    except ValueError:
        raise InputError(
            f"--classes must be two of {', '.join(names)} separated by a comma, not {given!r}"
        ) from None
    return first, second


def suffix(split: SplitName) -> str:
    """Return the end of a file's name: nothing for test images, which most results are of."""
    return "" if split is SplitName.TEST else f"-{split.value}"


def names_of(text: str) -> list[str]:
    """Split names that are separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def show(results: "Results", stem: Path, *, json_output: bool) -> None:
    """Write results, and print them as JSON, or as tables and the paths of their files."""
    from ecinn.studies.benchmark.record import jsonable

    paths = results.write(stem)
    if json_output:
        print_json(jsonable(results.values))
        return
    print_tables(results.tables)
    for path in filter(Path.exists, paths):
        out.print(f"wrote {plain(str(path))}")


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables on the terminal, as wide as their figures need."""
    from rich.console import Console
    from rich.table import Table as RichTable

    for table in tables:
        out.print(f"\n[bold]{plain(table.title)}[/]")
        shown = RichTable(box=None, padding=(0, 1, 0, 0))
        for number, (name, width) in enumerate(zip(table.head, _widths(table), strict=True)):
            shown.add_column(
                plain(name), justify="right" if number else "left", no_wrap=not number, width=width
            )
        for row in table.rows:
            shown.add_row(*(plain(cell.replace("**", "")) for cell in row))
        # A narrow terminal breaks lines; it never cuts figures.
        least = sum(_widths(table)) + len(table.head)
        Console(width=max(out.width, least), highlight=False).print(shown)
        for note in table.notes:
            style = "bold" if note.startswith("**") else "dim"
            out.print(f"[{style}]{plain(note.replace('**', ''))}[/]")


def _widths(table: Table) -> list[int]:
    """Widths of columns: of whole cells, or of names and words where those are too wide."""
    columns = [*zip(table.head, *table.rows, strict=True)]
    words = [
        max((len(word) for cell in column for word in cell.split()), default=0)
        for column in columns
    ]
    cells = [max(len(cell) for cell in column[1:] or column) for column in columns]
    wide = [max(pair) for pair in zip(words, cells, strict=True)]
    return wide if sum(wide) + len(wide) <= out.width else [*wide[:1], *words[1:]]
