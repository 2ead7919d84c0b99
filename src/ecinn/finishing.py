"""From trained weights to a model: what is fitted and measured on the clean training images."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.checkpoints import Checkpoint
from ecinn.data.dataset import Dataset
from ecinn.experiments import Experiment
from ecinn.explain import class_means
from ecinn.model.classifier import GenerativeClassifier
from ecinn.pixels import to_pixels
from ecinn.precision import exact_convolutions
from ecinn.stored_weights import stored_precision


@torch.no_grad()
def finish(
    experiment: Experiment,
    data: Dataset,
    weights: Mapping[str, Tensor],
    device: torch.device,
    training: Mapping[str, object],
) -> Checkpoint:
    """Measure what explanations need on the clean training images: μ, μ̄ and typical log p(x)."""
    # On weights as they will be stored, so that what is measured is what is loaded.
    classifier = GenerativeClassifier(experiment.architecture).to(device).eval()
    classifier.load_state_dict(stored_precision(weights, experiment.stored_bits))
    with exact_convolutions():
        encoded = [
            classifier.encode_with_log_det(to_pixels(images.to(device)))
            for images in data.images.split(500)
        ]
    z = torch.cat([z for z, _ in encoded])
    log_det = torch.cat([log_det for _, log_det in encoded])
    if experiment.means_label_smoothing is not None:
        classifier.mu.copy_(refit_means(z, data.labels.to(device), classifier.mu, experiment))
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, classifier.mu))
    low, high = log_p.double().quantile(log_p.new_tensor([0.001, 0.999]).double()).tolist()
    mu_bar = class_means(z.split(500), classifier.mu)
    return Checkpoint(
        experiment=experiment,
        classifier=classifier.requires_grad_(requires_grad=False).cpu(),
        mu_bar=mu_bar.cpu(),
        typical=(low, high),
        class_names=data.class_names,
        training=training,
    )


def refit_means(
    z: Float[Tensor, "batch dim"],
    labels: Int[Tensor, " batch"],
    mu: Float[Tensor, "classes dim"],
    experiment: Experiment,
) -> Float[Tensor, "classes dim"]:
    """The class means that minimise the training loss on these latents, the network held fixed.

    The network learns from noisy images, but images to be explained are clean: their latents
    lie closer together, and means fitted to them separate the classes better.
    """
    assert experiment.means_label_smoothing is not None
    label_smoothing = experiment.means_label_smoothing
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
            experiment.beta,
        )
        value.backward()
        return value

    optimiser.step(loss)
    return fitted.detach()
