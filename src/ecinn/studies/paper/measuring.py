"""Measure claims: explained samples, heatmaps, timed evaluations, correlations."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.attribution import heatmaps
from ecinn.attribution.heatmaps import HeatmapMethod, Heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.data.dataset import Dataset
from ecinn.explanation.result import Explanation
from ecinn.metrics.heatmaps import rank_similarity
from ecinn.metrics.statistics import Interval, bootstrap, bootstrap_interval
from ecinn.model import Model
from ecinn.pixels import Images, Labels, StoredImages
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.heatmap_measures import white_noise_maps
from ecinn.studies.benchmark.heatmaps import SAMPLE
from ecinn.studies.benchmark.quality import random_of_class
from ecinn.studies.benchmark.side_by_side import Pairs, draw_pairs
from ecinn.studies.judges import Judges, load_judges
from ecinn.studies.paper.artefact import Context

GRADIENT_METHODS = heatmaps.METHODS[1:]
RESAMPLES = 1000
BATCH_SIZE = 125

Values = Float[Tensor, " values"]
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements; `docs/paper-figures.md` says how long the defaults take."""

    digits: int = 1000
    samples: int = 1000
    """Digits that are drawn from p(x|y)."""
    searched: int = 64
    """Digits that gradient searches are run on."""
    few: int = 200
    """Digits of the measurements that need fewer."""
    timings: int = 15
    maps: int = 32
    """Digits whose heatmaps are made."""
    twins: int = 6
    """Networks of every activation."""
    twin_images: int = 16_384
    """Images that each of them is trained on."""
    averaged: int = 400
    """Training images of every class, for means of latents and of features."""
    faces: int = 200
    face_maps: int = 24
    """Faces whose heatmaps are made, or that a higher confidence is requested for."""

    def limited(self, n: int) -> "Sizes":
        """Take at most n images, n/10 of what needs gradients, and train networks on 100 n."""
        fewer = max(n // 10, 2)
        slow = {"searched", "timings", "maps", "twins", "face_maps"}
        least = {k: min(v, fewer if k in slow else n) for k, v in vars(self).items()}
        return Sizes(**least | {"twin_images": min(self.twin_images, 100 * n)})


@dataclass(frozen=True)
class Sample(Pairs):
    """Random test images, each explained with a random target."""

    model: Model
    parts: tuple[Explanation, ...]
    """Explanations at α₁, in batches."""
    real: StoredImages
    """Control: a random real image of q."""

    def gather(self, select: Callable[[Explanation], Tensor]) -> Tensor:
        """Concatenate a field of all explanations."""
        return torch.cat([select(part) for part in self.parts]).cpu()

    @property
    def stored(self) -> StoredImages:
        """The convincing counterfactuals as 8-bit images."""
        return self.gather(lambda e: e.stored_convincing[:, 0])

    @property
    def change(self) -> Images:
        """Eq. 4 at α₁: x̂ − x."""
        return self.gather(lambda e: e.heatmap[:, 0])

    @property
    def smoothed_label(self) -> float:
        """1 − s + s/K: the posterior of the correct class that training asks for."""
        smoothing = self.model.checkpoint.recipe.label_smoothing
        return 1 - smoothing + smoothing / len(self.model.class_names)

    def posterior_of_q(self, posterior: Tensor) -> Values:
        """Select p(q) from the posteriors of all classes."""
        return posterior.double().gather(1, self.q[:, None])[:, 0]


def explained_sample(
    model: Model, data: Dataset, n: int, seed: int, observe: Observer = ignore
) -> Sample:
    """Draw images and targets and explain them; the classifier also reads the stored images."""
    pairs, parts = draw_pairs(model, data, n, seed), []
    count = counter(observe, f"explaining {model.recipe.dataset}", n)
    for rows in torch.arange(n).split(BATCH_SIZE):
        q = pairs.q[rows, None]
        parts.append(model.explain(pairs.images[rows], q, confidence="alpha_1"))
        count(int(rows[-1]) + 1)
    real = random_of_class(data, pairs.q, torch.Generator().manual_seed(seed + 1))
    return Sample(**vars(pairs), model=model, parts=tuple(parts), real=real)


@dataclass(frozen=True)
class Bench:
    """Settings of a run, and what its columns share."""

    context: Context
    sizes: Sizes

    @cached_property
    def sample(self) -> Callable[[Model], Sample]:
        """Explain random test digits with a model, once."""

        def explained(model: Model) -> Sample:
            data, context = self.test(model), self.context
            return explained_sample(model, data, self.sizes.digits, context.seed, context.observe)

        return cache(explained)

    @cached_property
    def once(self) -> Callable[[Callable[["Bench"], T]], T]:
        """Call a function of the bench that no model takes part in, once for all columns."""
        return cache(lambda function: function(self))

    @cached_property
    def judges(self) -> Judges:
        """The shipped judges of digits."""
        return load_judges("mnist")

    def explained(self, model: Model, pairs: Pairs, n: int) -> "ExplainedImages":
        """Take the first pairs, with training images that gradient methods compare with."""
        training = self.training(model)
        generator = torch.Generator().manual_seed(self.context.seed)
        drawn = torch.randperm(len(training), generator=generator)[:SAMPLE]
        x, compared = model.pixels(pairs.images[:n]), model.pixels(training.images[drawn])
        p, q = (labels[:n].to(model.device) for labels in (pairs.p, pairs.q))
        return ExplainedImages(model, x, p, q, compared)

    def test(self, model: Model) -> Dataset:
        """Return the test images of a model."""
        return self.context.data(model.recipe.dataset, "test")

    def training(self, model: Model) -> Dataset:
        """Return the training images of a model."""
        return self.context.data(model.recipe.dataset, "train")


@dataclass(frozen=True)
class ExplainedImages:
    """Images with p and q, and the training images that gradient methods compare with."""

    model: Model | None
    """None for images that only other networks explain."""
    x: Images
    p: Labels
    q: Labels
    training: Float[Tensor, "sample channels height width"]

    @property
    def inn(self) -> ExplainedINN:
        """The model as `heatmaps` takes it."""
        assert self.model is not None
        return ExplainedINN(self.model.classifier, self.model.mu_bar)

    def maps(
        self,
        network: ExplainedINN | nn.Module,
        methods: Sequence[HeatmapMethod] = GRADIENT_METHODS,
        done: Callable[[int], None] = lambda number: None,
        batch_size: int = heatmaps.BATCH_SIZE,
    ) -> dict[str, Heatmaps]:
        """Make the maps of several methods."""
        images, made = (self.x, self.p, self.q), dict[str, Heatmaps]()
        options: dict[str, Any] = {
            "baseline": self.training.mean(0),
            "baselines": self.training[: heatmaps.DEFAULTS.baselines],
            "batch_size": batch_size,
        }
        for method in methods:
            made[method] = heatmaps.heatmaps(network, *images, method, **options)
            done(len(made))
        return made

    def white_noise(self, network: ExplainedINN | nn.Module, generator: torch.Generator) -> Images:
        """Make the maps of `white_noise_maps`, with which those of `maps` compare."""
        return white_noise_maps(network, self.x, self.training.mean(0), generator)


def median_seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Time a function, after one run that is not timed.

    On a CPU in processor time, which other work on the machine does not take; on a GPU in
    seconds until it has finished.
    """

    def clock() -> float:
        if device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    run()
    seconds = []
    for _ in range(repeats):
        start = clock()
        run()
        seconds.append(clock() - start)
    return statistics.median_high(seconds)


def means(*columns: Tensor, seed: int = 0) -> list[Interval]:
    """Return the mean of every column, bootstrapped one after the other."""
    generator = torch.Generator().manual_seed(seed)
    return [bootstrap_interval(column, generator=generator) for column in columns]


def mean_difference(
    a: Float[Tensor, " first"], b: Float[Tensor, " second"], generator: torch.Generator
) -> Interval:
    """mean(a) − mean(b) of independent values in [0, 1], each bootstrapped.

    Without values of either the interval is [−1, 1].
    """
    if not len(a) or not len(b):
        return Interval(0.0, -1.0, 1.0, 0)
    first, second = (
        v.double()[torch.randint(len(v), (RESAMPLES, len(v)), generator=generator)].mean(1)
        for v in (a, b)
    )
    low, high = (first - second).quantile(first.new_tensor([0.025, 0.975])).tolist()
    return Interval(float(a.double().mean() - b.double().mean()), low, high, min(len(a), len(b)))


def over_pairs(statistic: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Interval]:
    """Turn a statistic of two columns into its bootstrap interval over finite pairs."""

    def measure(
        a: Values, b: Values, generator: torch.Generator, resamples: int = RESAMPLES
    ) -> Interval:
        finite = torch.stack([a, b]).isfinite().all(0)
        columns = (column[finite].double() for column in (a, b))
        return bootstrap(statistic, *columns, resamples=resamples, generator=generator)

    return measure


@over_pairs
def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's r; 0 where either is constant."""
    a, b = (column - column.mean(-1, keepdim=True) for column in (a, b))
    scale = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return ((a * b).sum(-1) / scale).nan_to_num()


@over_pairs
def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's ρ."""
    return rank_similarity(*(column.reshape(-1, 1, a.shape[-1]) for column in (a, b)))


@over_pairs
def ratio_of_sums(part: Tensor, whole: Tensor) -> Tensor:
    """Σ part / Σ whole."""
    return part.sum(-1) / whole.sum(-1)
