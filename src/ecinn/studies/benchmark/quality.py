"""What judges that took no part, and a planted cue, say of counterfactuals."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.data.planted import FAKE_MNIST_CUE, Cue
from ecinn.errors import InputError
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.counterfactuals import Images, Labels, MeanWithInterval
from ecinn.studies.judges import Judges, load_judges

Observe = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""

CUES: Mapping[str, Cue] = MappingProxyType({"fakemnist": FAKE_MNIST_CUE})
"""Data sets whose classes are a planted cue. Their judges know what the images show beneath it."""
JUDGES: Mapping[str, str] = MappingProxyType({"mnist": "mnist", "fakemnist": "mnist"})
"""The shipped judges of every data set."""
MAIN_ORACLE = "convolutional"


@dataclass(frozen=True)
class Verdict:
    """Shares and means over the images given."""

    oracles: Mapping[str, MeanWithInterval] | None
    """Share that each oracle reads as q; None where the class is a planted cue."""
    kept: Mapping[str, MeanWithInterval] | None
    """Share that each oracle reads as it read the original; None where the class is no cue."""
    label_variation: MeanWithInterval
    """Jensen–Shannon divergence of the convolutional oracle's posteriors before and after."""
    frechet: float
    """To the real images, on the judges' feature network."""
    truth: MeanWithInterval | None
    """Share in which the cue itself says q."""
    inside: MeanWithInterval | None
    """Share of the squared change inside the cue's region, over images that changed."""


def judge(
    judges: Judges,
    originals: Images,
    images: Images,
    q: Labels,
    real_features: Float[Tensor, "real features"],
    cue: Cue | None = None,
) -> Verdict:
    """All that can be said of counterfactuals without the classifier that they explain."""
    before, after = judges.scores(originals), judges.scores(images)
    share = metrics.mean_and_interval
    variation = metrics.label_variation_score(
        before[MAIN_ORACLE].softmax(1), after[MAIN_ORACLE].softmax(1)
    )
    oracles = kept = truth = inside = None
    if cue is None:
        oracles = {
            family: share(metrics.oracle_agrees(scores, q)) for family, scores in after.items()
        }
    else:
        kept = {
            family: share(metrics.oracle_agrees(scores, before[family].argmax(1)))
            for family, scores in after.items()
        }
        truth = share(cue.read(images) == q)
        change = (images.float() - originals.float()) / 255
        shares = metrics.share_inside(change, cue.mask.to(images.device))
        inside = share(shares[~shares.isnan()])
    return Verdict(
        oracles=oracles,
        kept=kept,
        label_variation=share(variation),
        frechet=metrics.frechet_distance(judges.features(images), real_features),
        truth=truth,
        inside=inside,
    )


def find_judges(name_or_path: str | None, dataset: str) -> Judges:
    """The judges that were asked for, or the data set's own."""
    if name_or_path is None and dataset not in JUDGES:
        raise InputError(
            f"no judges ship for {dataset}: train them with `ecinn judges {dataset} --out FILE` "
            "and give --judges FILE"
        )
    return load_judges(JUDGES[dataset] if name_or_path is None else name_or_path)


def random_of_class(data: Dataset, q: Labels, generator: torch.Generator) -> Images:
    """For every target a random image of that label; black where there is none."""
    images = torch.zeros((len(q), *data.images.shape[1:]), dtype=torch.uint8)
    for label in q.unique().tolist():
        choice = (data.labels == label).nonzero()[:, 0]
        if len(choice):
            wanted = (q == label).nonzero()[:, 0]
            drawn = torch.randint(len(choice), (len(wanted),), generator=generator)
            images[wanted] = data.images[choice[drawn]]
    return images


def real_as_near(pool: Dataset, originals: Images, counterfactuals: Images, q: Labels) -> Images:
    """For every counterfactual the real image of q whose EN from the original is nearest to its.

    What reality has to offer at that distance: IM1 and oracles judge nothing but q-likeness, and
    the images of q that lie near an image of p are the less typical ones.
    """
    flat = pool.images.flatten(1).float() / 255
    members = {label: (pool.labels == label).nonzero()[:, 0] for label in q.unique().tolist()}
    candidates = {label: flat[rows] for label, rows in members.items()}
    wanted = metrics.elastic_net(originals, counterfactuals)
    images = torch.zeros_like(originals)
    for index, label in enumerate(q.tolist()):
        if len(members[label]):
            change = candidates[label] - originals[index].flatten().float() / 255
            distance = change.abs().sum(1) + change.norm(dim=1)
            images[index] = pool.images[members[label][(distance - wanted[index]).abs().argmin()]]
    return images
