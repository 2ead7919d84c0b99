"""Invertible layers, each with its formula, forward map, log-determinant and inverse."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Maps = Float[Tensor, "batch channels height width"]
"""Images or feature maps."""
Resized = Float[Tensor, "batch channels_out height_out width_out"]
"""Feature maps of another size than the input's."""
Vector = Float[Tensor, "batch dim"]
LogDet = Float[Tensor, " batch"]
Kernel = Float[Tensor, "channels channels 1 1"]


class Bijection(nn.Module, ABC):
    """An invertible map: `forward` returns (y, log |det ∂y/∂x|), `inverse` returns x."""

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, LogDet]:
        """Return y and log |det ∂y/∂x|, one value per image."""

    @abstractmethod
    def inverse(self, y: Tensor) -> Tensor:
        """Return the x that `forward` maps to y."""


def _no_change(x: Tensor) -> LogDet:
    return x.new_zeros(x.shape[0])


class Chain(Bijection):
    """f_n ∘ … ∘ f_1; log-determinants add."""

    def __init__(self, bijections: Iterable[Bijection]) -> None:
        super().__init__()
        self.bijections = nn.ModuleList(bijections)

    def forward(self, x: Tensor) -> tuple[Tensor, LogDet]:
        log_det = _no_change(x)
        for bijection in self.bijections:
            x, change = bijection(x)
            log_det = log_det + change
        return x, log_det

    def inverse(self, y: Tensor) -> Tensor:
        for bijection in reversed(self.bijections):
            y = cast("Bijection", bijection).inverse(y)
        return y


class PixelScale(Bijection):
    """γ(x − ½): centres pixels in [0, 1] around zero; the density includes the factor γ."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Maps) -> tuple[Maps, LogDet]:
        log_det = x[0].numel() * math.log(self.scale)
        return self.scale * (x - 0.5), x.new_full((x.shape[0],), log_det)

    def inverse(self, y: Maps) -> Maps:
        return y / self.scale + 0.5


class PixelLogit(Bijection):
    """γ/4 · logit(m + (1 − 2m)x): keeps decoded pixels close to [0, 1].

    The slope at mid-grey is about γ, as with `PixelScale`. The margin m > 0 keeps black, white
    and a little noise around them at finite values.
    """

    def __init__(self, scale: float, margin: float) -> None:
        super().__init__()
        self.scale = scale
        self.margin = margin

    def forward(self, x: Maps) -> tuple[Maps, LogDet]:
        inside = (self.margin + (1 - 2 * self.margin) * x).clamp(1e-6, 1 - 1e-6)
        slope = 0.25 * self.scale * (1 - 2 * self.margin) / (inside * (1 - inside))
        return 0.25 * self.scale * torch.logit(inside), slope.log().flatten(1).sum(1)

    def inverse(self, y: Maps) -> Maps:
        return (torch.sigmoid(4 / self.scale * y) - self.margin) / (1 - 2 * self.margin)


class Squeeze(Bijection):
    """(c, h, w) → (4c, h/2, w/2): each 2×2 patch becomes four channels."""

    def forward(self, x: Maps) -> tuple[Resized, LogDet]:
        return F.pixel_unshuffle(x, 2), _no_change(x)

    def inverse(self, y: Maps) -> Resized:
        return F.pixel_shuffle(y, 2)


_HAAR = 0.5 * torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])


class Haar(Bijection):
    """Orthonormal Haar wavelet of each 2×2 patch: the averages, then the three details."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # The patch (a b; c d) of channel i becomes channels i, n+i, 2n+i, 3n+i.
        mix = torch.einsum("kp,ij->kijp", _HAAR, torch.eye(channels)).reshape(4 * channels, -1)
        self.mix = nn.Buffer(mix[:, :, None, None], persistent=False)

    def forward(self, x: Maps) -> tuple[Resized, LogDet]:
        return F.conv2d(F.pixel_unshuffle(x, 2), self.mix), _no_change(x)

    def inverse(self, y: Maps) -> Resized:
        return F.pixel_shuffle(F.conv2d(y, self.mix.transpose(0, 1)), 2)


class AffineMix(Bijection):
    """R(e^s ⊙ x + b): an affine map per channel, then a fixed orthogonal matrix R.

    Args:
        scale: fixed e^s, as in IB-INN, with b = 0; None learns both.
    """

    def __init__(self, channels: int, scale: float | None = None) -> None:
        super().__init__()
        log_scale = torch.full((channels,), 0.0 if scale is None else math.log(scale))
        self.log_scale = nn.Parameter(log_scale, requires_grad=scale is None)
        self.shift = nn.Parameter(torch.zeros(channels), requires_grad=scale is None)

    @abstractmethod
    def matrix(self) -> Kernel:
        """R, as a 1×1 convolution."""

    def forward(self, x: Maps) -> tuple[Maps, LogDet]:
        scaled = x * self.log_scale.exp()[:, None, None] + self.shift[:, None, None]
        log_det = x.shape[2] * x.shape[3] * self.log_scale.sum()
        return F.conv2d(scaled, self.matrix()), log_det.expand(x.shape[0])

    def inverse(self, y: Maps) -> Maps:
        scaled = F.conv2d(y, self.matrix().transpose(0, 1))
        return (scaled - self.shift[:, None, None]) * (-self.log_scale).exp()[:, None, None]


class ChannelMix(AffineMix):
    """R(e^s ⊙ x + b) with a random rotation R."""

    def __init__(
        self, channels: int, generator: torch.Generator, scale: float | None = None
    ) -> None:
        super().__init__(channels, scale)
        gaussian = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
        orthogonal, triangular = torch.linalg.qr(gaussian)
        rotation = orthogonal * triangular.diagonal().sign()
        # Stored with the weights in float32: rebuilt from a seed it would depend on the linear
        # algebra library, and in half precision it would not be orthogonal.
        self.rotation = nn.Buffer(rotation.float()[:, :, None, None])

    def matrix(self) -> Kernel:
        return self.rotation


class CosineMix(AffineMix):
    """R(e^s ⊙ x + b) with R the DCT of the channels in random order; only the order is stored."""

    def __init__(
        self, channels: int, generator: torch.Generator, scale: float | None = None
    ) -> None:
        super().__init__(channels, scale)
        self.order = nn.Buffer(torch.randperm(channels, generator=generator))
        self.cosines = nn.Buffer(_dct_matrix(channels)[:, :, None, None], persistent=False)

    def matrix(self) -> Kernel:
        return self.cosines[:, self.order]


class Coupling(Bijection):
    """x_a, x_b ↦ x_a, e^s ⊙ x_b + t with (s, t) = subnet(x_a) and s softly clamped.

    The channels are split in halves. The subnet can be any network; it is never inverted.
    """

    def __init__(self, channels: int, subnet: nn.Module, clamp: float) -> None:
        super().__init__()
        self.split = (channels // 2, channels - channels // 2)
        self.subnet = subnet
        self.clamp = clamp
        self.half_precision = False
        """Run the subnet in bfloat16, with channels last: faster training on a GPU, but an inexact
        inverse."""

    def _scale_and_shift(self, x_a: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x_a.device.type, torch.bfloat16, enabled=self.half_precision):
            raw, shift = self.subnet(x_a).to(x_a.dtype).chunk(2, dim=1)
        # tanh(0.1·) as in IB-INN: nearly linear for usual values, bounded everywhere.
        return self.clamp * torch.tanh(0.1 * raw), shift

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.half_precision and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        x_a, x_b = x.split(self.split, dim=1)
        return x_a, x_b

    def forward(self, x: Tensor) -> tuple[Tensor, LogDet]:
        x_a, x_b = self._halves(x)
        log_scale, shift = self._scale_and_shift(x_a)
        y = torch.cat([x_a, x_b * log_scale.exp() + shift], dim=1)
        return y, log_scale.flatten(1).sum(1)

    def inverse(self, y: Tensor) -> Tensor:
        y_a, y_b = self._halves(y)
        log_scale, shift = self._scale_and_shift(y_a)
        return torch.cat([y_a, (y_b - shift) * (-log_scale).exp()], dim=1)


class DownsamplingCoupling(Coupling):
    """x_a, x_b ↦ S x_a, e^s ⊙ S x_b + t with (s, t) = subnet(x_a) and S the squeeze.

    Coupling and squeeze in one layer, as in IB-INN: the subnet has stride 2.
    """

    def forward(self, x: Maps) -> tuple[Resized, LogDet]:
        x_a, x_b = self._halves(x)
        log_scale, shift = self._scale_and_shift(x_a)
        y_b = F.pixel_unshuffle(x_b, 2) * log_scale.exp() + shift
        return torch.cat([F.pixel_unshuffle(x_a, 2), y_b], dim=1), log_scale.flatten(1).sum(1)

    def inverse(self, y: Maps) -> Resized:
        y_a, y_b = y.split([4 * channels for channels in self.split], dim=1)
        x_a = F.pixel_shuffle(y_a, 2)
        log_scale, shift = self._scale_and_shift(x_a)
        x_b = F.pixel_shuffle((y_b - shift) * (-log_scale).exp(), 2)
        return torch.cat([x_a, x_b], dim=1)


def _dct_matrix(size: int) -> Tensor:
    """Orthonormal DCT-II: row k samples cos(π(n + ½)k / size)."""
    n = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * (n + 0.5) * n[:, None] / size) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


class DCTPooling(Bijection):
    """Two-dimensional orthonormal DCT of every channel, flattened with low frequencies first."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.shape = (channels, height, width)
        frequency = torch.arange(height)[:, None] + torch.arange(width)
        order = frequency.flatten().argsort(stable=True)
        transform = torch.kron(_dct_matrix(height), _dct_matrix(width))
        self.transform = nn.Buffer(transform[order], persistent=False)

    def forward(self, x: Maps) -> tuple[Vector, LogDet]:
        return (x.flatten(2) @ self.transform.T).transpose(1, 2).flatten(1), _no_change(x)

    def inverse(self, y: Vector) -> Maps:
        channels, height, width = self.shape
        spectrum = y.reshape(-1, height * width, channels).transpose(1, 2)
        return (spectrum @ self.transform).reshape(-1, channels, height, width)


class Permutation(Bijection):
    """A fixed random permutation of a vector's entries."""

    def __init__(self, dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.order = nn.Buffer(torch.randperm(dim, generator=generator))

    def forward(self, x: Vector) -> tuple[Vector, LogDet]:
        return x[:, self.order], _no_change(x)

    def inverse(self, y: Vector) -> Vector:
        return y[:, self.order.argsort()]


Norm = Literal["group", "batch", "none"]


def _norm(kind: Norm, width: int) -> nn.Module:
    # Group statistics are of one image, so training and evaluation agree. Batch statistics, as
    # in IB-INN, diverge on faces in evaluation mode.
    if kind == "group":
        return nn.GroupNorm(math.gcd(width, 8), width)
    if kind == "none":
        return nn.Identity()
    # IB-INN's numbers: evaluation uses the statistics of the last batch.
    return nn.BatchNorm2d(width, eps=1e-4, momentum=0.999)


class Convolution(nn.Conv2d):
    """A convolution that can run with channels padded to multiples of 8.

    The padding adds zeros, so the result is the same. Convolutions of 2 or 4 channels in
    bfloat16 are many times slower on a GPU than those of 8.
    """

    padded = False

    def forward(self, x: Maps) -> Resized:
        if not self.padded:
            return super().forward(x)
        extra_in, extra_out = -self.in_channels % 8, -self.out_channels % 8
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, extra_in, 0, extra_out))
        weight = weight.contiguous(memory_format=torch.channels_last)
        bias = None if self.bias is None else F.pad(self.bias, (0, extra_out))
        x = F.pad(x, (0, 0, 0, 0, 0, extra_in))
        return F.conv2d(x, weight, bias, self.stride, self.padding)[:, : self.out_channels]


def convolutional_subnet(
    channels_in: int,
    channels_out: int,
    width: int,
    *,
    norm: Norm = "group",
    dropout: float = 0.0,
    stride: int = 1,
    start_at_zero: bool = True,
) -> nn.Sequential:
    """Return two 3×3 convolutions and a 1×1 convolution.

    Args:
        start_at_zero: initialise the last one with zeros, so that the coupling starts as the
            identity; otherwise all three start at random, as in IB-INN.
    """
    last = Convolution(width, channels_out, 1)
    assert last.bias is not None
    nn.init.zeros_(last.bias)
    subnet = nn.Sequential(
        Convolution(channels_in, width, 3, padding=1, stride=stride),
        _norm(norm, width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        _norm(norm, width),
        nn.ReLU(),
        nn.Dropout2d(dropout) if dropout else nn.Identity(),
        last,
    )
    if start_at_zero:
        nn.init.zeros_(last.weight)
    else:
        for layer in subnet:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
    return subnet


def fully_connected_subnet(
    dim_in: int, dim_out: int, width: int, dropout: float = 0.0
) -> nn.Sequential:
    """Return a network with one hidden layer; its last layer starts at zero."""
    last = nn.Linear(width, dim_out)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    optional_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
    return nn.Sequential(nn.Linear(dim_in, width), nn.ReLU(), optional_dropout, last)
