"""Small networks, models and datasets for tests."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import MNIST
from ecinn.data.dataset import Dataset
from ecinn.flow.network import Architecture, Stage
from ecinn.model import Model
from ecinn.pixels import to_pixels


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> torch.nn.Module:
    """A flow that starts as the identity passes every test, wrong ones included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            parameter.add_(scale * noise.to(parameter.dtype) / fan_in**0.5)
    return module


class RotationClassifier:
    """z = Q x − ½ on flattened pixels: log-determinant 0, inverse exact. Counts its calls."""

    def __init__(self, shape: tuple[int, int, int] = (1, 2, 3), classes: int = 4, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        dim = shape[0] * shape[1] * shape[2]
        self.shape = shape
        self.q = torch.linalg.qr(
            torch.randn((dim, dim), generator=generator, dtype=torch.float64)
        )[0]
        self.mu = 3 * torch.randn((classes, dim), generator=generator, dtype=torch.float64)
        self.mu_bar = self.mu + 0.2 * torch.randn(
            (classes, dim), generator=generator, dtype=torch.float64
        )
        self.tau = torch.tensor(0.7, dtype=torch.float64)
        self.calls = {"encode": 0, "decode": 0}

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls["encode"] += 1
        return (x.flatten(1) - 0.5) @ self.q.T, x.new_zeros(len(x))

    def decode(self, z: Tensor) -> Tensor:
        self.calls["decode"] += 1
        return (z @ self.q).reshape(-1, *self.shape) + 0.5

    def posterior(self, x: Tensor) -> Tensor:
        z = (x.flatten(1) - 0.5) @ self.q.T
        return (-0.5 * self.tau * torch.cdist(z, self.mu).square()).softmax(1)


def random_images(n: int, channels: int, classes: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, channels, 8, 8), generator=generator).byte()
    labels = torch.randint(classes, (n,), generator=generator)
    return Dataset(images, labels, tuple("abc"[:classes]))


def small_model(channels: int = 1, classes: int = 3, dataset: str = "tiny") -> Model:
    stages = (Stage(2, 4), Stage(1, 4))
    architecture = Architecture(channels, 8, 8, classes, stages, dense_width=8, seed=3)
    classifier = GenerativeClassifier(architecture).eval().requires_grad_(requires_grad=False)
    randomise(classifier)
    z = classifier.encode(to_pixels(random_images(60, channels, classes, 9).images))
    classifier.mu += z.mean(0) - classifier.mu.mean(0)  # so that all classes are predicted
    noise = torch.randn(classifier.mu.shape, generator=torch.Generator().manual_seed(1))
    recipe = replace(MNIST, name="tiny", dataset=dataset, architecture=architecture)
    mu_bar, names = classifier.mu + 0.02 * noise, tuple("abc"[:classes])
    return Model(Checkpoint(recipe, classifier, mu_bar, OODDetector((0.0, 1.0)), names))


def with_default(model: Model, confidence: float) -> Model:
    """The same model, whose convincing counterfactuals have this confidence by default."""
    recipe = replace(model.recipe, default_confidence=confidence)
    return Model(replace(model.checkpoint, recipe=recipe), model.device)


def small_cnn() -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(256, 3),
    )  # fmt: skip
    for parameter in network.parameters():
        nn.init.zeros_(parameter)  # they start from the global generator
    return randomise(network, scale=3.0).eval().requires_grad_(requires_grad=False)


class RowTeacher(nn.Module):
    """A teacher of digits whose class logits are ten times the mean brightness of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * x.mean((1, 3))[:, 4:24:2]
