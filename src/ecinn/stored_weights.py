"""Weights as a file holds them: those of subnets rounded, because no inverse depends on them.

A coupling is invertible whatever its subnet computes; everything outside the subnets stays as
it is. What is rounded to 8 bits has one scale per output channel.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from ecinn.errors import InputError

STORED_BITS = (32, 16, 8)
_SCALE = ".scale"


def pack(weights: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """The tensors to write: at 8 bits kernels are integers, vectors half precision."""
    if bits not in STORED_BITS:
        raise InputError(f"weights are stored with 32, 16 or 8 bits, not {bits}")
    packed: dict[str, Tensor] = {}
    for name, value in weights.items():
        if bits == 32 or not _may_be_rounded(name, value):
            packed[name] = value
        elif bits == 16 or value.ndim < 2:
            packed[name] = value.half()
        else:
            packed[name], packed[name + _SCALE] = _round_rows(value)
    return packed


def unpack(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack`, all in single precision."""
    weights = {}
    for name, value in packed.items():
        if name + _SCALE in packed:
            scale = packed[name + _SCALE].float()
            weights[name] = value.float() * scale.reshape(-1, *[1] * (value.ndim - 1))
        elif not name.endswith(_SCALE) or name.removesuffix(_SCALE) not in packed:
            weights[name] = value.float() if value.is_floating_point() else value
    return weights


def stored_precision(weights: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """The weights as they will be when they have been saved and loaded."""
    return unpack(pack(weights, bits))


def _round_rows(
    value: Float[Tensor, "*shape"],
) -> tuple[Int8[Tensor, "*shape"], Float[Tensor, " rows"]]:
    """w ≈ scale · k with |k| ≤ 127.

    A scale of eight binary digits makes 127 · scale exact, so that what has been rounded once
    is not changed by being saved again.
    """
    rows = value.flatten(1)
    largest = rows.abs().amax(1)
    scale = torch.where(largest > 0, largest / 127, 1.0).to(torch.bfloat16)
    whole = (rows / scale.float()[:, None]).round().clamp(-127, 127)
    return whole.to(torch.int8).reshape(value.shape), scale


def _may_be_rounded(name: str, value: Tensor) -> bool:
    return ".subnet." in name and value.is_floating_point()
