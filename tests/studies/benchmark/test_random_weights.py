"""Networks with random weights: still networks, and nothing of the trained ones left in them."""

import pytest
import torch

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.errors import EcinnError
from ecinn.pixels import to_pixels
from ecinn.studies.benchmark.random_weights import randomised_cnn, randomised_inn
from helpers.builders import random_images, small_cnn, small_model


def test_random_inn_is_invertible_and_neither_the_identity_nor_the_trained_one() -> None:
    model = small_model()
    trained = model.classifier
    images = to_pixels(random_images(40, 1, 3, 2).images)
    before = torch.get_rng_state()
    random, again, other = (randomised_inn(model, images, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    z, log_det = random.classifier.encode_with_log_det(images)
    identity = GenerativeClassifier(random.classifier.architecture).eval().encode(images)
    assert (z - identity).abs().mean() > 0.05
    assert log_det.std() > 1e-3  # an affine map has the same for all images
    torch.testing.assert_close(random.classifier.decode(z), images, atol=1e-4, rtol=0)
    for name, weight in trained.named_parameters():
        assert weight.ndim == 1 or not torch.allclose(
            random.classifier.get_parameter(name), weight, atol=1e-3
        )
    predicted = torch.cdist(z, random.classifier.mu).argmin(1)
    means = torch.stack([z[predicted == label].mean(0) for label in range(3)])
    torch.testing.assert_close(random.mu_bar, means)
    assert torch.equal(again.mu_bar, random.mu_bar)
    assert not torch.allclose(other.mu_bar, random.mu_bar)
    with pytest.raises(EcinnError, match="another --seed"):
        randomised_inn(model, images[:1].expand(5, -1, -1, -1), 0)


def test_random_cnn_has_new_weights_and_batch_norms_that_fit() -> None:
    cnn = small_cnn()
    images = to_pixels(random_images(40, 1, 3, 2).images)
    before, kept = torch.get_rng_state(), cnn[0].weight.clone()
    random = randomised_cnn(cnn, images, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(cnn[0].weight, kept)
    assert not random.training
    out = random[1](random[0](images))
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    assert (out.std((0, 2, 3)) - 1).abs().max() < 0.01
    assert torch.equal(randomised_cnn(cnn, images, 0)[0].weight, random[0].weight)
    for name, weight in random.named_parameters():
        assert weight.ndim == 1 or not torch.allclose(cnn.get_parameter(name), weight)
