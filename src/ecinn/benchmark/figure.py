"""The pictures of a side-by-side benchmark: quality against cost, and the images themselves."""

import importlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from ecinn import pictures
from ecinn.benchmark.quality import MAIN_ORACLE
from ecinn.benchmark.side_by_side import Made, Pairs, Scores, SideBySide
from ecinn.data.planted import Cue
from ecinn.errors import InputError
from ecinn.judges import Judges

SHOWN = 8
# Okabe & Ito: apart from each other under every common colour blindness, and by marker besides.
_STYLES = (
    ("#D55E00", "*"), ("#0072B2", "o"), ("#009E73", "s"), ("#CC79A7", "^"), ("#E69F00", "D"),
    ("#56B4E9", "v"), ("#000000", "P"),
)  # fmt: skip


def cost_figure(result: SideBySide) -> bytes:
    """A PNG: who is convinced and how real it looks, against passes and against seconds."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise InputError(
            "the figure needs matplotlib: pip install 'ecinn[benchmark]' (tables are written)"
        ) from None
    rows = [row for row in result.methods if row.images is not None and row.seconds is not None]
    if not rows:
        raise InputError("no method made an image: there is nothing to draw")
    figure = figures.Figure(figsize=(12, 8), dpi=130, layout="constrained")
    figure.suptitle(
        f"{len(rows)} methods on the same {result.n} images and targets ({result.dataset})",
        fontsize=14,
    )
    axes = figure.subplots(2, 2, sharey="row")
    planted = rows[0].images.verdict.oracles is None
    convinced = "cue says q" if planted else "read as q by the weaker oracle"
    reference = result.references[-1]
    costs = [
        ("network evaluations per counterfactual", [row.passes.mean for row in rows]),
        ("seconds per counterfactual", [row.seconds for row in rows]),
    ]
    qualities = [
        (f"{convinced} (%), more is better", _convinced),
        ("Fréchet distance to real images, less is better", _frechet),
    ]
    for line, (quality_name, quality) in zip(axes, qualities, strict=True):
        line[0].set_ylabel(quality_name, fontsize=11)
        for axis, (cost_name, cost) in zip(line, costs, strict=True):
            _draw(axis, rows, cost, [quality(row) for row in rows])
            level = quality(reference)
            axis.axhline(level, color="#777777", linestyle="--", linewidth=1, zorder=0)
            axis.annotate(
                reference.method,
                (1, level),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                color="#555555",
                fontsize=9,
                ha="right",
            )
            axis.set_xlabel(f"{cost_name} (log scale)", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _convinced(row: Scores) -> float:
    assert row.images is not None
    verdict = row.images.verdict
    if verdict.oracles is not None:
        return 100 * min(share.mean for share in verdict.oracles.values())
    assert verdict.truth is not None
    return 100 * verdict.truth.mean


def _frechet(row: Scores) -> float:
    assert row.images is not None
    return row.images.verdict.frechet


def _draw(axis: Any, rows: Sequence[Scores], cost: Any, quality: list[float]) -> None:  # noqa: ANN401
    """One labelled point per method; labels that would overlap move apart."""
    axis.set_xscale("log")
    axis.grid(visible=True, color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    least, most = min(cost), max(cost)
    axis.set_xlim(least / 2.2, max(most, 3 * least) * 6)
    low, high = min(quality), max(quality)
    room = 0.12 * (high - low) or 1.0
    axis.set_ylim(low - room, high + room)
    bottom, top = axis.get_ylim()
    heights = _apart([(value - bottom) / (top - bottom) for value in quality], 0.07)
    for number, row in enumerate(rows):
        colour, marker = _STYLES[number % len(_STYLES)]
        size = 17 if marker == "*" else 10
        axis.plot(
            cost[number], quality[number], marker, color=colour, markersize=size,
            markeredgecolor="white", markeredgewidth=0.8, zorder=3,
        )  # fmt: skip
        axis.annotate(
            row.method,
            (cost[number], quality[number]),
            xytext=(cost[number] * 1.35, bottom + heights[number] * (top - bottom)),
            fontsize=10.5,
            color="#222222",
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 4},
        )


def _apart(places: Sequence[float], distance: float) -> list[float]:
    """The same order of places in [0, 1], none nearer to the next than this."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [places[index] for index in order]
    for _ in range(200):
        for below in range(len(moved) - 1):
            overlap = distance - (moved[below + 1] - moved[below])
            if overlap > 0:
                moved[below] -= overlap / 2
                moved[below + 1] += overlap / 2
        moved = [min(max(place, 0.03), 0.97) for place in moved]
    answer = list(places)
    for place, index in zip(moved, order, strict=True):
        answer[index] = place
    return answer


def sheet(
    result: SideBySide,
    pairs: Pairs,
    made: Mapping[str, Made],
    judges: Judges,
    class_names: Sequence[str],
    cue: Cue | None = None,
) -> Image.Image:
    """The same first images by every method, with what is read in each by who took no part."""
    shown = min(SHOWN, len(pairs.q))
    columns = [
        [
            pictures.Cell(
                pictures.image_array(pairs.images[column]),
                f"{class_names[int(pairs.p[column])]} → {class_names[int(pairs.q[column])]}",
            )
        ]
        for column in range(shown)
    ]
    rows = [("original", "from → to")]
    for row in result.methods:
        images = made[row.method].images[:shown]
        judged = cue.read(images) if cue else judges.verdicts(images)[MAIN_ORACLE]
        rows.append((row.method, f"classifier convinced:\n{100 * row.reached.mean:.1f} %"))
        for column in range(shown):
            there = bool(made[row.method].exists[column])
            said = int(judged[column])
            who = "dot" if cue else "oracle"
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
            caution="Orange: whoever took no part in it does not read the target.",
            rows=tuple(rows),
            columns=tuple(tuple(column) for column in columns),
        )
    )
