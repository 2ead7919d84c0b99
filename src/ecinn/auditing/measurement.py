"""Measure an audit: change many images with a model, and average, locate and compare the maps."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ecinn import equations
from ecinn.auditing.result import (
    Audit,
    Comparison,
    Flips,
    Group,
    PairMaps,
    Prediction,
    Region,
    Similarity,
)
from ecinn.data import face_regions as faces
from ecinn.data.celeba import ATTRIBUTES, class_names
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import checked_confidence, convincing_latent
from ecinn.explanation.result import Confidence, request_in_words
from ecinn.metrics import heatmaps as measure
from ecinn.metrics.statistics import bootstrap_interval, proportion
from ecinn.model import Model
from ecinn.pixels import Images, Labels, StoredImages, to_pixels, to_uint8
from ecinn.progress import Observer, counter, ignore

GRID = (8, 5)
"""Rows and columns of the coarse grid: few enough to name each cell in words."""
SUBGROUPS = ("Male", "Young", "Pale_Skin", "Eyeglasses")
"""CelebA attributes, as annotators saw them, by which errors are counted separately."""
MOST_VALUES = 10
"""A column with more different values is not one of groups."""
EXAMPLES = 6
BATCH_SIZE = 50


@torch.inference_mode()
def audit(
    model: Model,
    data: Dataset,
    *,
    others: Mapping[str, Model] | Sequence[Model] = (),
    n: int = 500,
    confidence: Confidence | None = None,
    seed: int = 0,
    split: str = "test",
    observe: Observer = ignore,
) -> Audit:
    """Change n random images into other classes and measure what changed and what went wrong.

    Takes three network evaluations per image, and two for every other model. With more than two
    classes each image gets one target; images of one predicted class get all targets in turn.

    Args:
        others: models to compare with, by name or in a sequence.
        confidence: as in `Model.explain`; None for the default of each model.
        split: the split that `data` is, for the report.
    """
    if not isinstance(others, Mapping):
        others = {other.name: other for other in others}
    _check(model, data, others, n)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(data), generator=generator)[:n]
    images, labels = data.images[index].cpu(), data.labels[index].cpu()
    classes, dataset = len(model.class_names), model.recipe.dataset
    offsets = [torch.randperm(classes - 1, generator=generator) + 1 for _ in range(classes)]
    report = counter(observe, "changing images", len(images))
    flips = _flip(model, images, lambda p: _targets_in_turn(p, offsets), confidence, report)
    report = counter(observe, "classifying the changed images", len(images))
    _, after = _predict(model, flips.counterfactuals, report)

    def same_target(p: Tensor) -> Tensor:
        return torch.where((p == flips.q) | (classes == 2), (p + 1) % classes, flips.q)

    def compare(name: str, other: Model) -> Comparison:
        report = counter(observe, f"changing images with {name}", len(images))
        theirs = _flip(other, images, same_target, confidence, report)
        return _compare(name, flips, theirs, generator)

    def groups(masks: Sequence[tuple[str, Tensor]]) -> tuple[Group, ...]:
        return tuple(
            _group(name, rows, labels, flips, after, generator)
            for name, rows in masks
            if bool(rows.any())
        )

    amount = measure.importance(flips.change).mean(0).double()
    grid = min(GRID[0], amount.shape[0]), min(GRID[1], amount.shape[1])
    wrong = (flips.p != labels).nonzero()[:, 0]
    by_confidence = flips.before.posterior[wrong].amax(1).argsort(descending=True, stable=True)
    return Audit(
        model=model.name,
        dataset=dataset,
        split=split,
        seed=seed,
        class_names=model.class_names,
        available=len(data),
        index=index,
        images=images,
        labels=labels,
        flips=flips,
        after=after,
        pairs=_pair_maps(to_pixels(images), flips, classes),
        grid=measure.regions_by_change(amount, grid) / amount.mean(),
        regions=face_regions(flips.change, generator) if dataset.startswith("celeba/") else (),
        overall=groups([("all", torch.ones_like(labels, dtype=torch.bool))])[0],
        classes=groups([(name, labels == y) for y, name in enumerate(model.class_names)]),
        subgroups=groups(_subgroups(dataset, data, index)),
        comparisons=tuple(compare(name, other) for name, other in others.items()),
        unlikely=tuple(after.log_p.argsort()[:EXAMPLES].tolist()),
        misclassified=tuple(wrong[by_confidence][:EXAMPLES].tolist()),
    )


def similarity(
    a: Images, b: Images, sign: Float[Tensor, " batch"], generator: torch.Generator
) -> Similarity:
    """Compare maps image by image; `sign` is −1 where they lead to different classes of two."""
    cosine = measure.map_similarity(a, b)
    rank = measure.rank_similarity(measure.importance(a), measure.importance(b))
    measures = (cosine, cosine * sign, cosine.abs(), rank)
    return Similarity(*(bootstrap_interval(values, generator=generator) for values in measures))


def face_regions(change: Images, generator: torch.Generator) -> tuple[Region, ...]:
    """Locate the change in mouth, eyes, cheeks, face and background, most changed first."""
    amount, regions = measure.importance(change), []
    for name in faces.REGION_NAMES:
        mask = faces.region_mask(name, *change.shape[2:])
        density = measure.relative_density(amount, mask)
        share = float(measure.share_inside(amount, mask).mean())
        regions.append(Region(name, share, bootstrap_interval(density, generator=generator)))
    return tuple(sorted(regions, key=lambda region: -region.density.mean))


def _targets_in_turn(p: Labels, offsets: list[Tensor]) -> Labels:
    """Give images of one predicted class all other classes in turn, equally often up to one."""
    q = torch.empty_like(p)
    for label, order in enumerate(offsets):
        rows = (p == label).nonzero()[:, 0]
        q[rows] = (label + order[torch.arange(len(rows)) % len(order)]) % len(offsets)
    return q


def _predict(
    model: Model, images: StoredImages, report: Callable[[int], None]
) -> tuple[Tensor, Prediction]:
    """Encode images; return their latents, on the model's device, and the prediction."""
    mu, batches, done = model.mu, [], 0
    for batch in images.split(BATCH_SIZE):
        z, log_det = model.encode_with_log_det(to_pixels(batch.to(model.device)))
        log_p = equations.log_marginal(equations.log_likelihood(z, log_det, mu))
        posterior = equations.log_posterior(z, mu, model.tau).exp()
        flags = model.ood.flags(z, z - model.mu_bar[posterior.argmax(1)], log_p)
        batches.append((z, posterior, log_p, ~flags.any(1)))
        done += len(batch)
        report(done)
    z, *columns = (torch.cat(column) for column in zip(*batches, strict=True))
    return z, Prediction(*(column.cpu() for column in columns))


def _flip(
    model: Model,
    images: StoredImages,
    targets: Callable[[Tensor], Tensor],
    confidence: Confidence | None,
    report: Callable[[int], None],
) -> Flips:
    """x̂ = f⁻¹(f(x) + αΔ) for all images."""
    confidence, by_default = model.request(confidence)
    confidence, n = checked_confidence(confidence), len(images)
    z, before = _predict(model, images, lambda done: report(done // 2))
    p = before.posterior.argmax(1)
    q, decoded = targets(p), []
    for rows in torch.arange(n).split(BATCH_SIZE):
        labels = (p[rows].to(z.device), q[rows].to(z.device))
        moved = convincing_latent(model, model.mu_bar, z[rows], *labels, confidence)
        decoded.append(model.decode(moved).cpu())
        report((n + int(rows[-1]) + 1) // 2)
    x_hat = torch.cat(decoded)
    change = equations.heatmap(to_pixels(images), x_hat)
    requested = request_in_words(confidence, by_default=by_default)
    return Flips(before, p, q, change, to_uint8(x_hat), requested)


def _pair_maps(pixels: Images, flips: Flips, classes: int) -> tuple[PairMaps, ...]:
    pairs = []
    for p, q in itertools.product(range(classes), repeat=2):
        rows = (flips.p == p) & (flips.q == q)
        if bool(rows.any()):
            image, change = pixels[rows].mean(0), flips.change[rows]
            signed, absolute = change.mean(0), change.abs().mean(0)
            pairs.append(PairMaps(p, q, int(rows.sum()), image, image + signed, signed, absolute))
    return tuple(pairs)


def _subgroups(dataset: str, data: Dataset, index: Labels) -> list[tuple[str, Tensor]]:
    """Return name and rows of every subgroup: of faces by attribute, else by column.

    The attribute classified is left out, and so are columns with too many values.
    """
    if data.columns:
        return _column_groups(data, index)
    if not dataset.startswith("celeba/") or data.attributes is None:
        return []
    groups = []
    for attribute in SUBGROUPS:
        if dataset != f"celeba/{attribute}":
            present = data.attributes[index, ATTRIBUTES.index(attribute)].bool().cpu()
            groups += [*zip(class_names(attribute), (~present, present), strict=True)]
    return groups


def _column_groups(data: Dataset, index: Labels) -> list[tuple[str, Tensor]]:
    """Return the rows of every value of every column that has few values."""
    groups = []
    for column, texts in data.columns.items():
        values = [texts[row] for row in index.tolist()]
        known = sorted({*values} - {""})
        if 2 <= len(known) <= MOST_VALUES:
            groups += [
                (f"{column}: {value}", torch.tensor([v == value for v in values]))
                for value in known
            ]
    return groups


def _group(
    name: str,
    rows: Bool[Tensor, " batch"],
    labels: Labels,
    flips: Flips,
    after: Prediction,
    generator: torch.Generator,
) -> Group:
    p, binary = flips.p, flips.before.posterior.shape[1] == 2
    change = flips.change[rows].abs().flatten(1).mean(1)
    return Group(
        name=name,
        n=int(rows.sum()),
        error=proportion((p != labels)[rows]),
        false_positive=proportion((p == 1)[rows & (labels == 0)]) if binary else None,
        false_negative=proportion((p == 0)[rows & (labels == 1)]) if binary else None,
        reached=proportion((after.posterior.argmax(1) == flips.q)[rows]),
        change=bootstrap_interval(change, generator=generator),
        median_change=float(change.median()),
        typical=proportion(flips.before.typical[rows]),
        typical_counterfactual=proportion(after.typical[rows]),
    )


def _compare(name: str, ours: Flips, theirs: Flips, generator: torch.Generator) -> Comparison:
    binary = ours.before.posterior.shape[1] == 2
    kept = ((ours.q == theirs.q) | binary).nonzero()[:, 0]
    if len(kept) < 2:
        raise InputError(f"this model and {name} share fewer than two targets: use a larger n")
    a, b, sign = ours.change[kept], theirs.change[kept], theirs.sign[kept]
    # A cycle through all images in random order: no image is paired with itself.
    cycle = torch.randperm(len(kept), generator=generator)
    shuffled = torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(1))
    towards = F.one_hot(torch.ones_like(kept) if binary else ours.q[kept]).float()
    sums = (
        torch.einsum("nk,n,nchw->kchw", towards, flips.sign[kept], flips.change[kept])
        for flips in (ours, theirs)
    )
    correlation = float(torch.corrcoef(torch.stack([ours.p, theirs.p]).double())[0, 1])
    return Comparison(
        other=name,
        n=len(kept),
        same=similarity(a, b, ours.sign[kept] * sign, generator),
        shuffled=similarity(a, b[shuffled], ours.sign[kept] * sign[shuffled], generator),
        mean_maps=float(measure.map_similarity(*sums) @ towards.double().mean(0)),
        agreement=proportion(ours.p == theirs.p),
        correlation=correlation if binary and math.isfinite(correlation) else None,
        absolute=theirs.change.abs().mean(0),
        requested=theirs.requested,
    )


def _check(model: Model, data: Dataset, others: Mapping[str, Model], n: int) -> None:
    if min(n, len(data)) < 2:
        raise InputError(f"an audit needs at least 2 images, not {min(n, len(data))}")
    shape, classes = model.image_shape, len(model.class_names)
    if data.images.shape[1:] != shape:
        raise InputError(f"the model needs images of {shape}, not {tuple(data.images.shape[1:])}")
    for name, other in others.items():
        if (other.image_shape, len(other.class_names)) != (shape, classes):
            raise InputError(
                f"{name} classifies images of {other.image_shape} into {len(other.class_names)} "
                f"classes, this model {shape} into {classes}: compare models of the same images "
                "and classes"
            )
