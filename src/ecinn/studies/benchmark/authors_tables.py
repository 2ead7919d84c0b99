"""Tables of the authors' benchmark: the control, all rows, and ours over asked confidences."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ecinn.drawing.table import Table
from ecinn.drawing.words import NONE, show
from ecinn.studies.benchmark.authors import AS_NEAR, NEAREST, OURS, AuthorsResult
from ecinn.studies.benchmark.authors_files import DATASETS
from ecinn.studies.benchmark.authors_scores import Comparison
from ecinn.studies.benchmark.quality import CUES, about_judges
from ecinn.studies.benchmark.record import table


def control_line(result: AuthorsResult) -> str:
    """Return one line that says whether the published figures were reproduced."""
    if result.reproduced is None:
        return "CONTROL: not checked (limited)"
    worst = min(result.control, key=lambda figure: figure.digits, default=None)
    if result.reproduced and worst is not None:
        digits = _digits(worst.digits)
        return f"CONTROL: reproduced ({len(result.control)} figures, {digits} or more)"
    return f"CONTROL: NOT reproduced ({worst or 'no published figure could be compared'})"


def _digits(digits: float) -> str:
    if digits == -math.inf:
        return "other images"
    return "all digits" if digits == math.inf else f"{int(digits)} digits"


def authors_tables(result: AuthorsResult, record: Mapping[str, Any]) -> tuple[Table, ...]:
    """Lay out the control, all rows, paired differences, and ours over asked confidences."""
    ours = (
        OURS if result.reproduced is not False else f"{OURS} (does not count: the control failed)"
    )
    rows = (*result.theirs, replace(result.ours, method=ours), *result.references)
    values = {
        **vars(result),
        **about_judges(record, planted=DATASETS[result.name] in CUES),
        "name": {"mnist": "MNIST", "fake_mnist": "FakeMNIST"}[result.name],
        "control": control_line(result),
        "means": "; ".join(_means(result, metric) for metric in ("FID", "Oracle")),
        "nearest": NEAREST,
        "near": AS_NEAR,
    }
    tables = [
        table(
            "authors", "control", [_control_cells(figure) for figure in result.control], **values
        ),
        table("authors", "convinced", rows, **values),
        table("authors", "distance", rows, **values),
        table("authors", "differences", result.differences, **values).transposed(),
    ]
    if result.curve:
        tables += [
            table("authors", n, result.curve, **values) for n in ("curve", "curve_distance")
        ]
    return tuple(tables)


def _control_cells(figure: Comparison) -> dict[str, str]:
    heading, form = {
        "TargetClassValidity": ("TCV %", ".2p"),
        "ElasticNet": ("EN", ".4"),
        "IM1": ("IM1", ".5"),
        "IM2": ("IM2 ×100", ".5p"),
    }[figure.metric]
    published, here = (
        f"{show(score.mean, form)} ± {show(score.half_width, form)}"
        for score in (figure.published, figure.here)
    )
    cells = {"figure": heading, "method": figure.method, "published": published, "here": here}
    return cells | {"agree to": _digits(figure.digits)}


def _means(result: AuthorsResult, metric: str) -> str:
    factor, unit = (100.0, " %") if metric == "Oracle" else (1.0, "")
    figures = result.published.get(metric, {}).items()
    values = ", ".join(f"{method} {factor * mean:.2f}" for method, mean in figures)
    return f"{metric}{unit} {values or NONE}"
