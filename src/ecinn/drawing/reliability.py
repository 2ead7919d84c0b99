"""Draw a reliability plot: accuracy against confidence, and how many images have which."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ecinn.drawing import pictures

_INK, _MUTED, _FRAME, _BLUE = (
    "#" + bytes(colour).hex()
    for colour in (pictures.INK, pictures.MUTED, pictures.FRAME, tuple(pictures.REMOVED.tolist()))
)
_LOOK: Any = {
    "font.size": 9.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
}


@dataclass(frozen=True)
class ReliabilityPoint:
    """A bin of confidences, all between 0 and 1."""

    left: float
    right: float
    confidence: float
    accuracy: float
    low: float
    high: float
    """Ends of the accuracy's interval."""
    images: int


def reliability_plot(points: Sequence[ReliabilityPoint], title: str, note: str = "") -> bytes:
    """Draw a PNG: points on the diagonal are calibrated, below it the model is too sure."""
    confidence, accuracy = (
        [100 * getattr(p, n) for p in points] for n in ("confidence", "accuracy")
    )
    below, above = (
        [100 * abs(getattr(p, end) - p.accuracy) for p in points] for end in ("low", "high")
    )
    with mpl.rc_context(_LOOK):
        figure = Figure(figsize=(4.6, 5.4), dpi=160, layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        figure.suptitle(title, fontsize=11)
        upper.set_title(note, fontsize=8.5, color=_MUTED)
        upper.plot([0, 100], [0, 100], "--", color=_MUTED, linewidth=1, zorder=1)
        for up, words in ((2, "too cautious"), (-6, "too sure")):
            upper.text(
                25, 25 + up, words, color=_MUTED, fontsize=8, ha="center", rotation=45,
                rotation_mode="anchor", transform_rotates_text=True,
            )  # fmt: skip
        upper.errorbar(
            confidence, accuracy, (below, above), fmt="o-", color=_BLUE, ecolor=_BLUE,
            markersize=5, linewidth=1.2, elinewidth=1, capsize=2, zorder=3, clip_on=False,
        )  # fmt: skip
        upper.set(xlim=(0, 100), ylim=(0, 100), ylabel="correct predictions, %")
        upper.grid(visible=True, color=_FRAME, linewidth=0.6)
        lower.bar(
            [100 * p.left for p in points], [p.images for p in points],
            [100 * (p.right - p.left) for p in points], align="edge", color=_BLUE,
            edgecolor="white", linewidth=0.6,
        )  # fmt: skip
        lower.set(yscale="log", xlabel="confidence of the prediction, %", ylabel="images")
        lower.set_ylim(bottom=0.7)
        lower.yaxis.set_major_formatter("{x:,.0f}")
        for axes in (upper, lower):
            axes.set_axisbelow(True)
        return pictures.figure_png(figure)
