"""What was measured of heatmaps, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jaxtyping import UInt8
from torch import Tensor

from ecinn.explanation.result import Images
from ecinn.metrics.statistics import Interval
from ecinn.studies.benchmark.side_by_side import Pairs

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "ecinn": "ECINNh",
        "integrated_gradients": "Integrated Gradients",
        "deep_lift": "DeepLift",
        "deep_lift_shap": "DeepLiftSHAP",
        "gradient_shap": "GradientSHAP",
    }
)
RANDOM_ORDER = "random order"
SHOWN = 4

Section = Literal[
    "replacement",
    "magnitude",
    "cross-check",
    "localisation",
    "noise",
    "stability",
    "random weights",
]
Role = Literal["counted", "compared", "shown"]
"""Compared with ECINNh and counted in the tally; compared only; or neither.

Not counted is what follows from another measure, what ECINNh's own counterfactual replaces,
and what tells of random weights.
"""
Baseline = Literal["mean", "black"]
Verdict = Literal["better", "worse", "no difference", "more", "less"]


@dataclass(frozen=True)
class Measure:
    """A number per image."""

    section: Section
    name: str
    better: Literal["more", "less"] | None
    """None where neither is: it is only told."""
    role: Role = "counted"


@dataclass(frozen=True)
class Comparison:
    """ECINNh minus the other method, on the same images."""

    difference: Interval
    verdict: Verdict
    """Of ECINNh; "more" and "less" where neither is better."""


@dataclass(frozen=True)
class Cost:
    """Of one map."""

    passes: int
    seconds: float
    """Wall-clock, in batches."""
    times_ecinn: float
    """Seconds over ECINNh's."""


@dataclass(frozen=True)
class Convergence:
    """Medians over images of how far a map's sum is from the output's change."""

    delta: float
    relative: float
    """Over the output's change."""


@dataclass(frozen=True)
class Row:
    """What was measured of one method."""

    method: str
    figures: Mapping[str, Interval]
    """By the measure's name."""
    against: Mapping[str, Comparison]
    """Empty for ECINNh itself; without the measures that are only shown."""
    cost: Cost | None = None
    convergence: Convergence | None = None


@dataclass(frozen=True)
class Block:
    """All methods on one network."""

    network: str
    same_prediction: float
    """Share of the images that this network reads as the INN does."""
    measures: tuple[Measure, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class HeatmapBenchmark:
    """All blocks, and what they were measured on."""

    dataset: str
    n: int
    checked: int
    """Of these first images only, where maps are made again or another network reads them."""
    seed: int
    batch_size: int
    baseline: Baseline
    """What Integrated Gradients and DeepLift compare with: a sample's mean, or black."""
    blocks: tuple[Block, ...]
    noise: float
    """Added to the images for stability; a standard deviation."""
    density: tuple[Row, ...] = ()
    """The gradient methods on the INN's other logit, of the first images."""
    linear: tuple[Row, ...] = ()
    """The same of the logit that the blocks attribute, of the same images."""


@dataclass(frozen=True)
class Shown:
    """The first images with the INN's counterfactuals and everybody's maps of them."""

    pairs: Pairs
    counterfactuals: UInt8[Tensor, "batch channels height width"]
    maps: Mapping[tuple[str, str], Images]
    """By network and method."""
    other_pair: Mapping[str, tuple[bool, ...]]
    """By network: which of its maps are of another p and q than the INN's."""


def verdict(difference: Interval, better: Literal["more", "less"] | None) -> Verdict:
    """What an interval of ECINNh − other says of ECINNh."""
    if difference.low <= 0 <= difference.high:
        return "no difference"
    if better is None:
        return "more" if difference.low > 0 else "less"
    return "better" if (difference.low > 0) == (better == "more") else "worse"
