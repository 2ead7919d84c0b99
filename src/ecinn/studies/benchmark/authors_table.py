"""The authors' benchmark scored again: GB, GL and GEN (ECINN), and any further method beside them.

FID, Oracle and LabelVariationScore cannot be computed again: they depend on the authors'
classifiers, which are not published. Their published values stay in `AuthorsBenchmark.published`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.counterfactuals import MeanWithInterval
from ecinn.studies.benchmark.authors_files import AuthorsBenchmark, StoredCounterfactuals
from ecinn.studies.benchmark.autoencoders import ClassAutoencoders

NOT_REPRODUCIBLE = ("FID", "Oracle", "LabelVariationScore")
"""Published metrics that depend on classifiers which are not at hand."""


@dataclass(frozen=True)
class Row:
    """A method's scores. Failed and all-black counterfactuals count for the first two only."""

    method: str
    class_changed: MeanWithInterval
    """The authors' target-class validity: over all images, where a failure changed nothing."""
    reached: MeanWithInterval
    """Share read as q, over all images."""
    elastic_net: MeanWithInterval
    im1: MeanWithInterval | None
    im2: MeanWithInterval | None
    """Not ×100. None, like IM1, where no autoencoders were given."""
    failed: int
    black: int
    """All-black images that the method did not call failed."""


@dataclass(frozen=True)
class Comparison:
    """One figure computed here and as the authors published it."""

    metric: str
    method: str
    here: MeanWithInterval
    published: MeanWithInterval

    @property
    def digits(self) -> float:
        """Significant digits to which mean and interval agree: −log₁₀ of the relative difference.

        −inf where they are over different numbers of images.
        """
        if self.here.n != self.published.n:
            return -math.inf
        pairs = (
            (self.here.mean, self.published.mean),
            (self.here.half_width, self.published.half_width),
        )
        apart = max(abs(here - published) / (abs(published) or 1.0) for here, published in pairs)
        return -math.log10(apart) if apart else math.inf

    def __str__(self) -> str:
        """Both at full precision."""
        return (
            f"{self.metric} of {self.method}: here {self.here.mean!r} ± {self.here.half_width!r}, "
            f"published {self.published.mean!r} ± {self.published.half_width!r} "
            f"(over {self.here.n} and {self.published.n} images)"
        )


def score(
    originals: Dataset,
    counterfactuals: StoredCounterfactuals,
    autoencoders: ClassAutoencoders | None = None,
) -> Row:
    """Score counterfactuals of these originals as the authors did.

    They scale whole arrays to [−½, ½] by minimum and maximum; all of theirs span 0 to 255, where
    that is k/255 − ½, which we use, so that no image's score depends on another image.
    """
    if len(originals) != len(counterfactuals.images):
        raise InputError(
            f"{counterfactuals.method} has {len(counterfactuals.images)} counterfactuals "
            f"of {len(originals)} originals: give one of each, in the same order"
        )
    read_as, p, q = counterfactuals.read_as, counterfactuals.p, counterfactuals.q
    failed, black = counterfactuals.failed, counterfactuals.black
    kept = ~failed & ~black
    images = counterfactuals.images[kept]
    im1 = im2 = None
    if autoencoders is not None:
        made = autoencoders.reconstruct(images, p[kept], q[kept])
        im1 = metrics.mean_and_interval(metrics.im1(made.pixels, made.by_q, made.by_p))
        im2 = metrics.mean_and_interval(metrics.im2(made.pixels, made.by_q, made.by_all))
    return Row(
        method=counterfactuals.method,
        class_changed=metrics.mean_and_interval(metrics.class_changed(read_as, p)),
        reached=metrics.mean_and_interval(metrics.reached(read_as, q)),
        elastic_net=metrics.mean_and_interval(metrics.elastic_net(originals.images[kept], images)),
        im1=im1,
        im2=im2,
        failed=int(failed.sum()),
        black=int((black & ~failed).sum()),
    )


def score_all(
    benchmark: AuthorsBenchmark,
    autoencoders: ClassAutoencoders | None = None,
    further: Sequence[StoredCounterfactuals] = (),
) -> list[Row]:
    """A row for every method of the authors, then one for every further method."""
    methods = [*benchmark.counterfactuals.values(), *further]
    return [score(benchmark.originals, method, autoencoders) for method in methods]


def compare(benchmark: AuthorsBenchmark, rows: Sequence[Row]) -> list[Comparison]:
    """Every figure of these rows that the authors published too."""
    comparisons = []
    for row in rows:
        figures = {
            "TargetClassValidity": row.class_changed,
            "ElasticNet": row.elastic_net,
            "IM1": row.im1,
            "IM2": row.im2,
        }
        for metric, here in figures.items():
            theirs = benchmark.published.get(metric, {}).get(row.method)
            if here is None or theirs is None or theirs.half_width is None or theirs.n is None:
                continue
            published = MeanWithInterval(theirs.mean, theirs.half_width, theirs.n)
            comparisons.append(Comparison(metric, row.method, here, published))
    return comparisons
