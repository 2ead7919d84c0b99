"""The teacher: networks that read all attributes, what they say together, how they are drilled."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.errors import InputError
from ecinn.flow.bijections import Image

Logits = Float[Tensor, "batch attributes"]

WIDTH = 64
SMALLEST_SIDE = 16
"""Pixels; three of the four stages halve it."""
_STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))
"""Of every stage: how many times the width, and the stride of its first block."""
_BLOCKS = 2
_DROPOUT = 0.3


class AttributeNetwork(nn.Module):
    """A residual network for small pictures: pixels in [0, 1] to one logit per attribute."""

    def __init__(self, attributes: int, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = _convolution(3, width)
        blocks: list[nn.Module] = []
        channels = width
        for times, stride in _STAGES:
            for index in range(_BLOCKS):
                blocks.append(_Block(channels, times * width, stride if index == 0 else 1))
                channels = times * width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(_DROPOUT)
        self.head = nn.Linear(channels, attributes)

    def forward(self, x: Image) -> Logits:
        """The logit of every attribute."""
        h = self.blocks(self.stem(4 * (x - 0.5)))
        pooled = F.relu(self.norm(h)).mean((2, 3))
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


class _Block(nn.Module):
    """s(x) + F(x), norm and ReLU before each of the two convolutions."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.convolution1 = _convolution(channels, filters, stride)
        self.norm2 = nn.BatchNorm2d(filters)
        self.convolution2 = _convolution(filters, filters)
        self.shortcut: nn.Module | None = None
        if channels != filters or stride != 1:
            self.shortcut = nn.Conv2d(channels, filters, 1, stride, bias=False)

    def forward(self, x: Image) -> Float[Tensor, "batch filters rows columns"]:
        h = F.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(h)
        changed: Tensor = self.convolution2(F.relu(self.norm2(self.convolution1(h))))
        return kept + changed


def _convolution(channels: int, filters: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)


class Teachers(nn.Module):
    """What several networks say of a picture and of its mirror image, on average.

    Frozen, always in evaluation mode, without a gradient; a call can be captured in a CUDA graph.
    """

    def __init__(self, members: Sequence[AttributeNetwork]) -> None:
        super().__init__()
        if not members:
            raise InputError("a teacher has at least one network")
        self.members = nn.ModuleList(members)
        self.requires_grad_(requires_grad=False).eval()

    def train(self, mode: bool = True) -> "Teachers":  # noqa: FBT001, FBT002
        """Stay in evaluation mode, also as a part of what is trained."""
        super().train(mode=False)
        return self

    def forward(self, x: Image) -> Logits:
        """logit p̄, p̄ the mean of σ(logit) over the members and over x and its mirror image."""
        return logit_of_mean(torch.cat([self.read(x), self.read(x.flip(-1))]))

    @torch.no_grad()
    def read(self, x: Image) -> Float[Tensor, "members batch attributes"]:
        """What every member says of the picture itself."""
        on_gpu = x.device.type == "cuda"
        pixels = x.contiguous(memory_format=torch.channels_last) if on_gpu else x
        # Not on a CPU: some crash on bf16.
        with torch.autocast(x.device.type, torch.bfloat16, enabled=on_gpu):
            return torch.stack([member(pixels).to(x.dtype) for member in self.members])


def logit_of_mean(logits: Float[Tensor, "voices batch attributes"]) -> Logits:
    """log p̄ − log(1 − p̄), p̄ the voices' mean σ(logit); exact also where σ rounds to 0 or 1."""
    present = F.logsigmoid(logits).logsumexp(0)
    return present - F.logsigmoid(-logits).logsumexp(0)


def jitter(x: Image, strength: float, generator: torch.Generator) -> Image:
    """Saturation, contrast and brightness of each picture times its own 1 ± strength."""
    draws = torch.rand((3, len(x), 1, 1, 1), generator=generator, device=x.device)
    saturation, contrast, brightness = (1 + strength * (2 * draws - 1)).unbind()
    x = torch.lerp(x.mean(1, keepdim=True), x, saturation)
    x = torch.lerp(x.mean((1, 2, 3), keepdim=True), x, contrast)
    return (brightness * x).clamp(0, 1)


def cut_out(x: Image, side: float, share: float, generator: torch.Generator) -> Image:
    """Grey, in that share of the pictures, where a window of that part of each side falls."""
    draws = torch.rand((3, len(x), 1), generator=generator, device=x.device)

    def window(length: int, draw: Tensor) -> Tensor:
        """Which of the places along an axis lie in it; the window is never cut at the edge."""
        size = round(side * length)
        first = (draw * (length - size + 1)).floor()
        place = torch.arange(length, device=x.device)
        return (place >= first) & (place < first + size)

    rows, columns = window(x.shape[2], draws[0]), window(x.shape[3], draws[1])
    covered = rows[:, :, None] & columns[:, None, :] & (draws[2, :, :, None] < share)
    return torch.where(covered[:, None], 0.5, x)


def mix(x: Image, targets: Logits, weight: float) -> tuple[Image, Logits]:
    """λ of each picture and of its targets, 1 − λ of its neighbour's in the shuffled batch."""
    if weight == 1:
        return x, targets
    return (
        weight * x + (1 - weight) * x.roll(1, 0),
        weight * targets + (1 - weight) * targets.roll(1, 0),
    )
