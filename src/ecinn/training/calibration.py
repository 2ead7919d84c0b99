"""Calibration: turn trained weights into a model with statistics of the clean training images."""

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import (
    POSE_IMAGES,
    OODDetector,
    band_energies,
    fit_distance,
    fit_log_p,
    fit_pose,
    fit_texture,
)
from ecinn.classifier.quantisation import stored_precision
from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import misplace
from ecinn.data.dataset import Dataset
from ecinn.errors import EcinnError
from ecinn.explanation.counterfactual import class_means
from ecinn.flow.network import latent_frequencies
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import Labels, StoredImages, to_pixels

PART = 500
"""Images or latents that are processed at once."""
LATENTS_LIMIT = 2**30
"""Bytes of latents that are kept in memory, or a quarter of the free memory of a GPU if that is
more; other latents are written to a temporary file."""


@torch.no_grad()
def calibrate(
    recipe: Recipe,
    data: Dataset,
    weights: Mapping[str, Tensor],
    device: torch.device,
    training: Mapping[str, object],
    held_out: Dataset | None = None,
    folder: Path | None = None,
    *,
    answers: Float[Tensor, "held_out classes"] | None = None,
) -> Checkpoint:
    """Measure μ̄ and fit the OOD detector on clean training images, with the weights as stored.

    Tied class means become μ̄; their temperature is fitted on held-out images, if there are any,
    to their labels or to the answers of another classifier.

    Args:
        folder: for a temporary file of the latents, if they are many; None: the system's.
    """
    classifier = GenerativeClassifier(recipe.architecture).to(device).eval()
    classifier.load_state_dict(stored_precision(weights, recipe.stored_bits))
    z, log_det = _encode(classifier, data.images, device, folder)

    def parts() -> Iterator[Tensor]:
        return (part.to(device) for part in z.split(PART))

    if recipe.tied:
        labels = data.labels.to(device).split(PART)
        classifier.mu.copy_(label_means(parts(), labels, classifier.mu))
    mu_bar = class_means(parts(), classifier.mu)
    if recipe.tied:
        classifier.mu.copy_(mu_bar)
        if held_out is not None:
            z_held_out, _ = _encode(classifier, held_out.images, device, folder)
            where = z_held_out.device
            given = None if answers is None else answers.to(where)
            labels, mu = held_out.labels.to(where), classifier.mu.to(where)
            classifier.tau.fill_(fit_tau(z_held_out, labels, mu, given))
    densities = zip(parts(), log_det.split(PART), strict=True)
    log_p = torch.cat(
        [
            equations.log_marginal(equations.log_likelihood(part, change, classifier.mu))
            for part, change in densities
        ]
    )
    texture = pose = distance = None
    frequency = latent_frequencies(recipe.architecture)
    if frequency is not None:
        frequency = frequency.to(device)
        energies = [
            band_energies(part - mu_bar[equations.predicted_class(part, classifier.mu)], frequency)
            for part in parts()
        ]
        texture = fit_texture(torch.cat(energies), frequency)
    else:
        latents: Iterable[Tensor] = parts()
        if held_out is not None:
            latents = _encode(classifier, held_out.images, device, folder)[0].split(PART)
        distance = _distance_limit(latents, classifier.mu, mu_bar)
    if recipe.aligned:
        generator = torch.Generator().manual_seed(recipe.seed)
        misplaced = misplace(data.images[: min(POSE_IMAGES, len(data) // 2)], generator)
        pose = fit_pose(z, _encode(classifier, misplaced, device, folder)[0].to(z.device))
    return Checkpoint(
        recipe=recipe,
        classifier=classifier.requires_grad_(requires_grad=False).cpu(),
        mu_bar=mu_bar.cpu(),
        ood=OODDetector(fit_log_p(log_p), texture, pose, distance).to(torch.device("cpu")),
        class_names=data.class_names,
        training=training,
    )


@torch.no_grad()
def with_distance(checkpoint: Checkpoint, held_out: Dataset) -> Checkpoint:
    """Return a model of an older version with the OOD detector's distance, weights unchanged."""
    classifier, mu_bar = checkpoint.classifier, checkpoint.mu_bar
    latents, _ = _encode(classifier, held_out.images, mu_bar.device, None)
    limit = _distance_limit(latents.split(PART), classifier.mu, mu_bar)
    return dataclasses.replace(checkpoint, ood=dataclasses.replace(checkpoint.ood, distance=limit))


def _distance_limit(
    latents: Iterable[Tensor],
    mu: Float[Tensor, "classes dim"],
    mu_bar: Float[Tensor, "classes dim"],
) -> float:
    squares = []
    for part in latents:
        z = part.to(mu.device)
        squares.append((z - mu_bar[equations.predicted_class(z, mu)]).square().sum(1))
    return fit_distance(torch.cat(squares))


def _encode(
    classifier: GenerativeClassifier,
    images: StoredImages,
    device: torch.device,
    folder: Path | None,
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, " batch"]]:
    """Return all latents, in a file if they are many, and log-determinants."""
    z = _storage((len(images), classifier.architecture.dim), device, folder)
    log_det = torch.empty(len(images), device=device)
    with exact_convolutions():
        for part, kept, change in zip(*(t.split(PART) for t in (images, z, log_det)), strict=True):
            latents, changes = classifier.encode_with_log_det(to_pixels(part.to(device)))
            kept.copy_(latents)
            change.copy_(changes)
    return z, log_det


def _storage(
    shape: tuple[int, int], device: torch.device, folder: Path | None
) -> Float[Tensor, "batch dim"]:
    """Return memory for latents: on the device, or a file that vanishes when it is not used."""
    size, limit = 4 * shape[0] * shape[1], LATENTS_LIMIT
    if device.type == "cuda":
        limit = max(limit, torch.cuda.mem_get_info(device)[0] // 4)
    if size <= limit:
        return torch.empty(shape, device=device)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Writing to a mapped file on a full disk would end the process without a word.
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))
    except OSError as error:
        raise EcinnError(
            f"cannot write {size / 2**30:.1f} GiB of latents: {error.strerror or error}; "
            "free some space and resume"
        ) from error


def label_means(
    latents: Iterable[Tensor], labels: Iterable[Tensor], mu: Float[Tensor, "classes dim"]
) -> Float[Tensor, "classes dim"]:
    """Return the mean latent of every class, from parts of the images; zero if it has none."""
    total = torch.zeros_like(mu, dtype=torch.float64)
    count = torch.zeros(len(mu), dtype=torch.float64, device=mu.device)
    for z, own in zip(latents, labels, strict=True):
        total.index_add_(0, own, z.double())
        count += torch.bincount(own, minlength=len(mu))
    return (total / count.clamp(min=1)[:, None]).to(mu.dtype)


def fit_tau(
    z: Float[Tensor, "batch dim"],
    labels: Labels,
    mu: Float[Tensor, "classes dim"],
    answers: Float[Tensor, "batch classes"] | None = None,
) -> Float[Tensor, ""]:
    """Return the inverse temperature τ that minimises the cross-entropy on held-out images.

    Targets are smoothed by 1/(n + 2), as in Platt scaling: n correct predictions do not justify
    certainty. The cross-entropy is convex in τ, so its slope is zero at one place. Answers of
    another classifier, which are class probabilities, replace the labels.
    """
    logits = equations.linear_logits(z, mu).double()
    logits = logits - logits.mean(1, keepdim=True)
    own = logits.gather(1, labels[:, None])[:, 0]
    if answers is not None:
        own = (answers.to(logits) * logits).sum(1)
    # Mean logit under the smoothed targets: the logits of a row add up to zero.
    expected = (1 - len(mu) / (len(mu) - 1) / (len(z) + 2)) * own

    def too_low(log_tau: Tensor) -> Tensor:
        posterior = (log_tau.exp() * logits).softmax(1)
        return ((posterior * logits).sum(1) - expected).mean()[None] < 0

    low, high = (torch.full_like(own[0], limit) for limit in (-20.0, 20.0))
    return equations.bisect(too_low, low, high).exp().to(z.dtype)
