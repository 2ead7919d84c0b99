"""Tables of the authors' benchmark: the control, all rows, and ours over asked confidences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ecinn.drawing.table import NONE, Table, number, percent, percent_interval, plus_minus
from ecinn.studies.benchmark.authors import AS_NEAR, NEAREST, OURS, AuthorsResult
from ecinn.studies.benchmark.authors_files import DATASETS, Score
from ecinn.studies.benchmark.authors_scores import Comparison, Difference, Row
from ecinn.studies.benchmark.quality import CUES, ORACLES, verdict_cells
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
    """Lay out the control, all rows, paired differences, and ours over asked confidences."""
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
    rows = (*result.theirs, ours, *result.references)
    tables = [
        Table.of(
            f"{name}: published and scored again ({result.n} images)",
            [_control_cells(figure) for figure in result.control],
            [f"**{control_line(result)}**", note("authors", "published", means=means)],
        ),
        Table.of(
            f"{name}: who is convinced ({result.n} images)",
            [
                {
                    "method": row.method,
                    "TCV %": percent_interval(row.class_changed, 2),
                    **_convinced(row, record, planted=planted),
                    "failed": str(row.failed),
                    "black": str(row.black),
                }
                for row in rows
            ],
            [note("authors", "rows", **predictions)],
        ),
        Table.of(
            f"{name}: distance and realism",
            [{"method": row.method, **_distance(row)} for row in rows],
            [
                note("authors", "distance"),
                *([] if planted else [note("authors", "real", nearest=NEAREST, near=AS_NEAR)]),
            ],
        ),
        Table.of(
            f"{name}: ours minus another, image by image",
            _difference_rows(result.differences, planted=planted),
            [note("authors", "differences")],
        ),
    ]
    if result.curve:
        title = f"{name}: ours over the asked confidence (the first {result.curve[0].n} images)"
        convinced = [
            {
                "asked p(q) %": percent(point.asked, 0),
                "reachable %": percent_interval(point.reachable),
                "obtained, stored %": plus_minus(point.obtained, 2, 100.0),
                **_convinced(point.row, record, planted=planted, digits=1),
            }
            for point in result.curve
        ]
        distances = [
            {"asked p(q) %": percent(point.asked, 0), **_distance(point.row)}
            for point in result.curve
        ]
        tables += [
            Table.of(title, convinced, [note("authors", "curve")]),
            Table.of(f"{name}: distance and realism over the asked confidence", distances),
        ]
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
        "published": _score(figure.published, digits, factor),
        "here": _score(figure.here, digits, factor),
        "agree to": _digits(figure.digits),
    }


def _means(result: AuthorsResult, metric: str) -> str:
    factor, unit = (100.0, " %") if metric == "Oracle" else (1.0, "")
    figures = result.published.get(metric, {}).items()
    values = ", ".join(f"{method} {factor * mean:.2f}" for method, mean in figures)
    return f"{metric}{unit} {values or NONE}"


def _score(score: Score, digits: int, factor: float) -> str:
    mean, half_width = (number(v, digits, factor) for v in (score.mean, score.half_width))
    return f"{mean} ± {half_width}"


def _convinced(
    row: Row, record: Mapping[str, Any], *, planted: bool, digits: int = 2
) -> dict[str, str]:
    return {
        "reached q %": percent_interval(row.reached, digits),
        **verdict_cells(row.verdict, record, planted=planted, digits=digits),
    }


def _distance(row: Row) -> dict[str, str]:
    return {
        "EN": plus_minus(row.elastic_net),
        "IM1": plus_minus(row.im1, 3),
        "IM2 ×100": plus_minus(row.im2, 3, 100.0),
        "Fréchet": plus_minus(getattr(row.verdict, "frechet", None)),
    }


def _difference_rows(differences: Sequence[Difference], *, planted: bool) -> list[dict[str, str]]:
    """Lay out a row per measure, with a column per other method."""
    points = partial(percent_interval, digits=2, sign="+")
    kept = "digit kept, " if planted else ""
    measures = {
        "reached q, points": ("reached", points),
        "cue says q, points": ("truth", points),
        "change inside the cue, points": ("inside", partial(plus_minus, factor=100.0, sign="+")),
        **{f"{kept}{family} oracle, points": (family, points) for family in ORACLES},
        "EN": ("elastic_net", partial(plus_minus, sign="+")),
        "IM1": ("im1", partial(plus_minus, digits=3, sign="+")),
        "IM2 ×100": ("im2", partial(plus_minus, digits=3, factor=100.0, sign="+")),
    }
    rows = [
        {
            "ours minus": heading,
            **{each.other: form(each.values.get(name)) for each in differences},
        }
        for heading, (name, form) in measures.items()
        if planted or name not in ("truth", "inside")
    ]
    counts = {each.other: str(each.n) for each in differences}
    return [*rows, {"ours minus": "pairs without failed and black", **counts}]
