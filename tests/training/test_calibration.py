"""Mixing two models."""

import dataclasses

import pytest
import torch

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import MNIST
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import class_means
from ecinn.flow.network import Architecture, Stage
from ecinn.pixels import to_pixels
from ecinn.training.calibration import mix
from helpers.builders import randomise

CPU = torch.device("cpu")
ARCHITECTURE = Architecture(1, 28, 28, 10, (Stage(1, 8), Stage(1, 8)), dense_width=16)


def model(weights_seed: int, architecture: Architecture = ARCHITECTURE) -> Checkpoint:
    classifier = GenerativeClassifier(architecture).eval()
    randomise(classifier, seed=weights_seed, scale=0.05)
    recipe = dataclasses.replace(MNIST, architecture=architecture)
    names = tuple(map(str, range(10)))
    mu = classifier.mu.detach()
    return Checkpoint(recipe, classifier, mu, OODDetector((0.0, 1.0)), names)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_mnist("train").first(300)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_weights_are_averaged_and_the_model_is_calibrated(share: float, data: Dataset) -> None:
    first, second = model(1), model(2)
    mixed = mix(first, second, share, data, CPU)
    ones, others = first.classifier.state_dict(), second.classifier.state_dict()
    for name, value in mixed.classifier.state_dict().items():
        if name != "mu" and value.is_floating_point():  # μ is fitted at the end of training
            expected = (1 - share) * ones[name] + share * others[name]
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-5)  # stored as float16
    z = mixed.classifier.encode(to_pixels(data.images))
    torch.testing.assert_close(mixed.mu_bar, class_means([z], mixed.classifier.mu.detach()))
    assert mixed.training["mixed"] == {"share": share}


def test_models_that_cannot_be_mixed_are_refused(data: Dataset) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        mix(model(1), model(2), 1.5, data, CPU)
    wider = dataclasses.replace(ARCHITECTURE, dense_width=32)
    with pytest.raises(InputError, match="different architectures"):
        mix(model(1), model(2, wider), 0.5, data, CPU)
    other = dataclasses.replace(
        model(2), recipe=dataclasses.replace(model(2).recipe, dataset="fakemnist")
    )
    with pytest.raises(InputError, match="different datasets"):
        mix(model(1), other, 0.5, data, CPU)
