"""Networks with random weights, whose heatmaps must differ from those of trained ones."""

import copy
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecinn import equations
from ecinn.attribution.scores import ExplainedINN
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.errors import EcinnError
from ecinn.explanation.counterfactual import class_means
from ecinn.flow.bijections import Coupling
from ecinn.model import Model
from ecinn.pixels import Images
from ecinn.training.networks import seeded

LAST_LAYER = 0.3
"""Approximate output of a subnet with random weights: about the variation of a pixel."""


def randomised_inn(model: Model, images: Images, seed: int) -> ExplainedINN:
    """Return the same architecture with random weights and its own measured class means.

    A new network is the identity, because the last layer of every subnet starts at zero; here
    these layers get weights N(0, 0.3²/fan-in). The means μ are drawn around the mean latent until
    every class is predicted for some image, so that every class mean μ̄ exists.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    trained = model.classifier.architecture
    architecture = dataclasses.replace(trained, seed=trained.seed + 1000 + seed)
    fresh = GenerativeClassifier(architecture).to(model.mu).eval()
    fresh.requires_grad_(requires_grad=False)
    for module in fresh.modules():
        if isinstance(module, Coupling):
            *_, (_, weight), (_, _bias) = module.subnet.named_parameters()
            weight.copy_(LAST_LAYER * normal(weight) / math.sqrt(weight[0].numel()))
    network = Model(dataclasses.replace(model.checkpoint, classifier=fresh), model.device)
    z, _ = network.encode_with_log_det(images)
    for _ in range(1000):
        directions = F.normalize(normal(fresh.mu)) * (trained.class_distance / math.sqrt(2))
        fresh.mu.copy_(z.mean(0) + directions)
        if len(equations.predicted_class(z, fresh.mu).unique()) == trained.classes:
            return ExplainedINN(fresh, class_means([z], fresh.mu))
    raise EcinnError("with random weights some class is never predicted: choose another --seed")


def randomised_cnn(network: nn.Module, images: Images, seed: int) -> nn.Module:
    """Return a copy with random weights, and batch norms fitted to the images.

    With batch norms as they are initialised, the signal would vanish in a deep network.
    """
    fresh = copy.deepcopy(network).cpu()
    with seeded(torch.device("cpu"), seed):  # layers draw their weights from the global generator
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
    norms = [m for m in fresh.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        fresh.to(images.device)(images)
    return fresh.eval().requires_grad_(requires_grad=False)
