"""Deletion and insertion: the probability of p while pixels are replaced in a map's order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.benchmark.heatmap_results import Measure, Role, Section
from ecinn.explanation import Images
from ecinn.heatmaps import Classes, Heatmaps
from ecinn.metrics.heatmaps import Importance, PerImage, importance
from ecinn.metrics.replacement import area_under_curve, replacement_curve
from ecinn.model.classifier import GenerativeClassifier
from ecinn.precision import exact_convolutions

COUNTERFACTUAL = "counterfactual"
Areas = dict[Measure, PerImage]


@torch.no_grad()
def posterior(network: nn.Module, x: Images, size: int) -> Float[Tensor, "batch classes"]:
    """p(y|x), so many images at a time."""
    parts = x.split(size)
    with exact_convolutions():
        if isinstance(network, GenerativeClassifier):
            return torch.cat([network.log_posterior(part).exp() for part in parts])
        return torch.cat([network(part).softmax(1) for part in parts])


def evidence_for_p(made: Heatmaps) -> Importance:
    """−Σ_c h_c, what pixels say for p; Σ_c |h_c| of ECINNh, whose sign says lighter or darker."""
    return importance(made.maps) if made.method == "ecinn" else -made.maps.sum(1)


@dataclass(frozen=True)
class Reader:
    """A network that says how probable p still is."""

    section: Section
    network: nn.Module
    x: Images
    p: Classes
    replacements: Mapping[str, Images]
    batch_size: int
    seed: int

    def of_p(self, images: Images) -> PerImage:
        """p(p|x) of every image."""
        answer = posterior(self.network, images, self.batch_size)
        return answer.gather(1, self.p[:, None])[:, 0]

    @cached_property
    def ends(self) -> Mapping[str, tuple[PerImage, PerImage]]:
        """Of x and of every replacement, which no order changes."""
        at_x = self.of_p(self.x)
        return {what: (at_x, self.of_p(other)) for what, other in self.replacements.items()}

    def of_maps(self, made: Heatmaps) -> Areas:
        """In the method's own order, and in that of |h|."""
        if made.method == "ecinn":
            return self.areas(evidence_for_p(made), by_magnitude=(False, True))
        own = self.areas(evidence_for_p(made))
        return own | self.areas(importance(made.maps), by_magnitude=(True,))

    def areas(self, order: Importance, by_magnitude: Sequence[bool] = (False,)) -> Areas:
        """Under the probability of p.

        Args:
            by_magnitude: the measures that the areas are of: those of the own order, of |h|.
        """
        values: Areas = {}
        for what, replacement in self.replacements.items():
            for insertion in (False, True):
                curve = replacement_curve(
                    self.of_p,
                    self.x,
                    replacement,
                    order,
                    insertion=insertion,
                    generator=torch.Generator().manual_seed(self.seed),
                    ends=self.ends[what],
                )
                for magnitude in by_magnitude:
                    measure = self._measure(what, insertion=insertion, magnitude=magnitude)
                    values[measure] = area_under_curve(curve)
        return values

    def _measure(self, what: str, *, insertion: bool, magnitude: bool) -> Measure:
        name = f"{'insertion' if insertion else 'deletion'} AUC, {what}"
        name += ", by the CNN" if self.section == "cross-check" else ""
        role: Role = "compared" if what == COUNTERFACTUAL else "counted"
        if magnitude:
            name, role = f"{name}, by |h|", "shown"
        return Measure(self.section, name, "more" if insertion else "less", role)
