"""The critic: a network that tells real images of a class from counterfactuals into it."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn.flow.bijections import Image

WIDTH = 48
FEATURES = 256


class Critic(nn.Module):
    """D(x, y) = w·h(x) + e_y·h(x)/√d, high for real images x of class y.

    The projection form of a conditional discriminator; h is convolutional.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        layers: list[nn.Module] = []
        filters = WIDTH
        while min(height, width) > 8:
            layers += [nn.Conv2d(channels, filters, 5, stride=2, padding=2), nn.LeakyReLU(0.2)]
            height, width = (height + 1) // 2, (width + 1) // 2
            channels, filters = filters, min(2 * filters, 192)
        layers += [nn.Conv2d(channels, 128, 3, padding=1), nn.LeakyReLU(0.2), nn.Flatten()]
        layers += [nn.Linear(128 * height * width, FEATURES), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers)
        self.score = nn.Linear(FEATURES, 1)
        self.classes = nn.Embedding(classes, FEATURES)

    def forward(self, x: Image, label: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """How real each image is as one of its class."""
        h = self.features(x)
        projected: Tensor = self.score(h)[:, 0] + (h * self.classes(label)).sum(1) / FEATURES**0.5
        return projected
