"""Tables of the authors' benchmark: the control, all rows, and ours over asked confidences."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ecinn.drawing.table import NONE, Table, number, percent
from ecinn.studies.benchmark.authors import AS_NEAR, OURS, AuthorsResult, Comparison, Row
from ecinn.studies.benchmark.authors_files import DATASETS
from ecinn.studies.benchmark.quality import CUES, verdict_cells
from ecinn.studies.benchmark.record import note


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
    """Lay out the control, all rows, and ours over asked confidences."""
    name = {"mnist": "MNIST", "fake_mnist": "FakeMNIST"}[result.name]
    planted = DATASETS[result.name] in CUES
    valid = result.reproduced is not False
    ours = replace(
        result.ours, method=OURS if valid else "ours (does not count: the control failed)"
    )
    means = "; ".join(_means(result, metric) for metric in ("FID", "Oracle"))
    predictions = {
        name: getattr(result, name) for name in ("other_prediction", "target_is_prediction")
    }
    tables = [
        Table.of(
            f"{name}: published and scored again ({result.n} images)",
            [_control_cells(figure) for figure in result.control],
            [f"**{control_line(result)}**", note("authors", "published", means=means)],
        ),
        Table.of(
            f"{name}: the same images, the same targets ({result.n} images)",
            [
                {"method": row.method, **_cells(row, record, planted=planted),
                 "failed": str(row.failed), "black": str(row.black)}
                for row in (*result.theirs, ours, *result.references)
            ],
            [
                note("authors", "rows", **predictions),
                *([] if planted else [note("authors", "as_near", name=AS_NEAR)]),
            ],
        ),
    ]  # fmt: skip
    if result.curve:
        title = f"{name}: ours over the asked confidence (the first {result.curve[0].n} images)"
        points = [
            {
                "asked p(q) %": percent(point.asked, 0),
                "reachable %": percent(point.reachable),
                "obtained, stored %": percent(point.obtained),
                **_cells(point.row, record, planted=planted),
            }
            for point in result.curve
        ]
        tables.append(Table.of(title, points, [note("authors", "curve")]))
    return tuple(tables)


def _control_cells(figure: Comparison) -> dict[str, str]:
    heading, factor, digits = {
        "TargetClassValidity": ("TCV %", 100.0, 2),
        "ElasticNet": ("EN", 1.0, 4),
        "IM1": ("IM1", 1.0, 5),
        "IM2": ("IM2 ×100", 100.0, 5),
    }[figure.metric]
    return {
        "figure": heading,
        "method": figure.method,
        "published": number(figure.published.mean, digits, factor),
        "here": number(figure.here.mean, digits, factor),
        "agree to": _digits(figure.digits),
    }


def _means(result: AuthorsResult, metric: str) -> str:
    factor, unit = (100.0, " %") if metric == "Oracle" else (1.0, "")
    figures = result.published.get(metric, {}).items()
    values = ", ".join(f"{method} {factor * mean:.2f}" for method, mean in figures)
    return f"{metric}{unit} {values or NONE}"


def _cells(row: Row, record: Mapping[str, Any], *, planted: bool) -> dict[str, str]:
    return {
        "TCV %": percent(row.class_changed),
        "reached q %": percent(row.reached),
        "EN": number(row.elastic_net),
        "IM1": number(row.im1, 3),
        "IM2 ×100": number(row.im2, 3, 100.0),
        **verdict_cells(row.verdict, record, planted=planted),
        "Fréchet": number(getattr(row.verdict, "frechet", None)),
    }
