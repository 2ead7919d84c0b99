"""Score the authors' published counterfactuals again, and ours of the same images and targets.

FID, Oracle and LabelVariationScore cannot be computed again, because they depend on classifiers
that the authors did not publish; their published values are only reported.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import (
    Interval,
    normal_interval,
    paired_share_difference,
    proportion,
)
from ecinn.model import Model
from ecinn.pixels import StoredImages
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.authors_files import (
    DATASETS,
    FAILED,
    AuthorsBenchmark,
    BenchmarkName,
    ClassAutoencoders,
    Score,
    StoredCounterfactuals,
)
from ecinn.studies.benchmark.quality import (
    CUES,
    PERFECT,
    REAL,
    Verdict,
    judge_each,
    predicted_classes,
    random_of_class,
    real_at_distance,
    summarise,
)
from ecinn.studies.judges import Judges, scaled

OURS = "ours"
NEAREST = "nearest real image of q"
AS_NEAR = "real image of q, as near as ours"
DIGITS = 6.0
"""Significant digits that count as reproduced; float32 autoencoders give about seven."""
ASKED = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
CURVE_IMAGES = 1000
_BATCH = 250


METRICS = {
    "class_changed": "TargetClassValidity",
    "elastic_net": "ElasticNet",
    "im1": "IM1",
    "im2": "IM2",
}
"""The authors' names of the figures that can be computed again."""


@dataclass(frozen=True)
class Row:
    """A method's scores. Failed and all-black counterfactuals count for the first two only."""

    method: str
    class_changed: Interval
    """The authors' target-class validity, over all images; a failure changes nothing."""
    reached: Interval
    """Share classified as q, over all images."""
    elastic_net: Interval
    failed: int
    black: int
    """All-black images that the method did not report as failed."""
    as_published: Mapping[str, Score]
    """The figures that can be reproduced, by the authors' names, at full precision."""
    im1: Interval | None = None
    im2: Interval | None = None
    """Not ×100. Like IM1, None without autoencoders."""
    verdict: Verdict | None = None
    """Our judges' verdict on the others; None without judges and on fewer than two images."""


@dataclass(frozen=True)
class Scored:
    """A method's row, and the values behind it for comparisons image by image."""

    row: Row
    kept: Bool[Tensor, " batch"]
    of_all: Mapping[str, Bool[Tensor, " batch"]]
    """Classifications of all images."""
    of_kept: Mapping[str, Tensor]
    """One value for every image that is kept."""


@dataclass(frozen=True)
class Difference:
    """Ours minus another method's, on the same images and targets: means over images."""

    other: str
    n: int
    """Images that are neither failed nor black in either; classifications are over all images."""
    values: Mapping[str, Interval]


@dataclass(frozen=True)
class Comparison:
    """One figure as computed here and as published."""

    metric: str
    method: str
    here: Score
    published: Score

    @property
    def digits(self) -> float:
        """−log₁₀ of the larger relative difference of mean and half width.

        −inf if the numbers of images differ.
        """
        if self.here.n != self.published.n:
            return -math.inf
        pairs = (
            (getattr(score, name) for score in (self.here, self.published))
            for name in ("mean", "half_width")
        )
        difference = max(abs(a - b) / (abs(b) or 1.0) for a, b in pairs)
        return -math.log10(difference) if difference else math.inf

    def __str__(self) -> str:
        """Return both at full precision."""
        return (
            f"{self.metric} of {self.method}: here {self.here.mean!r} ± {self.here.half_width!r}, "
            f"published {self.published.mean!r} ± {self.published.half_width!r} "
            f"(over {self.here.n} and {self.published.n} images)"
        )


@dataclass(frozen=True)
class CurvePoint:
    """Our counterfactuals at an asked confidence instead of at α₁."""

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


def score(
    originals: StoredImages,
    counterfactuals: StoredCounterfactuals,
    autoencoders: ClassAutoencoders | None = None,
) -> Row:
    """Score counterfactuals of these originals as the authors did.

    The authors scale whole arrays to [−½, ½] by minimum and maximum. All of theirs span 0 to 255,
    so this equals k/255 − ½, which is used here: no image's score depends on another image.
    """
    return score_each(originals, counterfactuals, autoencoders).row


def score_each(
    originals: StoredImages,
    counterfactuals: StoredCounterfactuals,
    autoencoders: ClassAutoencoders | None = None,
) -> Scored:
    """Score counterfactuals as `score` does, and keep the scores of every image."""
    predicted, p, q = counterfactuals.predicted, counterfactuals.p, counterfactuals.q
    kept = counterfactuals.kept
    images = counterfactuals.images[kept]
    of_all = {
        "class_changed": metrics.class_changed(predicted, p),
        "reached": metrics.reached(predicted, q),
    }
    values: dict[str, Tensor] = {"elastic_net": metrics.elastic_net(originals[kept], images)}
    if autoencoders is not None:
        pixels, by_q = scaled(images), autoencoders.reconstruct(images, q[kept])
        values["im1"] = metrics.im1(pixels, by_q, autoencoders.reconstruct(images, p[kept]))
        values["im2"] = metrics.im2(pixels, by_q, autoencoders.reconstruct(images))
    intervals: dict[str, Any] = {name: proportion(v) for name, v in of_all.items()}
    intervals |= {name: normal_interval(v) for name, v in values.items()}
    published = {"class_changed": of_all["class_changed"], **values}
    row = Row(
        method=counterfactuals.method,
        failed=int(counterfactuals.failed.sum()),
        black=int((~kept & ~counterfactuals.failed).sum()),
        as_published={METRICS[name]: _published_form(v.double()) for name, v in published.items()},
        **intervals,
    )
    return Scored(row, kept, of_all, values)


def subtract(ours: Scored, other: Scored) -> Difference:
    """Subtract another method's scores from ours, image by image."""
    both = ours.kept & other.kept
    pairs = {name: (value, other.of_all[name]) for name, value in ours.of_all.items()} | {
        name: (value[both[ours.kept]], other.of_kept[name][both[other.kept]])
        for name, value in ours.of_kept.items()
    }
    return Difference(
        other=other.row.method,
        n=int(both.sum()),
        values={name: _mean_difference(*pair) for name, pair in pairs.items()},
    )


def _mean_difference(a: Tensor, b: Tensor) -> Interval:
    if a.dtype == torch.bool:
        return paired_share_difference(a, b)
    difference = a - b
    return normal_interval(difference[~difference.isnan()])


def _published_form(values: Float[Tensor, " values"]) -> Score:
    """mean ± 1.96 σ/√n; an interval's ends would lose digits of the half width."""
    mean = values.mean()
    sigma = (values - mean).square().mean().sqrt()
    half_width = 1.96 * float(sigma) / math.sqrt(max(len(values), 1))
    return Score(float(mean), half_width, len(values))


def compare(benchmark: AuthorsBenchmark, rows: Sequence[Row]) -> list[Comparison]:
    """Compare every figure of these rows that the authors published with an interval."""
    return [
        Comparison(metric, row.method, here, theirs)
        for row in rows
        for metric, here in row.as_published.items()
        if (theirs := benchmark.published.get(metric, {}).get(row.method)) is not None
        and theirs.half_width is not None
    ]


class Scorer:
    """Scores counterfactuals of a benchmark with the authors' metrics and our judges."""

    def __init__(
        self, benchmark: AuthorsBenchmark, autoencoders: ClassAutoencoders, judges: Judges
    ) -> None:
        self.originals = benchmark.originals.images
        self.cue = CUES.get(DATASETS[benchmark.name])
        self._autoencoders = autoencoders
        self._judges = judges
        self._features = judges.features(self.originals)

    def __call__(self, made: StoredCounterfactuals, rows: Tensor | slice = slice(None)) -> Scored:
        """Score all counterfactuals, or those of these rows of the originals."""
        originals, kept = self.originals[rows], made.kept
        scored = score_each(originals, made, self._autoencoders)
        if int(kept.sum()) < 2:
            return scored
        images = made.images[kept]
        judged = judge_each(self._judges, originals[kept], images, made.q[kept], self.cue)
        verdict = summarise(judged, self._judges.features(images), self._features)
        values = {"truth": judged.truth, "inside": judged.inside, **judged.agreement}
        known = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(
            scored,
            row=dataclasses.replace(scored.row, verdict=verdict),
            of_kept={**scored.of_kept, **known},
        )


def our_counterfactuals(
    model: Model, benchmark: AuthorsBenchmark, observe: Observer = ignore
) -> StoredCounterfactuals:
    """Compute 8-bit counterfactuals at α₁ for ECINN's targets; failed where q is predicted."""
    originals, q = benchmark.originals.images, benchmark.counterfactuals["GEN"].q
    images, p = torch.zeros_like(originals), torch.zeros_like(q)
    predicted = torch.full_like(q, FAILED)
    count = counter(observe, OURS, len(q))
    for rows in torch.arange(len(q)).split(_BATCH):
        p[rows] = predicted_classes(model, originals[rows])
        usable = rows[(q[rows] != p[rows]) & (q[rows] >= 0)]
        if len(usable):
            targets = q[usable, None].to(model.device)
            answer = model.explain(originals[usable], targets, confidence="alpha_1")
            images[usable] = answer.stored_convincing[:, 0].cpu()
            predicted[usable] = answer.convincing_certificate.winner[:, 0].cpu()
        count(int(rows[-1]) + 1)
    return StoredCounterfactuals(OURS, images, p, q, predicted)


def confidence_curve(
    model: Model,
    scorer: Scorer,
    ours: StoredCounterfactuals,
    *,
    asked: Sequence[float] = ASKED,
    images: int = CURVE_IMAGES,
    observe: Observer = ignore,
) -> tuple[CurvePoint, ...]:
    """Score our counterfactuals of the first images at several asked confidences."""
    usable = (~ours.failed).nonzero()[:, 0][:images]
    originals, p, q = scorer.originals[usable], ours.p[usable], ours.q[usable]
    count = counter(observe, "asked confidences", len(asked) * len(q))
    points = []
    for number, confidence in enumerate(asked):
        parts = []
        for rows in torch.arange(len(q)).split(_BATCH):
            targets = q[rows, None].to(model.device)
            answer = model.explain(originals[rows], targets, confidence=confidence)
            verdict = answer.convincing_certificate.verdict
            parts.append((answer.stored_convincing, answer.reachable, verdict))
            count(number * len(q) + int(rows[-1]) + 1)
        stored, reachable, verdicts = (
            torch.cat(part)[:, 0].cpu() for part in zip(*parts, strict=True)
        )
        obtained = verdicts.gather(1, q[:, None])[:, 0]
        kept = (tensor[reachable] for tensor in (stored, p, q, verdicts.argmax(1)))
        made = StoredCounterfactuals(OURS, *kept)
        points.append(
            CurvePoint(
                asked=confidence,
                n=len(q),
                reachable=proportion(reachable),
                obtained=normal_interval(obtained[reachable]),
                row=scorer(made, usable[reachable]).row,
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
    seed: int = 0,
    with_curve: bool = True,
    observe: Observer = ignore,
) -> AuthorsResult:
    """Score the authors' counterfactuals, ours and references, and check the published figures."""
    whole, benchmark = benchmark, benchmark.first(limit)
    n = len(benchmark.originals)
    ours = our_counterfactuals(model, benchmark, observe)
    scorer = Scorer(benchmark, autoencoders, judges)

    def scored(made: StoredCounterfactuals) -> Scored:
        count = counter(observe, f"scoring {made.method}", 1)
        count(0)
        row = scorer(made)
        count(1)
        return row

    theirs = {name: scored(made) for name, made in benchmark.counterfactuals.items()}
    references = [scored(made) for made in _references(model, whole, scorer, ours, seed, observe)]
    our_scores = scored(ours)
    # GB and GL have targets of their own, so their images are not paired with ours.
    others = [theirs["GEN"], *(each for each in references if each.row.method != REAL)]
    curve = with_curve and confidence_curve(model, scorer, ours, observe=observe)
    return AuthorsResult(
        name=benchmark.name,
        n=n,
        limited=n < len(whole.originals),
        control=tuple(compare(benchmark, [each.row for each in theirs.values()])),
        published={
            metric: {method: figure.mean for method, figure in figures.items()}
            for metric, figures in benchmark.published.items()
        },
        theirs=tuple(each.row for each in theirs.values()),
        ours=our_scores.row,
        references=tuple(each.row for each in references),
        differences=tuple(subtract(our_scores, other) for other in others),
        target_is_prediction=int((ours.q == ours.p).sum()),
        other_prediction=int((ours.p != benchmark.counterfactuals["GEN"].p).sum()),
        curve=curve or (),
    )


def _references(
    model: Model,
    whole: AuthorsBenchmark,
    scorer: Scorer,
    ours: StoredCounterfactuals,
    seed: int,
    observe: Observer,
) -> list[StoredCounterfactuals]:
    """Make references for the pairs of ours, classified by our model."""
    originals, q = scorer.originals, ours.q.clamp(min=0)
    generator = torch.Generator().manual_seed(seed)
    references = {REAL: random_of_class(whole.originals, q, generator)}
    if scorer.cue is None:
        distances = metrics.elastic_net(originals, ours.images)
        wanted = torch.stack([torch.zeros_like(distances), distances], 1)
        real = real_at_distance(model.recipe.load("train"), originals, q, wanted)
        references |= {NEAREST: real[:, 0], AS_NEAR: real[:, 1]}
    else:
        references[PERFECT] = scorer.cue.paint(originals, q)
    made = []
    for name, images in references.items():
        predicted = predicted_classes(model, images, observe, f"classifying {name}")
        predicted = torch.where(ours.failed, FAILED, predicted)
        made.append(StoredCounterfactuals(name, images, ours.p, ours.q, predicted))
    return made
