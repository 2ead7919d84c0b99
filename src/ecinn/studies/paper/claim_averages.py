"""The claim that what does not depend on the class cancels out of mean latents."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ecinn import equations
from ecinn.auditing.measurement import Rate, rate
from ecinn.data.dataset import Dataset
from ecinn.data.planted import FAKE_MNIST_CUE, Cue
from ecinn.errors import InputError
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics.statistics import Interval
from ecinn.metrics.strokes import slant, thickness
from ecinn.model import Model
from ecinn.pixels import Labels, to_uint8
from ecinn.pixels import StoredImages as Images
from ecinn.studies.benchmark.quality import MAIN_ORACLE
from ecinn.studies.benchmark.side_by_side import Pairs, draw_pairs
from ecinn.studies.judges import Judges
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.claim import Claim, number, of_votes, percent, table
from ecinn.studies.paper.claim_measures import share_of

AVERAGED = (1, 10, 100)
"""Latents of each class that Δ is taken between, before those of all training images."""
CANCELLED = 0.02
"""Of a squared difference between two images: a fifth of a feature's standard deviation."""
SAYS_Q = 0.95
"""Share of the images that a Δ which keeps the class must take to q."""
STAYS = 0.5
"""Of a difference between classes: from here on it does not cancel."""
FEATURES: Mapping[str, Callable[[Images], Tensor]] = MappingProxyType(
    {"slant": slant, "thickness": thickness}
)
"""Orientation is the paper's example in Section 3.2, and both are in Section 4.2."""

Latents = Float[Tensor, "classes images dim"]


@dataclasses.dataclass(frozen=True)
class Left:
    """What a Δ still changes of all that is not the planted cue."""

    shares: Mapping[str, Interval]
    """Of pixels and features: Σ(change)² / Σ(difference from another image)², over images."""
    same_digit: Rate
    """Read by the convolutional oracle as before."""
    says_q: Rate
    """The cue, which alone depends on the class."""

    @property
    def cancelled(self) -> bool:
        """Next to nothing is left of anything but the class."""
        gone = all(share.high <= CANCELLED for share in self.shares.values())
        return gone and self.says_q.share >= SAYS_Q


@dataclasses.dataclass(frozen=True)
class Stayed:
    """A feature whose mean differs from class to class."""

    apart: float
    """Two classes' means, root mean square, in standard deviations within a class."""
    share: Interval
    """Of that difference, what Δ takes along: Σ(change · difference) / Σ difference²."""

    @property
    def cancelled(self) -> bool:
        """Less than half is taken along, or even the other way round."""
        return self.share.high < STAYS


def draw_classes(
    data: Dataset, per_class: int, generator: torch.Generator
) -> UInt8[Tensor, "classes images channels height width"]:
    """So many random images of every class."""
    answer = []
    for label, name in enumerate(data.class_names):
        own = (data.labels == label).nonzero()[:, 0]
        if not 1 <= per_class <= len(own):
            raise InputError(f"class {name} has {len(own)} images: take 1 to {len(own)}")
        answer.append(data.images[own[torch.randperm(len(own), generator=generator)[:per_class]]])
    return torch.stack(answer)


def mean_differences(
    latents: Latents, p: Labels, q: Labels, n: int, generator: torch.Generator
) -> Float[Tensor, "batch dim"]:
    """Δ between the means of n latents of q and n of p, drawn anew for every row."""

    def mean(label: Tensor) -> Tensor:
        drawn = torch.randperm(latents.shape[1], generator=generator)[:n]
        return latents[label, drawn].double().mean(0)

    pairs = zip(p, q, strict=True)
    return torch.stack([mean(own_q) - mean(own_p) for own_p, own_q in pairs]).to(latents.dtype)


@torch.inference_mode()
def encoded(model: Model, images: Images) -> Float[Tensor, "batch dim"]:
    """z = f(x)."""
    with exact_convolutions():
        return model.classifier.encode(model.pixels(images)).cpu()


@torch.inference_mode()
def decoded(model: Model, z: Float[Tensor, "batch dim"]) -> Images:
    """f⁻¹(z), with 8 bits."""
    with exact_convolutions():
        return to_uint8(model.classifier.decode(z.to(model.device))).cpu()


def left_over(
    pairs: Pairs, after: Images, cue: Cue, judges: Judges, generator: torch.Generator
) -> Left:
    """Of images whose cue is wiped out, and what the cue says."""
    before, wiped = (each.masked_fill(cue.mask, cue.off) for each in (pairs.images, after))
    shares = {}
    for name, measure in {"pixels": _pixels, **FEATURES}.items():
        own, new = (measure(images).reshape(len(images), -1) for images in (before, wiped))
        change, difference = ((own - other).square().sum(1) for other in (new, own.roll(1, 0)))
        shares[name] = share_of(change, difference, generator)
    read, again = (judges.verdicts(images)[MAIN_ORACLE] for images in (before, wiped))
    return Left(shares, rate(read == again), rate(cue.read(after) == pairs.q))


def independent_parts(
    model: Model,
    pairs: Pairs,
    training: Dataset,
    cue: Cue,
    judges: Judges,
    per_class: int,
    seed: int,
) -> dict[int, Left]:
    """Where all but the cue is independent of the class; by n, and the last is of μ̄ itself."""
    generator = torch.Generator().manual_seed(seed)
    drawn = draw_classes(training, per_class, generator)
    latents = torch.stack([encoded(model, own) for own in drawn])
    every = len(training) // cue.classes
    directions = {
        n: mean_differences(latents, pairs.p, pairs.q, n, generator)
        for n in AVERAGED
        if n <= per_class and n < every
    }
    directions[every] = equations.latent_direction(model.mu_bar.cpu(), pairs.p, pairs.q)
    z = encoded(model, pairs.images)
    return {
        n: left_over(pairs, decoded(model, z + delta), cue, judges, generator)
        for n, delta in directions.items()
    }


def dependent_parts(
    model: Model, pairs: Pairs, training: Dataset, per_class: int, seed: int
) -> dict[str, Stayed]:
    """How much of what the classes of real images differ in Δ takes along."""
    generator = torch.Generator().manual_seed(seed)
    drawn = draw_classes(training, per_class, generator)
    delta = equations.latent_direction(model.mu_bar.cpu(), pairs.p, pairs.q)
    after = decoded(model, encoded(model, pairs.images) + delta)
    answer = {}
    for name, measure in FEATURES.items():
        values = measure(drawn.flatten(0, 1)).unflatten(0, drawn.shape[:2])
        mean, variance = values.mean(1), values.var(1).mean()
        change, difference = measure(after) - measure(pairs.images), mean[pairs.q] - mean[pairs.p]
        answer[name] = Stayed(
            # Two of K values differ by 2 · variance in the mean of squares.
            float((2 * mean.var() / variance).sqrt()),
            share_of(change * difference, difference.square(), generator),
        )
    return answer


def averages_cancel(context: Context, judges: Judges, images: int, per_class: int) -> Claim:
    """Of FakeMNIST, where the digit is independent by construction, and of MNIST."""
    models = {name: context.model(name) for name in ("fakemnist", "mnist")}
    pairs = {
        name: draw_pairs(model, context.data(name, "test"), images, context.seed)
        for name, model in models.items()
    }
    context.observe("averages of latents", 0, 2)
    fake, fake_training = models["fakemnist"], context.data("fakemnist", "train")
    left = independent_parts(
        fake, pairs["fakemnist"], fake_training, FAKE_MNIST_CUE, judges, per_class, context.seed
    )
    context.observe("averages of latents", 1, 2)
    training = context.data("mnist", "train")
    stayed = dependent_parts(models["mnist"], pairs["mnist"], training, per_class, context.seed)
    context.observe("averages of latents", 2, 2)
    return claim_of(left, stayed, fake.mu_bar.cpu())


def claim_of(
    left: Mapping[int, Left],
    stayed: Mapping[str, Stayed],
    mu_bar: Float[Tensor, "classes dim"],
) -> Claim:
    """Needs all of the first next to nothing, and of the others less than half."""
    single, every = left[min(left)], left[max(left)]
    common = float(mu_bar.mean(0).square().sum())
    # Two of K vectors are so far apart in the mean of squares.
    apart = float(2 * mu_bar.var(0).sum())
    features = "; ".join(f"{name} {_share(every.shares[name])}" for name in FEATURES)
    along = "; ".join(
        f"{name} {feature.apart:.2f} and {number(feature.share, 2)}"
        for name, feature in stayed.items()
    )
    kept = not all(each.cancelled for each in stayed.values())
    meant = ": averages keep what classes differ in on average, whether it makes the class or not"
    return Claim(
        "cancel",
        "3.2",
        "Averaged over many images of a class, what does not depend on the class, such as "
        "background and orientation, cancels out of μ̄.",
        of_votes([every.cancelled, *(each.cancelled for each in stayed.values())]),
        f"On FakeMNIST all but the dot is independent of the class. {every.says_q.n:,} test "
        "images were moved by Δ between means of n latents. Beside the dots they change by "
        f"{_share(single.shares['pixels'])} of the squared difference between two images for "
        f"n = 1, and by {_share(every.shares['pixels'])} for μ̄ itself ({features}; up to "
        f"{100 * CANCELLED:.0f} % counts as cancelled). Sampling noise falls as 1/n. What all "
        "images share is in every μ̄ and cancels only out of their difference Δ (‖mean of all "
        f"μ̄‖² = {common:.0f}, ‖Δ‖² = {apart:.0f}). On MNIST orientation and thickness are not "
        "independent. How far the means of two classes are apart, in standard deviations within "
        f"a class, and how much of that difference Δ takes along: {along}. Less than {STAYS} "
        f"counts as cancelled{meant if kept else ''}. Both limits were set after a first look at "
        "the figures.",
        figure="figure-2",
        numbers={
            "left": {str(n): dataclasses.asdict(each) for n, each in left.items()},
            "stayed": {name: dataclasses.asdict(each) for name, each in stayed.items()},
            "common_squared": common,
            "delta_squared": apart,
        },
        detail=table(
            [
                "n of FakeMNIST",
                "pixels but the dots",
                *FEATURES,
                "oracle reads the same digit",
                "dot of q",
            ],
            [
                [
                    f"{n:,}",
                    *(_share(share) for share in each.shares.values()),
                    percent(each.same_digit),
                    percent(each.says_q),
                ]
                for n, each in left.items()
            ],
        ),
    )


def _pixels(images: Images) -> Float[Tensor, "batch pixels"]:
    return images.flatten(1).double() / 255


def _share(share: Interval) -> str:
    middle, low, high = (f"{100 * value:.2g}" for value in (share.mean, share.low, share.high))
    return f"{middle} % [{low}, {high}]"
