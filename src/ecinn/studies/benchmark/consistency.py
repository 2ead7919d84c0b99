"""Confidence consistency: how sure of p the stored image is, against what was asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.explanation.correction import Ends, Line, correct_alpha
from ecinn.explanation.reading import stored_posterior
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics.counterfactuals import (
    ConfidenceConsistency,
    Images,
    Labels,
    confidence_consistency,
)
from ecinn.model import Model
from ecinn.studies.benchmark.methods import read

ASKED = tuple(round(0.05 * step, 2) for step in range(1, 20))
_BATCH = 64


@dataclass(frozen=True)
class Variant:
    """One way of getting there."""

    consistency: ConfidenceConsistency
    passes: float
    """Mean network evaluations per counterfactual."""
    obtained: tuple[float, ...]
    """Mean p(p) of the stored 8-bit images at every asked level; nan where there is none."""


@dataclass(frozen=True)
class Consistency:
    """Images of two classes moved towards each other, asked for every level of p(p)."""

    classes: tuple[str, str]
    n: int
    """Images; each is asked for every level."""
    seed: int
    asked: tuple[float, ...]
    unreachable: int
    """Pairs of image and level that no α gives; left out."""
    plain: Variant
    corrected: Variant
    """Stored images are read, and α is corrected where they are not as was asked."""


@dataclass(frozen=True)
class _Answers:
    """p(p) of stored images, a column per level."""

    plain: Float[Tensor, "batch levels"]
    corrected: Float[Tensor, "batch levels"]
    reachable: Bool[Tensor, "batch levels"]
    corrections: Int[Tensor, "batch levels"]


def measure_consistency(
    model: Model,
    data: Dataset,
    classes: tuple[int, int],
    *,
    n: int = 100,
    seed: int = 0,
    observe: Callable[[int], None] = lambda done: None,
) -> Consistency:
    """Random test images of two classes, read as what they are, moved towards the other one."""
    images, p = draw_of_classes(model, data, classes, n, seed)
    parts = []
    for rows in torch.arange(n).split(_BATCH):
        parts.append(_answers(model, images[rows], p[rows], sum(classes) - p[rows]))
        observe(int(rows[-1]) + 1)
    reachable = torch.cat([part.reachable for part in parts])
    corrections = torch.cat([part.corrections for part in parts])[reachable]
    plain = torch.cat([part.plain for part in parts])
    corrected = torch.cat([part.corrected for part in parts])
    names = model.class_names
    return Consistency(
        classes=(names[classes[0]], names[classes[1]]),
        n=n,
        seed=seed,
        asked=ASKED,
        unreachable=int((~reachable).sum()),
        plain=_variant(plain, reachable, 2.0),
        # One more to read what was stored, then a decode and a reading per correction.
        corrected=_variant(corrected, reachable, 3 + 2 * float(corrections.double().mean())),
    )


def _variant(
    obtained: Float[Tensor, "batch levels"], reachable: Bool[Tensor, "batch levels"], passes: float
) -> Variant:
    asked = torch.tensor(ASKED, dtype=torch.float64).expand_as(obtained)
    means = [column[there].mean() for column, there in zip(obtained.T, reachable.T, strict=True)]
    return Variant(
        consistency=confidence_consistency(asked[reachable], obtained[reachable]),
        passes=passes,
        obtained=tuple(float(mean) for mean in means),
    )


def draw_of_classes(
    model: Model, data: Dataset, classes: tuple[int, int], n: int, seed: int
) -> tuple[Images, Labels]:
    """Random images of either class that the model reads as their label, and that label."""
    known = len(model.class_names)
    if len(set(classes)) < 2 or not all(0 <= label < known for label in classes):
        raise InputError(f"classes are two different ones of 0 to {known - 1}, not {classes}")
    if n < 1:
        raise InputError(f"n is at least 1 image, not {n}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data), generator=generator)
    labels = data.labels[order]
    order = order[(labels == classes[0]) | (labels == classes[1])]
    # A few more than asked for, since some are misread; all of them only where that is needed.
    for some in (order[: n + 20], order):
        p = read(model, data.images[some])
        right = (p == data.labels[some]).nonzero()[:, 0]
        if len(right) >= n:
            return data.images[some[right[:n]]], p[right[:n]]
    raise InputError(f"n is at most the {len(right)} images of these two classes, not {n}")


@torch.inference_mode()
def _answers(model: Model, images: Images, p: Labels, q: Labels) -> _Answers:
    """Every image at every level, plain and corrected."""
    classifier = model.classifier
    p, q = p[:, None].to(model.device), q[:, None].to(model.device)
    plain, corrected, there, corrections = [], [], [], []
    with exact_convolutions():
        z = classifier.encode(model.pixels(images))[:, None]
        delta = equations.latent_direction(model.mu_bar, p, q)
        for level in ASKED:
            alpha, reachable = equations.departing_alpha(z, delta, classifier.mu, p, level)
            moved = equations.corrected_latent(z, alpha, delta)
            image = classifier.decode(moved[:, 0])
            stored = stored_posterior(classifier, image)[:, None]
            expected = equations.log_posterior(moved, classifier.mu).exp()
            # p is where the same line leads to when it is walked backwards.
            none = torch.zeros_like(p)
            ends = Ends(expected, stored, alpha=-alpha, image=image[:, None], corrections=none)
            better = correct_alpha(classifier, Line(z, -delta, p), ends, level, reachable)
            assert better.stored_posterior is not None
            plain.append(stored.gather(2, p[..., None])[:, 0])
            corrected.append(better.stored_posterior.gather(2, p[..., None])[:, 0])
            there.append(reachable)
            corrections.append(better.corrections)
    return _Answers(
        plain=torch.cat(plain, 1).double().cpu(),
        corrected=torch.cat(corrected, 1).double().cpu(),
        reachable=torch.cat(there, 1).cpu(),
        corrections=torch.cat(corrections, 1).cpu(),
    )
