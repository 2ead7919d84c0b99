"""Independent judgements of faces: the predictions of other networks, and realism by features."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ecinn.data.dataset import Dataset, Split
from ecinn.data.face_regions import region_mask
from ecinn.metrics.counterfactuals import frechet_distance, in_manifold
from ecinn.metrics.heatmaps import importance, share_inside
from ecinn.metrics.statistics import Interval, normal_interval, proportion
from ecinn.model import Model
from ecinn.pixels import Labels, StoredImages, to_pixels
from ecinn.studies.benchmark.quality import refuse_choices
from ecinn.studies.face_judges import FaceJudges, load_face_judges

INCEPTION = "Inception-V3"
REAL = "real faces"
UNCHANGED = "unchanged faces of p"
NEIGHBOURS = 3
"""Neighbours that define the manifold of real faces; 3, as in Kynkäänniemi et al. (2019)."""
_BATCH = 50


REFERENCE: Mapping[Split, Split] = {
    "train": "validation",
    "validation": "train",
    "test": "validation",
}
"""The real faces with which the faces of a split are compared."""
REFERENCE_FACES = 4_000
"""Largest number of real faces to compare with, which bounds the time."""


@dataclass(frozen=True)
class JudgePanel:
    """Networks that took no part in making any model, asked about one attribute."""

    attribute: str
    judges: FaceJudges
    inception: nn.Module | None = None
    """Maps pixels to logits of faces without and with the attribute."""
    device: str | torch.device = "cpu"
    """Device that Inception-V3 runs on."""

    @torch.inference_mode()
    def probabilities(self, images: StoredImages) -> dict[str, Float[Tensor, " batch"]]:
        """Return the probability of the attribute by each network, on the CPU."""
        said = self.judges.probabilities(images.cpu(), self.attribute)
        if self.inception is not None:
            parts = images.split(_BATCH)
            logits = [self.inception(to_pixels(part.to(self.device))).cpu() for part in parts]
            said[INCEPTION] = torch.cat(logits).softmax(1)[:, 1]
        return said

    def read(self, images: StoredImages) -> dict[str, Labels]:
        """Return the class that each network predicts."""
        return {name: (p > 0.5).long() for name, p in self.probabilities(images).items()}


@dataclass(frozen=True)
class Convinced:
    """Share of images that each network of a panel classifies as their class."""

    images: str
    """Name of the images that the panel classified."""
    shares: Mapping[str, Interval]
    """Share for each network; a counterfactual counts only if the network and the model agree on
    its original."""
    change: Interval | None = None
    """Mean |x̂ − x| in pixels of [0, 1], over all counterfactuals."""
    outside: Interval | None = None
    """Mean share of |x̂ − x| outside the oval of the face."""


def convinced(
    panel: JudgePanel,
    images: str,
    shown: StoredImages,
    classes: Labels,
    judged: Mapping[str, Bool[Tensor, " batch"]] | None = None,
    originals: StoredImages | None = None,
) -> Convinced:
    """Show images to a panel and count how many it classifies as these classes.

    Args:
        judged: the images that count, by network; None counts all.
        originals: the faces of which the images are counterfactuals, to measure the change.
    """
    right = {name: read == classes for name, read in panel.read(shown).items()}
    if judged is not None:
        right = {name: each[judged[name]] for name, each in right.items()}
    shares = {name: proportion(each) for name, each in right.items()}
    if originals is None:
        return Convinced(images, shares)
    moved = to_pixels(shown) - to_pixels(originals)
    outside = share_inside(importance(moved), region_mask("background", *shown.shape[2:]))
    change = normal_interval(moved.abs().flatten(1).mean(1))
    return Convinced(images, shares, change, normal_interval(outside))


def show_samples(
    panel: JudgePanel, model: Model, n: int, temperature: float, seed: int
) -> Convinced:
    """Show new faces of both classes, drawn from p(x|y), to a panel."""
    labels = torch.arange(n) % 2
    parts = [
        model.sample(part, temperature=temperature, seed=seed + number).cpu()
        for number, part in enumerate(labels.split(_BATCH))
    ]
    return convinced(panel, f"samples at T = {temperature}", torch.cat(parts), labels)


@dataclass(frozen=True)
class Realism:
    """Faces that should look like real faces of a class, against other real faces of it."""

    target: str
    """The name of the class."""
    images: str
    """The counterfactuals, or for comparison as many real faces or unchanged faces."""
    n: int
    frechet: Mapping[str, Interval]
    """Fréchet distance in the features of each judge; with few faces it is above 0."""
    precision: Mapping[str, Interval]
    """Share inside the manifold of the real faces' features, by judge."""


def measure_realism(
    judges: FaceJudges,
    data: Dataset,
    p: Labels,
    counterfactuals: Mapping[str, StoredImages],
    reference: Dataset,
    generator: torch.Generator,
) -> tuple[Realism, ...]:
    """Compare counterfactuals, real faces and unchanged faces with real faces of the target.

    All sets have the same size, because a Fréchet distance depends on it. The real faces are the
    control: no counterfactual should be expected to do better.

    Args:
        data: faces of which the counterfactuals were made, in their order.
        reference: other real faces.
    """
    features = {name: judges.features(images) for name, images in counterfactuals.items()}
    test, real = judges.features(data.images), judges.features(reference.images)
    results = []
    for q in range(2):
        changed, control = (p != q).nonzero()[:, 0], (data.labels == q).nonzero()[:, 0]
        known = reference.labels == q
        n = min(len(changed), len(control))
        if n < 2 or int(known.sum()) <= NEIGHBOURS:
            continue
        changed = changed[torch.randperm(len(changed), generator=generator)[:n]]
        control = control[torch.randperm(len(control), generator=generator)[:n]]
        sets = {name: (each, changed) for name, each in features.items()}
        sets |= {REAL: (test, control), UNCHANGED: (test, changed)}
        for name, (each, rows) in sets.items():
            pairs = {family: (f[rows], real[family][known]) for family, f in each.items()}
            distances = {family: frechet_distance(*pair) for family, pair in pairs.items()}
            inside = {family: in_manifold(*pair, NEIGHBOURS) for family, pair in pairs.items()}
            shares = {family: proportion(each) for family, each in inside.items()}
            results.append(Realism(data.class_names[q], name, n, distances, shares))
    return tuple(results)


def find_face_judges(
    name_or_path: str | None, split: Split, device: str | torch.device
) -> FaceJudges:
    """Load the given judges, or the shipped ones, which score test faces only."""
    refuse_choices(name_or_path, "celeba", split)
    return load_face_judges(name_or_path or "celeba", device)
