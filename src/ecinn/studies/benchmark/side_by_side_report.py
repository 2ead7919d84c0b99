"""Tables and pictures of a side-by-side benchmark: quality, cost, and the images themselves."""

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ecinn.drawing import grid
from ecinn.drawing.pictures import figure_png, image_array
from ecinn.drawing.table import Table
from ecinn.drawing.words import NONE, show
from ecinn.errors import InputError
from ecinn.studies.benchmark.quality import CUES, MAIN_ORACLE, about_judges
from ecinn.studies.benchmark.record import WORDS, table
from ecinn.studies.benchmark.side_by_side import (
    METHODS,
    ImageScores,
    Made,
    Pairs,
    Scores,
    SideBySide,
)
from ecinn.studies.judges import Judges

SHOWN = 8
# Okabe & Ito's colours, distinct under every common colour blindness, and distinct markers.
_STYLES = (
    ("#D55E00", "*"), ("#0072B2", "o"), ("#009E73", "s"), ("#CC79A7", "^"), ("#E69F00", "D"),
    ("#56B4E9", "v"), ("#000000", "P"),
)  # fmt: skip
_WIDTH, _HEIGHT, _LETTER = 390.0, 215.0, 6.4
"""Size of a panel and of a letter in points, precise enough to keep labels apart."""


def side_by_side_tables(result: SideBySide, record: Mapping[str, Any]) -> tuple[Table, ...]:
    """Lay out who is convinced, distance and realism, tipping points and samples, and cost."""
    rows = (*result.methods, *result.references)
    values = {**vars(result), **about_judges(record, planted=result.dataset in CUES)}
    opinion = vars(result.opinion).items()
    readers = [
        {"reader": reader, **{name: shares[reader] for name, shares in opinion}}
        for reader in result.opinion.tipping_points
    ]
    about = [f"{row.method}: {WORDS['methods'].get(row.method, NONE)}." for row in result.methods]
    about += [
        f"{row.method} raised an error in {len(row.errors)} batch(es), first: {row.errors[0]}"
        for row in result.methods
        if row.errors
    ]
    return (
        table("side_by_side", "convinced", rows, **values),
        table("side_by_side", "distance", rows, **values),
        table("side_by_side", "opinion", readers, **values),
        table("side_by_side", "cost", result.methods, about, **values),
    )


@dataclass(frozen=True)
class _Point:
    """A method in the figure."""

    method: str
    costs: tuple[float, float]
    """Network evaluations and seconds per counterfactual."""
    qualities: tuple[float, float]
    """Percentage of convinced judges, and the size or realism of the change."""


def _point(row: Scores, images: ImageScores, *, planted: bool) -> _Point:
    verdict = images.verdict
    shares = [verdict.truth] if verdict.oracles is None else list(verdict.oracles.values())
    convinced = 100 * min(share.mean for share in shares if share is not None)
    other = (images.elastic_net if planted else verdict.frechet).mean
    passes = math.nan if row.passes is None else row.passes.mean
    return _Point(row.method, (passes, row.seconds or math.nan), (convinced, other))


def cost_figure(result: SideBySide) -> bytes:
    """Draw a PNG of conviction and of realism or change, each against two costs."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise InputError(
            "the figure needs matplotlib: pip install 'ecinn[benchmark]' (tables are written)"
        ) from None
    planted = result.dataset in CUES
    points, references = (
        [_point(row, row.images, planted=planted) for row in rows if row.images is not None]
        for rows in (result.methods, result.references)
    )
    if not points:
        raise InputError("no method made an image: there is nothing to draw")
    figure = figures.Figure(figsize=(12, 8.4), dpi=130, layout="constrained")
    figure.suptitle(
        f"{len(points)} methods on the same {result.n} images and targets ({result.dataset})",
        fontsize=14,
    )
    axes = figure.subplots(2, 2, sharey="row")
    who = "Cue says q (%)" if planted else "Classified as q by the weaker oracle (%)"
    what = "EN, the size of the change" if planted else "Fréchet distance to real images"
    names = (f"{who}\nmore is better", f"{what}\nless is better")
    costs = ("network evaluations per counterfactual", "seconds per counterfactual")
    for row, name in enumerate(names):
        axes[row, 0].set_ylabel(name, fontsize=11)
        for column, cost in enumerate(costs):
            axis, level = axes[row, column], references[-1].qualities[row]
            line = axis.axhline(level, color="#777777", linestyle="--", linewidth=1, zorder=0)
            _draw(axis, points, column, row, level)
            axis.set_xlabel(f"{cost} (log scale)", fontsize=11)
    (hollow,) = axes[0, 0].plot([], [], "o", color="#777777", markersize=9, mfc="white", mew=1.8)
    labels = [references[-1].method, "hollow: less than half convinced (upper panels)"]
    figure.legend([line, hollow], labels, loc="outside lower center", ncols=2, frameon=False)
    return figure_png(figure)


def _draw(
    axis: Any,  # noqa: ANN401
    points: Sequence[_Point],
    column: int,
    row: int,
    level: float,
) -> None:
    """Draw one labelled marker per method, hollow where fewer than half are convinced."""
    cost = [point.costs[column] for point in points]
    quality = [point.qualities[row] for point in points]
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(visible=True, color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    left, right = math.log(min(cost) / 2.5), math.log(max(max(cost), 3 * min(cost)) * 5)
    axis.set_xlim(math.exp(left), math.exp(right))
    low, high = min(*quality, level), max(*quality, level)
    margin = 0.15 * (high - low) or 1.0
    bottom, top = low - margin, high + margin
    axis.set_ylim(bottom, top)
    places = [
        (_WIDTH * (math.log(x) - left) / (right - left), _HEIGHT * (y - bottom) / (top - bottom))
        for x, y in zip(cost, quality, strict=True)
    ]
    offsets = _label_offsets(places, [_LETTER * len(point.method) for point in points])
    for point, x, y, offset in zip(points, cost, quality, offsets, strict=True):
        colour, marker = _STYLES[list(METHODS).index(point.method) % len(_STYLES)]
        axis.plot(
            x, y, marker, color=colour, markersize=15 if marker == "*" else 9,
            mfc=colour if point.qualities[0] >= 50 else "white", mew=1.8, zorder=3,
        )  # fmt: skip
        axis.annotate(
            point.method, (x, y), xytext=offset, textcoords="offset points", fontsize=10.5,
            color="#222222", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 6},
        )  # fmt: skip


def _label_offsets(
    points: Sequence[tuple[float, float]], widths: Sequence[float]
) -> list[tuple[float, float]]:
    """Place each label at the nearest offset that overlaps neither points nor other labels."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in points]
    chosen = []
    for (x, y), width in zip(points, widths, strict=True):
        offsets = [
            (across, float(up))
            for distance in range(0, 120, 15)
            for up in (distance, -distance)
            for across in (14.0, -14.0 - width)
        ]
        boxes = [(x + dx, y + dy - 7, x + dx + width, y + dy + 7) for dx, dy in offsets]
        free = (
            index
            for index, (left, low, right, high) in enumerate(boxes)
            if left >= 0 and right <= _WIDTH and low >= 0 and high <= _HEIGHT
            if not any(left < c and a < right and low < d and b < high for a, b, c, d in taken)
        )
        best = next(free, 0)
        taken.append(boxes[best])
        chosen.append(offsets[best])
    return chosen


def sheet(
    result: SideBySide,
    pairs: Pairs,
    made: Mapping[str, Made],
    judges: Judges,
    class_names: Sequence[str],
) -> Image.Image:
    """Draw the first images by every method, with the class that the cue or an oracle reads."""
    cue = CUES.get(result.dataset)
    who = "cue" if cue else "oracle"
    shown = min(SHOWN, len(pairs.q))
    p, q = pairs.p.tolist(), pairs.q.tolist()
    captions = [f"{class_names[p[i]]} to {class_names[q[i]]}" for i in range(shown)]
    first = map(image_array, pairs.images[:shown])
    rows = [tuple(map(grid.Panel, first, captions))]
    names = [("original", "class, and target")]
    for row in result.methods:
        images, exists = made[row.method].images[:shown], made[row.method].exists.tolist()
        judged = (cue.read(images) if cue else judges.verdicts(images)[MAIN_ORACLE]).tolist()
        names.append((row.method, f"classified as the\ntarget: {show(row.reached.mean, '.1%')}"))
        rows.append(
            tuple(
                grid.Panel(
                    image_array(images[i]),
                    f"{who}: {class_names[judged[i]]}" if exists[i] else "error",
                    not exists[i] or judged[i] != q[i],
                )
                for i in range(shown)
            )
        )
    return grid.draw(
        grid.Grid(
            tuple(rows),
            title=f"The same {shown} random images by every method ({result.dataset})",
            caution=f"Orange: the {who} does not read the target, whatever the model predicts.",
            names=tuple(names),
        )
    )
