"""`ecinn paper claims`: measure every claim of the paper and write them on one page."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from ecinn.drawing.table import Table
from ecinn.studies.benchmark.record import jsonable
from ecinn.studies.paper import (
    claims_counterfactuals,
    claims_faces,
    claims_heatmaps,
    claims_planted,
)
from ecinn.studies.paper.artefact import Context, Made
from ecinn.studies.paper.claim import (
    CLAIMS_COMMAND,
    Claim,
    Measurement,
    Verdict,
    claim_of,
    document,
    entries,
    unmeasured,
)
from ecinn.studies.paper.measuring import Sizes


def measurements(context: Context, sizes: Sizes) -> Iterator[Measurement]:
    """Measure all claims whose data is at hand."""
    yield from claims_counterfactuals.measure(context, sizes)
    yield from claims_planted.measure(context, sizes)
    yield from claims_heatmaps.measure(context, sizes)
    if context.celeba is not None:
        yield from claims_faces.measure(context, sizes)
    yield from claims_faces.measure_trade_off(context)


def measure_claims(
    context: Context,
    sizes: Sizes = Sizes(),  # noqa: B008
) -> list[Claim]:
    """Return all claims in the order of `claims.toml`, with their verdicts."""
    measured = {result.name: claim_of(result) for result in measurements(context, sizes)}
    claims = []
    for name, entry in entries().items():
        if name in measured:
            claims.append(measured[name])
        elif entry.without == "celeba":
            claims += [unmeasured(entry)] if context.celeba is None else []
        elif entry.verdict == "untested" or entry.untested:
            claims.append(unmeasured(entry))
    return claims


def page(claims: Sequence[Claim]) -> str:
    """List all claims in one table, then report every one under its chapter."""
    counts = {verdict: sum(c.verdict == verdict for c in claims) for verdict in get_args(Verdict)}
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    chapters = [
        (chapter["title"], [claim for claim in claims if claim.section in chapter["sections"]])
        for chapter in document()["chapters"]
    ]
    rows = tuple(
        (claim.sentence, f"**{claim.verdict}**", claim.section)
        for _, chapter in chapters
        for claim in chapter
    )
    overview = Table("", ("claim", "verdict", "section"), rows).markdown().rstrip()
    parts = [document()["introduction"].strip(), f"{len(claims)} claims: {tally}.", overview]
    for title, chapter in chapters:
        if chapter:
            parts += [f"## {title}", *(_report(claim) for claim in chapter)]
    return "\n\n".join(parts) + "\n"


def _report(claim: Claim) -> str:
    parts = [f"*{claim.verdict.capitalize()}.* {claim.measured}"]
    if claim.figure:
        parts.append(f"Figure: `ecinn paper {claim.figure}`.")
    if claim.verdict != "untested":
        more = "" if claim.command == CLAIMS_COMMAND else f"; in more detail: `{claim.command}`"
        parts.append(f"Measured by `{CLAIMS_COMMAND}`{more}.")
    text = f"**{claim.sentence}** (Section {claim.section})\n\n{' '.join(parts)}"
    return f"{text}\n\n{claim.table}" if claim.table else text


def as_json(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Return the reports without the templates they were made from."""
    templates = {"needs", "without", "untested", "phrases", "columns"}
    return [
        {key: value for key, value in jsonable(claim).items() if key not in templates}
        for claim in claims
    ]


def make(context: Context) -> Made:
    """Make the page and its JSON."""
    claims = measure_claims(context)
    return Made(pages={"claims": page(claims)}, data={"claims": as_json(claims)})
