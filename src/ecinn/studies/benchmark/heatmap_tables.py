"""What was measured of heatmaps: as tables, and as a sheet to look at."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from PIL import Image

from ecinn.drawing.heatmaps import HeatmapColumn, heatmap_sheet
from ecinn.metrics.replacement import STEPS
from ecinn.metrics.statistics import Interval
from ecinn.studies.benchmark.heatmap_results import (
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
from ecinn.studies.benchmark.quality import CUES
from ecinn.studies.benchmark.tables import NONE, Table

CAPTIONS: Mapping[Section, str] = MappingProxyType(
    {
        "replacement": "The probability of p, by the network that is explained, while pixels are "
        f"replaced (deletion) or come back (insertion), in {STEPS} steps. The gradient methods' "
        "maps are signed: their pixels go in the order of evidence for p, −Σ h over channels. "
        "ECINNh tells what changes and has no such sign: its order is |h|, compared with the "
        "signed order of the others. What the counterfactual's pixels replace "
        "favours ECINNh, which made that counterfactual: look at blur and noise first. Both leave "
        "the images that the network knows.",
        "magnitude": "The first of the same images, with pixels in the order of |h| for all, "
        "which the signed maps are not made for: only shown, compared with nothing.",
        "cross-check": "The first of the same images in the same orders, read by the CNN. The "
        "maps are explanations of the INN: what the CNN says of them is a cross-check, not a "
        "measure of how they explain it.",
        "noise": "Total variation is 2√2 for Gaussian noise; spatial coherence (Moran's I) is 1 "
        "where smooth and 0 for noise.",
    }
)
BASELINES: Mapping[Baseline, str] = MappingProxyType(
    {
        "mean": "Integrated Gradients and DeepLift compare with the mean of a sample of training "
        "images.",
        "black": "Integrated Gradients and DeepLift compare with black, which handicaps them "
        "where what is dark matters.",
    }
)
TITLES: Mapping[Section, str] = MappingProxyType(
    {
        "replacement": "Pixels replaced",
        "magnitude": "Pixels replaced in the order of |h|",
        "cross-check": "Pixels replaced, read by the CNN: a cross-check",
        "localisation": "Where the map is",
        "noise": "How noisy the map is",
        "stability": "How alike the map of a noisy image is",
        "random weights": "How alike the map of random weights is",
    }
)


def heatmap_tables(result: HeatmapBenchmark) -> tuple[Table, ...]:
    """For every network its measures, cost and comparison with ECINNh; then the other logit."""
    laid_out: list[Table] = []
    for block in result.blocks:
        sections = dict.fromkeys(measure.section for measure in block.measures)
        laid_out += [_section_table(result, block, section) for section in sections]
        laid_out.append(_cost_table(result, block))
        if any(row.against for row in block.rows):
            laid_out.append(_comparison_table(block))
    if result.density:
        laid_out.append(_density_table(result))
    return tuple(laid_out)


def column(block: Block, method: str) -> str:
    """What a method is called in a network's tables."""
    if method == "ecinn" and block.network != "INN":
        return "ECINNh of the INN (cross-check)"
    return LABELS.get(method, method)


def lost(block: Block) -> dict[str, list[str]]:
    """Measures by which some method beats ECINNh, with the methods that do."""
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
    return Table(
        f"{block.network}: {TITLES[section]} ({result.dataset}, {n} random test images)",
        ("measure", *(column(block, row.method) for row in rows)),
        tuple(
            (_named(measure), *(_figure(row.figures.get(measure.name)) for row in rows))
            for measure in measures
        ),
        (
            f"{_caption(result, section)} Means with 95 % bootstrap intervals over images; ↓ less "
            "is better, ↑ more is better.",
            *_about_network(block),
        ),
    )


def _caption(result: HeatmapBenchmark, section: Section) -> str:
    if section == "localisation" and result.dataset.startswith("celeba/"):
        return (
            "Shares of the importance, and their density, where 1 is chance, in fixed regions of "
            "an aligned face. What the network looks at is not known: arrows say where people "
            f"would look for the attribute. {BASELINES[result.baseline]}"
        )
    if section == "localisation":
        marks = {
            "mean": "In that mean all marks are faint, so q's, which is black, counts little.",
            "black": "So is q's mark, which gets next to nothing.",
        }
        return (
            "Only the marks of p and q tell these classes apart. "
            f"{BASELINES[result.baseline]} {marks[result.baseline]}"
        )
    if section == "noise" and result.dataset in CUES:
        return (
            f"{CAPTIONS[section]} The right map of this data set is single pixels, which count as "
            "noise: here these figures tell nothing of how good a map is."
        )
    if section == "stability":
        return f"Gaussian noise of {result.noise:g} is added to the image, p and q are kept."
    if section == "random weights":
        return (
            "The same architecture with weights drawn anew, random μ, and for ECINNh the μ̄ of "
            "that network. A map that does not depend on what was learned explains nothing. Two "
            "smooth maps are less unlike by chance than two noisy ones; the gradient methods' "
            "have x minus a baseline as a factor, which keeps ranks whatever the network is."
        )
    if section in ("replacement", "magnitude", "cross-check"):
        return f"{CAPTIONS[section]} {BASELINES[result.baseline]}"
    return CAPTIONS[section]


def _about_network(block: Block) -> tuple[str, ...]:
    if block.network == "INN":
        return ()
    same = 100 * block.same_prediction
    return (
        f"p is what the CNN reads, which is what the INN reads in {same:.1f} % of the images. "
        "The CNN has no inverse for ECINNh: its column is an explanation of the INN, for the "
        "CNN's p and q, and only a cross-check.",
    )


def _cost_table(result: HeatmapBenchmark, block: Block) -> Table:
    rows = []
    for row in block.rows:
        if row.cost is not None:
            known = row.convergence
            rows.append(
                (
                    column(block, row.method),
                    str(row.cost.passes),
                    f"{row.cost.seconds:.4f}",
                    f"{row.cost.times_ecinn:.1f}",
                    NONE if known is None else f"{known.delta:.3g}",
                    NONE if known is None else f"{known.relative:.2%}",
                )
            )
    return Table(
        f"{block.network}: cost and convergence",
        (
            "method",
            "passes",
            "seconds each",
            "times ECINNh's",
            "median size of δ",
            "of output change",
        ),
        tuple(rows),
        (
            f"Seconds are wall-clock of this run, in batches of {result.batch_size}, the gradient "
            "methods' with the outputs that δ needs. δ is the convergence delta: the map's sum "
            "minus the change of the log-odds that it should add up to. ECINNh's map is a change "
            f"of the image, which adds up to nothing. {BASELINES[result.baseline]}",
        ),
    )


def _comparison_table(block: Block) -> Table:
    others = [row for row in block.rows if row.against]
    losses = lost(block)
    words = "; ".join(f"{name} (against {', '.join(them)})" for name, them in losses.items())
    ecinn = column(block, "ecinn")
    return Table(
        f"{block.network}: {ecinn} minus every other method, on the same images",
        ("measure", *(column(block, row.method) for row in others)),
        tuple(
            (_named(measure), *(_compared(row.against.get(measure.name)) for row in others))
            for measure in block.measures
            if measure.role != "shown"
        ),
        (
            f"**ECINNh loses on: {words}.**" if losses else "ECINNh loses on nothing here.",
            "Better, worse or no difference: what the 95 % interval of the paired difference says "
            f"of ECINNh. {_tally(block)}Where nothing differs, one in twenty is said to. "
            "Pixels go in the order of |h| for ECINNh and of evidence for p for the signed maps "
            "of the others. The counterfactual's pixels favour ECINNh, which made it.",
            *_about_network(block),
        ),
    )


def _tally(block: Block) -> str:
    """How often ECINNh is better and worse; nothing where it explains another network."""
    if block.network != "INN":
        return ""
    counted = [measure.name for measure in block.measures if measure.role == "counted"]
    judged = [
        row.against[name].verdict
        for row in block.rows
        if row.method != RANDOM_ORDER
        for name in counted
        if name in row.against and row.against[name].verdict not in ("more", "less")
    ]
    return (
        f"It is better in {judged.count('better')} and worse in {judged.count('worse')} of "
        f"{len(judged)}, not counting {RANDOM_ORDER}, which is a control, what follows from "
        "another measure (densities; the background from the face), the counterfactual's pixels "
        "and random weights. "
    )


def _density_table(result: HeatmapBenchmark) -> Table:
    rows = []
    for density, linear in zip(result.density, result.linear, strict=True):
        both = (density, linear)
        deltas = [row.convergence for row in both if row.convergence is not None]
        names = ("total variation", "spatial coherence")
        rows.append(
            (
                LABELS[density.method],
                *(f"{each.delta:.3g}" for each in deltas),
                *(f"{each.relative:.2%}" for each in deltas),
                *(_figure(row.figures[name]) for name in names for row in both),
            )
        )
    heads = ("median size of δ", "of output change", "total variation", "spatial coherence")
    logits = ("density", "linear")
    return Table(
        f"INN, the density as logit, and the linear one ({result.checked} images)",
        ("method", *(f"{head}, {logit}" for head in heads for logit in logits)),
        tuple(rows),
        (
            "−½‖z − μ_y‖² of all classes y has the same posterior as z·μ_y − ½‖μ_y‖², which all "
            "other tables attribute, and is what a library that asks for one class's output gets. "
            "Both are of the same images.",
        ),
    )


def _named(measure: Measure) -> str:
    arrow = {"more": " ↑", "less": " ↓", None: ""}[measure.better]
    return measure.name.replace("|", "\\|") + arrow


def _figure(figure: Interval | None) -> str:
    if figure is None:
        return NONE
    digits = 3 if abs(figure.mean) < 10 else 1
    return f"{figure.mean:.{digits}f} [{figure.low:.{digits}f}, {figure.high:.{digits}f}]"


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return NONE
    word = comparison.verdict
    difference = comparison.difference
    mean, low, high = difference.mean, difference.low, difference.high
    digits = 3 if abs(mean) < 10 else 1
    figures = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"**worse** {figures}" if word == "worse" else f"{word} {figures}"


def sheet(result: HeatmapBenchmark, shown: Shown, class_names: Sequence[str]) -> Image.Image:
    """The first images with every method's map of every network."""
    columns = []
    for (network, method), maps in shown.maps.items():
        if method == "ecinn" and network != "INN":
            continue
        other = shown.other_pair[network]
        name = LABELS[method] if network == "INN" else f"{LABELS[method]} ({network})"
        signs = ("darker", "lighter") if method == "ecinn" else ("for p", "for q")
        remarks = tuple("other p and q" if is_other else "" for is_other in other)
        columns.append(HeatmapColumn(name, maps, signs, remarks, other))
    pairs = zip(shown.pairs.p.tolist(), shown.pairs.q.tolist(), strict=True)
    return heatmap_sheet(
        shown.pairs.images,
        shown.counterfactuals,
        columns,
        [(class_names[p], class_names[q]) for p, q in pairs],
        title=f"{len(shown.pairs.p)} random test images by every method ({result.dataset})",
    )
