"""The generative classifier as a probability model."""

import pytest
import torch

from ecinn.classifier import generative
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.flow.network import Architecture, Stage
from helpers.builders import randomise


@pytest.mark.slow
def test_density_integrates_to_one() -> None:
    """∫ p(x|y) dx = 1, by brute force over a two-pixel image seen through a 2×2 network."""
    architecture = Architecture(1, 2, 2, 2, (Stage(1, 4),), dense_width=4, seed=1)
    classifier = GenerativeClassifier(architecture).double().eval()
    randomise(classifier, seed=4, scale=0.4)
    classifier.mu.data = torch.tensor([[1.0, 0, 0.5, 0], [-1, 0.5, 0, 0]]).double()
    # In latent space almost all of the mass lies within ±6; its image under f⁻¹ is covered by
    # Monte Carlo with a wide Gaussian proposal.
    generator = torch.Generator().manual_seed(0)
    n, spread = 100_000, 3.0
    centre = classifier.decode(classifier.mu.detach()).mean(0, keepdim=True)
    noise = torch.randn((n, 1, 2, 2), generator=generator, dtype=torch.float64)
    x = (centre + spread * noise).detach()
    proposal = torch.distributions.Normal(centre, spread).log_prob(x).sum((1, 2, 3))
    with torch.no_grad():
        weights = (classifier.log_likelihood(x) - proposal[:, None]).exp()
    mean = weights.mean(0)
    uncertainty = weights.std(0) / n**0.5
    assert bool(((mean - 1).abs() < 4 * uncertainty + 0.01).all()), (mean, uncertainty)


def test_posterior_is_the_likelihoods_share(small_classifier, uniform) -> None:
    x = uniform(5, 1, 8, 8)
    likelihood = small_classifier.log_likelihood(x)
    share = (likelihood - likelihood.amax(1, keepdim=True)).exp()
    share = share / share.sum(1, keepdim=True)
    torch.testing.assert_close(small_classifier.log_posterior(x).exp(), share)
    assert torch.equal(small_classifier.predict(x), likelihood.argmax(1))


def test_prediction_is_the_nearest_mean(small_classifier, uniform) -> None:
    x = uniform(6, 1, 8, 8)
    z = small_classifier.encode(x)
    assert torch.equal(torch.cdist(z, small_classifier.mu).argmin(1), small_classifier.predict(x))


def test_samples_are_of_their_class_and_temperature_zero_is_the_mean(small_classifier) -> None:
    label = torch.tensor([0, 1, 2])
    small_classifier.float()
    generator = torch.Generator().manual_seed(0)
    still = small_classifier.sample(label, generator, temperature=0.0)
    torch.testing.assert_close(
        small_classifier.encode(still), small_classifier.mu.detach(), atol=1e-4, rtol=1e-4
    )
    many = small_classifier.sample(torch.full((2000,), 1), generator)
    latents = small_classifier.encode(many)
    torch.testing.assert_close(latents.mean(0), small_classifier.mu[1], atol=0.12, rtol=0.0)
    torch.testing.assert_close(latents.std(0), torch.ones(64), atol=0.08, rtol=0.0)


def test_means_start_apart() -> None:
    mu = GenerativeClassifier(Architecture(1, 28, 28, 10, (Stage(1, 4),), 0)).mu.detach()
    distances = torch.pdist(mu)
    assert 5.0 < distances.min() <= distances.max() < 7.0


def test_large_batches_pass_in_parts_with_the_same_result(small_classifier, uniform, monkeypatch):
    x = uniform(5, 1, 8, 8)
    z, log_det = small_classifier.encode_with_log_det(x)
    seen: list[int] = []
    small_classifier.inn.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    # The first coupling's maps are the largest: 4×4 pixels.
    two_images = 2 * 16 * small_classifier.architecture.stages[0].width
    monkeypatch.setattr(generative, "CPU_FLOATS", two_images + 1)
    z_parts, log_det_parts = small_classifier.encode_with_log_det(x)
    assert seen == [2, 2, 1]
    torch.testing.assert_close(z_parts, z)
    torch.testing.assert_close(log_det_parts, log_det)
    torch.testing.assert_close(small_classifier.decode(z), x, atol=1e-5, rtol=1e-5)
    small_classifier.train()
    small_classifier.encode(x)
    assert seen[3:] == [5]
