"""Calibration: turn trained weights into a model with statistics of the clean training images."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import (
    POSE_IMAGES,
    OODDetector,
    band_energies,
    fit_log_p,
    fit_pose,
    fit_texture,
)
from ecinn.classifier.quantisation import stored_precision
from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import misplace
from ecinn.data.dataset import Dataset
from ecinn.explanation.counterfactual import class_means
from ecinn.flow.network import latent_frequencies
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import Labels, StoredImages, to_pixels


@torch.no_grad()
def calibrate(
    recipe: Recipe,
    data: Dataset,
    weights: Mapping[str, Tensor],
    device: torch.device,
    training: Mapping[str, object],
    held_out: Dataset | None = None,
    *,
    answers: Float[Tensor, "held_out classes"] | None = None,
) -> Checkpoint:
    """Measure μ̄ and fit the OOD detector on clean training images, with the weights as stored.

    Tied class means become μ̄; their temperature is fitted on held-out images, if there are any,
    to their labels or to the answers of another classifier.
    """
    classifier = GenerativeClassifier(recipe.architecture).to(device).eval()
    classifier.load_state_dict(stored_precision(weights, recipe.stored_bits))
    z, log_det = _encode(classifier, data.images, device)
    if recipe.tied:
        classifier.mu.copy_(label_means(z, data.labels.to(device), len(classifier.mu)))
    mu_bar = class_means(z.split(500), classifier.mu)
    if recipe.tied:
        classifier.mu.copy_(mu_bar)
        if held_out is not None:
            z_held_out, _ = _encode(classifier, held_out.images, device)
            labels = held_out.labels.to(device)
            classifier.tau.fill_(fit_tau(z_held_out, labels, classifier.mu, answers))
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, classifier.mu))
    texture = pose = None
    frequency = latent_frequencies(recipe.architecture)
    if frequency is not None:
        predicted = equations.predicted_class(z, classifier.mu)
        frequency = frequency.to(device)
        # In parts, because intermediate results of all latents may not fit into memory.
        parts = zip(z.split(500), predicted.split(500), strict=True)
        energies = torch.cat([band_energies(part - mu_bar[p], frequency) for part, p in parts])
        texture = fit_texture(energies, frequency)
    if recipe.aligned:
        generator = torch.Generator().manual_seed(recipe.seed)
        misplaced = misplace(data.images[: min(POSE_IMAGES, len(data) // 2)], generator)
        pose = fit_pose(z, _encode(classifier, misplaced, device)[0])
    return Checkpoint(
        recipe=recipe,
        classifier=classifier.requires_grad_(requires_grad=False).cpu(),
        mu_bar=mu_bar.cpu(),
        ood=OODDetector(fit_log_p(log_p), texture, pose).to(torch.device("cpu")),
        class_names=data.class_names,
        training=training,
    )


def _encode(
    classifier: GenerativeClassifier,
    images: StoredImages,
    device: torch.device,
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, " batch"]]:
    """Return all latents and log-determinants."""
    parts = images.split(500)
    with exact_convolutions():
        encoded = [classifier.encode_with_log_det(to_pixels(part.to(device))) for part in parts]
    return torch.cat([z for z, _ in encoded]), torch.cat([log_det for _, log_det in encoded])


def label_means(
    z: Float[Tensor, "batch dim"], labels: Labels, classes: int
) -> Float[Tensor, "classes dim"]:
    """Return the mean latent of every class; zero for a class without images."""
    member = F.one_hot(labels, classes).to(z.dtype)
    return member.T @ z / member.sum(0)[:, None].clamp(min=1)


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
        return ((posterior * logits).sum(1) - expected).mean() < 0

    low, high = (torch.full_like(own[0], limit) for limit in (-20.0, 20.0))
    return equations.bisect(too_low, low, high).exp().to(z.dtype)
