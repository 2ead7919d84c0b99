"""Methods of counterfactuals on the same random images and targets, measured alike."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ecinn.attribution import search
from ecinn.auditing.verdict import bits_per_dim
from ecinn.data.dataset import Dataset, Split
from ecinn.errors import InputError
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import Interval, normal_interval, proportion
from ecinn.model import Model
from ecinn.pixels import Labels, StoredImages
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.quality import (
    MAIN_ORACLE,
    PERFECT,
    REAL,
    Panel,
    SecondOpinion,
    Verdict,
    distances,
    predicted_classes,
    random_of_class,
    second_opinion,
)
from ecinn.studies.judges import Judges
from ecinn.training.evaluation import random_offsets

BATCH_SIZE = 64
COUT_IMAGES = 100
"""COUT evaluates an oracle 51 times per image, so it is measured on the first images only."""

Run = Callable[[StoredImages, Int[Tensor, "batch 1"]], search.Counterfactuals]
"""Turns 8-bit images and one target each into counterfactuals."""
Prepare = Callable[[Model, Callable[[], Dataset], Observer], Run]
"""Prepares a method for a model; may load training images."""


def _direct(method: Callable[..., search.Counterfactuals], **options: str) -> Prepare:
    """Wrap a method that needs nothing but the model."""
    return lambda model, *_: (
        lambda images, q: method(model, model.mu_bar, model.pixels(images), q, **options)
    )


def _nearest_image(model: Model, load_training: Callable[[], Dataset], observe: Observer) -> Run:
    images = load_training().images
    predicted = predicted_classes(model, images, observe, "classifying training images")
    return lambda x, q: search.nearest_image(
        model, model.mu_bar, model.pixels(x), q, images=images, predicted=predicted
    )


METHODS: Mapping[str, Prepare] = {
    "ecinn": _direct(search.ecinn),
    "model-means": _direct(search.model_means),
    "pixel-gradient-l1": _direct(search.pixel_gradient, norm="l1"),
    "pixel-gradient-l2": _direct(search.pixel_gradient, norm="l2"),
    "latent-gradient": _direct(search.latent_gradient),
    "nearest-image": _nearest_image,
}


@dataclass(frozen=True)
class Pairs:
    """Images, their predicted classes p, and their target classes q."""

    index: Int[Tensor, " batch"]
    """Positions in the split."""
    images: StoredImages
    p: Labels
    q: Labels


@dataclass(frozen=True)
class Made:
    """A method's counterfactuals of all pairs."""

    images: StoredImages
    """8-bit images; black where there is none."""
    exists: Bool[Tensor, " batch"]
    """False where the method raised an error."""
    failed: Bool[Tensor, " batch"]
    """True where a search gave up and returned its best image."""
    passes: Int[Tensor, " batch"]
    seconds: float
    """Wall-clock time of all batches together."""
    errors: tuple[str, ...]
    """One message per batch that raised an error."""


@dataclass(frozen=True)
class ImageScores:
    """Means over the images that exist."""

    elastic_net: Interval
    l1: Interval
    l2: Interval
    bits_per_dim: Interval
    """−log₂ p(x̂) per dimension under the model, an exact code length of the stored image."""
    diversity: Interval | None
    """Mean over the target classes with two counterfactuals or more."""
    verdict: Verdict
    im1: Interval | None = None
    im2: Interval | None = None
    """Not ×100. Like IM1, None if the judges' autoencoders do not know the classes."""
    cout: Interval | None = None
    """By the convolutional oracle, on the first images; None if it does not know q."""


@dataclass(frozen=True)
class Scores:
    """A method's row. Errors count as neither reached nor changed."""

    method: str
    reached: Interval
    """Share of all pairs whose stored 8-bit image the model classifies as q."""
    class_changed: Interval
    failed: int
    raised: int
    errors: tuple[str, ...]
    passes: Interval | None
    seconds: float | None
    """Mean wall-clock seconds per counterfactual, in batches; None for references."""
    images: ImageScores | None
    """None if fewer than two images exist."""


@dataclass(frozen=True)
class SideBySide:
    """All rows and the conditions under which they were measured."""

    dataset: str
    split: Split
    n: int
    seed: int
    batch_size: int
    cout_images: int
    originals_bits_per_dim: Interval
    originals_frechet: Interval
    """Fréchet distance of the drawn originals to all images of the split: the bias of so few."""
    opinion: SecondOpinion
    references: tuple[Scores, ...]
    methods: tuple[Scores, ...]


@dataclass(frozen=True)
class Bench:
    """Everything that all methods are measured with."""

    model: Model
    data: Dataset
    """All images of the split."""
    panel: Panel
    seed: int = 0

    def bits_per_dim(self, images: StoredImages) -> Interval:
        """Mean code length under the model."""
        generator = torch.Generator().manual_seed(self.seed)
        return normal_interval(bits_per_dim(self.model, images, generator))


Keep = Callable[[SideBySide, Pairs, Mapping[str, Made]], None]


def require_known(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise an error unless every name is known and given once."""
    if not names:
        raise InputError(f"name at least one method of: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise InputError(f"no method is called {name!r}; choose from: {', '.join(known)}")
        if list(names).count(name) > 1:
            raise InputError(f"the method {name} is named twice: name every method once")


def draw_pairs(model: Model, data: Dataset, n: int, seed: int) -> Pairs:
    """Draw random images and a uniformly random target for each."""
    if not 2 <= n <= len(data):
        raise InputError(f"n must be from 2 to {len(data)} (the number of images), not {n}")
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(data), generator=generator)[:n]
    images = data.images[index]
    p = predicted_classes(model, images)
    classes = len(model.class_names)
    return Pairs(index, images, p, (p + random_offsets(n, classes, seed)) % classes)


def make(
    prepare: Callable[[], Run],
    pairs: Pairs,
    device: torch.device,
    count: Callable[[int], None] = lambda done: None,
    batch_size: int = BATCH_SIZE,
) -> Made:
    """Run a method in batches; an error fails its own batch only, and its message is kept."""
    n = len(pairs.q)
    images = torch.zeros_like(pairs.images)
    exists = torch.zeros(n, dtype=torch.bool)
    failed, passes = torch.zeros_like(exists), torch.zeros_like(pairs.q)
    errors: list[str] = []
    seconds = 0.0
    try:
        run = prepare()
    except Exception as error:  # the other methods still run
        return Made(images, exists, failed, passes, seconds, (_message(error),))
    for rows in torch.arange(n).split(batch_size):
        began = time.perf_counter()
        try:
            answer = run(pairs.images[rows], pairs.q[rows, None].to(device))
            stored = answer.stored[:, 0].cpu()
        except Exception as error:
            errors.append(_message(error))
        else:
            seconds += time.perf_counter() - began
            images[rows], exists[rows] = stored, True
            failed[rows] = answer.failed[:, 0].cpu()
            passes[rows] = answer.passes[:, 0].cpu()
        count(int(rows[-1]) + 1)
    return Made(images, exists, failed, passes, seconds, tuple(errors))


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def score(bench: Bench, name: str, pairs: Pairs, made: Made, *, timed: bool = True) -> Scores:
    """Measure one method, or a reference, which has neither passes nor seconds."""
    exists = made.exists
    predicted = torch.full_like(pairs.q, -1)
    predicted[exists] = predicted_classes(bench.model, made.images[exists])
    enough = int(exists.sum()) >= 2
    return Scores(
        method=name,
        reached=proportion(metrics.reached(predicted, pairs.q)),
        class_changed=proportion(metrics.class_changed(predicted, pairs.p)),
        failed=int((made.failed & exists).sum()),
        raised=int((~exists).sum()),
        errors=made.errors,
        passes=normal_interval(made.passes[exists].double()) if timed else None,
        seconds=made.seconds / int(exists.sum()) if timed and enough else None,
        images=_score_images(bench, pairs, made) if enough else None,
    )


def _score_images(bench: Bench, pairs: Pairs, made: Made) -> ImageScores:
    judges, planted = bench.panel.judges, bench.panel.cue is not None
    originals, images = pairs.images[made.exists], made.images[made.exists]
    p, q = pairs.p[made.exists], pairs.q[made.exists]
    values = {
        **distances(originals, images, p, q, None if planted else judges),
        "l1": metrics.l1(originals, images),
        "l2": metrics.l2(originals, images),
    }
    if not planted:
        first = slice(COUT_IMAGES)
        values["cout"] = metrics.transition_curves(
            lambda batch: judges.scores(batch)[MAIN_ORACLE].softmax(1),
            originals[first],
            images[first],
            p[first],
            q[first],
        ).cout
    return ImageScores(
        bits_per_dim=bench.bits_per_dim(images),
        diversity=_diversity(bench.data, images, q),
        verdict=bench.panel.judge(originals, images, q)[0],
        **{name: normal_interval(value) for name, value in values.items()},
    )


def _diversity(data: Dataset, images: StoredImages, q: Labels) -> Interval | None:
    """Mean over classes, whose counterfactuals are independent of each other."""
    values = [
        metrics.diversity(images[q == label], data.images[data.labels == label])
        for label in q.unique().tolist()
        if int((q == label).sum()) > 1 and int((data.labels == label).sum()) > 1
    ]
    if not values:
        return None
    mean = sum(value.mean for value in values) / len(values)
    half_width = math.hypot(*(value.half_width for value in values)) / len(values)
    return Interval(mean, mean - half_width, mean + half_width, sum(v.n for v in values))


def _references(bench: Bench, pairs: Pairs) -> tuple[Scores, ...]:
    """Score real images of q, and for planted cues the perfect answer."""
    generator = torch.Generator().manual_seed(bench.seed)
    references = {REAL: random_of_class(bench.data, pairs.q, generator)}
    if bench.panel.cue is not None:
        references[PERFECT] = bench.panel.cue.paint(pairs.images, pairs.q)
    zeros = torch.zeros_like(pairs.q)
    rows = []
    for name, images in references.items():
        made = Made(images, (images > 0).flatten(1).any(1), zeros > 0, zeros, 0.0, ())
        rows.append(score(bench, name, pairs, made, timed=False))
    return tuple(rows)


def compare_methods(
    model: Model,
    data: Dataset,
    judges: Judges,
    methods: Sequence[str],
    load_training: Callable[[], Dataset],
    *,
    split: Split = "test",
    n: int = 500,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    known: Mapping[str, Prepare] = METHODS,
    observe: Observer = ignore,
    keep: Keep = lambda result, pairs, made: None,
) -> SideBySide:
    """Run and score every method; `keep` receives all results after each method."""
    require_known(methods, tuple(known))
    panel = Panel.of(judges, data.images, model.recipe.dataset)
    bench = Bench(model, data, panel, seed)
    pairs = draw_pairs(model, data, n, seed)
    result = SideBySide(
        dataset=model.recipe.dataset,
        split=split,
        n=n,
        seed=seed,
        batch_size=batch_size,
        cout_images=min(COUT_IMAGES, n),
        originals_bits_per_dim=bench.bits_per_dim(pairs.images),
        originals_frechet=metrics.frechet_distance(
            judges.features(pairs.images), panel.real_features
        ),
        opinion=second_opinion(
            model, judges, pairs.images, pairs.q, seed=seed, cue=panel.cue, observe=observe
        ),
        references=_references(bench, pairs),
        methods=(),
    )
    made: dict[str, Made] = {}
    for name in methods:
        prepare = functools.partial(known[name], model, load_training, observe)
        count = counter(observe, name, n)
        made[name] = make(prepare, pairs, model.device, count, batch_size)
        row = score(bench, name, pairs, made[name])
        result = dataclasses.replace(result, methods=(*result.methods, row))
        keep(result, pairs, made)
    return result
