"""What was measured of heatmaps: as data, as tables, and as a sheet to look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from ecinn.benchmark.quality import CUES
from ecinn.benchmark.side_by_side import Pairs
from ecinn.benchmark.tables import NONE, Table
from ecinn.explanation import Images
from ecinn.heatmap_pictures import HeatmapColumn, heatmap_sheet
from ecinn.metrics.intervals import Interval

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "ecinn": "ECINNh",
        "integrated_gradients": "Integrated Gradients",
        "deep_lift": "DeepLift",
        "deep_lift_shap": "DeepLiftSHAP",
        "gradient_shap": "GradientSHAP",
    }
)
RANDOM_ORDER = "random order"
SHOWN = 4

Section = Literal[
    "replacement", "cross-check", "localisation", "noise", "stability", "random weights"
]
Verdict = Literal["better", "worse", "no difference", "more", "less"]


@dataclass(frozen=True)
class Measure:
    """A number per image."""

    section: Section
    name: str
    better: Literal["more", "less"] | None
    """None where neither is: it is only told."""


@dataclass(frozen=True)
class Comparison:
    """ECINNh minus the other method, on the same images."""

    difference: Interval
    verdict: Verdict
    """Of ECINNh; "more" and "less" where neither is better."""


@dataclass(frozen=True)
class Cost:
    """Of one map."""

    passes: int
    seconds: float
    """Wall-clock, in batches."""
    times_ecinn: float
    """Seconds over ECINNh's."""


@dataclass(frozen=True)
class Convergence:
    """Medians over images of how far a map's sum is from the output's change."""

    delta: float
    relative: float
    """Over the output's change."""


@dataclass(frozen=True)
class Row:
    """What was measured of one method."""

    method: str
    figures: Mapping[str, Interval]
    """By the measure's name."""
    against: Mapping[str, Comparison]
    """Empty for ECINNh itself."""
    cost: Cost | None = None
    convergence: Convergence | None = None


@dataclass(frozen=True)
class Block:
    """All methods on one network."""

    network: str
    same_prediction: float
    """Share of the images that this network reads as the INN does."""
    measures: tuple[Measure, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class HeatmapBenchmark:
    """All blocks, and what they were measured on."""

    dataset: str
    n: int
    checked: int
    """Of these images only, where maps are made again."""
    seed: int
    batch_size: int
    blocks: tuple[Block, ...]
    noise: float
    """Added to the images for stability; a standard deviation."""
    density: tuple[Row, ...]
    """The gradient methods on the INN's other logit."""


@dataclass(frozen=True)
class Shown:
    """The first images with the INN's counterfactuals and everybody's maps of them."""

    pairs: Pairs
    counterfactuals: UInt8[Tensor, "batch channels height width"]
    maps: Mapping[tuple[str, str], Images]
    """By network and method."""
    other_pair: Mapping[str, tuple[bool, ...]]
    """By network: which of its maps are of another p and q than the INN's."""


def verdict(difference: Interval, better: Literal["more", "less"] | None) -> Verdict:
    """What an interval of ECINNh − other says of ECINNh."""
    if difference.low <= 0 <= difference.high:
        return "no difference"
    if better is None:
        return "more" if difference.low > 0 else "less"
    return "better" if (difference.low > 0) == (better == "more") else "worse"


CAPTIONS: Mapping[Section, str] = MappingProxyType(
    {
        "replacement": "The probability of p, by the network that is explained, while pixels are "
        "replaced in the map's order (deletion) or come back (insertion), in 20 steps. What the "
        "counterfactual's pixels replace favours ECINNh, which made that counterfactual: look at "
        "blur and noise first. Both leave the images that the network knows.",
        "cross-check": "The same images, read by the CNN. The maps are explanations of the INN: "
        "what the CNN says of them is a cross-check, not a measure of how they explain it.",
        "noise": "Total variation is 2√2 for Gaussian noise; spatial coherence (Moran's I) is 1 "
        "where smooth and 0 for noise.",
    }
)
TITLES: Mapping[Section, str] = MappingProxyType(
    {
        "replacement": "Pixels replaced",
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
    n = result.checked if section in ("stability", "random weights") else result.n
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
            "would look for the attribute."
        )
    if section == "localisation":
        return (
            "Only the marks of p and q tell these classes apart. Integrated Gradients and "
            "DeepLift compare with black, so q's mark, which is black, gets next to nothing."
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
        ("method", "passes", "seconds each", "times ECINNh's", "median |δ|", "of output change"),
        tuple(rows),
        (
            f"Seconds are wall-clock of this run, in batches of {result.batch_size}, the gradient "
            "methods' with the outputs that δ needs. δ is the convergence delta: the map's sum "
            "minus the change of the log-odds that it should add up to. ECINNh's map is a change "
            "of the image, which adds up to nothing.",
        ),
    )


def _comparison_table(block: Block) -> Table:
    others = [row for row in block.rows if row.against]
    losses = lost(block)
    words = "; ".join(f"{name} (against {', '.join(them)})" for name, them in losses.items())
    judged = [
        comparison.verdict
        for row in others
        if row.method != RANDOM_ORDER
        for comparison in row.against.values()
        if comparison.verdict not in ("more", "less")
    ]
    ecinn = column(block, "ecinn")
    return Table(
        f"{block.network}: {ecinn} minus every other method, on the same images",
        ("measure", *(column(block, row.method) for row in others)),
        tuple(
            (_named(measure), *(_compared(row.against.get(measure.name)) for row in others))
            for measure in block.measures
        ),
        (
            f"**ECINNh loses on: {words}.**" if losses else "ECINNh loses on nothing here.",
            f"Better, worse or no difference: what the 95 % interval of the paired difference "
            f"says of ECINNh. Beside {RANDOM_ORDER}, which is only a control, it is better in "
            f"{judged.count('better')} and worse in {judged.count('worse')} of {len(judged)}. "
            "Where nothing differs, one in twenty is said to. The counterfactual's pixels favour "
            "ECINNh, which made it.",
            *_about_network(block),
        ),
    )


def _density_table(result: HeatmapBenchmark) -> Table:
    linear = {row.method: row.convergence for row in result.blocks[0].rows}
    rows = []
    for row in result.density:
        own, fair = row.convergence, linear[row.method]
        assert own is not None
        assert fair is not None
        deltas = (f"{own.delta:.3g}", f"{own.relative:.2%}", f"{fair.relative:.2%}")
        names = ("total variation", "spatial coherence")
        rows.append((LABELS[row.method], *deltas, *(_figure(row.figures[name]) for name in names)))
    return Table(
        f"INN, the density as logit ({result.checked} images)",
        (
            "method",
            "median |δ|",
            "of output change",
            "with the linear logit",
            "total variation",
            "spatial coherence",
        ),
        tuple(rows),
        (
            "−½‖z − μ_y‖² of all classes y has the same posterior as z·μ_y − ½‖μ_y‖², which all "
            "other tables attribute, and is what a library that asks for one class's output gets.",
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
    mean, low, high = comparison.difference
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
