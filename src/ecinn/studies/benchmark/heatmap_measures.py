"""Measures of heatmaps and their results: replacement, localisation, noise, similarity."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.attribution.heatmaps import Heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.data.face_regions import REGION_NAMES, region_mask
from ecinn.data.planted import Cue
from ecinn.metrics import heatmaps as metrics
from ecinn.metrics.heatmaps import Importance, PerImage, importance
from ecinn.metrics.statistics import Interval
from ecinn.pixels import Images, Labels, StoredImages
from ecinn.studies.benchmark.side_by_side import Pairs

LABELS: Mapping[str, str] = {
    "ecinn": "ECINNh",
    "integrated_gradients": "Integrated Gradients",
    "deep_lift": "DeepLift",
    "deep_lift_shap": "DeepLiftSHAP",
    "gradient_shap": "GradientSHAP",
}
RANDOM_ORDER = "random order"
WHITE_NOISE = "white noise"
CONTROLS = (RANDOM_ORDER, WHITE_NOISE)
"""Rows of a block that are not methods."""
COUNTERFACTUAL = "counterfactual"
ATTRIBUTE_PARTS: Mapping[str, tuple[str, ...]] = {
    "Smiling": ("mouth",),
    "High_Cheekbones": ("cheeks",),
    "Wearing_Lipstick": ("mouth",),
    "Heavy_Makeup": ("mouth", "eyes", "cheeks"),
}
"""Parts of a face in which people look for an attribute; the network may look elsewhere."""

Section = Literal[
    "replacement", "magnitude", "cross-check", "localisation", "noise", "stability",
    "random weights",
]  # fmt: skip
Better = Literal["more", "less"] | None
Role = Literal["counted", "compared", "shown"]
"""counted: compared with ECINNh and included in the tally; compared: compared with ECINNh, but not
in the tally; shown: neither.

Not counted are measures that follow from others, replacement by ECINNh's own counterfactual, and
similarity to random weights. Not compared are replacement in the order of |h|, and noise that is
not relative to white noise.
"""
Baseline = Literal["mean", "black"]
Word = Literal["better", "worse", "no difference", "more", "less"]
NOISE: tuple[tuple[str, Better, Callable[[Images], PerImage]], ...] = (
    ("total variation", "less", metrics.total_variation),
    ("spatial coherence", "more", metrics.spatial_coherence),
    ("high-frequency share", "less", metrics.high_frequency_share),
)
"""Measures of noise with the better direction."""
_SUFFIXES = {"replacement": "", "magnitude": ", by |h|", "cross-check": ", by the CNN"}


@dataclass(frozen=True)
class Measure:
    """A named number per image."""

    section: Section
    name: str
    better: Better
    """The better direction; None if neither is."""
    role: Role = "counted"


@dataclass(frozen=True)
class Comparison:
    """ECINNh minus another method, on the same images."""

    difference: Interval
    verdict: Word
    """What it says about ECINNh; "more" or "less" where a measure has no better direction."""


@dataclass(frozen=True)
class Cost:
    """Cost of one map."""

    passes: int
    seconds: float
    """Wall-clock, in batches."""
    times_ecinn: float
    """Seconds relative to ECINNh."""


@dataclass(frozen=True)
class Convergence:
    """Medians over images of the convergence delta."""

    delta: float
    relative: float
    """Relative to the change of the output."""


@dataclass(frozen=True)
class Row:
    """All figures of one method."""

    method: str
    figures: Mapping[str, Interval]
    """By the measure's name."""
    against: Mapping[str, Comparison]
    """By the measure's name; empty for ECINNh itself."""
    cost: Cost | None = None
    convergence: Convergence | None = None


@dataclass(frozen=True)
class Block:
    """All methods on one network."""

    network: str
    same_prediction: float
    """Share of images that this network classifies as the INN does."""
    measures: tuple[Measure, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class HeatmapBenchmark:
    """All blocks and the conditions under which they were measured."""

    dataset: str
    planted: bool
    n: int
    checked: int
    seed: int
    batch_size: int
    baseline: Baseline
    """Reference of Integrated Gradients and DeepLift: mean of a sample, or black."""
    noise: float
    blocks: tuple[Block, ...] = ()
    density: tuple[Row, ...] = ()
    """The gradient methods on the INN's other logit, on the first images."""
    linear: tuple[Row, ...] = ()
    """The gradient methods on the logit of the blocks, on the same images."""


@dataclass(frozen=True)
class Shown:
    """The first images with the INN's counterfactuals and the maps of all methods."""

    pairs: Pairs
    counterfactuals: StoredImages
    maps: Mapping[tuple[str, str], Images]
    """By network and method."""
    other_pair: Mapping[str, tuple[bool, ...]]
    """By network: True where its p and q differ from the INN's."""


def verdict(difference: Interval, better: Better) -> Word:
    """Judge ECINNh by the interval of its difference to another method."""
    if difference.low <= 0 <= difference.high:
        return "no difference"
    if better is None:
        return "more" if difference.low > 0 else "less"
    return "better" if (difference.low > 0) == (better == "more") else "worse"


def evidence_for_p(made: Heatmaps) -> Importance:
    """−Σ_c h_c; for ECINNh Σ_c |h_c|, because its sign means lighter or darker."""
    return importance(made.maps) if made.method == "ecinn" else -made.maps.sum(1)


@dataclass(frozen=True)
class Reader:
    """A network that evaluates p(p|x) while pixels are replaced."""

    section: Section
    predict: Callable[[Images], Float[Tensor, "batch classes"]]
    x: Images
    p: Labels
    replacements: Mapping[str, Images]
    batch_size: int
    seed: int

    @torch.no_grad()
    def posterior(self, images: Images) -> PerImage:
        """p(p|x) of every image."""
        parts = [self.predict(part) for part in images.split(self.batch_size)]
        return torch.cat(parts).gather(1, self.p[:, None])[:, 0]

    @functools.cached_property
    def ends(self) -> Mapping[str, tuple[PerImage, PerImage]]:
        """p(p|x) of the images and of every replacement, which no order changes."""
        at_x = self.posterior(self.x)
        return {name: (at_x, self.posterior(other)) for name, other in self.replacements.items()}

    def of_maps(self, made: Heatmaps) -> dict[Measure, PerImage]:
        """Measure maps of the first images in the method's own order, or in the order of |h|."""
        by_magnitude = self.section == "magnitude"
        order = importance(made.maps) if by_magnitude else evidence_for_p(made)
        return self.areas(order[: len(self.x)])

    def areas(self, order: Importance) -> dict[Measure, PerImage]:
        """Return areas under p(p|x) of deletion and insertion in this order."""
        values = {}
        for name, replacement in self.replacements.items():
            for insertion in (False, True):
                curve = metrics.replacement_curve(
                    self.posterior,
                    self.x,
                    replacement,
                    order,
                    insertion=insertion,
                    generator=torch.Generator().manual_seed(self.seed),
                    ends=self.ends[name],
                )
                kind = "insertion" if insertion else "deletion"
                role: Role = "compared" if name == COUNTERFACTUAL else "counted"
                measure = Measure(
                    self.section,
                    f"{kind} AUC, {name}{_SUFFIXES[self.section]}",
                    "more" if insertion else "less",
                    "shown" if self.section == "magnitude" else role,
                )
                values[measure] = metrics.area_under_curve(curve)
        return values


def localisation(
    dataset: str, cue: Cue | None, s: Importance, p: Labels, q: Labels
) -> dict[Measure, PerImage]:
    """Measure importance inside a planted cue's marks, or inside the parts of a face."""
    measure = functools.partial(Measure, "localisation", better="more")
    if cue is not None:
        marks = cue.stencils.to(s.device)
        pair = marks[p] | marks[q]
        density = metrics.relative_density(s, pair)
        return {
            measure("share in the marks of p and q"): metrics.share_inside(s, pair),
            measure("relative density in them", role="compared"): density,
            measure("pointing game"): metrics.pointing_game(s, pair).double(),
            measure("localisation AUC"): metrics.localisation_auc(s, pair),
            measure("share in the marks of all classes"): metrics.share_inside(s, marks.any(0)),
        }
    kind, _, attribute = dataset.partition("/")
    if kind != "celeba":
        return {}
    values = {}
    functions = {"share": metrics.share_inside, "density": metrics.relative_density}
    for quantity, function in functions.items():
        for region in REGION_NAMES:
            # A density follows from the share, and the background's share from the face's.
            follows = quantity == "density" or region == "background"
            role: Role = "compared" if follows else "counted"
            wanted = region in (*ATTRIBUTE_PARTS.get(attribute, ()), "face")
            better: Better = "more" if wanted else "less" if region == "background" else None
            mask = region_mask(region, *s.shape[1:]).to(s.device)
            name = f"{quantity}, {region}"
            values[Measure("localisation", name, better, role)] = function(s, mask)
    return values


def white_noise_maps(
    network: ExplainedINN | nn.Module,
    x: Images,
    baseline: Float[Tensor, "channels height width"],
    generator: torch.Generator,
    batch_size: int = 100,
) -> Images:
    """(x − baseline) Aᵀε: gradient maps where the gradient at the network's own input is noise.

    A is the linear step with which the network prepares its images. Inception-V3 enlarges 64×64 to
    224×224 pixels, so its adjoint Aᵀ takes weighted sums over overlapping patches of 7×7 pixels, a
    low-pass filter: every map becomes smoother, whatever the network has learned. The noise of two
    networks is therefore comparable only relative to these maps, the null of each network. The INN
    and small CNNs read the image itself: A is the identity.

    Attributing to the enlarged pixels would avoid the filter, but then the maps of two networks
    have different sizes, and noise is measured at different scales.

    Args:
        network: its attribute `enlarge` is A; networks without it read the image itself.
        generator: draws ε, on its own device.
    """
    enlarge = getattr(network, "enlarge", nn.Identity())
    parts = []
    for some in x.split(batch_size):
        enlarged, adjoint, *_ = torch.func.vjp(enlarge, torch.zeros_like(some))
        noise = torch.randn(enlarged.shape, generator=generator, device=generator.device)
        parts.append((some - baseline) * adjoint(noise.to(enlarged))[0])
    return torch.cat(parts)


def noisiness(maps: Images) -> dict[Measure, PerImage]:
    """Measure changes from pixel to pixel; only `relative_noisiness` is compared."""
    return {
        Measure("noise", name, better, "shown"): function(maps) for name, better, function in NOISE
    }


def relative_noisiness(
    noise: Mapping[Measure, PerImage], null: Mapping[Measure, Float[Tensor, " draws"]]
) -> dict[Measure, PerImage]:
    """(m − s) / (mean(null) − s) of every measure m, where s is its value for a constant map.

    0 is perfectly smooth, and 1 as noisy as white noise that took the same way (`null`, the
    measures of `white_noise_maps`). The relative measures of different networks are comparable.
    """
    values = {}
    for measure, value in noise.items():
        smooth = 1.0 if measure.better == "more" else 0.0
        name = "spatial incoherence" if measure.better == "more" else measure.name
        relative = (value - smooth) / (null[measure].mean() - smooth)
        values[Measure("noise", f"relative {name}", "less")] = relative
    return values


def similarity(
    section: Literal["stability", "random weights"], maps: Images, other: Images
) -> dict[Measure, PerImage]:
    """Compare maps with those of noisy images, or of random weights, whose sign is random."""
    values = {
        "cosine": metrics.map_similarity(maps, other),
        "rank correlation": metrics.rank_similarity(importance(maps), importance(other)),
    }
    if section == "stability":
        return {Measure(section, f"{name}, noisy image", "more"): v for name, v in values.items()}
    return {
        Measure(section, f"|{name}|, {section}", "less", "compared"): value.abs()
        for name, value in values.items()
    }
