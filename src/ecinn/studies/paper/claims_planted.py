"""Measure claims where the class is a planted dot, and what cancels out of mean latents."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset
from ecinn.data.planted import FAKE_MNIST_CUE, Cue
from ecinn.drawing.words import show
from ecinn.metrics import counterfactuals, heatmaps
from ecinn.metrics.statistics import Interval, proportion
from ecinn.metrics.strokes import slant, thickness
from ecinn.model import Model
from ecinn.pixels import Labels, StoredImages, to_uint8
from ecinn.progress import counter
from ecinn.studies.benchmark.quality import MAIN_ORACLE, draw_of_class
from ecinn.studies.benchmark.side_by_side import Pairs
from ecinn.studies.judges import Judges
from ecinn.studies.paper.claim import Measurement, limits, share_votes
from ecinn.studies.paper.measuring import Bench, Sample, means, ratio_of_sums

AVERAGED = (1, 10, 100)
"""Latents of each class that Δ is taken between; the means over all training images come last."""
Feature = Callable[[StoredImages], Tensor]
FEATURES: Mapping[str, Feature] = {"slant": slant, "thickness": thickness}
"""Orientation is the example of the paper's Section 3.2, and Section 4.2 names both."""

Latents = Float[Tensor, "classes images dim"]


def measure(bench: Bench, model: Model) -> Iterator[Measurement]:
    """Measure all that need a model of FakeMNIST and no other."""
    cue, sample = FAKE_MNIST_CUE, bench.sample(model)
    yield only_dots_change(sample, cue, bench.judges, bench.context.seed)
    yield from (no_dot_at_tipping_points(sample, cue), no_class_without_dot(sample, cue))
    yield reaches_target(sample)


def few_class_pixels() -> Measurement:
    """Count the pixels that depend on the class: 10 of 784."""
    mask, most = FAKE_MNIST_CUE.mask, limits("few-pixels")["most"]
    share = float(mask.double().mean())
    counts = {"pixels": int(mask.sum()), "all_pixels": mask.numel()}
    return Measurement("few-pixels", {"share": share}, [[share < most]], counts)


def only_dots_change(sample: Sample, cue: Cue, judges: Judges, seed: int) -> Measurement:
    """Locate the change, squared and absolute, and measure what is left outside the dots."""
    dots, change = cue.stencils[sample.p] | cue.stencils[sample.q], sample.change
    outside = (change.abs() * ~cue.mask).flatten(1)
    largest = outside.amax(1)
    squared, absolute, levels = means(
        counterfactuals.share_inside(change, dots),
        heatmaps.share_inside(heatmaps.importance(change), dots),
        256 * (outside.sum(1) / int((~cue.mask).sum())),
        seed=seed,
    )
    before, after = judges.verdicts(sample.images), judges.verdicts(sample.stored)
    kept = {family: proportion(after[family] == before[family]) for family in before}
    truth = proportion(cue.read(sample.stored) == sample.q)
    limit = limits("only-dots")
    votes = [
        squared.low > limit["inside"],
        absolute.low > limit["inside"],
        float(largest.max()) <= limit["visible"],
        levels.high < limit["levels"],
        *(share.low > limit["kept"] for share in kept.values()),
    ]
    return Measurement(
        "only-dots",
        {
            "inside_squared": squared,
            "inside_absolute": absolute,
            "outside_grey_levels": levels,
            "outside_at_most": 256 * float(largest.max()),
            "seen_outside": proportion(largest > limit["visible"]),
            "truth": truth,
            "kept": kept,
        },
        [votes, [truth.high > limit["truth"]]],
        {"visible_levels": 256 * limit["visible"]},
    )


def no_dot_at_tipping_points(sample: Sample, cue: Cue) -> Measurement:
    """Brightness of the dots of p and q at α₀."""
    images = sample.gather(lambda e: e.stored_tipping_point[:, 0])[:, 0].double() / 255
    dots = [images[cue.stencils[label]] for label in (sample.p, sample.q)]
    p, q, brighter = means(*dots, torch.stack(dots).amax(0))
    limit = limits("no-dot")
    votes = [[brighter.high < limit["faint"], brighter.low <= limit["bright"]]]
    return Measurement("no-dot", {"p": p, "q": q, "brighter": brighter}, votes)


@torch.inference_mode()
def no_class_without_dot(sample: Sample, cue: Cue) -> Measurement:
    """Compare p(y|x) of images with all dots erased with 1/K."""
    parts = sample.images.masked_fill(cue.mask, cue.off).split(250)
    posterior = torch.cat([sample.model.predict(part) for part in parts]).cpu().double()
    from_uniform = (posterior - 1 / cue.classes).abs().sum(1) / 2
    distance, surest = means(from_uniform, posterior.amax(1))
    limit, most = limits("no-dot-no-class"), 1 - 1 / cue.classes
    return Measurement(
        "no-dot-no-class",
        {"surest": surest, "from_uniform": distance},
        [[distance.high < limit["near"], distance.low <= limit["half"] * most]],
        {"classes": cue.classes, "most": most},
    )


def reaches_target(sample: Sample) -> Measurement:
    """p(q) of the stored image at α₁."""
    reached = proportion(sample.gather(lambda e: e.convincing_certificate.reached[:, 0]))
    p_q = sample.posterior_of_q(sample.gather(lambda e: e.convincing_certificate.verdict[:, 0]))
    limit = limits("fake-reaches-q")
    certain = proportion(p_q >= limit["nearly_certain"])
    return Measurement(
        "fake-reaches-q",
        {"reached": reached, "certain": certain, "median_p_q": float(p_q.median())},
        [share_votes(reached, limit["share"]), share_votes(certain, limit["nearly_certain"])],
        {"least_p_q": float(p_q.min()), "smoothed_label": sample.smoothed_label},
    )


@dataclass(frozen=True)
class Left:
    """Changes outside the planted cue that a Δ between n latents causes."""

    shares: Mapping[str, Interval]
    """For pixels and features: Σ(change)² / Σ(difference from another image)², over images."""
    same_digit: Interval
    """Share of images that the convolutional oracle classifies as before."""
    says_q: Interval
    """Share of images whose cue, which alone depends on the class, is that of q."""

    @property
    def cancelled(self) -> bool:
        """True if next to nothing but the class is left."""
        limit = limits("cancel")
        gone = all(share.high <= limit["cancelled"] for share in self.shares.values())
        return gone and self.says_q.mean >= limit["reaches_q"]


@dataclass(frozen=True)
class Carried:
    """A feature whose mean differs between classes, and how much of this Δ carries over."""

    apart: float
    """Root mean square distance of two class means, in standard deviations within a class."""
    share: Interval
    """Σ(change · difference) / Σ difference²."""

    @property
    def cancelled(self) -> bool:
        """True if less than half is carried over, or even the opposite."""
        return self.share.high < limits("cancel")["stays"]


def draw_classes(
    data: Dataset, per_class: int, generator: torch.Generator
) -> UInt8[Tensor, "classes images channels height width"]:
    """Draw the same number of random images of every class."""
    classes = range(len(data.class_names))
    drawn = [draw_of_class(data.labels, label, per_class, generator) for label in classes]
    return data.images[torch.stack(drawn)]


def mean_differences(
    latents: Latents, p: Labels, q: Labels, n: int, generator: torch.Generator
) -> Float[Tensor, "batch dim"]:
    """Δ between the means of n latents of q and n of p, drawn anew for every row."""

    def mean(label: Tensor) -> Tensor:
        drawn = torch.randperm(latents.shape[1], generator=generator)[:n]
        return latents[label, drawn].double().mean(0)

    rows = [mean(target) - mean(source) for source, target in zip(p, q, strict=True)]
    return torch.stack(rows).to(latents.dtype)


@torch.inference_mode()
def _decoded(model: Model, z: Float[Tensor, "batch dim"]) -> StoredImages:
    return to_uint8(model.decode(z.to(model.device))).cpu()


def left_over(
    pairs: Pairs,
    after: StoredImages,
    cue: Cue,
    judges: Judges,
    generator: torch.Generator,
    features: Mapping[str, Feature] = FEATURES,
) -> Left:
    """Compare images before and after with the cue erased, and read the cue."""
    before, erased = (images.masked_fill(cue.mask, cue.off) for images in (pairs.images, after))
    shares = {}
    for name, feature in {"pixels": lambda images: images.double() / 255, **features}.items():
        old, new = (feature(images).reshape(len(images), -1) for images in (before, erased))
        change, difference = ((old - other).square().sum(1) for other in (new, old.roll(1, 0)))
        shares[name] = ratio_of_sums(change, difference, generator)
    first, second = (judges.verdicts(images)[MAIN_ORACLE] for images in (before, erased))
    return Left(shares, proportion(first == second), proportion(cue.read(after) == pairs.q))


def independent_parts(
    model: Model,
    pairs: Pairs,
    training: Dataset,
    cue: Cue,
    judges: Judges,
    per_class: int,
    seed: int,
    features: Mapping[str, Feature] = FEATURES,
) -> dict[int, Left]:
    """Move images whose class is the cue by Δ between n latents; the last Δ is that of μ̄."""
    generator = torch.Generator().manual_seed(seed)
    drawn = draw_classes(training, per_class, generator)
    latents = torch.stack([model.encode(images).cpu() for images in drawn])
    every = len(training) // cue.classes
    directions = {
        n: mean_differences(latents, pairs.p, pairs.q, n, generator)
        for n in AVERAGED
        if n <= per_class and n < every
    }
    directions[every] = equations.latent_direction(model.mu_bar.cpu(), pairs.p, pairs.q)
    z = model.encode(pairs.images).cpu()
    return {
        n: left_over(pairs, _decoded(model, z + delta), cue, judges, generator, features)
        for n, delta in directions.items()
    }


def dependent_parts(
    model: Model,
    pairs: Pairs,
    training: Dataset,
    per_class: int,
    seed: int,
    features: Mapping[str, Feature] = FEATURES,
) -> dict[str, Carried]:
    """Measure how much of the differences between classes of real images Δ carries over."""
    generator = torch.Generator().manual_seed(seed)
    drawn = draw_classes(training, per_class, generator)
    delta = equations.latent_direction(model.mu_bar.cpu(), pairs.p, pairs.q)
    after = _decoded(model, model.encode(pairs.images).cpu() + delta)
    parts = {}
    for name, feature in features.items():
        values = feature(drawn.flatten(0, 1)).unflatten(0, drawn.shape[:2])
        mean, variance = values.mean(1), values.var(1).mean()
        change = feature(after) - feature(pairs.images)
        difference = mean[pairs.q] - mean[pairs.p]
        parts[name] = Carried(
            # The mean squared difference of two of K values is twice their variance.
            float((2 * mean.var() / variance).sqrt()),
            ratio_of_sums(change * difference, difference.square(), generator),
        )
    return parts


def averages_cancel(bench: Bench, fake: Model, mnist: Model) -> Measurement:
    """Measure FakeMNIST, where the digit is independent by construction, and MNIST."""
    done = counter(bench.context.observe, "averages of latents", 2)
    sizes = bench.sizes.averaged, bench.context.seed
    pairs, training = bench.sample(fake), bench.training(fake)
    left = independent_parts(fake, pairs, training, FAKE_MNIST_CUE, bench.judges, *sizes)
    done(1)
    carried = dependent_parts(mnist, bench.sample(mnist), bench.training(mnist), *sizes)
    done(2)
    return cancelled(left, carried, fake.mu_bar.cpu())


def cancelled(
    left: Mapping[int, Left], carried: Mapping[str, Carried], mu_bar: Float[Tensor, "classes dim"]
) -> Measurement:
    """Require that next to nothing of the first is left, and less than half of the second."""
    single, every = left[min(left)], left[max(left)]
    votes = [every.cancelled, *(part.cancelled for part in carried.values())]
    features = (f"{name} {show(every.shares[name], '.2g%')}" for name in FEATURES)
    parts = (f"{k} {part.apart:.2f} and {show(part.share, '.2f')}" for k, part in carried.items())
    return Measurement(
        "cancel",
        {
            "left": left,
            "stayed": carried,
            "common_squared": float(mu_bar.mean(0).square().sum()),
            # The mean squared distance of two of K vectors is twice their variance.
            "delta_squared": float(2 * mu_bar.var(0).sum()),
        },
        [votes],
        {
            "n": every.says_q.n,
            "single": single.shares["pixels"],
            "every": every.shares["pixels"],
            "features": "; ".join(features),
            "carried": "; ".join(parts),
        },
        {"meaning": ["gone" if all(votes[1:]) else "kept"]},
        [[n, *part.shares.values(), part.same_digit, part.says_q] for n, part in left.items()],
    )
