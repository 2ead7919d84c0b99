"""f and f⁻¹ as ONNX nodes, layer by layer.

Written by hand: torch's exporters take minutes, or write graphs that take many seconds to load,
and both store 8-bit weights as float32.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.quantisation import pack, unpack
from ecinn.errors import EcinnError
from ecinn.export.graph import FLOAT, Graph, Name, Value
from ecinn.flow import bijections as b
from ecinn.flow.fused import folded_mix

_LOG_SCALE_FACTOR = 0.1
"""Factor of the log-scale in `Coupling`, tanh(0.1 s); folded into the weights that compute s."""


class Maps(NamedTuple):
    """A tensor in the graph and its shape after the batch: channels, height, width; or dim."""

    name: Name
    shape: tuple[int, ...]


def array(tensor: Tensor) -> np.ndarray:
    """Return the tensor as a NumPy array."""
    values: np.ndarray = tensor.detach().cpu().numpy()
    return values


class FlowWriter:
    """Adds a classifier's flow to a graph; f and f⁻¹ share their weights."""

    def __init__(self, graph: Graph, classifier: GenerativeClassifier, bits: int) -> None:
        """Prepare the weights.

        Args:
            bits: bits per subnet weight, if the classifier's weights have no more.
        """
        self._graph = graph
        self._op = graph.op
        self._inn = classifier.inn
        self._image_shape = classifier.image_shape
        weights = {name: value.cpu() for name, value in classifier.inn.state_dict().items()}
        self._packed = _packed(weights, bits)
        self._parameters = {id(value): name for name, value in classifier.inn.named_parameters()}
        self._written: dict[str, Name] = {}
        self._log_det: list[Name] = []
        self._constant_log_det = 0.0

    def encode(self, pixels: Name) -> tuple[Name, Name]:
        """z = f(x) and log |det J|."""
        self._log_det, self._constant_log_det = [], 0.0
        z = self._forward(self._inn, Maps(pixels, self._image_shape))
        log_det = self._op("Add", self._op("Sum", *self._log_det), self._constant_log_det)
        return z.name, log_det

    def decode(self, z: Name) -> Name:
        """x = f⁻¹(z)."""
        dim = int(np.prod(self._image_shape))
        return self._inverse(self._inn, Maps(z, (dim,))).name

    def _forward(self, layer: nn.Module, x: Maps) -> Maps:
        match layer:
            case b.Chain():
                for each in layer.bijections:
                    x = self._forward(each, x)
                return x
            case b.PixelScale():
                self._constant_log_det += float(np.prod(x.shape) * np.log(layer.scale))
                centred = self._op("Sub", x.name, 0.5)
                return Maps(self._op("Mul", centred, float(layer.scale)), x.shape)
            case b.PixelLogit():
                return self._logit(layer, x)
            case b.Squeeze():
                return self._squeezed(x)
            case b.Haar():
                squeezed = self._squeezed(x)
                return Maps(self._op("Conv", squeezed.name, array(layer.mix)), squeezed.shape)
            case b.AffineMix():
                log_scale = float(layer.log_scale.double().sum())
                self._constant_log_det += float(np.prod(x.shape[1:])) * log_scale
                return Maps(self._op("Conv", x.name, *self._mix(layer)[0]), x.shape)
            case b.Coupling():
                return self._couple(layer, x)
            case b.DCTPooling():
                channels, size = x.shape[0], int(np.prod(x.shape[1:]))
                flat = self._op("Reshape", x.name, np.array([0, channels, size]))
                spectrum = self._op("MatMul", flat, array(layer.transform.T))
                turned = self._op("Transpose", spectrum, perm=[0, 2, 1])
                dim = channels * size
                return Maps(self._op("Reshape", turned, np.array([0, dim])), (dim,))
            case b.Permutation():
                return Maps(self._op("Gather", x.name, array(layer.order), axis=1), x.shape)
        raise EcinnError(f"{type(layer).__name__} has no ONNX form: add it to export/flow.py")

    def _inverse(self, layer: nn.Module, y: Maps) -> Maps:
        match layer:
            case b.Chain():
                for each in reversed(layer.bijections):
                    y = self._inverse(each, y)
                return y
            case b.PixelScale():
                scaled = self._op("Div", y.name, float(layer.scale))
                return Maps(self._op("Add", scaled, 0.5), y.shape)
            case b.PixelLogit():
                inside = self._op("Sigmoid", self._op("Mul", y.name, 4 / layer.scale))
                above = self._op("Sub", inside, float(layer.margin))
                return Maps(self._op("Div", above, 1 - 2 * layer.margin), y.shape)
            case b.Squeeze():
                return self._unsqueezed(y)
            case b.Haar():
                mixed = self._op("Conv", y.name, array(layer.mix.transpose(0, 1)))
                return self._unsqueezed(Maps(mixed, y.shape))
            case b.AffineMix():
                return Maps(self._op("Conv", y.name, *self._mix(layer)[1]), y.shape)
            case b.Coupling():
                return self._uncouple(layer, y)
            case b.DCTPooling():
                channels, height, width = layer.shape
                rows = self._op("Reshape", y.name, np.array([0, height * width, channels]))
                spectrum = self._op("Transpose", rows, perm=[0, 2, 1])
                x = self._op("MatMul", spectrum, array(layer.transform))
                return Maps(self._op("Reshape", x, np.array([0, *layer.shape])), layer.shape)
            case b.Permutation():
                back = array(layer.order.argsort())
                return Maps(self._op("Gather", y.name, back, axis=1), y.shape)
        raise EcinnError(f"{type(layer).__name__} has no ONNX form: add it to export/flow.py")

    def _logit(self, layer: b.PixelLogit, x: Maps) -> Maps:
        inside = self._op("Mul", x.name, 1 - 2 * layer.margin)
        inside = self._op("Clip", self._op("Add", inside, float(layer.margin)), 1e-6, 1 - 1e-6)
        log_p, log_q = self._op("Log", inside), self._op("Log", self._op("Sub", 1.0, inside))
        both = self._op("Neg", self._op("Add", log_p, log_q))
        self._log_det.append(self._sum_per_image(Maps(both, x.shape)))
        slope = 0.25 * layer.scale * (1 - 2 * layer.margin)
        self._constant_log_det += float(np.prod(x.shape) * np.log(slope))
        return Maps(self._op("Mul", self._op("Sub", log_p, log_q), 0.25 * layer.scale), x.shape)

    def _couple(self, layer: b.Coupling, x: Maps) -> Maps:
        x_a, x_b = self._halves(x, layer.split)
        log_scale, shift = self._subnet(layer, x_a)
        if isinstance(layer, b.DownsamplingCoupling):
            x_a, x_b = self._squeezed(x_a), self._squeezed(x_b)
        self._log_det.append(self._sum_per_image(Maps(log_scale, x_b.shape)))
        y_b = self._op("Add", self._op("Mul", x_b.name, self._op("Exp", log_scale)), shift)
        shape = (x_a.shape[0] + x_b.shape[0], *x_a.shape[1:])
        return Maps(self._op("Concat", x_a.name, y_b, axis=1), shape)

    def _uncouple(self, layer: b.Coupling, y: Maps) -> Maps:
        down = isinstance(layer, b.DownsamplingCoupling)
        split = (4 * layer.split[0], 4 * layer.split[1]) if down else layer.split
        y_a, y_b = self._halves(y, split)
        x_a = self._unsqueezed(y_a) if down else y_a
        log_scale, shift = self._subnet(layer, x_a)
        scaled = self._op("Div", self._op("Sub", y_b.name, shift), self._op("Exp", log_scale))
        x_b = Maps(scaled, y_b.shape)
        x_b = self._unsqueezed(x_b) if down else x_b
        shape = (x_a.shape[0] + x_b.shape[0], *x_a.shape[1:])
        return Maps(self._op("Concat", x_a.name, x_b.name, axis=1), shape)

    def _subnet(self, layer: b.Coupling, x: Maps) -> tuple[Name, Name]:
        """Return log-scale and shift."""
        children = list(layer.subnet.children())
        last = children[-1]
        for child in children:
            x = self._subnet_layer(child, x, is_last=child is last)
        half = x.shape[0] // 2
        raw, shift = self._graph.ops("Split", x.name, np.array([half, half]), outputs=2, axis=1)
        return self._op("Mul", self._op("Tanh", raw), float(layer.clamp)), shift

    def _subnet_layer(self, layer: nn.Module, x: Maps, *, is_last: bool) -> Maps:
        match layer:
            case nn.Conv2d():
                weight, bias = (
                    self._weight(p, is_last=is_last) for p in (layer.weight, layer.bias)
                )
                stride, padding = layer.stride[0], layer.padding[0]
                shape = (layer.out_channels, *(-(-side // stride) for side in x.shape[1:]))
                options = {"strides": [stride] * 2, "pads": [padding] * 4}
                return Maps(self._op("Conv", x.name, weight, bias, **options), shape)
            case nn.Linear():
                weight, bias = (
                    self._weight(p, is_last=is_last) for p in (layer.weight, layer.bias)
                )
                y = self._op("Gemm", x.name, weight, bias, transB=1)
                return Maps(y, (layer.out_features,))
            case nn.GroupNorm():
                return self._group_norm(layer, x)
            case nn.BatchNorm2d():
                names = ("weight", "bias", "running_mean", "running_var")
                values = (array(getattr(layer, name)) for name in names)
                y = self._op("BatchNormalization", x.name, *values, epsilon=layer.eps)
                return Maps(y, x.shape)
            case nn.ReLU():
                return Maps(self._op("Relu", x.name), x.shape)
            case nn.Identity() | nn.Dropout() | nn.Dropout2d():
                return x
        raise EcinnError(f"{type(layer).__name__} has no ONNX form: add it to export/flow.py")

    def _group_norm(self, layer: nn.GroupNorm, x: Maps) -> Maps:
        """Normalise each group as one channel, then scale and shift channels in one node."""
        groups, channels = layer.num_groups, x.shape[0]
        one, zero = np.ones(groups, np.float32), np.zeros(groups, np.float32)
        y = self._op("Reshape", x.name, np.array([0, groups, -1]))
        y = self._op("InstanceNormalization", y, one, zero, epsilon=layer.eps)
        y = self._op("Reshape", y, np.array([0, *x.shape]))
        mean, variance = np.zeros(channels, np.float32), np.ones(channels, np.float32)
        affine = (array(layer.weight), array(layer.bias), mean, variance)
        return Maps(self._op("BatchNormalization", y, *affine, epsilon=0.0), x.shape)

    def _weight(self, parameter: Tensor | None, *, is_last: bool) -> Name:
        """Write a weight as it is stored; runtimes convert it to float32 when they load it."""
        assert parameter is not None
        name = self._parameters[id(parameter)]
        if name not in self._written:
            stored = self._packed[name]
            rows = torch.ones(len(stored))
            rows[: len(rows) // 2] = _LOG_SCALE_FACTOR if is_last else 1.0
            rows = rows * self._packed.get(f"{name}.scale", torch.ones(1)).float()
            rows = rows.reshape(-1, *[1] * (stored.ndim - 1))
            if stored.ndim == 1 or stored.dtype == torch.float32:
                self._written[name] = self._graph.constant(array(stored.float() * rows))
            else:
                self._written[name] = self._op(
                    "Mul", self._op("Cast", array(stored), to=FLOAT), array(rows)
                )
        return self._written[name]

    def _mix(self, layer: b.AffineMix) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
        """Return kernel and bias both ways; a DCT is stored once, and its order for each layer."""
        (kernel, bias), (inverse_kernel, inverse_bias) = folded_mix(layer)
        if not isinstance(layer, b.CosineMix):
            return (array(kernel), array(bias)), (array(inverse_kernel), array(inverse_bias))
        rotation = self._op("Gather", array(layer.cosines), array(layer.order), axis=1)
        scale = array(layer.log_scale.double().exp())[:, None, None]
        forward = self._op("Mul", rotation, as_float(scale))
        turned = self._op("Transpose", rotation, perm=[1, 0, 2, 3])
        inverse = self._op("Mul", turned, as_float(1 / scale[..., None]))
        return (forward, array(bias)), (inverse, array(inverse_bias))

    def _halves(self, x: Maps, split: tuple[int, int]) -> tuple[Maps, Maps]:
        names = self._graph.ops("Split", x.name, np.array(split), outputs=2, axis=1)
        x_a, x_b = (Maps(n, (c, *x.shape[1:])) for n, c in zip(names, split, strict=True))
        return x_a, x_b

    def _squeezed(self, x: Maps) -> Maps:
        """Return `pixel_unshuffle`, whose channels SpaceToDepth has in another order."""
        channels, height, width = x.shape
        y = self._op("SpaceToDepth", x.name, blocksize=2)
        if channels > 1:
            order = np.arange(4 * channels).reshape(4, channels).T.flatten()
            y = self._op("Gather", y, order, axis=1)
        return Maps(y, (4 * channels, height // 2, width // 2))

    def _unsqueezed(self, y: Maps) -> Maps:
        channels, height, width = y.shape
        x = self._op("DepthToSpace", y.name, blocksize=2, mode="CRD")
        return Maps(x, (channels // 4, 2 * height, 2 * width))

    def _sum_per_image(self, x: Maps) -> Name:
        axes = np.arange(1, 1 + len(x.shape))
        return self._op("ReduceSum", x.name, axes, keepdims=0)


def _packed(weights: Mapping[str, Tensor], bits: int) -> Mapping[str, Tensor]:
    """Return the weights as a checkpoint stores them, if that loses nothing."""
    packed = pack(weights, bits)
    unpacked = unpack(packed)
    same = all(torch.equal(unpacked[name], value) for name, value in weights.items())
    return packed if same else weights


def as_float(values: np.ndarray) -> np.ndarray:
    """Return the values in float32."""
    return values.astype(np.float32)
