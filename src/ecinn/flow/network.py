"""The invertible network f: described by an `Architecture`, built by `build_inn`."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ecinn.errors import InputError
from ecinn.flow.bijections import (
    Bijection,
    Chain,
    ChannelMix,
    CosineMix,
    Coupling,
    DCTPooling,
    DownsamplingCoupling,
    Haar,
    Norm,
    Permutation,
    PixelLogit,
    PixelScale,
    Squeeze,
    convolutional_subnet,
    fully_connected_subnet,
)


@dataclass(frozen=True)
class Stage:
    """Couplings at one resolution; each stage halves the height and width of the one before."""

    couplings: int
    width: int
    dropout: float | None = None
    """Overrides the architecture's dropout."""


@dataclass(frozen=True)
class Architecture:
    """Settings that determine every layer, so that a checkpoint can rebuild its network."""

    channels: int
    height: int
    width: int
    classes: int
    stages: tuple[Stage, ...]
    dense_width: int
    """Hidden units of the fully connected couplings at the end; 0 omits them."""
    dense_couplings: int = 1
    downsampling: str = "coupling"
    """Layer between stages: "coupling" (IB-INN's strided coupling), "haar" or "squeeze"."""
    clamp: float = 0.7
    """Log-scales stay within ±clamp per coupling."""
    dense_clamp: float | None = None
    """Overrides `clamp` in the fully connected couplings."""
    class_distance: float = 6.0
    """Initial distance between class means; at 6 two classes overlap by about 0.1 %."""
    pixel_scale: float = 2.0
    """γ, the slope at mid-grey of the first layer."""
    pixel_margin: float = 0.0
    """Above 0 the first layer is a logit, and decoded pixels exceed [0, 1] by at most about this
    much; at 0 it is linear, as in IB-INN."""
    mixing: str = "rotation"
    """Channel mixing after every coupling: "rotation" (random, stored) or "cosine" (DCT)."""
    channel_scale: float | None = None
    """Fixed factor after every coupling, with subnets that start at random and no mixing after
    the downsampling, as in IB-INN; None: subnets start at zero, and the scale and shift of
    every channel are learned."""
    norm: Norm = "group"
    dropout: float = 0.0
    dense_dropout: float | None = None
    """Overrides `dropout` in the fully connected couplings."""
    seed: int = 0
    """Seed of rotations, permutations and initial weights."""

    @property
    def dim(self) -> int:
        """Number of latents: channels × height × width."""
        return self.channels * self.height * self.width

    def same_layers(self, other: "Architecture") -> bool:
        """Return whether a network's weights fit the other.

        Pixel maps, initial class means and the number of classes may differ: no layer has weights
        for them.
        """
        free = ("pixel_scale", "pixel_margin", "classes", "class_distance")
        return replace(self, **{name: getattr(other, name) for name in free}) == other

    def __post_init__(self) -> None:
        """Raise an `InputError` if the network cannot be built."""
        halvings = 2 ** len(self.stages)
        if not self.stages or self.height % halvings or self.width % halvings:
            raise InputError(
                f"use at least one stage and an image size divisible by 2^stages = {halvings}, "
                f"not {self.height}×{self.width}"
            )
        if self.classes < 2:
            raise InputError(f"a classifier needs at least 2 classes, not {self.classes}")
        for name, known in (
            ("downsampling", ("coupling", "haar", "squeeze")),
            ("mixing", ("rotation", "cosine")),
        ):
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be {' or '.join(known)}, not {getattr(self, name)}")


def build_inn(architecture: Architecture) -> Chain:
    """Build f: Haar, the couplings of each stage, DCT, fully connected couplings, as in IB-INN."""
    # Layers draw initial weights from the global generator: fork it to leave the caller's alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(architecture.seed)
        generator = torch.Generator().manual_seed(architecture.seed)
        return Chain(_layers(architecture, generator))


def _layers(architecture: Architecture, generator: torch.Generator) -> list[Bijection]:
    a = architecture
    pixels = (
        PixelLogit(a.pixel_scale, a.pixel_margin) if a.pixel_margin else PixelScale(a.pixel_scale)
    )
    mix = ChannelMix if a.mixing == "rotation" else CosineMix
    layers: list[Bijection] = [pixels, Haar(a.channels)]
    channels, height, width = 4 * a.channels, a.height // 2, a.width // 2
    for index, stage in enumerate(a.stages):
        if index:
            halve: Bijection
            if a.downsampling == "coupling":
                halve = _coupling(a, channels, stage.width, a.dropout, downsamples=True)
            else:
                halve = Haar(channels) if a.downsampling == "haar" else Squeeze()
            channels, height, width = 4 * channels, height // 2, width // 2
            mixing = [mix(channels, generator)] if a.channel_scale is None else []
            layers.append(Chain([halve, *mixing]))
        dropout = a.dropout if stage.dropout is None else stage.dropout
        for _ in range(stage.couplings):
            coupling = _coupling(a, channels, stage.width, dropout)
            layers.append(Chain([coupling, mix(channels, generator, a.channel_scale)]))
    layers.append(DCTPooling(channels, height, width))
    for _ in range(a.dense_couplings if a.dense_width else 0):
        half = a.dim // 2
        dropout = a.dropout if a.dense_dropout is None else a.dense_dropout
        clamp = a.clamp if a.dense_clamp is None else a.dense_clamp
        subnet = fully_connected_subnet(half, 2 * (a.dim - half), a.dense_width, dropout)
        layers += [Permutation(a.dim, generator), Coupling(a.dim, subnet, clamp)]
    return layers


def latent_frequencies(architecture: Architecture) -> Int[Tensor, " dim"] | None:
    """Return row plus column of every latent in the last DCT; None if dense couplings mix them."""
    a = architecture
    if a.dense_width and a.dense_couplings:
        return None
    halvings = 2 ** len(a.stages)
    height, width = a.height // halvings, a.width // halvings
    frequency = (torch.arange(height)[:, None] + torch.arange(width)).flatten()
    return frequency.sort().values.repeat_interleave(a.dim // len(frequency))


def _coupling(
    a: Architecture, channels: int, width: int, dropout: float, *, downsamples: bool = False
) -> Coupling:
    half = channels // 2
    subnet = convolutional_subnet(
        half,
        (8 if downsamples else 2) * (channels - half),
        width,
        norm=a.norm,
        dropout=dropout,
        stride=2 if downsamples else 1,
        start_at_zero=a.channel_scale is None,
    )
    return (DownsamplingCoupling if downsamples else Coupling)(channels, subnet, a.clamp)
