"""Networks that have learned nothing: what a heatmap that explains must not look like."""

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
from ecinn.explanation.result import Images
from ecinn.flow.bijections import Coupling
from ecinn.flow.precision import exact_convolutions

LAST_LAYER = 0.3
"""What comes out of a subnet with random weights, about: as much as a pixel varies."""


def randomised_inn(classifier: GenerativeClassifier, images: Images, seed: int) -> ExplainedINN:
    """The same architecture with random weights, and the means that ECINN measures.

    A new network is the identity, because the last layer of every subnet starts at zero: these
    get weights N(0, 0.3²/fan-in) besides. μ are random around the images' mean latent and drawn
    until every class is predicted of some image, so that μ̄ exists.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    trained = classifier.architecture
    anew = dataclasses.replace(trained, seed=trained.seed + 1000 + seed)
    fresh = GenerativeClassifier(anew).to(classifier.mu).eval().requires_grad_(requires_grad=False)
    with torch.no_grad(), exact_convolutions():
        for module in fresh.modules():
            if isinstance(module, Coupling):
                *_, (_, weight), (_, _bias) = module.subnet.named_parameters()
                weight.copy_(LAST_LAYER * normal(weight) / math.sqrt(weight[0].numel()))
        z = fresh.encode(images)
        for _ in range(1000):
            directions = F.normalize(normal(fresh.mu)) * (trained.class_distance / math.sqrt(2))
            fresh.mu.copy_(z.mean(0) + directions)
            if len(equations.log_posterior(z, fresh.mu).argmax(1).unique()) == trained.classes:
                return ExplainedINN(fresh, class_means([z], fresh.mu))
    raise EcinnError("with random weights some class is never predicted: give another --seed")


def randomised_cnn(network: nn.Module, images: Images, seed: int) -> nn.Module:
    """A copy with every layer's weights drawn anew, and batch norms that fit the images.

    Batch norms as they start would let the signal die on its way through a deep network.
    """
    fresh = copy.deepcopy(network).cpu()
    # Layers draw from the global generator.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in fresh.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
    norms = [m for m in fresh.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad(), exact_convolutions():
        fresh.to(images.device)(images)
    return fresh.eval().requires_grad_(requires_grad=False)
