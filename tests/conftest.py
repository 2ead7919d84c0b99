"""What several tests share: a small classifier with every parameter randomised."""

from collections.abc import Callable

import pytest
import torch

from ecinn.checkpoints import shipped_models
from ecinn.model.classifier import GenerativeClassifier
from ecinn.model.inn import Architecture, Stage
from ecinn.pretrained import Model, load

torch.set_num_threads(1)


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> torch.nn.Module:
    """A flow that starts as the identity passes every test, wrong ones included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            parameter.add_(scale * noise.to(parameter.dtype) / fan_in**0.5)
    return module


@pytest.fixture
def small_architecture() -> Architecture:
    return Architecture(
        channels=1,
        height=8,
        width=8,
        classes=3,
        stages=(Stage(2, 4), Stage(2, 4)),
        dense_width=8,
        seed=3,
    )


@pytest.fixture
def small_classifier(small_architecture: Architecture) -> GenerativeClassifier:
    classifier = GenerativeClassifier(small_architecture).double().eval()
    randomise(classifier)
    return classifier.requires_grad_(requires_grad=False)


@pytest.fixture(scope="session")
def mnist() -> Model:
    assert "mnist" in shipped_models()
    return load("mnist")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def uniform(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return draw
