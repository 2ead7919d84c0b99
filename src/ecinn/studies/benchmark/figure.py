"""The pictures of a side-by-side benchmark: quality against cost, and the images themselves."""

import importlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from ecinn.data.planted import Cue
from ecinn.drawing import pictures
from ecinn.errors import InputError
from ecinn.studies.benchmark.methods import METHODS
from ecinn.studies.benchmark.quality import CUES, MAIN_ORACLE
from ecinn.studies.benchmark.side_by_side import Made, Pairs, Scores, SideBySide
from ecinn.studies.judges import Judges

SHOWN = 8
# Okabe & Ito: apart from each other under every common colour blindness, and by marker besides.
_STYLES = (
    ("#D55E00", "*"), ("#0072B2", "o"), ("#009E73", "s"), ("#CC79A7", "^"), ("#E69F00", "D"),
    ("#56B4E9", "v"), ("#000000", "P"),
)  # fmt: skip

Place = tuple[float, float]
Box = tuple[float, float, float, float]
# Of one panel and of a letter, in points: near enough to keep labels apart.
_WIDTH, _HEIGHT, _LETTER = 390.0, 215.0, 6.4


def cost_figure(result: SideBySide) -> bytes:
    """A PNG: who is convinced, and how real or how small the change is, against two costs."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise InputError(
            "the figure needs matplotlib: pip install 'ecinn[benchmark]', in a clone "
            "'.[benchmark]' (tables are written)"
        ) from None
    rows = [row for row in result.methods if row.images is not None]
    if not rows:
        raise InputError("no method made an image: there is nothing to draw")
    figure = figures.Figure(figsize=(12, 8.4), dpi=130, layout="constrained")
    figure.suptitle(
        f"{len(rows)} methods on the same {result.n} images and targets ({result.dataset})",
        fontsize=14,
    )
    axes = figure.subplots(2, 2, sharey="row")
    planted = result.dataset in CUES
    convinced = "Cue says q (%)" if planted else "Read as q by the weaker oracle (%)"
    reference = result.references[-1]
    costs: list[tuple[str, list[float]]] = [
        ("network evaluations per counterfactual", [_passes(row) for row in rows]),
        ("seconds per counterfactual", [_seconds(row) for row in rows]),
    ]
    qualities = [
        (f"{convinced}\nmore is better", _convinced),
        ("EN, the size of the change\nless is better", _elastic_net)
        if planted
        else ("Fréchet distance to real images\nless is better", _frechet),
    ]
    for line, (quality_name, quality) in zip(axes, qualities, strict=True):
        line[0].set_ylabel(quality_name, fontsize=11)
        for axis, (cost_name, cost) in zip(line, costs, strict=True):
            real = quality(reference)
            level = axis.axhline(real, color="#777777", linestyle="--", linewidth=1, zorder=0)
            _draw(axis, rows, cost, [quality(row) for row in rows], real)
            axis.set_xlabel(f"{cost_name} (log scale)", fontsize=11)
    (hollow,) = axes[0, 0].plot([], [], "o", color="#777777", markersize=9, mfc="white", mew=1.8)
    labels = [reference.method, "hollow: less than half convinces (upper panels)"]
    figure.legend([level, hollow], labels, loc="outside lower center", ncols=2, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _passes(row: Scores) -> float:
    assert row.passes is not None
    return row.passes.mean


def _seconds(row: Scores) -> float:
    assert row.seconds is not None
    return row.seconds


def _convinced(row: Scores) -> float:
    assert row.images is not None
    verdict = row.images.verdict
    if verdict.oracles is not None:
        return 100 * min(share.mean for share in verdict.oracles.values())
    assert verdict.truth is not None
    return 100 * verdict.truth.mean


def _elastic_net(row: Scores) -> float:
    assert row.images is not None
    return row.images.elastic_net.mean


def _frechet(row: Scores) -> float:
    assert row.images is not None
    return row.images.verdict.frechet


def _draw(
    axis: Any,  # noqa: ANN401
    rows: Sequence[Scores],
    cost: Sequence[float],
    quality: Sequence[float],
    level: float,
) -> None:
    """One labelled point per method, hollow where it does not convince."""
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(visible=True, color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    left, right = math.log(min(cost) / 2.5), math.log(max(max(cost), 3 * min(cost)) * 5)
    axis.set_xlim(math.exp(left), math.exp(right))
    low, high = min(*quality, level), max(*quality, level)
    room = 0.15 * (high - low) or 1.0
    bottom, top = low - room, high + room
    axis.set_ylim(bottom, top)
    points = [
        (
            _WIDTH * (math.log(x) - left) / (right - left),
            _HEIGHT * (y - bottom) / (top - bottom),
        )
        for x, y in zip(cost, quality, strict=True)
    ]
    moves = _label_places(points, [_LETTER * len(row.method) for row in rows])
    for number, row in enumerate(rows):
        colour, marker = _STYLES[list(METHODS).index(row.method) % len(_STYLES)]
        axis.plot(
            cost[number],
            quality[number],
            marker,
            color=colour,
            markersize=15 if marker == "*" else 9,
            mfc=colour if _convinced(row) >= 50 else "white",
            mew=1.8,
            zorder=3,
        )
        axis.annotate(
            row.method,
            (cost[number], quality[number]),
            xytext=moves[number],
            textcoords="offset points",
            fontsize=10.5,
            color="#222222",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 6},
        )


def _label_places(points: Sequence[Place], widths: Sequence[float]) -> list[Place]:
    """Where each label starts, from its point: the nearest place free of points and labels."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in points]
    moves = []
    for (x, y), width in zip(points, widths, strict=True):
        tries = [
            (across, up)
            for distance in range(0, 120, 15)
            for up in (distance, -distance)
            for across in (14.0, -14.0 - width)
        ]
        boxes = [(x + dx, y + dy - 7, x + dx + width, y + dy + 7) for dx, dy in tries]
        free = [
            index
            for index, box in enumerate(boxes)
            if box[0] >= 0 and box[2] <= _WIDTH and box[1] >= 0 and box[3] <= _HEIGHT
            if not any(_overlap(box, other) for other in taken)
        ]
        best = free[0] if free else 0
        taken.append(boxes[best])
        moves.append((tries[best][0], float(tries[best][1])))
    return moves


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def sheet(
    result: SideBySide,
    pairs: Pairs,
    made: Mapping[str, Made],
    judges: Judges,
    class_names: Sequence[str],
    cue: Cue | None = None,
) -> Image.Image:
    """The same first images by every method, with what is read in each by who took no part."""
    who = "cue" if cue else "oracle"
    shown = min(SHOWN, len(pairs.q))
    columns = [
        [
            pictures.Cell(
                pictures.image_array(pairs.images[column]),
                f"{class_names[int(pairs.p[column])]} to {class_names[int(pairs.q[column])]}",
            )
        ]
        for column in range(shown)
    ]
    rows = [("original", "class, and target")]
    for row in result.methods:
        images = made[row.method].images[:shown]
        judged = cue.read(images) if cue else judges.verdicts(images)[MAIN_ORACLE]
        rows.append(
            (row.method, f"the classifier reads\nthe target: {100 * row.reached.mean:.1f} %")
        )
        for column in range(shown):
            there = bool(made[row.method].exists[column])
            said = int(judged[column])
            columns[column].append(
                pictures.Cell(
                    pictures.image_array(images[column]),
                    f"{who}: {class_names[said]}" if there else "error",
                    not there or said != int(pairs.q[column]),
                )
            )
    return pictures.draw(
        pictures.Sheet(
            title=f"The same {shown} random test images by every method ({result.dataset})",
            caution=f"Orange: the {who} does not say the target, whatever the classifier reads.",
            rows=tuple(rows),
            columns=tuple(tuple(column) for column in columns),
        )
    )
