"""Calibration: turn trained weights into a model with statistics of the clean training images."""

from collections.abc import Mapping

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
    fit_log_p,
    fit_pose,
    fit_texture,
)
from ecinn.classifier.quantisation import stored_precision
from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import misplace
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
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
) -> Checkpoint:
    """Fit μ, μ̄ and the OOD detector to clean training images and the weights as stored."""
    classifier = GenerativeClassifier(recipe.architecture).to(device).eval()
    classifier.load_state_dict(stored_precision(weights, recipe.stored_bits))
    z, log_det = _encode(classifier, data.images, device)
    if recipe.refit_label_smoothing is not None:
        classifier.mu.copy_(refit_means(z, data.labels.to(device), classifier.mu, recipe))
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, classifier.mu))
    mu_bar = class_means(z.split(500), classifier.mu)
    texture = pose = None
    frequency = latent_frequencies(recipe.architecture)
    if frequency is not None:
        predicted = equations.log_posterior(z, classifier.mu).argmax(1)
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


def refit_means(
    z: Float[Tensor, "batch dim"],
    labels: Labels,
    mu: Float[Tensor, "classes dim"],
    recipe: Recipe,
) -> Float[Tensor, "classes dim"]:
    """Return the class means that minimise the training loss on these latents.

    Latents of clean images lie closer together than those of the noisy training images.
    """
    assert recipe.refit_label_smoothing is not None
    smoothing = recipe.refit_label_smoothing
    fitted = mu.detach().clone().requires_grad_()
    optimiser = torch.optim.LBFGS([fitted], max_iter=100, line_search_fn="strong_wolfe")
    no_jacobian = z.new_zeros(len(z))

    @torch.enable_grad()
    def loss() -> Tensor:
        optimiser.zero_grad()
        log_p = equations.log_marginal(equations.log_likelihood(z, no_jacobian, fitted))
        log_posterior = equations.log_posterior(z, fitted)
        cross_entropy = equations.smoothed_cross_entropy(log_posterior, labels, smoothing)
        nll = -log_p.mean() / z.shape[1]
        value = equations.information_bottleneck_loss(nll, cross_entropy, recipe.beta)
        value.backward()
        return value

    optimiser.step(loss)
    return fitted.detach()


def mix(
    first: Checkpoint, second: Checkpoint, share: float, data: Dataset, device: torch.device
) -> Checkpoint:
    """Return the calibrated model with weights (1 − share)·first + share·second.

    This trades off, for example, proximity against realism without training. It works for models
    that were fine-tuned from the same weights; the average of unrelated models is useless.
    """
    if not 0 <= share <= 1:
        raise InputError(f"the share of the second model must be between 0 and 1, not {share}")
    if first.recipe.architecture != second.recipe.architecture:
        raise InputError("cannot mix models with different architectures")
    if first.recipe.dataset != second.recipe.dataset:
        raise InputError("cannot mix models of different datasets")
    other = second.classifier.state_dict()
    weights = {
        name: torch.lerp(value, other[name], share) if value.is_floating_point() else value
        for name, value in first.classifier.state_dict().items()
    }
    record = {"mixed": {"share": share}, "first": first.training, "second": second.training}
    return calibrate(first.recipe, data, weights, device, record)
