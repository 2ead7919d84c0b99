"""An ONNX graph, written node by node."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
"""Version of ONNX's operators; ONNX Runtime knows it since 1.14, also in the browser."""
IR_VERSION = 8
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL

Name = str
"""The name of a tensor in the graph."""
Value = Name | np.ndarray | float
"""A tensor in the graph, or a constant."""


class Port(NamedTuple):
    """An input or output: its type, and its shape after the batch dimension."""

    type: int
    shape: tuple[int, ...] = ()


class Graph:
    """Nodes, in the order in which they are added, and constants, each stored once."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: list[onnx.TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Name] = {}

    def op(self, kind: str, *inputs: Value, **attributes: Any) -> Name:  # noqa: ANN401
        """Add a node with one output; return its name."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: Value, outputs: int, **attributes: Any) -> list[Name]:  # noqa: ANN401
        """Add a node with several outputs; return their names."""
        names = [f"{kind}_{len(self._nodes)}_{index}" for index in range(outputs)]
        given = [self.constant(value) for value in inputs]
        self._nodes.append(helper.make_node(kind, given, names, **attributes))
        return names

    def constant(self, value: Value) -> Name:
        """Return the name of a constant; that of a tensor is returned as it is."""
        if isinstance(value, str):
            return value
        constant = np.array(value, np.float32 if isinstance(value, float) else None, order="C")
        key = (constant.dtype.str, constant.shape, constant.tobytes())
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self._tensors.append(numpy_helper.from_array(constant, self._constants[key]))
        return self._constants[key]

    def serialise(
        self, inputs: Mapping[Name, Port], outputs: Mapping[Name, tuple[Name, Port]], about: str
    ) -> bytes:
        """Return the contents of a file with these inputs and outputs, for any batch size."""
        named = [helper.make_node("Identity", [t], [name]) for name, (t, _) in outputs.items()]
        graph = helper.make_graph(
            [*self._nodes, *named],
            "ecinn",
            [_value_info(name, port) for name, port in inputs.items()],
            [_value_info(name, port) for name, (_, port) in outputs.items()],
            self._tensors,
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="ecinn",
            doc_string=about,
        )
        onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString())


def _value_info(name: Name, port: Port) -> onnx.ValueInfoProto:
    shape: Sequence[str | int] = ("batch", *port.shape)
    return helper.make_tensor_value_info(name, port.type, shape)
