"""Table 1: the paper's figures, ours, and the paper's own recipe trained again."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.recipes import MNIST_PAPER
from ecinn.drawing.table import NONE, Table, number, percent
from ecinn.equations import paper_bits_per_dim
from ecinn.errors import InputError
from ecinn.files import ASSETS
from ecinn.metrics.statistics import wilson_interval
from ecinn.studies.paper.artefact import Artefact, Context, Made

PAPER_ASSETS = ASSETS / "paper"
RECIPE = PAPER_ASSETS / "mnist-paper.json"
"""What `ecinn train mnist-paper --out DIR` wrote as DIR/training.json."""
INCEPTION = PAPER_ASSETS / "inception.json"
"""Test errors of what `ecinn inception` trained, by attribute."""
NOT_RUN = "not run"

Source = Literal["paper", "ours", "recipe"]
SOURCES: Mapping[Source, str] = {
    "paper": "the paper",
    "ours": "ours",
    "recipe": "the paper's recipe, re-run",
}


@dataclass(frozen=True)
class Reported:
    """A row of the paper's Table 1, and which of our models answers it."""

    name: str
    model: str
    beta: float
    bits_per_dim: float
    error: float
    inception_error: float | None = None
    attribute: str | None = None


REPORTED = (
    Reported("FakeMNIST", "fakemnist", 1.4265, 1.77, 0.0),
    Reported("MNIST", "mnist", 1.4265, 1.89, 0.0085),
    Reported("Smile", "celeba-smile", 1.0, 3.32, 0.0742, 0.0662, "Smiling"),
    Reported("High cheekbones", "celeba-cheekbones", 1.0, 3.09, 0.1438, 0.1374, "High_Cheekbones"),
    Reported("Lipstick", "celeba-lipstick", 1.0, 3.06, 0.0487, 0.0570, "Wearing_Lipstick"),
    Reported("Heavy makeup", "celeba-makeup", 1.0, 3.08, 0.1268, 0.1084, "Heavy_Makeup"),
)


@dataclass(frozen=True)
class Row:
    """One line; None is what was not reported or not run."""

    name: str
    source: Source
    beta: float
    bits_per_dim: float | None
    """Exact, of 8-bit images."""
    bits_per_dim_paper: float | None
    """In the paper's convention."""
    error: float | None
    inception_error: float | None
    n: int | None = None
    """Test images, where they were counted here."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the error lies with 95 % confidence."""
        if self.error is None or self.n is None:
            return None
        return wilson_interval(round(self.error * self.n), self.n)


def rows(
    checkpoint: Callable[[str], Checkpoint],
    recipe: Path = RECIPE,
    inception: Path = INCEPTION,
) -> list[Row]:
    """All lines; what has not been run yet is left open."""
    errors = _read(inception, "`ecinn inception`")
    lines = []
    for reported in REPORTED:
        lines.append(
            Row(
                reported.name,
                "paper",
                reported.beta,
                None,
                reported.bits_per_dim,
                reported.error,
                reported.inception_error,
            )
        )
        model = checkpoint(reported.model)
        measured = errors.get(reported.attribute) if reported.attribute else None
        lines.append(_measured(reported.name, "ours", model.recipe.beta, model.metrics, measured))
        if reported.model == MNIST_PAPER.dataset:
            record = _read(recipe, "`ecinn train mnist-paper`")
            beta = record.get("settings", {}).get("beta", MNIST_PAPER.beta)
            lines.append(_measured(reported.name, "recipe", beta, record.get("metrics", {})))
    return lines


def _measured(
    name: str,
    source: Source,
    beta: float,
    metrics: Mapping[str, Any],
    inception_error: float | None = None,
) -> Row:
    return Row(
        name,
        source,
        beta,
        metrics.get("bits_per_dim"),
        metrics.get("bits_per_dim_paper"),
        metrics.get("error"),
        inception_error,
        metrics.get("n"),
    )


def _read(path: Path, maker: str) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): write it again with {maker}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is no JSON object: write it again with {maker}")
    return content


def table(lines: list[Row]) -> Table:
    """For people."""
    head = ("model", "whose", "β", "exact bits/dim", "bits/dim, paper's convention")
    shown = tuple((row.name, SOURCES[row.source], f"{row.beta:g}", *_cells(row)) for row in lines)
    return Table("Table 1", (*head, "error, %", "Inception-V3 error, %"), shown, _notes(lines))


def _cells(row: Row) -> tuple[str, str, str, str]:
    """Both bits/dim, the error with its interval, and Inception's error."""
    if row.source != "paper" and row.error is None:
        return NOT_RUN, NOT_RUN, NOT_RUN, NONE
    error = percent(row.error)
    if row.interval is not None:
        low, high = row.interval
        error += f" ({percent(low)} to {percent(high)})"
    return (
        number(row.bits_per_dim),
        number(row.bits_per_dim_paper),
        error,
        percent(row.inception_error),
    )


def _notes(lines: list[Row]) -> tuple[str, ...]:
    digits, faces = (
        -paper_bits_per_dim(0.0, scale)
        for scale in (2.0, 4.0)  # IB-INN's pixel scaling
    )
    mnist = next(reported for reported in REPORTED if reported.model == "mnist")
    counts = sorted({row.n for row in lines if row.n is not None})
    images = " or ".join(f"{n:,}" for n in counts)
    return (
        f"Errors are of {images} test images; in brackets, where they lie with 95 % confidence. "
        "Faces: the paper's are CelebA-HQ; how it was split is not said.",
        "The paper's bits/dim follow, as far as can be told, the evaluation of IB-INN, which "
        f"leaves out a constant: {digits:.2f} bits for digits and about {faces:.2f} for faces. "
        f"So MNIST's {mnist.bits_per_dim:.2f} would be {mnist.bits_per_dim + digits:.2f} exact. "
        "That convention is of noise-free images, for which a density is no code length; compare "
        "models by the exact column.",
        "The paper's recipe, re-run: the recipe `mnist-paper`, on our implementation of "
        "IB-INN's layers. Every setting there says where it comes from, and its comment lists in "
        "which details it still differs from the authors' code: it shows what the recipe gives "
        "here, not what their program gave.",
    )


def latex(lines: list[Row]) -> str:
    """A tabular for booktabs."""
    body, name = [], ""
    for row in lines:
        if row.name != name and name:
            body.append(r"\midrule")
        cells = (row.name if row.name != name else "", SOURCES[row.source], f"{row.beta:g}")
        body.append(" & ".join((*cells, *_cells(row))).replace(NONE, "--") + r" \\")
        name = row.name
    head = ("", "", r"$\beta$", "BPD", "BPD, paper's", r"Err., \%", r"Inception-V3 err., \%")
    return "\n".join(
        [
            r"\begin{tabular}{llrrrrr}",
            r"\toprule",
            " & ".join(head) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _table_1(context: Context) -> Made:
    lines = rows(lambda name: context.model(name).checkpoint)
    page = "\n".join(
        [f"# {TABLE_1.title}", "", table(lines).markdown(), "```latex", latex(lines), "```", ""]
    )
    numbers = [asdict(row) | {"interval": row.interval} for row in lines]
    return Made(pages={"table-1": page}, data={"table-1": numbers})


TABLE_1 = Artefact(
    "table-1",
    "Table 1: error and bits per dimension of every model, the paper's beside ours",
    _table_1,
    reported="β, bits/dim and errors of the six IB-INN models and errors of Inception-V3.",
)
