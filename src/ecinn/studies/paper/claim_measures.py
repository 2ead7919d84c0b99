"""What claims are measured with: correlations, counted passes, explained samples."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.result import Explanation
from ecinn.metrics.heatmaps import map_similarity, rank_similarity
from ecinn.metrics.statistics import Interval
from ecinn.model import Model
from ecinn.pixels import Labels
from ecinn.pixels import StoredImages as Images
from ecinn.studies.benchmark.quality import random_of_class
from ecinn.studies.benchmark.side_by_side import draw_pairs

RESAMPLES = 1000
BATCH_SIZE = 125

Values = Float[Tensor, " values"]


@dataclass(frozen=True)
class Sample:
    """Random test images, explained with a random target each."""

    model: Model
    index: Labels
    """Among the test images."""
    images: Images
    p: Labels
    q: Labels
    parts: tuple[Explanation, ...]
    """At α₁, verified nothing, in batches."""
    real: Images
    """The control: a random real image of q."""

    def gather(self, of: Callable[[Explanation], Tensor]) -> Tensor:
        """A field of the explanations, of the only target, of all images."""
        return torch.cat([of(part) for part in self.parts]).cpu()

    @property
    def stored(self) -> Images:
        """The convincing counterfactuals as 8-bit images."""
        return self.gather(lambda e: e.stored_convincing[:, 0])

    @property
    def smoothed_label(self) -> float:
        """1 − s + s/K: the p(y) of the right class that training asks for."""
        smoothing = self.model.checkpoint.recipe.label_smoothing
        return 1 - smoothing + smoothing / len(self.model.class_names)

    @property
    def change(self) -> Float[Tensor, "batch channels height width"]:
        """Eq. 4 at α₁."""
        return self.gather(lambda e: e.heatmap[:, 0])


def explained_sample(
    model: Model,
    data: Dataset,
    n: int,
    seed: int,
    observe: Callable[[int], None] = lambda done: None,
) -> Sample:
    """Draw images and targets, and explain them; the classifier reads the stored images, too."""
    pairs = draw_pairs(model, data, n, seed)
    parts = []
    for rows in torch.arange(n).split(BATCH_SIZE):
        parts.append(model.explain(pairs.images[rows], pairs.q[rows, None]))
        observe(int(rows[-1]) + 1)
    real = random_of_class(data, pairs.q, torch.Generator().manual_seed(seed + 1))
    return Sample(model, pairs.index, pairs.images, pairs.p, pairs.q, tuple(parts), real)


class CountedClassifier:
    """A classifier that counts how often it is asked, and how many images at a time."""

    def __init__(self, classifier: InvertibleClassifier) -> None:
        self.classifier = classifier
        self.encoded: list[int] = []
        self.decoded: list[int] = []

    @property
    def mu(self) -> Tensor:
        """Class means."""
        return self.classifier.mu

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x) and log |det J|."""
        self.encoded.append(len(x))
        return self.classifier.encode_with_log_det(x)

    def decode(self, z: Tensor) -> Tensor:
        """x = f⁻¹(z)."""
        self.decoded.append(len(z))
        return self.classifier.decode(z)


def median_seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Of one run to the end of its work on the device, after one that nobody times."""
    run()
    seconds = []
    for _ in range(repeats):
        _wait_for(device)
        began = time.perf_counter()
        run()
        _wait_for(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[repeats // 2]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pearson(a: Values, b: Values, generator: torch.Generator) -> Interval:
    """Pearson's r with the percentile bootstrap's interval over pairs."""
    return over_pairs(_pearson, a, b, generator, least=3)


def spearman(a: Values, b: Values, generator: torch.Generator) -> Interval:
    """Spearman's ρ with the percentile bootstrap's interval over pairs."""

    def of(a: Tensor, b: Tensor) -> Tensor:
        return rank_similarity(a[:, None], b[:, None])

    return over_pairs(of, a, b, generator, least=3)


def _pearson(
    a: Float[Tensor, "samples values"], b: Float[Tensor, "samples values"]
) -> Float[Tensor, " samples"]:
    a, b = (each - each.mean(1, keepdim=True) for each in (a, b))
    return map_similarity(a[:, None, None], b[:, None, None])


def share_of(part: Values, whole: Values, generator: torch.Generator) -> Interval:
    """Σ part / Σ whole with the percentile bootstrap's interval over pairs."""
    return over_pairs(lambda a, b: a.sum(1) / b.sum(1), part, whole, generator, least=1)


def over_pairs(
    of: Callable[[Tensor, Tensor], Tensor],
    a: Values,
    b: Values,
    generator: torch.Generator,
    *,
    least: int,
) -> Interval:
    """What a function of (samples, values) says of the finite pairs, with its interval."""
    both = a.isfinite() & b.isfinite()
    a, b = a[both].double(), b[both].double()
    if len(a) < least:
        raise InputError(f"a share or correlation needs {least} pairs or more, not {len(a)}")
    drawn = torch.randint(len(a), (RESAMPLES, len(a)), generator=generator)
    ends = of(a[drawn], b[drawn]).quantile(torch.tensor([0.025, 0.975], dtype=a.dtype))
    low, high = ends.tolist()
    return Interval(float(of(a[None], b[None])), low, high, len(a))
