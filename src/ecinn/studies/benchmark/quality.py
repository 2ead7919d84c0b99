"""Independent judgements of counterfactuals: oracles, Fréchet distance, planted cues."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset, Split
from ecinn.data.planted import FAKE_MNIST_CUE, Cue
from ecinn.errors import InputError
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import Interval, normal_interval, proportion
from ecinn.model import Model
from ecinn.pixels import Images, Labels, StoredImages, to_uint8
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.authors_files import ClassAutoencoders
from ecinn.studies.judges import Judges, load_judges, scaled, shipped_judges

CUES: Mapping[str, Cue] = {"fakemnist": FAKE_MNIST_CUE}
"""Datasets whose class is a planted cue. Their judges classify the image content (the digit), not
the cue."""
JUDGES: Mapping[str, str] = {"mnist": "mnist", "fakemnist": "mnist"}
"""The shipped judges of every dataset."""
MAIN_ORACLE = "convolutional"
REAL = "real image of q"
PERFECT = "perfect answer"
_BATCH, _EXPLAINED = 500, 250
"""Images at a time that are classified and explained."""

RealFeatures = Float[Tensor, "real features"]


@dataclass(frozen=True)
class SecondOpinion:
    """What independent readers, oracles or a planted cue, see in a model's own images."""

    tipping_points: Mapping[str, Interval]
    """Share of tipping points that each reads as q, of those it reads as p or q; perfect: ½."""
    third_class: Mapping[str, Interval]
    """Share of tipping points that each reads as another class."""
    samples: Mapping[str, Interval]
    """Share of samples from p(x|y), at temperature 1, that each reads as y."""


@dataclass(frozen=True)
class Verdict:
    """Shares and means over the judged images."""

    oracles: Mapping[str, Interval] | None
    """Share that each oracle classifies as q; None if the class is a planted cue."""
    kept: Mapping[str, Interval] | None
    """Share that each oracle classifies as it did the original; None without a planted cue."""
    label_variation: Interval
    """Jensen–Shannon divergence of the convolutional oracle's posteriors before and after."""
    frechet: Interval
    """Fréchet distance to the real images, on the features of the judges' network."""
    truth: Interval | None = None
    """Share whose cue says q."""
    inside: Interval | None = None
    """Share of the squared change inside the cue's region, over images that changed."""

    @property
    def agreement(self) -> Mapping[str, Interval] | None:
        """`oracles` or `kept`, whichever there is."""
        return self.kept if self.oracles is None else self.oracles


@dataclass(frozen=True)
class Panel:
    """Judges, the features of real images, and the cue if the class is a planted one."""

    judges: Judges
    real_features: RealFeatures
    cue: Cue | None = None

    @classmethod
    def of(cls, judges: Judges, real: StoredImages, dataset: str) -> "Panel":
        """Compare counterfactuals with these real images of a dataset."""
        return cls(judges, judges.features(real), CUES.get(dataset))

    def judge(
        self, originals: StoredImages, images: StoredImages, q: Labels
    ) -> tuple[Verdict, dict[str, Tensor]]:
        """Judge counterfactuals without the classifier that they explain.

        Returns:
            The verdict on all images, and what it counts or averages for every single one: whether
            each oracle agrees and, with a planted cue, truth and the share inside its region,
            which is nan where nothing changed.
        """
        cue, before, after = self.cue, self.judges.scores(originals), self.judges.scores(images)
        expected = {family: q if cue is None else s.argmax(1) for family, s in before.items()}
        agreement: dict[str, Tensor] = {
            family: metrics.oracle_agrees(scores, expected[family])
            for family, scores in after.items()
        }
        posteriors = (scores[MAIN_ORACLE].softmax(1) for scores in (before, after))
        shares = {family: proportion(agrees) for family, agrees in agreement.items()}
        verdict = Verdict(
            oracles=shares if cue is None else None,
            kept=None if cue is None else shares,
            label_variation=normal_interval(metrics.label_variation_score(*posteriors)),
            frechet=metrics.frechet_distance(self.judges.features(images), self.real_features),
        )
        if cue is None:
            return verdict, agreement
        truth = cue.read(images) == q
        change = (images.float() - originals.float()) / 255
        inside = metrics.share_inside(change, cue.mask.to(images.device))
        changed = inside[~inside.isnan()]
        verdict = replace(verdict, truth=proportion(truth), inside=normal_interval(changed))
        return verdict, {"truth": truth, "inside": inside, **agreement}


def distances(
    originals: StoredImages,
    images: StoredImages,
    p: Labels,
    q: Labels,
    autoencoders: ClassAutoencoders | Judges | None,
) -> dict[str, Tensor]:
    """EN of every image and, with autoencoders that know the classes, IM1 and IM2."""
    values: dict[str, Tensor] = {"elastic_net": metrics.elastic_net(originals, images)}
    if autoencoders is not None:
        pixels, by_q = scaled(images), autoencoders.reconstruct(images, q)
        values["im1"] = metrics.im1(pixels, by_q, autoencoders.reconstruct(images, p))
        values["im2"] = metrics.im2(pixels, by_q, autoencoders.reconstruct(images))
    return values


@torch.inference_mode()
def second_opinion(
    model: Model,
    judges: Judges,
    images: StoredImages,
    q: Labels,
    *,
    seed: int = 0,
    cue: Cue | None = None,
    observe: Observer = ignore,
) -> SecondOpinion:
    """Read the tipping points of these images and as many samples, both stored with 8 bits."""

    def read(made: StoredImages) -> Mapping[str, Labels]:
        return judges.verdicts(made) if cue is None else {"cue": cue.read(made)}

    targets = q[:, None].to(model.device)
    explanation = model.explain(
        images, targets, confidence="alpha_1", check=False, observe=observe
    )
    p, q = explanation.p.cpu(), explanation.q[:, 0].cpu()
    tipping_points = read(explanation.stored_tipping_point[:, 0].cpu())
    y = torch.arange(len(images)) % len(model.class_names)
    generator = torch.Generator(model.device).manual_seed(seed)
    with exact_convolutions():
        samples = read(to_uint8(model.classifier.sample(y.to(model.device), generator)).cpu())
    preferences = {name: metrics.prefers_q(said, p, q) for name, said in tipping_points.items()}
    return SecondOpinion(
        tipping_points={name: proportion(value) for name, value in preferences.items()},
        third_class={
            name: proportion((said != p) & (said != q)) for name, said in tipping_points.items()
        },
        samples={name: proportion(said == y) for name, said in samples.items()},
    )


def about_judges(record: Mapping[str, Any], *, planted: bool) -> dict[str, Any]:
    """Return what the headings of the judges' columns in all tables mention."""
    return {
        "planted": planted,
        "accuracy": record["judges"]["accuracy"],
        "kept": "digit kept, " if planted else "",
        "oracle": "" if planted else " oracle",
    }


def refuse_choices(name_or_path: str | None, dataset: str, split: Split) -> None:
    """Refuse to score other images than test images with shipped judges, also the default."""
    if split != "test" and name_or_path in (None, *shipped_judges()):
        raise InputError(
            f"the shipped judges take no part in choices, so they score test images only: train "
            f"others with `ecinn judges {dataset} --seed 200 --out FILE` and give --judges FILE"
        )


def find_judges(name_or_path: str | None, dataset: str, split: Split = "test") -> Judges:
    """Load the given judges, or those that ship for the dataset; these score test images only."""
    refuse_choices(name_or_path, dataset, split)
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


def stored_counterfactuals(
    model: Model, images: StoredImages, q: Labels, observe: Observer = ignore, task: str = "pairs"
) -> tuple[Labels, StoredImages, Labels]:
    """Explain 8-bit images at α₁, except those that are read as q already or have no q (−1).

    Returns:
        C(x), the stored counterfactuals and their class by the model: black and −1 where there is
        none.
    """
    p = predicted_classes(model, images, observe)
    stored, read_as = torch.zeros_like(images), torch.full_like(q, -1)
    count = counter(observe, task, len(q))
    left = ((q != p) & (q >= 0)).nonzero()[:, 0]
    for start in range(0, len(left), _EXPLAINED):
        rows = left[start : start + _EXPLAINED]
        answer = model.explain(images[rows], q[rows, None], confidence="alpha_1")
        stored[rows] = answer.stored_convincing[:, 0].to(images.device)
        read_as[rows] = answer.convincing_certificate.winner[:, 0].to(q.device)
        count(int(rows[-1]) + 1)
    return p, stored, read_as


def log_density(model: Model, x: Images) -> Float[Tensor, " batch"]:
    """log p(x), pixels in [0, 1]."""
    z, log_det = model.encode_with_log_det(x)
    return equations.log_marginal(equations.log_likelihood(z, log_det, model.mu))


def draw_of_class(
    labels: Labels, label: int, n: int, generator: torch.Generator
) -> Int[Tensor, " drawn"]:
    """Draw n images with a label, or all if there are fewer; return their positions."""
    members = (labels == label).nonzero()[:, 0]
    return members[torch.randperm(len(members), generator=generator)[:n]]


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


def real_at_distance(
    pool: Dataset, originals: StoredImages, q: Labels, wanted: Float[Tensor, "batch distances"]
) -> UInt8[Tensor, "batch distances channels height width"]:
    """Find, for every original, the real images of q whose EN is closest to those wanted.

    At 0 it is the nearest real image of q, a control for EN. At a counterfactual's EN it is a fair
    reference for IM1 and the oracles, which measure only how much an image looks like q: real
    images of q that are close to an image of p are less typical of q.
    """
    flat = pool.images.flatten(1).float() / 255
    members = {label: (pool.labels == label).nonzero()[:, 0] for label in q.unique().tolist()}
    candidates = {label: flat[rows] for label, rows in members.items()}
    images = torch.zeros((*wanted.shape, *originals.shape[1:]), dtype=torch.uint8)
    for index, label in enumerate(q.tolist()):
        if len(members[label]):
            change = candidates[label] - originals[index].flatten().float() / 255
            distance = change.abs().sum(1) + change.norm(dim=1)
            closest = (distance - wanted[index, :, None]).abs().argmin(1)
            images[index] = pool.images[members[label][closest]]
    return images
