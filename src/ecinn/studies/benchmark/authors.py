"""The authors' published benchmark scored again, and our counterfactuals of the same images."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ecinn.data.planted import Cue
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.counterfactuals import MeanWithInterval
from ecinn.model import Model
from ecinn.studies.benchmark.authors_files import (
    FAILED,
    AuthorsBenchmark,
    BenchmarkName,
    StoredCounterfactuals,
)
from ecinn.studies.benchmark.authors_table import Comparison, Row, compare
from ecinn.studies.benchmark.authors_table import score as score_as_published
from ecinn.studies.benchmark.autoencoders import ClassAutoencoders
from ecinn.studies.benchmark.methods import read
from ecinn.studies.benchmark.quality import (
    CUES,
    Observe,
    Verdict,
    judge,
    random_of_class,
    real_as_near,
)
from ecinn.studies.judges import Judges

OURS = "ours"
REAL = "real image of q"
AS_NEAR = "real image of q, as near as ours"
PERFECT = "perfect answer"
DIGITS = 6.0
"""Significant digits that count as reproduced; float32 autoencoders give about seven."""
ASKED = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
CURVE_IMAGES = 1000
_BATCH = 250
DATASETS: Mapping[BenchmarkName, str] = MappingProxyType(
    {"mnist": "mnist", "fake_mnist": "fakemnist"}
)


@dataclass(frozen=True)
class Scored:
    """A method's row as the authors score it, and what our judges say of the same images."""

    row: Row
    verdict: Verdict | None
    """Over the counterfactuals that are neither failed nor black; None if those are under two."""


@dataclass(frozen=True)
class CurvePoint:
    """α₁ counterfactuals at an asked confidence in place of α₁'s own."""

    asked: float
    n: int
    reachable: MeanWithInterval
    """Share of pairs whose line reaches that confidence; the rest is over those alone."""
    reached: MeanWithInterval
    obtained: MeanWithInterval
    """p(q) of the stored 8-bit image."""
    elastic_net: MeanWithInterval
    im1: MeanWithInterval
    im2: MeanWithInterval
    verdict: Verdict | None


@dataclass(frozen=True)
class AuthorsResult:
    """One data set."""

    name: BenchmarkName
    n: int
    limited: bool
    control: tuple[Comparison, ...]
    """Every published figure that can be computed again."""
    published: Mapping[str, Mapping[str, float]]
    """Means by metric and method, also of what cannot be computed again."""
    theirs: tuple[Scored, ...]
    ours: Scored
    references: tuple[Scored, ...]
    target_is_prediction: int
    """Pairs where our model already reads q: skipped, and counted as failures of ours."""
    other_prediction: int
    """Images that our model reads as another class than theirs."""
    curve: tuple[CurvePoint, ...] = ()

    @property
    def reproduced(self) -> bool | None:
        """Whether the control holds; None where fewer images were taken than published."""
        if self.limited:
            return None
        complete = len(self.control) == 4 * len(self.theirs)
        return complete and all(figure.digits >= DIGITS for figure in self.control)


def limit_authors(benchmark: AuthorsBenchmark, n: int | None) -> AuthorsBenchmark:
    """The first n images, or all."""
    if n is None or n >= len(benchmark.originals):
        return benchmark
    return dataclasses.replace(
        benchmark,
        originals=benchmark.originals.first(n),
        counterfactuals=MappingProxyType(
            {
                name: StoredCounterfactuals(
                    name, made.images[:n], made.p[:n], made.q[:n], made.read_as[:n]
                )
                for name, made in benchmark.counterfactuals.items()
            }
        ),
    )


def our_counterfactuals(
    model: Model, benchmark: AuthorsBenchmark, observe: Callable[[int], None] = lambda done: None
) -> StoredCounterfactuals:
    """α₁, stored as 8 bits, for ECINN's targets; black and failed where q is our prediction."""
    originals, q = benchmark.originals.images, benchmark.counterfactuals["GEN"].q
    images, p = torch.zeros_like(originals), torch.zeros_like(q)
    read_as = torch.full_like(q, FAILED)
    for rows in torch.arange(len(q)).split(_BATCH):
        p[rows] = read(model, originals[rows])
        usable = rows[(q[rows] != p[rows]) & (q[rows] >= 0)]
        if len(usable):
            answer = model.explain(originals[usable], q[usable, None].to(model.device))
            images[usable] = answer.stored_convincing[:, 0].cpu()
            read_as[usable] = answer.convincing_certificate.winner[:, 0].cpu()
        observe(int(rows[-1]) + 1)
    return StoredCounterfactuals(OURS, images, p, q, read_as)


def confidence_curve(
    model: Model,
    benchmark: AuthorsBenchmark,
    autoencoders: ClassAutoencoders,
    judges: Judges,
    ours: StoredCounterfactuals,
    *,
    asked: Sequence[float] = ASKED,
    images: int = CURVE_IMAGES,
    observe: Callable[[int], None] = lambda done: None,
) -> tuple[CurvePoint, ...]:
    """Change, realism and oracles against the confidence asked for, over the first images."""
    usable = (~ours.failed).nonzero()[:, 0][:images]
    originals, p, q = benchmark.originals.images[usable], ours.p[usable], ours.q[usable]
    real_features = judges.features(benchmark.originals.images)
    cue = _cue(benchmark)
    points = []
    for number, confidence in enumerate(asked):
        stored, obtained = torch.zeros_like(originals), torch.zeros(len(q))
        reachable, read_as = torch.zeros(len(q), dtype=torch.bool), torch.zeros_like(q)
        for rows in torch.arange(len(q)).split(_BATCH):
            answer = model.explain(
                originals[rows], q[rows, None].to(model.device), confidence=confidence
            )
            verdict = answer.convincing_certificate.verdict[:, 0].cpu()
            stored[rows] = answer.stored_convincing[:, 0].cpu()
            reachable[rows] = answer.reachable[:, 0].cpu()
            read_as[rows] = verdict.argmax(1)
            obtained[rows] = verdict.gather(1, q[rows, None])[:, 0]
            observe(number * len(q) + int(rows[-1]) + 1)
        made = autoencoders.reconstruct(stored[reachable], p[reachable], q[reachable])
        mean = metrics.mean_and_interval
        points.append(
            CurvePoint(
                asked=confidence,
                n=len(q),
                reachable=mean(reachable),
                reached=mean(metrics.reached(read_as, q)[reachable]),
                obtained=mean(obtained[reachable]),
                elastic_net=mean(metrics.elastic_net(originals[reachable], stored[reachable])),
                im1=mean(metrics.im1(made.pixels, made.by_q, made.by_p)),
                im2=mean(metrics.im2(made.pixels, made.by_q, made.by_all)),
                verdict=_verdict(judges, originals, stored, q, reachable, real_features, cue),
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
    observe: Observe = lambda what, done, total: None,
) -> AuthorsResult:
    """The control, the authors' rows, ours, and what no method made."""
    whole, benchmark = benchmark, limit_authors(benchmark, limit)
    n = len(benchmark.originals)
    gen = benchmark.counterfactuals["GEN"]
    ours = our_counterfactuals(model, benchmark, functools.partial(_count, observe, OURS, n))
    real_features = judges.features(benchmark.originals.images)
    cue = _cue(benchmark)

    def scored(made: StoredCounterfactuals) -> Scored:
        observe(f"scoring {made.method}", 0, 1)
        row = score_as_published(benchmark.originals, made, autoencoders)
        kept = ~made.failed & ~made.black
        originals = benchmark.originals.images
        verdict = _verdict(judges, originals, made.images, made.q, kept, real_features, cue)
        observe(f"scoring {made.method}", 1, 1)
        return Scored(row, verdict)

    theirs = tuple(scored(made) for made in benchmark.counterfactuals.values())
    result = AuthorsResult(
        name=benchmark.name,
        n=n,
        limited=n < len(whole.originals),
        control=tuple(compare(benchmark, [method.row for method in theirs])),
        published=MappingProxyType(
            {
                metric: {method: figure.mean for method, figure in figures.items()}
                for metric, figures in benchmark.published.items()
            }
        ),
        theirs=theirs,
        ours=scored(ours),
        references=tuple(
            scored(made) for made in _references(model, whole, benchmark, ours, cue, seed, observe)
        ),
        target_is_prediction=int((ours.q == ours.p).sum()),
        other_prediction=int((ours.p != gen.p).sum()),
    )
    if not with_curve:
        return result
    total = len(ASKED) * min(CURVE_IMAGES, int((~ours.failed).sum()))
    bar = functools.partial(_count, observe, "asked confidences", total)
    curve = confidence_curve(model, benchmark, autoencoders, judges, ours, observe=bar)
    return dataclasses.replace(result, curve=curve)


def _references(
    model: Model,
    whole: AuthorsBenchmark,
    benchmark: AuthorsBenchmark,
    ours: StoredCounterfactuals,
    cue: Cue | None,
    seed: int,
    observe: Observe,
) -> list[StoredCounterfactuals]:
    """Of the same pairs as ours; read by our model."""
    usable = ~ours.failed
    generator = torch.Generator().manual_seed(seed)
    answers = {REAL: random_of_class(whole.originals, ours.q.clamp(min=0), generator)}
    if cue is None:
        observe(AS_NEAR, 0, 1)
        answers[AS_NEAR] = real_as_near(
            model.checkpoint.recipe.load("train"),
            benchmark.originals.images,
            ours.images,
            ours.q.clamp(min=0),
        )
        observe(AS_NEAR, 1, 1)
    else:
        answers[PERFECT] = cue.paint(benchmark.originals.images, ours.q.clamp(min=0))
    made = []
    for name, images in answers.items():
        read_as = read(model, images, observe, f"reading {name}")
        read_as = torch.where(usable, read_as, FAILED)
        made.append(StoredCounterfactuals(name, images, ours.p, ours.q, read_as))
    return made


def _verdict(
    judges: Judges,
    originals: metrics.Images,
    images: metrics.Images,
    q: metrics.Labels,
    kept: Bool[Tensor, " batch"],
    real_features: Float[Tensor, "real features"],
    cue: Cue | None,
) -> Verdict | None:
    if int(kept.sum()) < 2:
        return None
    return judge(judges, originals[kept], images[kept], q[kept], real_features, cue)


def _cue(benchmark: AuthorsBenchmark) -> Cue | None:
    return CUES.get(DATASETS[benchmark.name])


def _count(observe: Observe, what: str, total: int, done: int) -> None:
    observe(what, done, total)
