"""Score the authors' published counterfactuals again, and ours of the same images and targets.

FID, Oracle and LabelVariationScore cannot be computed again, because they depend on classifiers
that the authors did not publish; their published values are only reported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ecinn.data.planted import Cue
from ecinn.drawing.table import Table
from ecinn.drawing.words import NONE, show
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import Interval, normal_interval, proportion
from ecinn.model import Model
from ecinn.pixels import StoredImages
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.authors_files import (
    DATASETS,
    FAILED,
    AuthorsBenchmark,
    BenchmarkName,
    ClassAutoencoders,
    StoredCounterfactuals,
)
from ecinn.studies.benchmark.authors_scores import (
    Comparison,
    Difference,
    Row,
    compare,
    score,
    subtract,
)
from ecinn.studies.benchmark.quality import (
    CUES,
    PERFECT,
    REAL,
    Panel,
    about_judges,
    predicted_classes,
    random_of_class,
    real_at_distance,
    stored_counterfactuals,
)
from ecinn.studies.benchmark.record import table
from ecinn.studies.judges import Judges

OURS = "ours"
NEAREST = "nearest real image of q"
AS_NEAR = "real image of q, as near as ours"
DIGITS = 6.0
"""Significant digits that count as reproduced; float32 autoencoders give about seven."""
ASKED = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
CURVE_IMAGES = 1000


@dataclass(frozen=True)
class CurvePoint:
    """Our counterfactuals at a requested confidence instead of at α₁."""

    asked: float
    n: int
    reachable: Interval
    """Share of pairs that can reach the confidence; all other figures are over those."""
    obtained: Interval
    """p(q) of the stored 8-bit image."""
    row: Row


@dataclass(frozen=True)
class AuthorsResult:
    """Results on one dataset."""

    name: BenchmarkName
    n: int
    limited: bool
    control: tuple[Comparison, ...]
    """Every published figure that can be computed again."""
    published: Mapping[str, Mapping[str, float]]
    """All published means, by metric and method."""
    theirs: tuple[Row, ...]
    ours: Row
    references: tuple[Row, ...]
    differences: tuple[Difference, ...]
    """Ours minus the authors' ECINN, and minus the references that are not random."""
    target_is_prediction: int
    """Pairs whose target our model already predicts; skipped, and counted as our failures."""
    other_prediction: int
    """Images that our model and the authors' classify differently."""
    curve: tuple[CurvePoint, ...] = ()

    @property
    def reproduced(self) -> bool | None:
        """True if all published figures were reproduced; None with fewer images."""
        if self.limited:
            return None
        complete = len(self.control) == 4 * len(self.theirs)
        return complete and all(figure.digits >= DIGITS for figure in self.control)


def our_counterfactuals(
    model: Model, benchmark: AuthorsBenchmark, observe: Observer = ignore
) -> StoredCounterfactuals:
    """Compute 8-bit counterfactuals at α₁ for ECINN's targets; failed where q is predicted."""
    originals, q = benchmark.originals.images, benchmark.counterfactuals["GEN"].q
    p, images, predicted = stored_counterfactuals(model, originals, q, observe, OURS)
    return StoredCounterfactuals(OURS, images, p, q, predicted)


def confidence_curve(
    model: Model,
    images: StoredImages,
    ours: StoredCounterfactuals,
    autoencoders: ClassAutoencoders,
    panel: Panel,
    *,
    asked: Sequence[float] = ASKED,
    limit: int = CURVE_IMAGES,
    observe: Observer = ignore,
) -> tuple[CurvePoint, ...]:
    """Score our counterfactuals of the first images at several requested confidences."""
    usable = (~ours.failed).nonzero()[:, 0][:limit]
    originals, p, q = images[usable], ours.p[usable], ours.q[usable]
    count = counter(observe, "requested confidences", len(asked))
    points = []
    for number, confidence in enumerate(asked, 1):
        answer = model.explain(originals, q[:, None], confidence=confidence)
        verdict = answer.convincing_certificate.verdict
        stored, reachable, verdicts = (
            values[:, 0].cpu() for values in (answer.stored_convincing, answer.reachable, verdict)
        )
        count(number)
        obtained = verdicts.gather(1, q[:, None])[:, 0]
        kept = (tensor[reachable] for tensor in (stored, p, q, verdicts.argmax(1)))
        made = StoredCounterfactuals(OURS, *kept)
        points.append(
            CurvePoint(
                asked=confidence,
                n=len(q),
                reachable=proportion(reachable),
                obtained=normal_interval(obtained[reachable]),
                row=score(originals[reachable], made, autoencoders, panel).row,
            )
        )
    return tuple(points)


def score_authors(
    benchmark: AuthorsBenchmark,
    model: Model,
    autoencoders: ClassAutoencoders,
    judges: Judges,
    *,
    limit: int | None = None,
    with_curve: bool = True,
    observe: Observer = ignore,
) -> AuthorsResult:
    """Score the authors' counterfactuals, ours and references, and check the published figures."""
    whole, benchmark = benchmark, benchmark.first(limit)
    n = len(benchmark.originals)
    ours = our_counterfactuals(model, benchmark, observe)
    originals = benchmark.originals.images
    panel = Panel.of(judges, originals, DATASETS[benchmark.name])
    references = _references(model, whole, ours, panel.cue, observe)
    made = [*benchmark.counterfactuals.values(), *references, ours]
    count, scores = counter(observe, "scoring", len(made)), []
    for number, each in enumerate(made, 1):
        scores.append(score(originals, each, autoencoders, panel))
        count(number)
    theirs, our_scores = scores[: len(benchmark.counterfactuals)], scores[-1]
    others = scores[len(theirs) : -1]
    # GB and GL have targets of their own, so their images are not paired with ours.
    gen = list(benchmark.counterfactuals).index("GEN")
    paired = [theirs[gen], *(each for each in others if each.row.method != REAL)]
    curve: tuple[CurvePoint, ...] = ()
    if with_curve:
        curve = confidence_curve(model, originals, ours, autoencoders, panel, observe=observe)
    return AuthorsResult(
        name=benchmark.name,
        n=n,
        limited=n < len(whole.originals),
        control=tuple(compare(benchmark, [each.row for each in theirs])),
        published={
            metric: {method: figure.mean for method, figure in figures.items()}
            for metric, figures in benchmark.published.items()
        },
        theirs=tuple(each.row for each in theirs),
        ours=our_scores.row,
        references=tuple(each.row for each in others),
        differences=tuple(subtract(our_scores, other) for other in paired),
        target_is_prediction=int((ours.q == ours.p).sum()),
        other_prediction=int((ours.p != benchmark.counterfactuals["GEN"].p).sum()),
        curve=curve,
    )


def _references(
    model: Model,
    whole: AuthorsBenchmark,
    ours: StoredCounterfactuals,
    cue: Cue | None,
    observe: Observer,
) -> list[StoredCounterfactuals]:
    """Make references for the pairs of ours, classified by our model."""
    originals, q = whole.originals.images[: len(ours.q)], ours.q.clamp(min=0)
    generator = torch.Generator().manual_seed(0)
    references = {REAL: random_of_class(whole.originals, q, generator)}
    if cue is None:
        distances = metrics.elastic_net(originals, ours.images)
        wanted = torch.stack([torch.zeros_like(distances), distances], 1)
        real = real_at_distance(model.recipe.load("train"), originals, q, wanted)
        references |= {NEAREST: real[:, 0], AS_NEAR: real[:, 1]}
    else:
        references[PERFECT] = cue.paint(originals, q)
    made = []
    for name, images in references.items():
        predicted = predicted_classes(model, images, observe, f"classifying {name}")
        predicted = torch.where(ours.failed, FAILED, predicted)
        made.append(StoredCounterfactuals(name, images, ours.p, ours.q, predicted))
    return made


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
    """Lay out the control, all rows, paired differences, and ours over requested confidences."""
    failed = " (does not count: the control failed)" if result.reproduced is False else ""
    rows = (*result.theirs, replace(result.ours, method=OURS + failed), *result.references)
    values = {
        **vars(result),
        **about_judges(record, planted=DATASETS[result.name] in CUES),
        "name": {"mnist": "MNIST", "fake_mnist": "FakeMNIST"}[result.name],
        "control": control_line(result),
        "means": "; ".join(_means(result, metric) for metric in ("FID", "Oracle")),
        "nearest": NEAREST,
        "near": AS_NEAR,
    }
    curves = ("curve", "curve_distance") if result.curve else ()
    return (
        table("authors", "control", list(map(_control_cells, result.control)), **values),
        table("authors", "convinced", rows, **values),
        table("authors", "distance", rows, **values),
        table("authors", "differences", result.differences, **values).transposed(),
        *(table("authors", name, result.curve, **values) for name in curves),
    )


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
