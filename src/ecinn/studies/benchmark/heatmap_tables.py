"""Tables and the sheet of the heatmap benchmark."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from PIL import Image

from ecinn.drawing.heatmaps import HeatmapColumn, heatmap_sheet
from ecinn.drawing.table import NONE, Table
from ecinn.metrics.heatmaps import STEPS
from ecinn.metrics.statistics import Interval
from ecinn.studies.benchmark.heatmap_measures import (
    LABELS,
    RANDOM_ORDER,
    Baseline,
    Block,
    Comparison,
    HeatmapBenchmark,
    Measure,
    Section,
    Shown,
)

CAPTIONS: Mapping[Section, str] = MappingProxyType(
    {
        "replacement": f"p(p|x) of the explained network while pixels are replaced (deletion) or "
        f"restored (insertion), in {STEPS} steps. Signed maps order pixels by their evidence for "
        "p, −Σ h over channels; ECINNh shows change, whose sign is not evidence, so its order is "
        "|h|. Replacement by the counterfactual favours ECINNh, which made it; blur and noise are "
        "fairer, but produce images unlike any training image.",
        "magnitude": "The first images, all ordered by |h|, which does not suit signed maps.",
        "cross-check": "The first images in the same orders, evaluated by the CNN although the "
        "maps explain the INN.",
        "noise": "Total variation is 2√2 for Gaussian noise; spatial coherence (Moran's I) is 1 "
        "for smooth maps and 0 for noise.",
        "random weights": "The same architecture with random weights and, for ECINNh, its own μ̄. "
        "A map that does not depend on the learned weights explains nothing. Smooth maps are more "
        "similar by chance than noisy ones; gradient maps contain the factor x − baseline, which "
        "preserves ranks for any weights.",
    }
)
BASELINES: Mapping[Baseline, str] = MappingProxyType(
    {
        "mean": "Baseline of Integrated Gradients and DeepLift: the mean of training images.",
        "black": "Baseline of Integrated Gradients and DeepLift: black, a disadvantage where dark "
        "pixels matter.",
    }
)
MARKS: Mapping[Baseline, str] = MappingProxyType(
    {
        "mean": "All marks are faint in that mean, so q's mark, which is black in the image, "
        "counts little.",
        "black": "q's mark is black in the image too, so it counts almost nothing.",
    }
)
TITLES: Mapping[Section, str] = MappingProxyType(
    {
        "replacement": "Replaced pixels",
        "magnitude": "Replaced pixels in the order of |h|",
        "cross-check": "Replaced pixels, evaluated by the CNN: a cross-check",
        "localisation": "Localisation",
        "noise": "Noise of the map",
        "stability": "Similarity to the map of a noisy image",
        "random weights": "Similarity to the map of random weights",
    }
)


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
    title = f"{block.network}: {TITLES[section]} ({result.dataset}, {n} random test images)"
    note = f"{_caption(result, section)} Means with 95 % bootstrap intervals; ↓ less is better, "
    return Table.of(title, cells, (note + "↑ more is better.", *_about_network(block)))


def _caption(result: HeatmapBenchmark, section: Section) -> str:
    baseline = BASELINES[result.baseline]
    if section == "localisation" and result.planted:
        return (
            f"Only the marks of p and q distinguish these classes. {baseline} "
            f"{MARKS[result.baseline]}"
        )
    if section == "localisation":
        return (
            "Shares of the importance, and their density (1 is chance), in fixed regions of an "
            "aligned face. Where the network looks is unknown; arrows show where people look for "
            f"the attribute. {baseline}"
        )
    if section == "stability":
        return f"Gaussian noise of {result.noise:g} is added to the image; p and q stay."
    if section in ("replacement", "magnitude", "cross-check"):
        return f"{CAPTIONS[section]} {baseline}"
    if section == "noise" and result.planted:
        return (
            f"{CAPTIONS[section]} The ideal map of this dataset is a few single pixels, which "
            "count as noise: these figures do not measure quality here."
        )
    return CAPTIONS[section]


def _about_network(block: Block) -> tuple[str, ...]:
    if block.network == "INN":
        return ()
    same = 100 * block.same_prediction
    return (
        f"p is the CNN's prediction, which is the INN's in {same:.1f} % of the images. ECINNh "
        "needs an inverse, which the CNN lacks: its column explains the INN for the CNN's p and q "
        "and is only a cross-check.",
    )


def _cost_table(result: HeatmapBenchmark, block: Block) -> Table:
    cells = []
    for row in block.rows:
        if row.cost is not None:
            known = row.convergence
            cells.append(
                {
                    "method": column(block, row.method),
                    "passes": str(row.cost.passes),
                    "seconds each": f"{row.cost.seconds:.4f}",
                    "times ECINNh's": f"{row.cost.times_ecinn:.1f}",
                    "median |δ|": NONE if known is None else f"{known.delta:.3g}",
                    "of output change": NONE if known is None else f"{known.relative:.2%}",
                }
            )
    note = (
        f"Wall-clock seconds in batches of {result.batch_size}; for gradient methods including "
        "the outputs that δ needs. δ, the convergence delta, is the map's sum minus the change of "
        "the log-odds that it should equal. ECINNh's map is a change of the image and has no such "
        f"sum. {BASELINES[result.baseline]}"
    )
    return Table.of(f"{block.network}: cost and convergence", cells, [note])


def _comparison_table(block: Block) -> Table:
    others = [row for row in block.rows if row.against]
    losses = lost(block)
    words = "; ".join(f"{name} (against {', '.join(them)})" for name, them in losses.items())
    return Table.of(
        f"{block.network}: {column(block, 'ecinn')} minus every other method, on the same images",
        [
            {
                "measure": _named(measure),
                **{
                    column(block, r.method): _compared(r.against.get(measure.name)) for r in others
                },
            }
            for measure in block.measures
            if measure.role != "shown"
        ],
        [
            f"**ECINNh loses on: {words}.**" if losses else "ECINNh loses on nothing here.",
            "Better, worse or no difference: the verdict of the paired difference's 95 % interval "
            f"on ECINNh. {_tally(block)}Without any real difference, one verdict in twenty would "
            "still show one. Pixels are ordered by |h| for ECINNh and by evidence for p for the "
            "others. Replacement by the counterfactual favours ECINNh.",
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
        if row.method != RANDOM_ORDER
        for name in counted
        if name in row.against and row.against[name].verdict not in ("more", "less")
    ]
    return (
        f"It is better in {verdicts.count('better')} and worse in {verdicts.count('worse')} of "
        f"{len(verdicts)}, not counting the control ({RANDOM_ORDER}), measures that follow from "
        "others (densities, background), the counterfactual's pixels and random weights. "
    )


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
    note = (
        "−½‖z − μ_y‖² gives the same posterior as z·μ_y − ½‖μ_y‖², which all other tables "
        "attribute; a library that asks for one class's output gets the former."
    )
    title = f"INN, density and linear logit ({result.checked} images)"
    return Table.of(title, cells, [note])


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
        name = LABELS[method] if network == "INN" else f"{LABELS[method]} ({network})"
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
