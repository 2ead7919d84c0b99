"""Arithmetic exact enough to invert."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """No TF32 on a GPU: its rounding makes f⁻¹ differ from the inverse of f by 1e-3."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
