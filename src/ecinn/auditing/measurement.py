"""What a model looks at as a whole: its heatmaps averaged, located and compared."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from ecinn import equations
from ecinn.data import face_regions as faces
from ecinn.data.celeba import ATTRIBUTES, class_names
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import convincing_latent
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics import heatmaps as measure
from ecinn.metrics.statistics import Interval, bootstrap_interval, wilson_interval
from ecinn.model import Model
from ecinn.pixels import to_pixels, to_uint8

GRID = (8, 5)
"""Rows and columns of the coarse grid: few enough to be named in words."""
SUBGROUPS = ("Male", "Young", "Pale_Skin", "Eyeglasses")
"""Attributes of faces by which errors are counted apart, as CelebA's annotators saw them."""
EXAMPLES = 6
BATCH_SIZE = 50

Map = Float[Tensor, "channels height width"]
Maps = Float[Tensor, "batch channels height width"]
Images = UInt8[Tensor, "batch channels height width"]
Labels = Int[Tensor, " batch"]
Observe = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class Rate:
    """A share of counted things with Wilson's interval of 95 %, which holds for few, too."""

    count: int
    n: int
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Reading:
    """What a model says of images: p(y|x), log p(x), and if they are like its training images."""

    posterior: Float[Tensor, "batch classes"]
    log_p: Float[Tensor, " batch"]
    typical: Bool[Tensor, " batch"]


@dataclass(frozen=True)
class Flips:
    """Images read as p and turned into q at α₁ by one model."""

    before: Reading
    p: Labels
    q: Labels
    change: Maps
    """Eq. 4: x̂ − x."""
    counterfactuals: Images

    @property
    def turn(self) -> Float[Tensor, " batch"]:
        """−1 where there are two classes and the change leads to 0, else 1."""
        return torch.where((self.q == 0) & (self.before.posterior.shape[1] == 2), -1.0, 1.0)


@dataclass(frozen=True)
class PairMaps:
    """Means over the n images read as p and turned into q; channels are kept."""

    p: int
    q: int
    n: int
    image: Map
    counterfactual: Map
    change: Map
    absolute: Map
    """Of |x̂ − x|: what changes in different directions does not cancel."""


@dataclass(frozen=True)
class Region:
    """How much of the change lies in one part of a face, averaged over images."""

    name: str
    share: float
    density: Interval
    """The share over the region's share of the picture: 1 is as much as its area."""


@dataclass(frozen=True)
class Similarity:
    """cos(a, b) of maps as they are, with both turned to class 1 (of two), and up to a sign."""

    signed: Interval
    turned: Interval
    absolute: Interval
    rank: Interval
    """Spearman's ρ of the importances: which pixels matter, whatever the sign."""


@dataclass(frozen=True)
class Comparison:
    """Two models' maps of the same images."""

    other: str
    n: int
    """Images that both turn into the same class; of two classes, all images."""
    same: Similarity
    shuffled: Similarity
    """The control: the other model's map is that of another image."""
    mean_maps: float
    """cos of both models' mean (turned) maps to a class, averaged over images."""
    agreement: Rate
    correlation: float | None
    """Both of predictions; None for more than two classes, or where only one is predicted."""
    absolute: Map
    """The other model's mean |x̂ − x|."""


@dataclass(frozen=True)
class Group:
    """Images that have something in common: how they are read and how they change."""

    name: str
    n: int
    error: Rate
    false_positive: Rate | None
    false_negative: Rate | None
    """Of two classes, 1 being positive."""
    reached: Rate
    """Stored counterfactuals that are read as their target."""
    change: Interval
    """Mean over images of mean |x̂ − x|, pixels in [0, 1]."""
    median_change: float
    typical: Rate
    typical_counterfactual: Rate
    """By likelihood, texture and pose (`ecinn.ood`)."""


@dataclass(frozen=True)
class Audit:
    """What a model looks at, where it errs, and which images to look at oneself."""

    model: str
    dataset: str
    split: str
    seed: int
    class_names: tuple[str, ...]
    available: int
    index: Labels
    """Which of the available images of the split were drawn."""
    images: Images
    labels: Labels
    flips: Flips
    after: Reading
    """Of the counterfactuals as stored in 8 bits."""
    pairs: tuple[PairMaps, ...]
    grid: Float[Tensor, "rows columns"]
    """Mean change in the cells of a coarse grid, over that of the whole picture."""
    regions: tuple[Region, ...]
    """Named parts of a face, most changed first; none of other pictures."""
    overall: Group
    classes: tuple[Group, ...]
    subgroups: tuple[Group, ...]
    comparisons: tuple[Comparison, ...]
    unlikely: tuple[int, ...]
    """Rows of the counterfactuals with the lowest log p."""
    misread: tuple[int, ...]
    """Rows where p is not the label, surest first."""


@torch.inference_mode()
def audit(
    model: Model,
    data: Dataset,
    *,
    others: Mapping[str, Model] = MappingProxyType({}),
    n: int = 500,
    seed: int = 0,
    split: str = "test",
    observe: Observe = lambda what, done, total: None,
) -> Audit:
    """Change n random images so that the model reads another class, and look at what changed.

    Three network evaluations per image, two for every other model (given by names). With more
    than two classes an image goes to one of the others; those read alike go to all in turn.
    """
    _check(model, data, others, n)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(data), generator=generator)[:n]
    images, labels = data.images[index].cpu(), data.labels[index].cpu()
    known = None if data.attributes is None else data.attributes[index].bool().cpu()
    classes, dataset = len(model.class_names), model.checkpoint.recipe.dataset
    attribute = dataset.removeprefix("celeba/") if dataset.startswith("celeba/") else None
    turns = [torch.randperm(classes - 1, generator=generator) + 1 for _ in range(classes)]
    flips = _flip(model, images, lambda p: _in_turn(p, turns), "changing images", observe)
    _, after = _read(model, flips.counterfactuals, "reading what came out", observe)

    def follow(p: Tensor) -> Tensor:
        return torch.where((p == flips.q) | (classes == 2), (p + 1) % classes, flips.q)

    def compare(name: str, other: Model) -> Comparison:
        theirs = _flip(other, images, follow, f"changing images with {name}", observe)
        return _compare(name, flips, theirs, generator)

    def group(name: str, rows: Tensor) -> Group:
        return _group(name, rows, labels, flips, after, generator)

    by_label = [(name, labels == label) for label, name in enumerate(model.class_names)]
    subgroups = []
    for theme in SUBGROUPS:
        if attribute not in (None, theme) and known is not None:
            has = known[:, ATTRIBUTES.index(theme)]
            subgroups += [*zip(class_names(theme), (~has, has), strict=True)]
    how_much = measure.importance(flips.change).mean(0).double()
    grid = min(GRID[0], how_much.shape[0]), min(GRID[1], how_much.shape[1])
    wrong = (flips.p != labels).nonzero()[:, 0]
    surest = wrong[flips.before.posterior[wrong].amax(1).argsort(descending=True, stable=True)]
    return Audit(
        model=model.checkpoint.recipe.name,
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
        grid=measure.regions_by_change(how_much, grid) / how_much.mean(),
        regions=face_regions(flips.change, generator) if attribute else (),
        overall=group("all", torch.ones_like(labels, dtype=torch.bool)),
        classes=tuple(group(name, rows) for name, rows in by_label if bool(rows.any())),
        subgroups=tuple(group(name, rows) for name, rows in subgroups if bool(rows.any())),
        comparisons=tuple(compare(name, other) for name, other in others.items()),
        unlikely=tuple(after.log_p.argsort()[:EXAMPLES].tolist()),
        misread=tuple(surest[:EXAMPLES].tolist()),
    )


def rate(happened: Bool[Tensor, " values"]) -> Rate:
    """k of n with Wilson's interval."""
    k, n = int(happened.sum()), len(happened)
    return Rate(k, n, k / max(n, 1), *wilson_interval(k, n))


def similarity(
    a: Maps, b: Maps, turn: Float[Tensor, " batch"], generator: torch.Generator
) -> Similarity:
    """Cosines and rank correlations; `turn` is −1 where maps lead to different classes of two."""
    cosine = measure.map_similarity(a, b)
    rank = measure.rank_similarity(measure.importance(a), measure.importance(b))
    each = (cosine, cosine * turn, cosine.abs(), rank)
    return Similarity(*(bootstrap_interval(values, generator=generator) for values in each))


def face_regions(change: Maps, generator: torch.Generator) -> tuple[Region, ...]:
    """Mouth, eyes, cheeks, face and background, most changed first; every image counts alike."""
    how_much, found = measure.importance(change), []
    for name in faces.REGION_NAMES:
        mask = faces.region_mask(name, *change.shape[2:])
        density = measure.relative_density(how_much, mask)
        share = float(measure.share_inside(how_much, mask).mean())
        found.append(Region(name, share, bootstrap_interval(density, generator=generator)))
    return tuple(sorted(found, key=lambda region: -region.density.mean))


def _in_turn(p: Labels, turns: list[Tensor]) -> Labels:
    """For images read alike all other classes in turn: pairs of one p differ by at most one."""
    q = torch.empty_like(p)
    for label, offsets in enumerate(turns):
        rows = (p == label).nonzero()[:, 0]
        q[rows] = (label + offsets[torch.arange(len(rows)) % len(offsets)]) % len(turns)
    return q


def _read(model: Model, images: Images, what: str, observe: Observe) -> tuple[Tensor, Reading]:
    """The latents, on the model's device, and what the model says."""
    mu, parts = model.classifier.mu, []
    for part in images.split(BATCH_SIZE):
        with exact_convolutions():
            z, log_det = model.classifier.encode_with_log_det(model.pixels(part))
        log_p = equations.log_marginal(equations.log_likelihood(z, log_det, mu))
        posterior = equations.log_posterior(z, mu).exp()
        unlike = model.ood.flags(z, z - model.mu_bar[posterior.argmax(1)], log_p)
        parts.append((z, posterior, log_p, ~unlike.any(1)))
        observe(what, sum(len(each[0]) for each in parts), len(images))
    z, *said = (torch.cat(column) for column in zip(*parts, strict=True))
    return z, Reading(*(each.cpu() for each in said))


def _flip(
    model: Model, images: Images, target: Callable[[Tensor], Tensor], what: str, observe: Observe
) -> Flips:
    """x̂ = f⁻¹(f(x) + α₁Δ) of all images."""
    n, mu, mu_bar = len(images), model.classifier.mu, model.mu_bar
    z, before = _read(model, images, what, lambda what, done, _: observe(what, done // 2, n))
    p = before.posterior.argmax(1)
    q, decoded = target(p), []
    for rows in torch.arange(n).split(BATCH_SIZE):
        moved = convincing_latent(z[rows], mu, mu_bar, p[rows].to(z.device), q[rows].to(z.device))
        with exact_convolutions():
            decoded.append(model.classifier.decode(moved).cpu())
        observe(what, (n + int(rows[-1]) + 1) // 2, n)
    x_hat = torch.cat(decoded)
    return Flips(before, p, q, equations.heatmap(to_pixels(images), x_hat), to_uint8(x_hat))


def _pair_maps(pixels: Maps, flips: Flips, classes: int) -> tuple[PairMaps, ...]:
    pairs = []
    for p, q in itertools.product(range(classes), repeat=2):
        rows = (flips.p == p) & (flips.q == q)
        if bool(rows.any()):
            image, change = pixels[rows].mean(0), flips.change[rows]
            signed, absolute = change.mean(0), change.abs().mean(0)
            pairs.append(PairMaps(p, q, int(rows.sum()), image, image + signed, signed, absolute))
    return tuple(pairs)


def _group(
    name: str,
    rows: Bool[Tensor, " batch"],
    labels: Labels,
    flips: Flips,
    after: Reading,
    generator: torch.Generator,
) -> Group:
    p, two = flips.p, flips.before.posterior.shape[1] == 2
    change = flips.change[rows].abs().flatten(1).mean(1)
    return Group(
        name,
        int(rows.sum()),
        rate((p != labels)[rows]),
        rate((p == 1)[rows & (labels == 0)]) if two else None,
        rate((p == 0)[rows & (labels == 1)]) if two else None,
        rate((after.posterior.argmax(1) == flips.q)[rows]),
        bootstrap_interval(change, generator=generator),
        float(change.median()),
        rate(flips.before.typical[rows]),
        rate(after.typical[rows]),
    )


def _compare(name: str, mine: Flips, theirs: Flips, generator: torch.Generator) -> Comparison:
    two = mine.before.posterior.shape[1] == 2
    kept = ((mine.q == theirs.q) | two).nonzero()[:, 0]
    if len(kept) < 2:
        raise InputError(f"{name} has no two images in common with this model: take a larger n")
    a, b, turn = mine.change[kept], theirs.change[kept], theirs.turn[kept]
    # A cycle through all images in random order: nobody meets himself.
    cycle = torch.randperm(len(kept), generator=generator)
    other = torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(1))
    towards = F.one_hot(torch.ones_like(kept) if two else mine.q[kept]).float()
    sums = (
        torch.einsum("nk,n,nchw->kchw", towards, flips.turn[kept], flips.change[kept])
        for flips in (mine, theirs)
    )
    correlation = float(torch.corrcoef(torch.stack([mine.p, theirs.p]).double())[0, 1])
    return Comparison(
        name,
        len(kept),
        similarity(a, b, mine.turn[kept] * turn, generator),
        similarity(a, b[other], mine.turn[kept] * turn[other], generator),
        float(measure.map_similarity(*sums) @ towards.double().mean(0)),
        rate(mine.p == theirs.p),
        correlation if two and math.isfinite(correlation) else None,
        theirs.change.abs().mean(0),
    )


def _check(model: Model, data: Dataset, others: Mapping[str, Model], n: int) -> None:
    if min(n, len(data)) < 2:
        raise InputError(f"an audit takes at least 2 images, not {min(n, len(data))}")
    reads = {name: each.classifier.image_shape for name, each in (("", model), *others.items())}
    if data.images.shape[1:] != reads[""]:
        raise InputError(f"images are of shape {reads['']}, not {tuple(data.images.shape[1:])}")
    for name, other in others.items():
        if reads[name] != reads[""] or len(other.class_names) != len(model.class_names):
            raise InputError(
                f"{name} reads images of shape {reads[name]} as {len(other.class_names)} classes, "
                f"this model {reads['']} as {len(model.class_names)}: compare models of one kind"
            )
