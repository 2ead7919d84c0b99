"""Deletion and insertion: the probability of p while pixels are replaced in a map's order."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.attribution.heatmaps import Heatmaps
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.explanation.result import Images
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics.heatmaps import Importance, PerImage, importance
from ecinn.metrics.replacement import area_under_curve, replacement_curve
from ecinn.pixels import Labels
from ecinn.studies.benchmark.heatmap_results import Measure, Role, Section

COUNTERFACTUAL = "counterfactual"
_ENDS: Mapping[Section, str] = MappingProxyType(
    {"replacement": "", "magnitude": ", by |h|", "cross-check": ", by the CNN"}
)
"""Of the measures' names."""
Areas = dict[Measure, PerImage]


@torch.no_grad()
def posterior(network: nn.Module, x: Images, size: int) -> Float[Tensor, "batch classes"]:
    """p(y|x), so many images at a time."""
    parts = x.split(size)
    if isinstance(network, GenerativeClassifier):
        with exact_convolutions():
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
    p: Labels
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
        """In the method's own order, or in that of |h|."""
        by_magnitude = self.section == "magnitude"
        return self.areas(importance(made.maps) if by_magnitude else evidence_for_p(made))

    def areas(self, order: Importance) -> Areas:
        """Under the probability of p."""
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
                values[self._measure(what, insertion=insertion)] = area_under_curve(curve)
        return values

    def _measure(self, what: str, *, insertion: bool) -> Measure:
        name = f"{'insertion' if insertion else 'deletion'} AUC, {what}{_ENDS[self.section]}"
        role: Role = "compared" if what == COUNTERFACTUAL else "counted"
        role = "shown" if self.section == "magnitude" else role
        return Measure(self.section, name, "more" if insertion else "less", role)
