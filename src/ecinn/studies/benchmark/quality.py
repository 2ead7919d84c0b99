"""Independent judgements of counterfactuals: oracles, Fréchet distance, planted cues."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset
from ecinn.data.planted import FAKE_MNIST_CUE, Cue
from ecinn.drawing.table import percent
from ecinn.errors import InputError
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import Interval, normal_interval
from ecinn.model import Model
from ecinn.pixels import Images, Labels, StoredImages, dequantise
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.judges import Judges, load_judges

CUES: Mapping[str, Cue] = {"fakemnist": FAKE_MNIST_CUE}
"""Datasets whose class is a planted cue. Their judges recognise what the images show otherwise."""
JUDGES: Mapping[str, str] = {"mnist": "mnist", "fakemnist": "mnist"}
"""The shipped judges of every dataset."""
MAIN_ORACLE = "convolutional"
ORACLES = (MAIN_ORACLE, "fully connected")
REAL = "real image of q"
PERFECT = "perfect answer"
_BATCH = 500

RealFeatures = Float[Tensor, "real features"]


@dataclass(frozen=True)
class Verdict:
    """Shares and means over the judged images."""

    oracles: Mapping[str, Interval] | None
    """Share that each oracle classifies as q; None if the class is a planted cue."""
    kept: Mapping[str, Interval] | None
    """Share that each oracle classifies as it did the original; None without a planted cue."""
    label_variation: Interval
    """Jensen–Shannon divergence of the convolutional oracle's posteriors before and after."""
    frechet: float
    """Fréchet distance to the real images, on the features of the judges' network."""
    truth: Interval | None
    """Share whose cue says q."""
    inside: Interval | None
    """Share of the squared change inside the cue's region, over images that changed."""


def judge(
    judges: Judges,
    originals: StoredImages,
    images: StoredImages,
    q: Labels,
    real_features: RealFeatures,
    cue: Cue | None = None,
) -> Verdict:
    """Judge counterfactuals without the classifier that they explain."""
    before, after = judges.scores(originals), judges.scores(images)
    variation = metrics.label_variation_score(
        before[MAIN_ORACLE].softmax(1), after[MAIN_ORACLE].softmax(1)
    )
    expected = {family: q if cue is None else s.argmax(1) for family, s in before.items()}
    agreement = {
        family: normal_interval(metrics.oracle_agrees(scores, expected[family]))
        for family, scores in after.items()
    }
    truth = inside = None
    if cue is not None:
        truth = normal_interval(cue.read(images) == q)
        change = (images.float() - originals.float()) / 255
        shares = metrics.share_inside(change, cue.mask.to(images.device))
        inside = normal_interval(shares[~shares.isnan()])
    return Verdict(
        oracles=agreement if cue is None else None,
        kept=None if cue is None else agreement,
        label_variation=normal_interval(variation),
        frechet=metrics.frechet_distance(judges.features(images), real_features),
        truth=truth,
        inside=inside,
    )


def verdict_cells(
    verdict: Verdict | None, record: Mapping[str, Any], *, planted: bool
) -> dict[str, str]:
    """Table cells: agreement of both oracles, and the cue's share and place where there is one.

    Args:
        record: provenance with the accuracy of the judges, which the headings show.
    """
    accuracy = record["judges"]["accuracy"]
    what = "digit kept, " if planted else ""
    shares = (verdict and (verdict.kept if planted else verdict.oracles)) or {}
    cells = {}
    if planted:
        cells["cue says q %"] = percent(getattr(verdict, "truth", None))
        cells["change inside the cue %"] = percent(getattr(verdict, "inside", None), 1)
    for family in ORACLES:
        heading = f"{what}{family} oracle % (accuracy {100 * accuracy[family]:.2f})"
        cells[heading] = percent(shares.get(family))
    return cells


def find_judges(name_or_path: str | None, dataset: str) -> Judges:
    """Load the given judges, or those that ship for the dataset."""
    if name_or_path is None and dataset not in JUDGES:
        raise InputError(
            f"no judges ship for {dataset}: train them with `ecinn judges {dataset} --out FILE` "
            "and give --judges FILE"
        )
    return load_judges(JUDGES[dataset] if name_or_path is None else name_or_path)


@torch.inference_mode()
def predicted_classes(
    model: Model, images: StoredImages, observe: Observer = ignore, task: str = "classifying"
) -> Labels:
    """C(x) of any number of 8-bit images, on their device."""
    count = counter(observe, task, len(images))
    predicted = torch.zeros(len(images), dtype=torch.long, device=images.device)
    for start in range(0, len(images), _BATCH):
        part = slice(start, start + _BATCH)
        predicted[part] = model.predict(images[part]).argmax(1).to(images.device)
        count(min(start + _BATCH, len(images)))
    return predicted


def log_density(model: Model, x: Images) -> Float[Tensor, " batch"]:
    """log p(x), pixels in [0, 1]."""
    z, log_det = model.encode_with_log_det(x)
    return equations.log_marginal(equations.log_likelihood(z, log_det, model.mu))


@torch.inference_mode()
def bits_per_dim(
    model: Model, images: StoredImages, generator: torch.Generator
) -> Float[Tensor, " batch"]:
    """−log₂ p(x) per dimension with one draw of dequantisation noise, a code length."""
    log_p = log_density(model, dequantise(images.to(model.device), generator))
    return equations.bits_per_dim(log_p, model.mu.shape[1]).cpu()


def random_of_class(data: Dataset, q: Labels, generator: torch.Generator) -> StoredImages:
    """Draw a random image of every target class; black where the dataset has none."""
    images = torch.zeros((len(q), *data.images.shape[1:]), dtype=torch.uint8)
    for label in q.unique().tolist():
        candidates = (data.labels == label).nonzero()[:, 0]
        if len(candidates):
            rows = (q == label).nonzero()[:, 0]
            drawn = torch.randint(len(candidates), (len(rows),), generator=generator)
            images[rows] = data.images[candidates[drawn]]
    return images


def real_as_near(
    pool: Dataset, originals: StoredImages, counterfactuals: StoredImages, q: Labels
) -> StoredImages:
    """Find, for every counterfactual, the real image of q at the most similar EN distance.

    A fair reference for IM1 and the oracles, which measure only how much an image looks like q:
    real images of q that are close to an image of p are less typical of q.
    """
    flat = pool.images.flatten(1).float() / 255
    members = {label: (pool.labels == label).nonzero()[:, 0] for label in q.unique().tolist()}
    candidates = {label: flat[rows] for label, rows in members.items()}
    target = metrics.elastic_net(originals, counterfactuals)
    images = torch.zeros_like(originals)
    for index, label in enumerate(q.tolist()):
        if len(members[label]):
            change = candidates[label] - originals[index].flatten().float() / 255
            distance = change.abs().sum(1) + change.norm(dim=1)
            images[index] = pool.images[members[label][(distance - target[index]).abs().argmin()]]
    return images
