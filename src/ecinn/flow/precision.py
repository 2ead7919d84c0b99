"""Arithmetic that is precise enough to invert."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """Switch TF32 off on a GPU: its rounding makes f⁻¹(f(x)) differ from x by 1e-3."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
