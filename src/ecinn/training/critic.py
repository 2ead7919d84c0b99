"""A critic of counterfactuals: a discriminator that learns to tell them from real images."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn.pixels import Images, Labels

WIDTH, WIDEST = 64, 256
"""Filters of the first convolution, which double with every halving, and their largest number."""
FEATURES = 256
SMALLEST_SIDE = 8
"""Images are halved to this side or less."""
LEARNING_RATE = 2.0
"""Learning rate, divided by that of the classifier."""
GRADIENT_PENALTY = 0.1
"""Weight of the squared slope at real images (R1), which keeps the critic smooth."""

Scores = Float[Tensor, " batch"]


class Critic(nn.Module):
    """D(x, y) = (w + e_y/√d)·h(x): high for real images x of class y.

    A projection discriminator (Miyato and Koyama 2018) with convolutional features h.
    """

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        filters = WIDTH
        while min(height, width) > SMALLEST_SIDE:
            layers += [nn.Conv2d(channels, filters, 5, stride=2, padding=2), nn.LeakyReLU(0.2)]
            height, width = (height + 1) // 2, (width + 1) // 2
            channels, filters = filters, min(2 * filters, WIDEST)
        layers += [nn.Conv2d(channels, 128, 3, padding=1), nn.LeakyReLU(0.2), nn.Flatten()]
        layers += [nn.Linear(128 * height * width, FEATURES), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers)
        self.score = nn.Linear(FEATURES, 1)
        self.classes = nn.Embedding(classes, FEATURES)

    def forward(self, x: Images, y: Labels) -> Scores:
        """D(x, y)."""
        h: Tensor = self.features(2 * x - 1)
        projection = (h * self.classes(y)).sum(1) / FEATURES**0.5
        score: Tensor = self.score(h)[:, 0] + projection
        return score


def critic_losses(
    critic: Critic,
    real: Images,
    y: Labels,
    x_hat: Float[Tensor, "others channels height width"],
    y_hat: Int[Tensor, " others"],
) -> tuple[Scores, Float[Tensor, " others"]]:
    """Hinge losses: real images score above 1, with R1, and counterfactuals below −1.

    Args:
        y: the classes of the real images.
        y_hat: the classes that the counterfactuals are meant to show.
    """
    real = real.detach().requires_grad_()
    score = critic(real, y)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    penalty = GRADIENT_PENALTY * slope.square().flatten(1).sum(1)
    return F.relu(1 - score) + penalty, F.relu(1 + critic(x_hat.detach(), y_hat))
