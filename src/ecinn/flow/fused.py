"""The same flow for inference: constants folded, and fewer operations per layer.

For a single digit, most of the time goes into starting operations, not into arithmetic.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.flow.bijections import (
    AffineMix,
    Bijection,
    Chain,
    Coupling,
    DownsamplingCoupling,
    Kernel,
    LogDet,
    Maps,
)

Step = Callable[[Tensor], Tensor]

CHANNELS_LAST = 64
"""Smallest width of subnets that are faster with channels last on a CPU: by 9 % for one digit, by
4 % for faces. Narrower ones are slower."""


def fused(layer: Bijection, kernels: ModuleType | None = None) -> Bijection:
    """Return the same map for inference, with the weights as they are now.

    Args:
        kernels: what `gpu_kernels` returns; None for operations of torch only.
    """
    if isinstance(layer, Chain):
        return FusedChain(fused(each, kernels) for each in _flattened(layer))
    if isinstance(layer, AffineMix):
        return FusedMix(layer)
    if isinstance(layer, DownsamplingCoupling):
        return FusedDownsamplingCoupling(layer, kernels)
    if isinstance(layer, Coupling):
        *_, last = layer.subnet.children()
        if kernels and isinstance(last, nn.Conv2d):
            return KernelCoupling(layer, kernels)
        return CouplingInPlace(layer)
    return layer


@cache
def gpu_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return `ecinn.flow.kernels` if weights of this kind can use it, else None."""
    if device.type != "cuda" or dtype != torch.float32:
        return None
    try:
        from ecinn.flow import kernels

        kernels.try_out(device)
    except Exception:  # no Triton, no C compiler for it, no folder to write to, …
        return None
    return kernels


def _flattened(chain: Chain) -> Iterator[Bijection]:
    for layer in chain.bijections:
        if isinstance(layer, Chain):
            yield from _flattened(layer)
        elif isinstance(layer, Bijection):
            yield layer


class FusedChain(Chain):
    """f_n ∘ … ∘ f_1 with couplings in place, and few sums for the log-determinant.

    log|det| = Σ constants + Σ over pixels of Σ_couplings log-scales, which are added up as maps.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, LogDet]:
        """Return y and log |det ∂y/∂x|; the input stays as it is."""
        x, constant = x.clone(), 0.0
        log_det, log_scales = x.new_zeros(x.shape[0]), x.new_zeros(())
        for layer in self.bijections:
            if isinstance(layer, FusedMix):
                constant += layer.log_scale * x[0, 0].numel()
                x = layer.mix(x)
            elif isinstance(layer, CouplingInPlace):
                x = x.contiguous()
                shape = x[:, layer.split[0] :].shape
                if log_scales.shape != shape:  # the size of the maps has changed
                    log_det = log_det + _sum(log_scales)
                    log_scales = x.new_zeros(shape)
                layer.forward_(x, log_scales)
            else:
                x, summed = layer(x)
                log_det = log_det + summed
        return x, (log_det + _sum(log_scales)).add_(constant)

    def inverse(self, y: Tensor) -> Tensor:
        """Return the x that `forward` maps to y; the input stays as it is."""
        y = y.clone()
        for layer in reversed(self.bijections):
            if isinstance(layer, CouplingInPlace):
                y = y.contiguous()
                layer.inverse_(y)
            else:
                y = cast("Bijection", layer).inverse(y)
        return y


def _sum(maps: Tensor) -> Tensor:
    return maps.flatten(1).sum(1) if maps.ndim else maps


class FusedMix(Bijection):
    """R(e^s ⊙ x + b) = (R e^s) x + Rb: one convolution each way."""

    def __init__(self, mix: AffineMix) -> None:
        super().__init__()
        (self.weight, self.bias), (self.inverse_weight, self.inverse_bias) = folded_mix(mix)
        self.log_scale = float(mix.log_scale.detach().double().sum())

    def mix(self, x: Maps) -> Maps:
        """(R e^s) x + Rb."""
        return torch.conv2d(x, self.weight, self.bias)

    def forward(self, x: Maps) -> tuple[Maps, LogDet]:
        """(R e^s) x + Rb, with the sum of s over channels and pixels."""
        log_det = x[0, 0].numel() * self.log_scale
        return self.mix(x), x.new_full((x.shape[0],), log_det)

    def inverse(self, y: Maps) -> Maps:
        """(e^−s Rᵀ) y − e^−s b."""
        return torch.conv2d(y, self.inverse_weight, self.inverse_bias)


Affine = tuple[Kernel, Float[Tensor, " channels"]]


@torch.no_grad()
def folded_mix(mix: AffineMix) -> tuple[Affine, Affine]:
    """Return kernel and bias of R(e^s ⊙ x + b) and of its inverse, computed in double."""
    rotation, scale = mix.matrix().double()[:, :, 0, 0], mix.log_scale.double().exp()
    shift, dtype = mix.shift.double(), mix.log_scale.dtype
    forward = (rotation * scale)[:, :, None, None], rotation @ shift
    inverse = (rotation.T.contiguous() / scale[:, None])[:, :, None, None], -shift / scale
    return (
        (forward[0].to(dtype), forward[1].to(dtype)),
        (inverse[0].to(dtype), inverse[1].to(dtype)),
    )


class FusedCoupling(Coupling):
    """A coupling whose subnet is a list of functions, with the factor 0.1 in its last weights."""

    def __init__(self, coupling: Coupling, kernels: ModuleType | None = None) -> None:
        super().__init__(sum(coupling.split), nn.Identity(), coupling.clamp)
        self.steps = list(_steps(coupling.subnet))
        if kernels:
            self.steps = list(_with_kernels(self.steps, kernels))

    def _scale_and_shift(self, x_a: Tensor) -> tuple[Tensor, Tensor]:
        for step in self.steps:
            x_a = step(x_a)
        raw, shift = x_a.chunk(2, dim=1)
        return torch.tanh(raw).mul_(self.clamp), shift


class FusedDownsamplingCoupling(FusedCoupling, DownsamplingCoupling):
    """A fused coupling that squeezes as well."""


class CouplingInPlace(FusedCoupling):
    """A fused coupling that can overwrite x_b."""

    def forward_(self, x: Tensor, log_scales: Tensor) -> None:
        """x_b ← e^s ⊙ x_b + t, in place; s is added to the map of log-scales."""
        x_a, x_b = x.split(self.split, dim=1)
        log_scale, shift = self._scale_and_shift(x_a)
        log_scales.add_(log_scale)
        torch.addcmul(shift, x_b, log_scale.exp_(), out=x_b)

    def inverse_(self, y: Tensor) -> None:
        """y_b ← e^−s ⊙ (y_b − t), in place."""
        y_a, y_b = y.split(self.split, dim=1)
        log_scale, shift = self._scale_and_shift(y_a)
        y_b.sub_(shift).mul_(log_scale.neg_().exp_())


class KernelCoupling(CouplingInPlace):
    """A coupling of contiguous maps on a GPU: one kernel after the subnet's last convolution."""

    def __init__(self, coupling: Coupling, kernels: ModuleType) -> None:
        super().__init__(coupling, kernels)
        self.kernels = kernels
        *self.first_steps, last = self.steps
        assert isinstance(last, _Convolution)
        self.last_step, self.bias = replace(last, bias=None), last.bias

    def _raw(self, x: Tensor) -> Tensor:
        x_a = x[:, : self.split[0]]
        for step in self.first_steps:
            x_a = step(x_a)
        return self.last_step(x_a)

    def forward_(self, x: Tensor, log_scales: Tensor) -> None:
        """x_b ← e^s ⊙ x_b + t, in place; s is added to the map of log-scales."""
        self.kernels.couple_(x, self._raw(x), self.bias, self.clamp, log_scales)

    def inverse_(self, y: Tensor) -> None:
        """y_b ← (y_b − t) / e^s, in place."""
        self.kernels.uncouple_(y, self._raw(y), self.bias, self.clamp)


@dataclass(frozen=True)
class _Convolution:
    weight: Tensor
    bias: Tensor | None
    stride: int
    padding: int | str

    def __call__(self, x: Tensor) -> Tensor:
        return torch.conv2d(x, self.weight, self.bias, self.stride, self.padding)


@torch.no_grad()
def _steps(subnet: nn.Module) -> Iterator[Step]:
    """Return the subnet's layers as functions; those that do nothing in inference are left out."""
    layers = list(subnet.children())
    layout = torch.contiguous_format
    if isinstance(layers[0], nn.Conv2d):
        first = layers[0].weight
        if len(first) >= CHANNELS_LAST and first.device.type == "cpu":
            layout = torch.channels_last
            yield partial(torch.Tensor.contiguous, memory_format=layout)
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert layer.bias is not None
            weight, bias = layer.weight.detach(), layer.bias.detach()
            if layer is layers[-1]:
                rows = torch.ones_like(bias)
                rows[: len(rows) // 2] = 0.1
                weight, bias = weight * rows.reshape(-1, *[1] * (weight.ndim - 1)), bias * rows
            if isinstance(layer, nn.Conv2d):
                weight = weight.contiguous(memory_format=layout)
                yield _Convolution(weight, bias, layer.stride[0], layer.padding[0])
            else:
                yield partial(F.linear, weight=weight, bias=bias)
        elif isinstance(layer, nn.GroupNorm):
            yield partial(
                torch.group_norm,
                num_groups=layer.num_groups,
                weight=layer.weight.detach(),
                bias=layer.bias.detach(),
                eps=layer.eps,
            )
        elif isinstance(layer, nn.ReLU):
            yield torch.relu_
        elif not isinstance(layer, nn.Identity | nn.Dropout | nn.Dropout2d):
            yield layer


def _with_kernels(steps: list[Step], kernels: ModuleType) -> Iterator[Step]:
    """Return the same steps, with a convolution's bias, GroupNorm and ReLU as one kernel."""
    while steps:
        match steps:
            case [
                _Convolution() as convolution,
                partial(func=torch.group_norm, keywords=norm),
                torch.relu_,
                *steps,
            ]:
                yield replace(convolution, bias=None)
                yield partial(kernels.group_norm_relu_, added=convolution.bias, **norm)
            case [step, *steps]:
                yield step
