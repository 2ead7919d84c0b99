"""Triton kernels for inference on a GPU: GroupNorm with ReLU, and the end of a coupling.

Importing this module needs Triton, which torch's CUDA wheels for Linux bring with them.
"""

from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 16_384
"""Values that one program of GroupNorm holds at once; it reads larger groups three times."""
BLOCK = 1024
"""Values that one program of a coupling transforms."""


def group_norm_relu_(
    x: Tensor, added: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """x ← relu(GroupNorm(x + added) · weight + bias), in place if x is contiguous."""
    x = _for_inference(x).contiguous()
    if not len(x):
        return x
    channels, pixels = x.shape[1] // num_groups, x[0, 0].numel()
    rows = triton.next_power_of_2(channels)
    columns = max(1, min(triton.next_power_of_2(pixels), LARGEST // rows))
    warps = 4 if rows * columns <= 2048 else 8 if rows * columns <= 8192 else 16
    with torch.cuda.device_of(x):
        _group_norm_relu[(len(x) * num_groups,)](
            x, added, weight, bias, eps, num_groups, channels, pixels, rows, columns,
            num_warps=warps,
        )  # fmt: skip
    return x


def couple_(x: Tensor, raw: Tensor, bias: Tensor, clamp: float, log_scales: Tensor) -> None:
    """x_b ← e^s ⊙ x_b + t and log_scales ← log_scales + s, in place.

    The second half of the channels of x is x_b. The halves of raw + bias are artanh(s / clamp)
    and t.
    """
    _launch_couple(x, raw, bias, clamp, log_scales, inverse=False)


def uncouple_(y: Tensor, raw: Tensor, bias: Tensor, clamp: float) -> None:
    """y_b ← (y_b − t) / e^s, in place, with s and t as in `couple_`."""
    _launch_couple(y, raw, bias, clamp, y, inverse=True)


def _launch_couple(
    x: Tensor, raw: Tensor, bias: Tensor, clamp: float, log_scales: Tensor, *, inverse: bool
) -> None:
    assert _for_inference(x).is_contiguous()
    assert log_scales.is_contiguous()
    if not len(x):
        return
    pixels = x[0, 0].numel()
    size = raw[0].numel() // 2
    first = x[0].numel() - size
    with torch.cuda.device_of(x):
        _couple[(len(x), triton.cdiv(size, BLOCK))](
            x, raw.contiguous(), bias, log_scales, float(clamp), first, size, pixels, inverse,
            BLOCK, num_warps=4,
        )  # fmt: skip


def _for_inference(x: Tensor) -> Tensor:
    if x.requires_grad:
        raise RuntimeError("the kernels of ecinn.flow.kernels have no gradients")
    return x


def try_out(device: torch.device) -> None:
    """Run every kernel on a few numbers; raise whatever error prevents it, or a wrong result."""
    x = torch.arange(16.0, device=device).reshape(1, 4, 2, 2).sin()
    zeros, ones = torch.zeros(4, device=device), torch.ones(4, device=device)
    normalised = group_norm_relu_(x.clone(), ones, 2, ones, ones, 1e-5)
    torch.testing.assert_close(normalised, F.group_norm(x, 2, bias=ones).relu())
    y, log_scales = x.clone(), torch.zeros_like(x[:, 2:])
    couple_(y, x, zeros, 1.0, log_scales)
    torch.testing.assert_close(log_scales, x[:, :2].tanh())
    torch.testing.assert_close(y[:, 2:], log_scales.exp() * x[:, 2:] + x[:, 2:])
    uncouple_(y, x, zeros, 1.0)
    torch.testing.assert_close(y, x)


# `no_type_check` keeps the type checks of tests away: Triton compiles the source of a function.


@triton.jit
@no_type_check
def _group_norm_relu(
    x: tl.tensor, added: tl.tensor, weight: tl.tensor, bias: tl.tensor, eps: float,
    groups: tl.constexpr, channels: tl.constexpr, pixels: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise one group of one image: `channels` times `pixels` values."""
    program = tl.program_id(0)
    row, column = tl.arange(0, rows), tl.arange(0, columns)[None, :]
    channel = (program % groups) * channels + row
    a = tl.load(added + channel, mask=row < channels, other=0.0)[:, None]
    w = tl.load(weight + channel, mask=row < channels, other=0.0)[:, None]
    b = tl.load(bias + channel, mask=row < channels, other=0.0)[:, None]
    known = (row < channels)[:, None]
    values = x + program.to(tl.int64) * (channels * pixels) + row[:, None] * pixels + column
    if pixels <= columns:  # one block
        inside = known & (column < pixels)
        value = tl.load(values, mask=inside, other=0.0) + a
        mean = tl.sum(tl.where(inside, value, 0.0)) / (channels * pixels)
        centred = tl.where(inside, value - mean, 0.0)
        variance = tl.sum(centred * centred) / (channels * pixels)
        y = centred * (tl.rsqrt(variance + eps) * w) + b
        tl.store(values, tl.where(y < 0, 0.0, y), mask=inside)
    else:
        total = tl.zeros((rows, columns), tl.float32)
        for start in range(0, pixels, columns):
            inside = known & (column + start < pixels)
            value = tl.load(values + start, mask=inside, other=0.0) + a
            total += tl.where(inside, value, 0.0)
        mean = tl.sum(total) / (channels * pixels)
        squares = tl.zeros((rows, columns), tl.float32)
        for start in range(0, pixels, columns):
            inside = known & (column + start < pixels)
            value = tl.load(values + start, mask=inside, other=0.0) + a
            centred = tl.where(inside, value - mean, 0.0)
            squares += centred * centred
        scale = tl.rsqrt(tl.sum(squares) / (channels * pixels) + eps) * w
        for start in range(0, pixels, columns):
            inside = known & (column + start < pixels)
            value = tl.load(values + start, mask=inside, other=0.0) + a
            y = (value - mean) * scale + b
            tl.store(values + start, tl.where(y < 0, 0.0, y), mask=inside)


@triton.jit
@no_type_check
def _couple(
    x: tl.tensor, raw: tl.tensor, bias: tl.tensor, log_scales: tl.tensor, clamp: float,
    first: tl.constexpr, size: tl.constexpr, pixels: tl.constexpr, inverse: tl.constexpr,
    block: tl.constexpr,
) -> None:  # fmt: skip
    """Transform one block of x_b, whose `size` values follow `first` values of x_a."""
    image = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * block + tl.arange(0, block)
    inside = offset < size
    channel = offset // pixels
    s_raw = raw + image * (2 * size) + offset
    s = tl.load(s_raw, mask=inside, other=0.0) + tl.load(bias + channel, mask=inside, other=0.0)
    t = tl.load(s_raw + size, mask=inside, other=0.0)
    t += tl.load(bias + size // pixels + channel, mask=inside, other=0.0)
    s = clamp * _tanh(s)
    values = x + image * (first + size) + first + offset
    value = tl.load(values, mask=inside, other=0.0)
    if inverse:  # a division, so that errors of exp cancel in a round trip
        value = tl.div_rn(value - t, tl.exp(s))
    else:
        value = value * tl.exp(s) + t
        sums = log_scales + image * size + offset
        tl.store(sums, tl.load(sums, mask=inside, other=0.0) + s, mask=inside)
    tl.store(values, value, mask=inside)


@triton.jit
@no_type_check
def _tanh(x: tl.tensor) -> tl.tensor:
    """tanh x to a few units in the last place: Cephes's polynomial near zero, exp elsewhere."""
    z = x * x
    p = (-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2
    p = (p * z + 1.33314422036e-1) * z - 3.33332819422e-1
    e = tl.exp(-2.0 * tl.abs(x))
    far = tl.div_rn(1.0 - e, 1.0 + e)
    return tl.where(tl.abs(x) < 0.625, p * z * x + x, tl.where(x < 0, -far, far))
