"""Make Table 1: the numbers of the paper, ours, and the paper's own recipe trained again."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.recipes import MNIST_PAPER
from ecinn.drawing.table import Table
from ecinn.drawing.words import NONE, fill, show
from ecinn.equations import paper_bits_per_dim
from ecinn.files import ASSETS
from ecinn.metrics.statistics import wilson
from ecinn.studies.paper.artefact import ABOUT, Context, Made
from ecinn.studies.published import PUBLISHED

RECIPE = ASSETS / "paper" / "mnist-paper.json"
"""The training.json that `ecinn train mnist-paper` wrote."""
INCEPTION = ASSETS / "paper" / "inception.json"
"""Test errors of the networks that `ecinn inception` trained, by attribute."""
NOT_RUN = "not run"

Source = Literal["paper", "ours", "recipe"]
SOURCES: Mapping[Source, str] = {
    "paper": "the paper",
    "ours": "ours",
    "recipe": "the paper's recipe, re-run",
}


@dataclass(frozen=True)
class Row:
    """One line; None where nothing was reported or run."""

    name: str
    source: Source
    beta: float
    bits_per_dim: float | None
    """Exact code length of 8-bit images."""
    bits_per_dim_paper: float | None
    """In the convention of the paper."""
    error: float | None
    inception_error: float | None
    n: int | None = None
    """Number of test images, where we counted the errors."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the error."""
        if self.error is None or self.n is None:
            return None
        interval = wilson(round(self.error * self.n), self.n)
        return interval.low, interval.high


def rows(
    checkpoint: Callable[[str], Checkpoint], recipe: Path = RECIPE, inception: Path = INCEPTION
) -> list[Row]:
    """Collect all lines; models that have not been trained are left open."""
    record, errors = (
        json.loads(path.read_text()) if path.is_file() else {} for path in (recipe, inception)
    )
    lines = []
    for model, printed in PUBLISHED["table_1"].items():
        name, ours = printed["name"], checkpoint(model)
        reported = {"bits_per_dim_paper": printed["bits_per_dim"], "error": printed["error"]}
        inception_error = printed.get("inception_error")
        lines.append(_row(name, "paper", printed["beta"], reported, inception_error))
        inception_error = errors.get(printed.get("attribute"))
        lines.append(_row(name, "ours", ours.recipe.beta, ours.metrics, inception_error))
        if model == MNIST_PAPER.dataset:
            beta = record.get("settings", {}).get("beta", MNIST_PAPER.beta)
            lines.append(_row(name, "recipe", beta, record.get("metrics", {})))
    return lines


def _row(
    name: str,
    source: Source,
    beta: float,
    metrics: Mapping[str, Any],
    inception_error: float | None = None,
) -> Row:
    bits = metrics.get("bits_per_dim"), metrics.get("bits_per_dim_paper")
    errors = metrics.get("error"), inception_error
    return Row(name, source, beta, *bits, *errors, metrics.get("n"))


def table(lines: list[Row]) -> Table:
    """Lay out the table for Markdown."""
    head = ("model", "source", "β", "exact bits/dim", "bits/dim, paper's convention")
    cells = tuple((row.name, SOURCES[row.source], f"{row.beta:g}", *_cells(row)) for row in lines)
    return Table("Table 1", (*head, "error, %", "Inception-V3 error, %"), cells, _notes(lines))


def _cells(row: Row) -> tuple[str, str, str, str]:
    """Format both bits/dim, the error with its interval, and the error of Inception-V3."""
    if row.source != "paper" and row.error is None:
        return NOT_RUN, NOT_RUN, NOT_RUN, NONE
    error = show(row.error, ".2p")
    if row.interval is not None:
        error += " ({} to {})".format(*(show(end, ".2p") for end in row.interval))
    bits = show(row.bits_per_dim, ".2"), show(row.bits_per_dim_paper, ".2")
    return (*bits, error, show(row.inception_error, ".2p"))


def _notes(lines: list[Row]) -> tuple[str, ...]:
    mnist, face = (PUBLISHED["table_1"][model] for model in ("mnist", "celeba-smile"))
    digits, faces = (-paper_bits_per_dim(0.0, row["pixel_scale"]) for row in (mnist, face))
    counts = sorted({row.n for row in lines if row.n is not None})
    values = {
        "images": " or ".join(f"{n:,}" for n in counts),
        "digits": digits,
        "faces": faces,
        "printed": mnist["bits_per_dim"],
        "exact": mnist["bits_per_dim"] + digits,
    }
    return tuple(fill(note, values) for note in ABOUT["table-1"]["notes"])


def latex(lines: list[Row]) -> str:
    """Lay out the table as a tabular with booktabs."""
    body, name = [], ""
    for row in lines:
        if row.name != name and name:
            body.append(r"\midrule")
        cells = (row.name if row.name != name else "", SOURCES[row.source], f"{row.beta:g}")
        body.append(" & ".join((*cells, *_cells(row))).replace(NONE, "--") + r" \\")
        name = row.name
    head = ("", "", r"$\beta$", "BPD", "BPD, paper's", r"Err., \%", r"Inception-V3 err., \%")
    start = [r"\begin{tabular}{llrrrrr}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
    return "\n".join([*start, *body, r"\bottomrule", r"\end{tabular}"])


def make(context: Context) -> Made:
    """Make the page and its JSON."""
    lines = rows(lambda name: context.model(name).checkpoint)
    title = ABOUT["table-1"]["title"]
    page = f"# {title}\n\n{table(lines).markdown()}\n```latex\n{latex(lines)}\n```\n"
    numbers = [asdict(row) | {"interval": row.interval} for row in lines]
    return Made(pages={"table-1": page}, data={"table-1": numbers})
