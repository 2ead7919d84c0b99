"""Graphs for browsers, whose 8-bit weights are in one file that all graphs of a model share.

ONNX Runtime spends seconds on the optimisation of a graph in a browser; without optimisation it
would convert the weights in every run. So the page converts them, once for all graphs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import GraphProto, TensorProto, numpy_helper

LOCATION = "weights"
"""By this name graphs refer to the converted weights: float32, kernel after kernel."""


@dataclass(frozen=True)
class SharedWeights:
    """Graphs without 8-bit weights, and these weights: the scales of all rows, then the rows."""

    graphs: Mapping[str, bytes]
    content: bytes
    shapes: Sequence[tuple[int, int]]
    """Rows and columns of every kernel; a row is an output channel."""


@dataclass
class _Kernels:
    """Kernels by their contents, in the order of the file, and where each begins."""

    scales: list[bytes] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    places: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    size: int = 0

    def place(self, values: np.ndarray, scale: np.ndarray) -> int:
        """Return where a kernel begins among the converted weights, in bytes."""
        key = (values.tobytes(), scale.astype("<f4").tobytes())
        if key not in self.places:
            self.places[key] = 4 * self.size
            self.size += values.size
            self.values.append(values.reshape(len(values), -1))
            self.scales.append(key[1])
        return self.places[key]


def share_weights(graphs: Mapping[str, bytes]) -> SharedWeights:
    """Take the 8-bit weights out of graphs; those with more bits are converted and stay."""
    kernels = _Kernels()
    rest = {name: _without_kernels(content, kernels) for name, content in graphs.items()}
    content = b"".join([*kernels.scales, *(values.tobytes() for values in kernels.values)])
    return SharedWeights(rest, content, [values.shape for values in kernels.values])


def _without_kernels(content: bytes, kernels: _Kernels) -> bytes:
    model = onnx.load_from_string(content)
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    for node in [node for node in graph.node if node.op_type == "Mul"]:
        cast = casts.get(node.input[0])
        if cast is None or cast.input[0] not in constants:
            continue
        values, scale = constants[cast.input[0]], constants[node.input[1]]
        if values.dtype == np.int8:
            place = kernels.place(values, scale)
            graph.initializer.append(_elsewhere(node.output[0], values.shape, place))
        else:
            converted = values.astype(np.float32) * scale
            graph.initializer.append(numpy_helper.from_array(converted, node.output[0]))
        graph.node.remove(node)
        graph.node.remove(cast)
    _drop_unused(graph)
    return bytes(model.SerializeToString())


def _elsewhere(name: str, shape: Sequence[int], place: int) -> TensorProto:
    """Return a tensor whose values the program adds when it loads the graph."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    size = 4 * int(np.prod(shape))
    for key, value in {"location": LOCATION, "offset": place, "length": size}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _drop_unused(graph: GraphProto) -> None:
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
