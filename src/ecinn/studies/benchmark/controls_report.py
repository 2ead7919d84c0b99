"""Tables and the dose-response curve of the controls of distillation."""

import importlib
import io
from collections.abc import Sequence

from ecinn.drawing.table import Table, number_interval, percent_interval
from ecinn.studies.benchmark.controls import EVIDENCE, NOT_EXPLAINED, Controls, Shortcut
from ecinn.studies.benchmark.record import note


def control_tables(result: Controls) -> tuple[Table, ...]:
    """Lay out both controls."""
    words, layers = {True: "yes", False: "no"}, {True: "kept", False: "trained"}
    return (
        Table.of(
            "A planted shortcut",
            [
                {
                    "layers": layers[each.kept],
                    "dose": f"{100 * each.dose:.0f} %",
                    "cue changes the answer %": percent_interval(each.cue_changes),
                    "digit changes the answer %": percent_interval(each.digit_changes),
                    "student agrees %": percent_interval(each.agreement),
                    "change at the cue": number_interval(each.density, 1),
                    "its rank": f"{each.rank} of {each.cells}",
                    "first": words[each.rank == 1],
                    "as it should": words[each.holds],
                }
                for each in result.shortcuts
            ],
            [note("controls", "shortcut", evidence=f"{100 * EVIDENCE:.0f}")],
        ),
        Table.of(
            "Labels without a reason",
            [
                {
                    "layers": layers[each.kept],
                    "labels": each.labels,
                    "learned %": percent_interval(each.learned),
                    "held-out accuracy %": percent_interval(each.accuracy),
                    "student agrees %": percent_interval(each.agreement),
                    "flipped, corrected %": percent_interval(each.flipped),
                    "not explained %": percent_interval(each.not_explained),
                }
                for each in result.reasons
            ],
            [note("controls", "reasons", limit=f"{100 * NOT_EXPLAINED:.0f}")],
        ),
    )


def dose_figure(shortcuts: Sequence[Shortcut]) -> bytes:
    """Draw a PNG of the change at the cue, and of changed answers, against the dose."""
    trained, kept = ([s for s in shortcuts if s.kept == kept] for kept in (False, True))
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 3.4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    doses = [100 * each.dose for each in trained]
    series = (
        (left, [each.cue_changes for each in trained], "the other cue", 100),
        (left, [each.digit_changes for each in trained], "another digit", 100),
        (right, [each.density for each in trained], "at the cue", 1),
        (right, [each.density for each in kept], "at the cue, layers kept", 1),
    )
    for axes, values, name, factor in series:
        middle = [factor * value.mean for value in values]
        ends = [
            [factor * abs(getattr(value, end) - value.mean) for value in values]
            for end in ("low", "high")
        ]
        axes.errorbar(doses[: len(middle)], middle, ends, fmt="o-", capsize=3, label=name)
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
