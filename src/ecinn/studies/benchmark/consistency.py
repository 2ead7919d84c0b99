"""Compare asked confidences with those of the stored counterfactuals."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset, Split
from ecinn.drawing.table import Table
from ecinn.errors import InputError
from ecinn.explanation.correction import Line, Points, correct_alpha
from ecinn.explanation.reading import stored_posterior
from ecinn.metrics.counterfactuals import (
    ConfidenceConsistency,
    confidence_consistency,
    mean_over_images,
)
from ecinn.metrics.statistics import Interval, normal_interval
from ecinn.model import Model
from ecinn.pixels import Labels, StoredImages
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.quality import predicted_classes
from ecinn.studies.benchmark.record import table

ASKED = tuple(round(0.05 * step, 2) for step in range(1, 20))
_BATCH = 64

PerLevel = Float[Tensor, "batch levels"]


@dataclass(frozen=True)
class Variant:
    """Counterfactuals with or without correction of α."""

    consistency: ConfidenceConsistency
    passes: Interval
    """Mean network evaluations per counterfactual."""
    obtained: tuple[Interval, ...]
    """Mean p(p) of the stored 8-bit images at every asked level; nan without images."""


@dataclass(frozen=True)
class Consistency:
    """Images of two classes moved towards each other, at every level of p(p)."""

    classes: tuple[str, str]
    split: Split
    n: int
    """Images; each is moved to every level."""
    seed: int
    asked: tuple[float, ...]
    unreachable: int
    """Pairs of image and level that no α reaches; they are left out."""
    plain: Variant
    corrected: Variant
    """α is corrected where the stored image misses the asked confidence."""


def measure_consistency(
    model: Model,
    data: Dataset,
    classes: tuple[int, int],
    *,
    split: Split = "test",
    n: int = 100,
    seed: int = 0,
    asked: Sequence[float] = ASKED,
    observe: Observer = ignore,
) -> Consistency:
    """Move random, correctly classified images of two classes towards the other class."""
    images, p = draw_of_classes(model, data, classes, n, seed)
    count = counter(observe, "asked confidences", n)
    batches = []
    for rows in torch.arange(n).split(_BATCH):
        batches.append(_confidences(model, images[rows], p[rows], sum(classes) - p[rows], asked))
        count(int(rows[-1]) + 1)
    plain, corrected, corrections, reachability = (
        torch.cat(parts) for parts in zip(*batches, strict=True)
    )
    reachable = reachability.bool()

    def variant(obtained: PerLevel, passes: PerLevel) -> Variant:
        levels = torch.tensor(asked, dtype=torch.float64).expand_as(obtained)
        columns = zip(obtained.T, reachable.T, strict=True)
        generator = torch.Generator().manual_seed(seed)
        return Variant(
            confidence_consistency(levels, obtained, reachable, generator=generator),
            mean_over_images(passes, reachable, generator=generator),
            tuple(normal_interval(column[rows]) for column, rows in columns),
        )

    return Consistency(
        classes=(model.class_names[classes[0]], model.class_names[classes[1]]),
        split=split,
        n=n,
        seed=seed,
        asked=tuple(asked),
        unreachable=int((~reachable).sum()),
        plain=variant(plain, torch.full_like(plain, 2.0)),
        # One pass to check the stored image, then a decode and an encode per correction.
        corrected=variant(corrected, 3 + 2 * corrections),
    )


def draw_of_classes(
    model: Model, data: Dataset, classes: tuple[int, int], n: int, seed: int
) -> tuple[StoredImages, Labels]:
    """Draw correctly classified images of either class, and their labels."""
    known = len(model.class_names)
    if len(set(classes)) < 2 or not all(0 <= label < known for label in classes):
        raise InputError(f"classes must be two different ones of 0 to {known - 1}, not {classes}")
    if n < 1:
        raise InputError(f"n must be at least 1 image, not {n}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data), generator=generator)
    labels = data.labels[order]
    order = order[(labels == classes[0]) | (labels == classes[1])]
    # Try a few more than needed, since some are misclassified, before trying all of them.
    for candidates in (order[: n + 20], order):
        p = predicted_classes(model, data.images[candidates])
        right = (p == data.labels[candidates]).nonzero()[:, 0]
        if len(right) >= n:
            return data.images[candidates[right[:n]]], p[right[:n]]
    raise InputError(f"n must be at most the {len(right)} images of these two classes, not {n}")


@torch.inference_mode()
def _confidences(
    model: Model, images: StoredImages, p: Labels, q: Labels, asked: Sequence[float]
) -> tuple[PerLevel, ...]:
    """p(p) of the stored images, plain and corrected, with corrections and reachability."""
    p, q = p.to(model.device), q.to(model.device)
    z = model.encode_with_log_det(model.pixels(images))[0]
    delta = equations.latent_direction(model.mu_bar, p, q)
    original = equations.log_posterior(z, model.mu, model.tau).exp()
    columns: list[tuple[Tensor, ...]] = []
    for level in asked:
        alpha, reachable = equations.departing_alpha(z, delta, model.mu, model.tau, p, level)
        image = model.decode(equations.corrected_latent(z, alpha, delta))
        stored = stored_posterior(model, image)
        # The same line, walked backwards, leads to p.
        first = Points(-alpha[:, None], image[:, None], stored[:, None])
        search = correct_alpha(model, Line(z, -delta, p), original, q, level, reachable, first)
        obtained = (each.gather(1, p[:, None])[:, 0] for each in (stored, search.end.answer))
        columns.append((*obtained, search.corrections, reachable))
    return tuple(torch.stack(parts, 1).double().cpu() for parts in zip(*columns, strict=True))


def consistency_tables(result: Consistency) -> tuple[Table, ...]:
    """Lay out both variants, and the mean confidence obtained at every asked level."""
    variants = {"plain": result.plain, "corrected": result.corrected}
    pairs = result.n * len(result.asked) - result.unreachable
    obtained = zip(result.asked, result.plain.obtained, result.corrected.obtained, strict=True)
    rows = [{"name": name, **vars(variant)} for name, variant in variants.items()]
    levels = [dict(zip(("asked", *variants), level, strict=True)) for level in obtained]
    return (
        table("consistency", "variants", rows, **vars(result), pairs=pairs),
        table("consistency", "levels", levels),
    )
