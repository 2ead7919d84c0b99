"""Tables and the sheet of the heatmap benchmark."""

from collections.abc import Sequence

from PIL import Image

from ecinn.drawing.heatmaps import HeatmapColumn, heatmap_sheet
from ecinn.drawing.table import Table
from ecinn.drawing.words import NONE
from ecinn.metrics.heatmaps import STEPS
from ecinn.metrics.statistics import Interval
from ecinn.studies.benchmark.heatmap_measures import (
    CONTROLS,
    LABELS,
    Block,
    Comparison,
    HeatmapBenchmark,
    Measure,
    Section,
    Shown,
)
from ecinn.studies.benchmark.record import WORDS, note


def heatmap_tables(result: HeatmapBenchmark) -> tuple[Table, ...]:
    """Lay out measures, cost and comparisons of every network, then the other logit."""
    tables: list[Table] = []
    for block in result.blocks:
        sections = dict.fromkeys(measure.section for measure in block.measures)
        tables += [_section_table(result, block, section) for section in sections]
        tables.append(_cost_table(result, block))
        if any(row.against for row in block.rows):
            tables.append(_comparison_table(block))
    if result.density:
        tables.append(_density_table(result))
    return tuple(tables)


def column(block: Block, method: str) -> str:
    """Return the heading of a method in a network's tables."""
    if method == "ecinn" and block.network != "INN":
        return "ECINNh of the INN (cross-check)"
    return LABELS.get(method, method)


def lost(block: Block) -> dict[str, list[str]]:
    """Return the measures on which ECINNh is worse, with the methods that beat it."""
    losses: dict[str, list[str]] = {}
    for measure in block.measures:
        for row in block.rows:
            comparison = row.against.get(measure.name)
            if comparison is not None and comparison.verdict == "worse":
                losses.setdefault(measure.name, []).append(column(block, row.method))
    return losses


def _section_table(result: HeatmapBenchmark, block: Block, section: Section) -> Table:
    measures = [measure for measure in block.measures if measure.section == section]
    rows = [row for row in block.rows if any(m.name in row.figures for m in measures)]
    n = result.n if section in ("replacement", "localisation", "noise") else result.checked
    cells = [
        {
            "measure": _named(measure),
            **{column(block, row.method): _figure(row.figures.get(measure.name)) for row in rows},
        }
        for measure in measures
    ]
    planted = result.planted and section in ("localisation", "noise")
    caption = note(
        "heatmaps",
        f"{section}_planted" if planted else section,
        steps=STEPS,
        noise=f"{result.noise:g}",
        baseline=note("heatmaps", f"baseline_{result.baseline}"),
        marks=note("heatmaps", f"marks_{result.baseline}"),
    )
    title = f"{block.network}: {WORDS['heatmap_titles'][section]}"
    title += f" ({result.dataset}, {n} random test images)"
    notes = (f"{caption} {note('heatmaps', 'intervals')}", *_about_network(block))
    return Table.of(title, cells, notes)


def _about_network(block: Block) -> tuple[str, ...]:
    if block.network == "INN":
        return ()
    return (note("heatmaps", "cnn", same=100 * block.same_prediction),)


def _cost_table(result: HeatmapBenchmark, block: Block) -> Table:
    cells = [
        {
            "method": column(block, row.method),
            "passes": str(row.cost.passes),
            "seconds each": f"{row.cost.seconds:.4f}",
            "times ECINNh's": f"{row.cost.times_ecinn:.1f}",
            "median |δ|": f"{row.convergence.delta:.3g}" if row.convergence else NONE,
            "of output change": f"{row.convergence.relative:.2%}" if row.convergence else NONE,
        }
        for row in block.rows
        if row.cost is not None
    ]
    baseline = note("heatmaps", f"baseline_{result.baseline}")
    words = note("heatmaps", "cost", batch_size=result.batch_size, baseline=baseline)
    return Table.of(f"{block.network}: cost and convergence", cells, [words])


def _comparison_table(block: Block) -> Table:
    others = [row for row in block.rows if row.against]
    losses = lost(block)
    words = "; ".join(f"{name} (against {', '.join(them)})" for name, them in losses.items())
    cells = [
        {
            "measure": _named(measure),
            **{column(block, r.method): _compared(r.against.get(measure.name)) for r in others},
        }
        for measure in block.measures
        if measure.role != "shown"
    ]
    return Table.of(
        f"{block.network}: {column(block, 'ecinn')} minus every other method, on the same images",
        cells,
        [
            f"**ECINNh loses on: {words}.**" if losses else "ECINNh loses on nothing here.",
            note("heatmaps", "comparison", tally=_tally(block)),
            *_about_network(block),
        ],
    )


def _tally(block: Block) -> str:
    """Count wins and losses of ECINNh; nothing where it explains another network."""
    if block.network != "INN":
        return ""
    counted = [measure.name for measure in block.measures if measure.role == "counted"]
    verdicts = [
        row.against[name].verdict
        for row in block.rows
        if row.method not in CONTROLS
        for name in counted
        if name in row.against and row.against[name].verdict not in ("more", "less")
    ]
    better, worse = verdicts.count("better"), verdicts.count("worse")
    return note("heatmaps", "tally", better=better, worse=worse, total=len(verdicts))


def _density_table(result: HeatmapBenchmark) -> Table:
    cells = []
    for pair in zip(result.density, result.linear, strict=True):
        rows = dict(zip(("density", "linear"), pair, strict=True))
        known = [(logit, row.convergence) for logit, row in rows.items() if row.convergence]
        noise = ("total variation", "spatial coherence")
        cells.append(
            {
                "method": LABELS[pair[0].method],
                **{f"median |δ|, {logit}": f"{c.delta:.3g}" for logit, c in known},
                **{f"of output change, {logit}": f"{c.relative:.2%}" for logit, c in known},
                **{
                    f"{name}, {logit}": _figure(row.figures[name])
                    for name in noise
                    for logit, row in rows.items()
                },
            }
        )
    title = f"INN, density and linear logit ({result.checked} images)"
    return Table.of(title, cells, [note("heatmaps", "density")])


def _named(measure: Measure) -> str:
    return measure.name + {"more": " ↑", "less": " ↓", None: ""}[measure.better]


def _figure(figure: Interval | None, sign: str = "") -> str:
    if figure is None:
        return NONE
    form = f"{sign}.{3 if abs(figure.mean) < 10 else 1}f"
    return f"{figure.mean:{form}} [{figure.low:{form}}, {figure.high:{form}}]"


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return NONE
    word = comparison.verdict
    return f"{'**worse**' if word == 'worse' else word} {_figure(comparison.difference, '+')}"


def heatmap_columns(shown: Shown) -> list[HeatmapColumn]:
    """Return the maps of every method and network as columns of the sheet."""
    columns = []
    for (network, method), maps in shown.maps.items():
        if method == "ecinn" and network != "INN":
            continue
        other = shown.other_pair[network]
        name = LABELS[method] + ("" if network == "INN" else f" ({network})")
        signs = ("darker", "lighter") if method == "ecinn" else ("for p", "for q")
        remarks = tuple("other p and q" if is_other else "" for is_other in other)
        columns.append(HeatmapColumn(name, maps, signs, remarks, other))
    return columns


def sheet(result: HeatmapBenchmark, shown: Shown, class_names: Sequence[str]) -> Image.Image:
    """Draw the first images with the maps of all methods and networks."""
    pairs = zip(shown.pairs.p.tolist(), shown.pairs.q.tolist(), strict=True)
    return heatmap_sheet(
        shown.pairs.images,
        shown.counterfactuals,
        heatmap_columns(shown),
        [(class_names[p], class_names[q]) for p, q in pairs],
        title=f"{len(shown.pairs.p)} random test images by every method ({result.dataset})",
    )
