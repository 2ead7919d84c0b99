"""Fit the shape score of the OOD detector: a readout of the latent, trained with outlier exposure.

Outlier exposure (Hendrycks et al. 2019): digits against drawings that are no digits, both drawn
with the same pens.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init

from ecinn.classifier.out_of_distribution import SHAPE_BITS, SHAPE_RATE, Shape
from ecinn.classifier.quantisation import pack, unpack
from ecinn.training.networks import one_cycle, train_network

HIDDEN = 64
DROPOUT, EPOCHS, BATCH, PEAK, DECAY = 0.3, 12, 512, 3e-3, 1e-2
"""Chosen on held-out digits, drawings of the same kind, and letters in the fonts for choices."""

Latents = Float[Tensor, "_ dim"]


def fit_shape(
    digits: Latents, others: Latents, held_out: Latents, generator: torch.Generator
) -> Shape:
    """Train a perceptron with one hidden layer; its limit comes from held-out digits."""
    z = torch.cat([digits, others])
    label = torch.cat([torch.zeros(len(digits)), torch.ones(len(others))])
    # Layers that leave the global generator alone.
    first, last = skip_init(nn.Linear, z.shape[1], HIDDEN), skip_init(nn.Linear, HIDDEN, 1)
    for layer in (first, last):
        bound = layer.in_features**-0.5
        for weights in layer.parameters():
            nn.init.uniform_(weights, -bound, bound, generator=generator)

    def loss(rows: Tensor) -> tuple[Tensor, None]:
        hidden = first(z[rows]).relu()
        kept = torch.rand(hidden.shape, generator=generator) >= DROPOUT
        score = last(hidden * kept / (1 - DROPOUT))[:, 0]
        return F.binary_cross_entropy_with_logits(score, label[rows]), None

    net = nn.Sequential(first, nn.ReLU(), last)
    with torch.enable_grad():
        train_network(
            net, loss, torch.optim.AdamW(net.parameters(), PEAK, weight_decay=DECAY, fused=True),
            images=len(z), batch_size=BATCH, epochs=EPOCHS, generator=generator,
            schedule=one_cycle(PEAK, 1),
        )  # fmt: skip
    found = {"weight": first.weight, "bias": first.bias, "out": last.weight[0]}
    found = {name: value.detach() for name, value in found.items()}
    shape = Shape(**unpack(pack(found, SHAPE_BITS, rounded="")), limit=0.0)
    limit = shape.score(held_out).double().quantile(1 - SHAPE_RATE)
    return shape._replace(limit=float(limit))
