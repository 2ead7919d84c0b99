"""Tables and the dose-response curve of the controls of distillation."""

import importlib
import io
from collections.abc import Sequence

from ecinn.drawing.table import Table
from ecinn.studies.benchmark.controls import EVIDENCE, NOT_EXPLAINED, Controls, Shortcut
from ecinn.studies.benchmark.record import table


def control_tables(result: Controls) -> tuple[Table, ...]:
    """Lay out both controls."""
    words = {True: "yes", False: "no"}
    shortcuts = [
        {**vars(each), "first": words[each.rank == 1], "right": words[each.holds]}
        for each in result.shortcuts
    ]
    return (
        table("controls", "shortcut", shortcuts, evidence=EVIDENCE),
        table("controls", "reasons", result.reasons, limit=NOT_EXPLAINED),
    )


def dose_figure(shortcuts: Sequence[Shortcut]) -> bytes:
    """Draw a PNG of the change at the cue, and of changed answers, against the dose."""
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 3.4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    doses = [100 * each.dose for each in shortcuts]
    series = (
        (left, [each.cue_changes for each in shortcuts], "the other cue", 100),
        (left, [each.digit_changes for each in shortcuts], "another digit", 100),
        (right, [each.density for each in shortcuts], "at the cue", 1),
    )
    for axes, values, name, factor in series:
        middle = [factor * value.mean for value in values]
        ends = [
            [factor * abs(getattr(value, end) - value.mean) for value in values]
            for end in ("low", "high")
        ]
        axes.errorbar(doses, middle, ends, fmt="o-", capsize=3, label=name)
    left.set(ylabel="answers changed by …, %", title="What the classifier uses", ylim=(-3, 103))
    right.set(
        ylabel="change ÷ that of an average place", title="What the audit of the student finds"
    )
    right.axhline(1, color="#777777", linestyle="--", linewidth=1, label="average place")
    for axes in (left, right):
        axes.set_xlabel("dose: training cues that agree with the label, %")
        axes.set_xticks(doses)
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
