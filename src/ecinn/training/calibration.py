"""From trained weights to a model: what is fitted and measured on the clean training images."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import (
    FITTED,
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
from ecinn.pixels import to_pixels


@torch.no_grad()
def finish(
    recipe: Recipe,
    data: Dataset,
    weights: Mapping[str, Tensor],
    device: torch.device,
    training: Mapping[str, object],
) -> Checkpoint:
    """Measure what explanations need on the clean training images: μ, μ̄ and what is usual."""
    # On weights as they will be stored, so that what is measured is what is loaded.
    classifier = GenerativeClassifier(recipe.architecture).to(device).eval()
    classifier.load_state_dict(stored_precision(weights, recipe.stored_bits))
    z, log_det = _encode(classifier, data.images, device)
    if recipe.means_label_smoothing is not None:
        classifier.mu.copy_(refit_means(z, data.labels.to(device), classifier.mu, recipe))
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, classifier.mu))
    mu_bar = class_means(z.split(500), classifier.mu)
    ood = OODDetector(fit_log_p(log_p))
    frequency = latent_frequencies(recipe.architecture)
    if frequency is not None:
        predicted = equations.log_posterior(z, classifier.mu).argmax(1)
        frequency = frequency.to(device)
        # In parts: of many images the latents fit once into memory, not three times.
        parts = zip(z.split(500), predicted.split(500), strict=True)
        energies = torch.cat([band_energies(some - mu_bar[p], frequency) for some, p in parts])
        ood = replace(ood, texture=fit_texture(energies, frequency))
    if recipe.upright:
        generator = torch.Generator().manual_seed(recipe.seed)
        misplaced = misplace(data.images[: min(FITTED, len(data) // 2)], generator)
        pose = fit_pose(z, _encode(classifier, misplaced, device)[0])
        ood = replace(ood, pose=pose)
    return Checkpoint(
        recipe=recipe,
        classifier=classifier.requires_grad_(requires_grad=False).cpu(),
        mu_bar=mu_bar.cpu(),
        ood=ood.to(torch.device("cpu")),
        class_names=data.class_names,
        training=training,
    )


def _encode(
    classifier: GenerativeClassifier,
    images: UInt8[Tensor, "batch channels height width"],
    device: torch.device,
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, " batch"]]:
    """All latents and log-determinants."""
    with exact_convolutions():
        encoded = [
            classifier.encode_with_log_det(to_pixels(part.to(device)))
            for part in images.split(500)
        ]
    return torch.cat([z for z, _ in encoded]), torch.cat([log_det for _, log_det in encoded])


def refit_means(
    z: Float[Tensor, "batch dim"],
    labels: Int[Tensor, " batch"],
    mu: Float[Tensor, "classes dim"],
    recipe: Recipe,
) -> Float[Tensor, "classes dim"]:
    """The class means that minimise the training loss on these latents, the network held fixed.

    The network learns from noisy images, but images to be explained are clean: their latents
    lie closer together, and means fitted to them separate the classes better.
    """
    assert recipe.means_label_smoothing is not None
    label_smoothing = recipe.means_label_smoothing
    fitted = mu.detach().clone().requires_grad_()
    optimiser = torch.optim.LBFGS([fitted], max_iter=100, line_search_fn="strong_wolfe")
    no_jacobian = z.new_zeros(len(z))

    @torch.enable_grad()
    def loss() -> Tensor:
        optimiser.zero_grad()
        log_p = equations.log_marginal(equations.log_likelihood(z, no_jacobian, fitted))
        value = equations.information_bottleneck_loss(
            -log_p.mean() / z.shape[1],
            equations.smoothed_cross_entropy(
                equations.log_posterior(z, fitted), labels, label_smoothing
            ),
            recipe.beta,
        )
        value.backward()
        return value

    optimiser.step(loss)
    return fitted.detach()
