"""Several methods on the same random images and targets, each measured in the same way."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset
from ecinn.data.planted import Cue
from ecinn.errors import InputError
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.counterfactuals import Images, Labels, MeanWithInterval
from ecinn.model import Model
from ecinn.pixels import dequantise
from ecinn.studies.benchmark.methods import METHODS, Run, Workshop, read, require_known
from ecinn.studies.benchmark.quality import (
    CUES,
    MAIN_ORACLE,
    Observe,
    Verdict,
    judge,
    random_of_class,
)
from ecinn.studies.judges import Judges, scaled
from ecinn.training.evaluation import random_offsets

BATCH_SIZE = 64
COUT_IMAGES = 100
"""COUT asks an oracle 51 times per image, so it is taken over the first images only."""
REAL = "real image of q"
PERFECT = "perfect answer"


@dataclass(frozen=True)
class Pairs:
    """Test images, the classes they are read as, and the classes they are to become."""

    index: Int[Tensor, " batch"]
    """Among the test images."""
    images: Images
    p: Labels
    q: Labels


@dataclass(frozen=True)
class Made:
    """What a method made of all pairs."""

    images: Images
    """Stored 8-bit images; black where there is none."""
    exists: Bool[Tensor, " batch"]
    """Where the method did not raise an error."""
    failed: Bool[Tensor, " batch"]
    """Where the method itself found nothing and gives the best that it had."""
    passes: Int[Tensor, " batch"]
    seconds: float
    """Wall-clock, of all batches together."""
    errors: tuple[str, ...]
    """One message per batch that raised an error."""


@dataclass(frozen=True)
class ImageScores:
    """Means over the images that exist."""

    elastic_net: MeanWithInterval
    l1: MeanWithInterval
    l2: MeanWithInterval
    im1: MeanWithInterval | None
    im2: MeanWithInterval | None
    """Not ×100. None, like IM1, where the judges' autoencoders do not know the classes."""
    bits_per_dim: MeanWithInterval
    """−log₂ p(x̂) per dimension of the model itself, an exact code length of the stored image."""
    diversity: float | None
    """Mean over the target classes with two counterfactuals or more."""
    cout: MeanWithInterval | None
    """By the convolutional oracle, over the first images; None where it does not know q."""
    verdict: Verdict


@dataclass(frozen=True)
class Scores:
    """A method's row. Failures count as not reached and not changed."""

    method: str
    reached: MeanWithInterval
    """Share whose stored 8-bit image the classifier reads as q, over all pairs."""
    class_changed: MeanWithInterval
    failed: int
    raised: int
    errors: tuple[str, ...]
    passes: MeanWithInterval | None
    seconds: float | None
    """Mean wall-clock seconds per counterfactual, in batches. None for what is no method."""
    images: ImageScores | None
    """None where fewer than two images exist."""


@dataclass(frozen=True)
class SideBySide:
    """All rows, and what they were measured on."""

    dataset: str
    n: int
    seed: int
    batch_size: int
    cout_images: int
    originals_bits_per_dim: MeanWithInterval
    originals_frechet: float
    """Of the originals that were drawn, to all test images: what chance alone gives."""
    references: tuple[Scores, ...]
    methods: tuple[Scores, ...]


@dataclass(frozen=True)
class Bench:
    """What every method is measured with."""

    model: Model
    data: Dataset
    """All test images: what counterfactuals should look like."""
    judges: Judges
    seed: int = 0
    cue: Cue | None = None

    def real_features(self) -> Float[Tensor, "real features"]:
        """Of all test images."""
        return self.judges.features(self.data.images)


Keep = Callable[[SideBySide, Pairs, Mapping[str, Made]], None]


def draw_pairs(model: Model, data: Dataset, n: int, seed: int) -> Pairs:
    """Random test images and a uniformly random target for each."""
    if not 2 <= n <= len(data):
        raise InputError(f"n lies between 2 and the {len(data)} test images, not at {n}")
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(data), generator=generator)[:n]
    images = data.images[index]
    p = read(model, images)
    classes = len(model.class_names)
    return Pairs(index, images, p, (p + random_offsets(n, classes, seed)) % classes)


def make(
    prepare: Callable[[], Run],
    pairs: Pairs,
    device: torch.device,
    observe: Callable[[int], None] = lambda done: None,
    batch_size: int = BATCH_SIZE,
) -> Made:
    """Run a method in batches; a batch that raises an error fails alone and keeps its message."""
    n = len(pairs.q)
    images = torch.zeros_like(pairs.images)
    exists = torch.zeros(n, dtype=torch.bool)
    failed, passes = torch.zeros_like(exists), torch.zeros_like(pairs.q)
    errors: list[str] = []
    seconds = 0.0
    try:
        run = prepare()
    except Exception as error:  # whatever it is, the other methods go on
        return Made(images, exists, failed, passes, seconds, (_message(error),))
    for rows in torch.arange(n).split(batch_size):
        began = time.perf_counter()
        try:
            with exact_convolutions():
                answer = run(pairs.images[rows], pairs.q[rows, None].to(device))
            stored = answer.stored[:, 0].cpu()
        except Exception as error:
            errors.append(_message(error))
        else:
            seconds += time.perf_counter() - began
            images[rows], exists[rows] = stored, True
            failed[rows] = answer.failed[:, 0].cpu()
            passes[rows] = answer.passes[:, 0].cpu()
        observe(int(rows[-1]) + 1)
    return Made(images, exists, failed, passes, seconds, tuple(errors))


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def score(
    bench: Bench,
    real_features: Float[Tensor, "real features"],
    name: str,
    pairs: Pairs,
    made: Made,
    *,
    timed: bool = True,
) -> Scores:
    """Every figure of one method."""
    there = made.exists
    read_as = torch.full_like(pairs.q, -1)
    read_as[there] = read(bench.model, made.images[there])
    enough = int(there.sum()) >= 2
    return Scores(
        method=name,
        reached=metrics.mean_and_interval(metrics.reached(read_as, pairs.q)),
        class_changed=metrics.mean_and_interval(metrics.class_changed(read_as, pairs.p)),
        failed=int((made.failed & there).sum()),
        raised=int((~there).sum()),
        errors=made.errors,
        passes=metrics.mean_and_interval(made.passes[there].double()) if timed else None,
        seconds=made.seconds / int(there.sum()) if timed and enough else None,
        images=_score_images(bench, real_features, pairs, made) if enough else None,
    )


def _score_images(
    bench: Bench, real_features: Float[Tensor, "real features"], pairs: Pairs, made: Made
) -> ImageScores:
    mean, judges = metrics.mean_and_interval, bench.judges
    originals, images = pairs.images[made.exists], made.images[made.exists]
    p, q = pairs.p[made.exists], pairs.q[made.exists]
    im1 = im2 = cout = None
    if bench.cue is None:
        by_q = judges.reconstruct(images, q)
        im1 = mean(metrics.im1(scaled(images), by_q, judges.reconstruct(images, p)))
        im2 = mean(metrics.im2(scaled(images), by_q, judges.reconstruct(images)))
        first = slice(COUT_IMAGES)
        curves = metrics.transition_curves(
            lambda some: judges.scores(some)[MAIN_ORACLE].softmax(1),
            originals[first],
            images[first],
            p[first],
            q[first],
        )
        cout = mean(curves.cout)
    return ImageScores(
        elastic_net=mean(metrics.elastic_net(originals, images)),
        l1=mean(metrics.l1(originals, images)),
        l2=mean(metrics.l2(originals, images)),
        im1=im1,
        im2=im2,
        bits_per_dim=mean(code_length(bench.model, images, bench.seed)),
        diversity=_diversity(bench.data, images, q),
        cout=cout,
        verdict=judge(judges, originals, images, q, real_features, bench.cue),
    )


@torch.inference_mode()
def code_length(model: Model, images: Images, seed: int) -> Float[Tensor, " batch"]:
    """−log₂ p(x) per dimension with one draw of dequantisation noise."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with exact_convolutions():
        log_p = model.classifier.log_marginal(dequantise(images.to(model.device), generator))
    return equations.bits_per_dim(log_p, model.classifier.architecture.dim).cpu()


def _diversity(data: Dataset, images: Images, q: Labels) -> float | None:
    values = [
        metrics.diversity(images[q == label], data.images[data.labels == label])
        for label in q.unique().tolist()
        if int((q == label).sum()) > 1 and int((data.labels == label).sum()) > 1
    ]
    return sum(values) / len(values) if values else None


def references(bench: Bench, pairs: Pairs) -> Mapping[str, Images]:
    """What no method made: real images of q, and of planted data the perfect answer."""
    generator = torch.Generator().manual_seed(bench.seed)
    images = {REAL: random_of_class(bench.data, pairs.q, generator)}
    if bench.cue is not None:
        images[PERFECT] = bench.cue.paint(pairs.images, pairs.q)
    return images


def compare_methods(
    model: Model,
    data: Dataset,
    judges: Judges,
    methods: Sequence[str],
    load_training: Callable[[], Dataset],
    *,
    n: int = 500,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    observe: Observe = lambda what, done, total: None,
    keep: Keep = lambda so_far, pairs, made: None,
) -> SideBySide:
    """Run and score every method; `keep` is given all there is after each."""
    require_known(methods)
    dataset = model.checkpoint.recipe.dataset
    bench = Bench(model, data, judges, seed, CUES.get(dataset))
    pairs = draw_pairs(model, data, n, seed)
    real_features = bench.real_features()
    result = SideBySide(
        dataset=dataset,
        n=n,
        seed=seed,
        batch_size=batch_size,
        cout_images=min(COUT_IMAGES, n),
        originals_bits_per_dim=metrics.mean_and_interval(code_length(model, pairs.images, seed)),
        originals_frechet=metrics.frechet_distance(judges.features(pairs.images), real_features),
        references=tuple(
            score(bench, real_features, name, pairs, _given(images), timed=False)
            for name, images in references(bench, pairs).items()
        ),
        methods=(),
    )
    workshop = Workshop(model, load_training, observe)
    made: dict[str, Made] = {}
    for name in methods:
        bar = functools.partial(_count, observe, name, n)
        prepare = functools.partial(METHODS[name], workshop)
        made[name] = make(prepare, pairs, model.device, bar, batch_size)
        row = score(bench, real_features, name, pairs, made[name])
        result = dataclasses.replace(result, methods=(*result.methods, row))
        keep(result, pairs, made)
    return result


def _count(observe: Observe, name: str, n: int, done: int) -> None:
    observe(name, done, n)


def _given(images: Images) -> Made:
    """Images that no method had to make; black ones are not there."""
    nothing = torch.zeros(len(images), dtype=torch.long)
    exists = (images > 0).flatten(1).any(1)
    return Made(images, exists, nothing > 0, nothing, 0.0, ())
