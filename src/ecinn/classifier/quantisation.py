"""Quantise weights for storage: those of a flow's subnets, or all of another network.

A coupling is invertible whatever its subnet computes, so rounding the subnet's weights keeps the
inverse exact; everything else of a flow is stored unrounded. 8-bit weights have one scale per
output channel.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from ecinn.errors import InputError

STORED_BITS = (32, 16, 8)
SUBNETS = ".subnet."
"""Part of the names of a flow's weights that may be rounded."""
_SCALE = ".scale"


def pack(weights: Mapping[str, Tensor], bits: int, rounded: str = SUBNETS) -> dict[str, Tensor]:
    """Return the tensors to write: with 8 bits kernels are integers and vectors float16.

    Args:
        rounded: part of the names of the weights to round; "" rounds all of them.
    """
    if bits not in STORED_BITS:
        raise InputError(f"weights are stored with 32, 16 or 8 bits, not {bits}")
    packed: dict[str, Tensor] = {}
    for name, value in weights.items():
        if bits == 32 or rounded not in name or not value.is_floating_point():
            packed[name] = value
        elif bits == 16 or value.ndim < 2:
            packed[name] = value.half()
        else:
            packed[name], packed[name + _SCALE] = _round_rows(value)
    return packed


def unpack(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights in float32: the inverse of `pack`."""
    weights = {}
    for name, value in packed.items():
        if name + _SCALE in packed:
            scale = packed[name + _SCALE].float()
            weights[name] = value.float() * scale.reshape(-1, *[1] * (value.ndim - 1))
        elif not name.endswith(_SCALE) or name.removesuffix(_SCALE) not in packed:
            weights[name] = value.float() if value.is_floating_point() else value
    return weights


def stored_precision(weights: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Return the weights as they are after saving and loading."""
    return unpack(pack(weights, bits))


def _round_rows(
    value: Float[Tensor, "*shape"],
) -> tuple[Int8[Tensor, "*shape"], Float[Tensor, " rows"]]:
    """w ≈ scale · k with |k| ≤ 127.

    A scale with eight significant bits makes 127 · scale exact, so that saving rounded weights
    again does not change them.
    """
    rows = value.flatten(1)
    largest = rows.abs().amax(1)
    scale = torch.where(largest > 0, largest / 127, 1.0).to(torch.bfloat16)
    whole = (rows / scale.float()[:, None]).round().clamp(-127, 127)
    return whole.to(torch.int8).reshape(value.shape), scale
