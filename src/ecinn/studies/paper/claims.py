"""`ecinn paper claims`: judge every claim of the paper by several models, on one page."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ecinn.drawing.table import Table
from ecinn.drawing.words import NONE, fill
from ecinn.model import Model
from ecinn.studies.benchmark.record import fingerprint, jsonable
from ecinn.studies.paper import (
    claims_beta,
    claims_digits,
    claims_faces,
    claims_heatmaps,
    claims_method,
    claims_planted,
)
from ecinn.studies.paper.artefact import Context, Made
from ecinn.studies.paper.claim import (
    CLAIMS_COMMAND,
    Claim,
    Judgement,
    Measurement,
    Report,
    Verdict,
    document,
    entries,
    judgement,
)
from ecinn.studies.paper.columns import Column, columns, stages
from ecinn.studies.paper.measuring import Bench, Sizes

FREE = "all columns"
"""Heading of the claims that do not depend on the models of the columns."""


def measure_without_models(bench: Bench) -> Iterator[Measurement]:
    """Measure the claims that do not depend on a model."""
    yield from (claims_method.same_class(), claims_method.bits_per_dim())
    yield claims_planted.few_class_pixels()
    if bench.context.celeba is not None:
        yield claims_faces.balanced_labels(bench.context)
    yield from claims_beta.measure(bench.context)


def measure_models(bench: Bench, models: Mapping[str, Model]) -> Iterator[Measurement]:
    """Measure all claims that the models of one column can judge."""
    digits, dots = models.get("mnist"), models.get("fakemnist")
    if digits is not None:
        for module in (claims_method, claims_digits, claims_heatmaps):
            yield from module.measure(bench, digits)
    if dots is not None:
        yield from claims_planted.measure(bench, dots)
    if digits is not None and dots is not None:
        yield claims_planted.averages_cancel(bench, dots, digits)
    yield from claims_faces.measure(bench, models)


def measure_claims(context: Context, columns: Sequence[Column], sizes: Sizes) -> list[Report]:
    """Return all claims in the order of `claims.toml`, judged in every column."""
    bench = Bench(context, sizes)
    free = {result.name: judgement(result) for result in measure_without_models(bench)}
    by_column = {
        column.title: {r.name: judgement(r) for r in measure_models(bench, column.models)}
        for column in columns
    }
    return [report(claim, columns, by_column, free) for claim in entries().values()]


def report(
    claim: Claim,
    columns: Sequence[Column],
    by_column: Mapping[str, Mapping[str, Judgement]],
    free: Mapping[str, Judgement],
) -> Report:
    """Collect the judgements of a claim; what could not be measured is untested."""
    if not claim.models:
        if claim.name in free:
            return Report(claim, (free[claim.name],))
        reason = fill(claim.untested or claim.measured, {})
        return Report(claim, (Judgement("untested", reason),))
    judgements, lacking = [], {}
    for column in columns:
        if lacks := column.lacks(claim.models):
            lacking[column.title] = lacks
            continue
        missing = [column.absent[name] for name in claim.models if name in column.absent]
        if missing:
            reason = "; ".join(dict.fromkeys(missing))
            judgements.append(Judgement("untested", reason, column=column.title))
        else:
            names = tuple(column.models[name].name for name in claim.models)
            unmeasured = Judgement("untested", claim.untested)
            judged = by_column[column.title].get(claim.name, unmeasured)
            judgements.append(replace(judged, column=column.title, models=names))
    return Report(claim, tuple(judgements), lacking)


def page(reports: Sequence[Report], columns: Sequence[Column], limit: int | None = None) -> str:
    """List all claims in one table, then report every one under its chapter."""
    chapters = [
        (chapter["title"], [r for r in reports if r.claim.section in chapter["sections"]])
        for chapter in document()["chapters"]
    ]
    titles = [column.title for column in columns]
    head = ("claim (section)", FREE, *titles)
    rows = tuple(
        (
            f"{each.claim.sentence} ({each.claim.section})",
            *(_cell(each, name) for name in ("", *titles)),
        )
        for _, chapter in chapters
        for each in chapter
    )
    overview = Table("", head, rows, align="l" * len(head)).markdown().rstrip()
    parts = [document()["introduction"].strip()]
    if limit is not None:
        parts.append(f"**Made with `--limit {limit}`: a quick look, with too few images.**")
    parts += [_models_table(columns), _tally(reports, ["", *titles]), overview]
    for title, chapter in chapters:
        if chapter:
            parts += [f"## {title}", *(_entry(each) for each in chapter)]
    return "\n\n".join(parts) + "\n"


def _models_table(columns: Sequence[Column]) -> str:
    """List the models of every column, and those that are absent."""
    rows = []
    for column in columns:
        title = f"*{column.title}*: {column.about}"
        for dataset, model in column.models.items():
            training = f"{stages(model)}; {fingerprint(model)}"
            rows.append((title, dataset, f"`{model.name}`", training))
            title = ""
        for dataset, reason in column.absent.items():
            rows.append((title, dataset, NONE, reason))
            title = ""
    head = ("column", "images", "model", "training, and fingerprint of the weights")
    return Table("", head, tuple(rows), align="llll").markdown().rstrip()


def _tally(reports: Sequence[Report], titles: Sequence[str]) -> str:
    """Count the verdicts of every column."""
    counted = []
    for title in titles:
        verdicts = [j.verdict for r in reports for j in r.judgements if j.column == title]
        counts = {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)}
        tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        if tally:
            counted.append(f"*{title or FREE}* {tally}")
    return f"{len(reports)} claims: {'; '.join(counted)}."


def _cell(report: Report, title: str) -> str:
    """The verdict of one column, or what it lacks."""
    for judged in report.judgements:
        if judged.column == title:
            lacking = title and not judged.models
            return re.split(" [`(]", judged.measured)[0] if lacking else f"**{judged.verdict}**"
    return NONE


def _entry(report: Report) -> str:
    claim, judgements = report.claim, report.judgements
    parts = [f"**{claim.sentence}** (Section {claim.section})"]
    if not claim.models:
        parts += [f"*{judged.verdict.capitalize()}.* {judged.measured}" for judged in judgements]
    else:
        parts.append("\n".join(map(_line, judgements)))
    tested = any(judged.verdict != "untested" for judged in judgements)
    more = [fill(claim.about, claim.limits)] if claim.about else []
    if report.lacking:
        where = " or ".join(f"*{title}*" for title in report.lacking)
        missing = dict.fromkeys(name for names in report.lacking.values() for name in names)
        more.append(f"Not judged in {where}, without a model of {' and '.join(missing)}.")
    if claim.thresholds:
        more.append(f"Limits: {'; '.join(_limit(*each) for each in claim.thresholds.items())}.")
    if claim.figure:
        more.append(f"Figure: `ecinn paper {claim.figure}`.")
    if tested and not claim.models:
        more.append("This does not depend on the models of the columns.")
    if tested:
        command = f"; in more detail: `{claim.command}`"
        detail = "" if claim.command == CLAIMS_COMMAND else command
        more.append(f"Measured by `{CLAIMS_COMMAND}`{detail}.")
    parts += [" ".join(more)] if more else []
    parts += [_joined_table(judgements)] if any(judged.table for judged in judgements) else []
    return "\n\n".join(parts)


def _line(judged: Judgement) -> str:
    if not judged.models:
        return f"- *{judged.column}*: **{judged.verdict}**, {judged.measured}."
    models = ", ".join(f"`{name}`" for name in judged.models)
    return f"- *{judged.column}*, {models}: **{judged.verdict}**. {judged.measured}"


def _limit(name: str, limit: Mapping[str, Any]) -> str:
    """The value of a threshold with its date and its reason."""
    reason = str(limit["reason"]).rstrip(".,")
    return f"*{name.replace('_', ' ')}* {limit['value']:g}, set {limit['set']} ({reason})"


def _joined_table(judgements: Sequence[Judgement]) -> str:
    """Join the tables of all columns; the first column then names the models."""
    tables = [(judged, judged.table) for judged in judgements if judged.table is not None]
    head = tables[0][1].head
    if not tables[0][0].column:
        return tables[0][1].markdown().rstrip()
    rows = tuple(
        (", ".join(judged.models), *row) for judged, table in tables for row in table.rows
    )
    align = "ll" + "r" * (len(head) - 1)
    return Table("", ("model", *head), rows, align=align).markdown().rstrip()


def as_json(reports: Sequence[Report], columns: Sequence[Column]) -> dict[str, Any]:
    """Return the columns with their models, and all judgements without their templates."""
    models = [
        {
            "title": column.title,
            "models": {
                dataset: {"name": model.name, "fingerprint": fingerprint(model)}
                for dataset, model in column.models.items()
            },
            "absent": column.absent,
        }
        for column in columns
    ]
    kept = ("name", "section", "sentence", "figure", "command", "thresholds", "models")
    claims = [
        {key: getattr(each.claim, key) for key in kept}
        | {"judgements": each.judgements, "lacking": each.lacking}
        for each in reports
    ]
    return {"columns": jsonable(models), "claims": jsonable(claims)}


def make(context: Context) -> Made:
    """Make the page and its JSON."""
    found = columns(context)
    sizes = Sizes() if context.limit is None else Sizes().limited(context.limit)
    reports = measure_claims(context, found, sizes)
    text = page(reports, found, context.limit)
    return Made(pages={"claims": text}, data={"claims": as_json(reports, found)})
