"""What is measured of maps alone: where they point, how noisy and how much alike they are."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from ecinn.data.face_regions import REGION_NAMES, region_mask
from ecinn.explanation.result import Images
from ecinn.metrics import heatmaps as metrics
from ecinn.metrics.heatmaps import Importance, PerImage
from ecinn.pixels import Labels
from ecinn.studies.benchmark.heatmap_results import Measure, Role
from ecinn.studies.benchmark.quality import CUES

Better = Literal["more", "less"] | None
ATTRIBUTE_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Smiling": ("mouth",),
        "High_Cheekbones": ("cheeks",),
        "Wearing_Lipstick": ("mouth",),
        "Heavy_Makeup": ("mouth", "eyes", "cheeks"),
    }
)
"""Where people would look; what the network looks at nobody knows."""


def localisation(dataset: str, s: Importance, p: Labels, q: Labels) -> dict[Measure, PerImage]:
    """Where the importance is: in a planted cue's marks, or in the parts of a face."""

    def measure(name: str, better: Better = "more", role: Role = "counted") -> Measure:
        return Measure("localisation", name, better, role)

    kind, _, attribute = dataset.partition("/")
    if dataset in CUES:
        marks = CUES[dataset].stencils.to(s.device)
        pair = marks[p] | marks[q]
        return {
            measure("share in the marks of p and q"): metrics.share_inside(s, pair),
            measure("relative density in them", role="compared"): metrics.relative_density(
                s, pair
            ),
            measure("pointing game"): metrics.pointing_game(s, pair).double(),
            measure("localisation AUC"): metrics.localisation_auc(s, pair),
            measure("share in the marks of all classes"): metrics.share_inside(s, marks.any(0)),
        }
    if kind != "celeba":
        return {}
    values = {}
    for what, of in (("share", metrics.share_inside), ("density", metrics.relative_density)):
        for name in REGION_NAMES:
            follows = what == "density" or name == "background"
            role: Role = "compared" if follows else "counted"
            wanted = name in (*ATTRIBUTE_PARTS.get(attribute, ()), "face")
            better: Better = "more" if wanted else "less" if name == "background" else None
            mask = region_mask(name, *s.shape[1:]).to(s.device)
            values[measure(f"{what}, {name}", better, role)] = of(s, mask)
    return values


def noisiness(maps: Images) -> dict[Measure, PerImage]:
    """How much a map changes from pixel to pixel."""
    return {
        Measure("noise", "total variation", "less"): metrics.total_variation(maps),
        Measure("noise", "spatial coherence", "more"): metrics.spatial_coherence(maps),
        Measure("noise", "high-frequency share", "less"): metrics.high_frequency_share(maps),
    }


def likeness(
    section: Literal["stability", "random weights"], maps: Images, other: Images
) -> dict[Measure, PerImage]:
    """Of maps to those of noisy images, or of random weights, where the sign is random too."""
    cosine = metrics.map_similarity(maps, other)
    ranks = metrics.rank_similarity(metrics.importance(maps), metrics.importance(other))
    if section == "stability":
        return {
            Measure(section, "cosine, noisy image", "more"): cosine,
            Measure(section, "rank correlation, noisy image", "more"): ranks,
        }
    return {
        Measure(section, "|cosine|, random weights", "less", "compared"): cosine.abs(),
        Measure(section, "|rank correlation|, random weights", "less", "compared"): ranks.abs(),
    }
