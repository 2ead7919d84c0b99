"""From 8-bit pictures to the input of somebody's classifier."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ecinn.errors import InputError
from ecinn.pixels import StoredImages

CHANNELS = ("RGB", "BGR", "grey")
LAYOUTS = ("NCHW", "NHWC")
GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601), as in Pillow."""


@dataclass(frozen=True)
class Preprocessing:
    """(value · scale − mean) / std of 8-bit values, after resizing and converting colours."""

    size: tuple[int, int] | None = None
    """Height and width; None: as the pictures are."""
    channels: str | None = None
    """Colours and their order; None: as the pictures are, RGB or grey."""
    layout: str = "NCHW"
    scale: float = 1 / 255
    mean: tuple[float, ...] = ()
    """One value, or one per channel in the classifier's order; empty: 0."""
    std: tuple[float, ...] = ()
    """One value, or one per channel in the classifier's order; empty: 1."""

    def __post_init__(self) -> None:
        """Check every value."""
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise InputError(f"size is a height and a width in pixels, not {self.size}")
        if self.channels is not None and self.channels not in CHANNELS:
            raise InputError(f"channels are RGB, BGR or grey, not {self.channels!r}")
        if self.layout not in LAYOUTS:
            raise InputError(f"layout is NCHW or NHWC, not {self.layout!r}")
        if not self.scale > 0:
            raise InputError(f"scale is above 0 (1/255 gives values in [0, 1]), not {self.scale}")
        if any(not value > 0 for value in self.std):
            raise InputError(f"standard deviations are above 0, not {self.std}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (0, 1, 1 if self.channels == "grey" else 3):
                raise InputError(f"{name} has one value, or one per channel, not {len(values)}")

    def __call__(self, images: StoredImages) -> Float[Tensor, "batch a b c"]:
        """Return the classifier's input."""
        x = _convert(images.float(), self.channels)
        if self.size is not None and tuple(x.shape[2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bilinear", antialias=True).clamp(0, 255)
        x = (x * self.scale - _column(self.mean or (0.0,), x)) / _column(self.std or (1.0,), x)
        return (x if self.layout == "NCHW" else x.permute(0, 2, 3, 1)).contiguous()


def _convert(x: Float[Tensor, "batch c h w"], channels: str | None) -> Tensor:
    if channels == "grey" and x.shape[1] == 3:
        return torch.einsum("bchw,c->bhw", x, x.new_tensor(GREY))[:, None]
    if channels in ("RGB", "BGR") and x.shape[1] == 1:
        return x.expand(-1, 3, -1, -1)
    return x.flip(1) if channels == "BGR" else x


def _column(values: tuple[float, ...], x: Tensor) -> Tensor:
    if len(values) not in (1, x.shape[1]):
        raise InputError(
            f"mean and std have {len(values)} values for pictures of {x.shape[1]} channel(s): "
            "give one per channel, and say which channels the classifier reads"
        )
    return x.new_tensor(values)[:, None, None]
