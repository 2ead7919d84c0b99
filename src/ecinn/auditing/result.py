"""The results of an audit: figures, mean maps, cautions, and their JSON and HTML forms."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ecinn.metrics.statistics import Interval, wilson
from ecinn.pixels import Images, Labels, StoredImages

FEW_IMAGES, FEW_IN_GROUP, REACHED, TYPICAL = 100, 30, 0.95, 0.9
"""Numbers of images and proportions below which an audit cautions its reader."""
SIMILAR = 0.5
"""Similarity of maps from which two models may be looking at the same features."""

Map = Float[Tensor, "channels height width"]


@dataclass(frozen=True)
class Prediction:
    """Posterior and likelihood of images; those out of distribution are not typical."""

    posterior: Float[Tensor, "batch classes"]
    log_p: Float[Tensor, " batch"]
    typical: Bool[Tensor, " batch"]


@dataclass(frozen=True)
class Flips:
    """Counterfactuals from the predicted class p to the target q, by one model."""

    before: Prediction
    p: Labels
    q: Labels
    change: Images
    """Eq. 4: x̂ − x."""
    counterfactuals: StoredImages
    requested: str
    """Requested point on the path, in words, as in `Explanation.requested`."""

    @property
    def sign(self) -> Float[Tensor, " batch"]:
        """−1 where one of two classes is the target 0, else 1: turns maps towards class 1."""
        return torch.where((self.q == 0) & (self.before.posterior.shape[1] == 2), -1.0, 1.0)


@dataclass(frozen=True)
class PairMaps:
    """Means over the n images predicted as p and changed into q, channel by channel."""

    p: int
    q: int
    n: int
    image: Map
    counterfactual: Map
    change: Map
    absolute: Map
    """Mean of |x̂ − x|, in which changes of opposite signs do not cancel."""


@dataclass(frozen=True)
class Region:
    """Share of the change that lies in one part of a face, averaged over images."""

    name: str
    share: float
    density: Interval
    """The share divided by the region's share of the image's area: 1 is chance."""


@dataclass(frozen=True)
class Similarity:
    """Cosines of two models' maps, and the rank correlation of their importances."""

    signed: Interval
    turned: Interval
    """Both maps turned towards class 1 of two."""
    absolute: Interval
    """|cos|: similarity up to a sign."""
    rank: Interval
    """Spearman's ρ of the importances: which pixels matter, whatever the sign."""


@dataclass(frozen=True)
class Comparison:
    """Another model's maps of the same images."""

    other: str
    n: int
    """Images that both models change into the same class; with two classes, all images."""
    same: Similarity
    shuffled: Similarity
    """Control: each map is compared with the other model's map of another image."""
    mean_maps: float
    """cos of both models' mean (turned) maps to a class, averaged over images."""
    agreement: Interval
    """Share of images for which both models predict the same class number."""
    correlation: float | None
    """Correlation of the predictions; None for more than two classes or a constant prediction."""
    absolute: Map
    """The other model's mean |x̂ − x|."""
    requested: str
    """Point on the path that was requested of the other model, in words."""


@dataclass(frozen=True)
class Group:
    """Errors, changes and typicality of a group of images."""

    name: str
    n: int
    error: Interval
    false_positive: Interval | None
    false_negative: Interval | None
    """Rates with two classes, class 1 being positive; None otherwise."""
    reached: Interval
    """Stored counterfactuals that are classified as their target."""
    change: Interval
    """Mean over images of mean |x̂ − x|, pixels in [0, 1]."""
    median_change: float
    typical: Interval
    typical_counterfactual: Interval


@dataclass(frozen=True)
class Audit:
    """Results of an audit: where counterfactuals change images, and how often the model errs."""

    model: str
    dataset: str
    split: str
    seed: int
    class_names: tuple[str, ...]
    available: int
    index: Labels
    """Positions of the audited images in the split."""
    images: StoredImages
    labels: Labels
    flips: Flips
    after: Prediction
    """Prediction of the counterfactuals, stored in 8 bits."""
    pairs: tuple[PairMaps, ...]
    grid: Float[Tensor, "rows columns"]
    """Mean change in the cells of a coarse grid, divided by that of the whole image."""
    regions: tuple[Region, ...]
    """Parts of a face, most changed first; empty for other images."""
    overall: Group
    classes: tuple[Group, ...]
    subgroups: tuple[Group, ...]
    comparisons: tuple[Comparison, ...]
    unlikely: tuple[int, ...]
    """Rows of the counterfactuals with the lowest log p."""
    misclassified: tuple[int, ...]
    """Rows of misclassified images, most confident first."""

    @property
    def cautions(self) -> tuple[str, ...]:
        """Sentences about what the figures warn of."""
        return tuple(_cautions(self))

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, without images and maps, as JSON can hold it."""
        more = {
            "n": len(self.images),
            "requested": self.flips.requested,
            "grid": self.grid.tolist(),
            "cautions": list(self.cautions),
        }
        return {**_without_tensors(self), **more}

    def html(self, command: str = "") -> str:
        """Return a self-contained HTML page, which shows the command that reproduces it."""
        from ecinn.auditing.page import render

        return render(self, command)


def _cautions(audit: Audit) -> Iterator[str]:
    n, overall = len(audit.images), audit.overall
    if n < FEW_IMAGES:
        yield f"Only {n} images were used: all figures are rough. Use more (--n)."
    for region in audit.regions:
        if region.name == "background" and region.density.mean > 1:
            yield (
                f"The background changes {region.density.mean:.1f} times as much as an average "
                "place: the model may look at things other than the face."
            )
    if overall.reached.mean < REACHED:
        missed = n - count(overall.reached)
        yield f"{missed} of {n} changed images are not classified as their target."
    if overall.typical_counterfactual.mean < TYPICAL:
        share = f"{100 * (1 - overall.typical_counterfactual.mean):.1f} %"
        yield f"{share} of the changed images do not look like training images to the model."
    for group in (*audit.classes, *audit.subgroups):
        rest = overall.error.n - group.error.n
        wrong = count(overall.error) - count(group.error)
        if rest and group.error.low > wilson(wrong, rest).high:
            figures = f"{count(group.error)} of {group.error.n}, against {wrong} of {rest}"
            yield f"“{group.name}” is misclassified more often than the other images: {figures}."
    small = [group.name for group in audit.subgroups if group.n < FEW_IN_GROUP]
    if n >= FEW_IMAGES and small:
        yield f"Too few images for conclusions about: {', '.join(small)}."
    for comparison in audit.comparisons:
        same, control = comparison.same.absolute, comparison.shuffled.absolute
        if same.mean >= SIMILAR and same.low > control.high:
            yield (
                f"The maps of {comparison.other} are similar to these (similarity "
                f"{same.mean:.2f} of 1): the two models may look at the same features."
            )


def count(proportion: Interval) -> int:
    """Return k of k/n."""
    return round(proportion.mean * proportion.n)


def _without_tensors(value: Any) -> Any:  # noqa: ANN401
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        left_out = (Tensor, Flips, Prediction)
        return {k: _without_tensors(v) for k, v in parts.items() if not isinstance(v, left_out)}
    return [_without_tensors(part) for part in value] if isinstance(value, tuple) else value
