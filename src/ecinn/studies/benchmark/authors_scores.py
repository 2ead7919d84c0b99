"""Score counterfactuals as the authors did, image by image, and compare with published figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import Interval, normal_interval, paired_share_difference, proportion
from ecinn.pixels import StoredImages
from ecinn.studies.benchmark.authors_files import (
    AuthorsBenchmark,
    ClassAutoencoders,
    Score,
    StoredCounterfactuals,
)
from ecinn.studies.benchmark.quality import Panel, Verdict, distances

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


def score(
    originals: StoredImages,
    made: StoredCounterfactuals,
    autoencoders: ClassAutoencoders | None = None,
    panel: Panel | None = None,
) -> Scored:
    """Score counterfactuals of these originals as the authors did, and with our judges.

    The authors scale whole arrays to [−½, ½] by minimum and maximum. All of theirs span 0 to 255,
    so this equals k/255 − ½, which is used here: no image's score depends on another image.
    """
    kept, verdict = made.kept, None
    originals, images, p, q = originals[kept], made.images[kept], made.p[kept], made.q[kept]
    of_all = {
        "class_changed": metrics.class_changed(made.predicted, made.p),
        "reached": metrics.reached(made.predicted, made.q),
    }
    of_kept = distances(originals, images, p, q, autoencoders)
    intervals: dict[str, Any] = {name: proportion(v) for name, v in of_all.items()}
    intervals |= {name: normal_interval(v) for name, v in of_kept.items()}
    published = {"class_changed": of_all["class_changed"], **of_kept}
    if panel is not None and len(images) > 1:
        verdict, judged = panel.judge(originals, images, q)
        of_kept |= judged
    row = Row(
        method=made.method,
        failed=int(made.failed.sum()),
        black=int((~kept & ~made.failed).sum()),
        as_published={METRICS[name]: _published_form(v.double()) for name, v in published.items()},
        verdict=verdict,
        **intervals,
    )
    return Scored(row, kept, of_all, of_kept)


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
