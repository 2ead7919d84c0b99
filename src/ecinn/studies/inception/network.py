"""Inception-V3, the predictive network of the paper's comparison (Section 4.4)."""

import functools
import importlib
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.errors import InputError

SIDE = 224
"""Side of the enlarged images in pixels, as in the paper."""

Maps = Float[Tensor, "batch channels height width"]
Reduced = Float[Tensor, "batch features rows columns"]


class InceptionClassifier(nn.Module):
    """torchvision's Inception-V3 without auxiliary classifier, for images of any size.

    The network enlarges its images, so that attributions refer to the same pixels as the INN's.
    This also smooths them: a gradient passes through the adjoint of `enlarge`, a low-pass filter.
    """

    def __init__(self, classes: int, side: int = SIDE) -> None:
        super().__init__()
        self.enlarge = nn.Upsample((side, side), mode="bilinear", align_corners=False)
        network = torchvision_models().inception_v3(
            weights=None, aux_logits=False, num_classes=classes, init_weights=True
        )
        self.network = with_relu_modules(network)
        # The memory format in which a GPU's half-precision convolutions are fastest.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch classes"]:
        """Return the logits of images in [0, 1]."""
        logits: Tensor = self.network(self.enlarge(x))
        return logits


def with_relu_modules(network: nn.Module) -> nn.Module:
    """Replace every nonlinearity by an nn.ReLU that is used once, without changing the function.

    DeepLift replaces the gradients of modules that it knows, and silently uses the plain gradient
    of F.relu and F.max_pool2d. Changes the network in place and returns it.
    """
    for name, module in list(network.named_modules()):
        if type(module).__name__ == "BasicConv2d":
            conv, norm = module.get_submodule("conv"), module.get_submodule("bn")
            network.set_submodule(name, ConvolutionBlock(conv, norm))
        elif isinstance(module, nn.MaxPool2d):
            network.set_submodule(name, MaxPool())
    for name, module in list(network.named_modules()):
        if type(module).__name__ in ("InceptionB", "InceptionD"):
            network.set_submodule(name, Reduction(module))
    # New modules start in training mode.
    return network.train(network.training)


class ConvolutionBlock(nn.Module):
    """ReLU(norm(conv(x)))."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        # torchvision's names, so that the state dicts are compatible.
        self.conv = conv
        self.bn = norm
        self.relu = nn.ReLU()

    def forward(self, x: Maps) -> Reduced:
        """Compute torchvision's BasicConv2d."""
        activation: Tensor = self.relu(self.bn(self.conv(x)))
        return activation


class MaxPool(nn.Module):
    """3×3 max-pooling with stride 2; in evaluation mode by max(a, b) = b + ReLU(a − b).

    captum's rule for nn.MaxPool2d is wrong for overlapping windows, after a ReLU and next to
    other branches. With ReLUs the contributions add up to the change of the output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.relus = nn.ModuleList(nn.ReLU() for _ in range(4))

    def forward(self, x: Maps) -> Reduced:
        """Pool the rows, then the columns."""
        if self.training:
            return F.max_pool2d(x, kernel_size=3, stride=2)
        for first, second in ((0, 1), (2, 3)):
            x = x.transpose(2, 3)
            places = (x.shape[3] - 1) // 2
            a, b, c = (x[..., start : start + 2 * places - 1 : 2] for start in range(3))
            larger = b + self.relus[first](a - b)
            x = c + self.relus[second](larger - c)
        return x


class Reduction(nn.Module):
    """Branches of convolutions and a max-pool: torchvision's InceptionB and InceptionD."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        # In torchvision, branch3x3dbl_1, branch3x3dbl_2, … are the layers of one branch.
        self.branches = [
            list(names)
            for _, names in itertools.groupby(self._modules, lambda name: name.split("_")[0])
        ]
        self.pool = MaxPool()

    def forward(self, x: Maps) -> Reduced:
        """Concatenate the branches and the pool as channels."""
        outputs = []
        for names in self.branches:
            output = x
            for name in names:
                output = self.get_submodule(name)(output)
            outputs.append(output)
        return torch.cat([*outputs, self.pool(x)], 1)


def torchvision_models() -> Any:  # noqa: ANN401
    """Import torchvision.models, whatever the build of torch."""
    try:
        return importlib.import_module("torchvision.models")
    except ImportError as error:
        raise InputError(
            f"Inception-V3 needs torchvision ({error}): pip install 'ecinn[inception]'"
        ) from None
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    _declare_missing_operators()
    return importlib.import_module("torchvision.models")


@functools.cache
def _declare_missing_operators() -> torch.library.Library:
    """Declare two operators that torchvision's import needs, and Inception-V3 does not use.

    With a CPU build of torch, torchvision's compiled part may not load, and the import fails on
    their names. The declaration lasts as long as the Library, which the cache keeps alive.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
