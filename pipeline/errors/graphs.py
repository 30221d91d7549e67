"""Reading Q/DQ graphs: producers, constants, and the graph without its Q/DQ nodes.

This works on ONNX protos, not on onnx-ir: the pieces cut out here go straight into onnxruntime sessions.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.ort import read_graph

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MOVEMENT", "QDQ", "Graph", "dequantised", "float_graph", "load_graph", "without_qdq"]

QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
MOVEMENT = frozenset(
    {
        "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape", "Slice",
        "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators that only move values: Q/DQ in front of them count for the operator behind."""


def load_graph(model: Path | Any) -> Any:
    """An ``onnx.ModelProto`` without its external weights, or the one given.

    Raises:
        InputError: the file is missing or is no ONNX model.
    """
    import onnx

    if isinstance(model, onnx.ModelProto):
        return model
    return read_graph(Path(model))


class Graph:
    """A model with the look-ups that following its edges needs.

    Args:
        model: a path or a ``ModelProto``.
        folder: where external weights lie; a path brings its own.
    """

    def __init__(self, model: Path | Any, *, folder: Path | None = None) -> None:
        self.proto = load_graph(model)
        self.folder = Path(model).parent if isinstance(model, (str, Path)) else folder
        graph = self.proto.graph
        self.nodes: list[Any] = list(graph.node)
        self.by_name: dict[str, Any] = {node.name: node for node in self.nodes}
        self.producers: dict[str, Any] = {name: node for node in self.nodes for name in node.output if name}
        self.consumers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                self.consumers.setdefault(name, []).append(node)
        self._initializers: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs: tuple[str, ...] = tuple(i.name for i in graph.input if i.name not in self._initializers)
        self.outputs: tuple[str, ...] = tuple(output.name for output in graph.output)

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the inputs and of everything that is computed."""
        return frozenset([*self.inputs, *self.producers])

    def is_initializer(self, name: str) -> bool:
        return name in self._initializers

    def initializer(self, name: str) -> Any:
        """The ``TensorProto`` ``name`` with its data read in."""
        import onnx
        from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

        tensor = self._initializers[name]
        if not uses_external_data(tensor):
            return tensor
        whole = onnx.TensorProto()
        whole.CopyFrom(tensor)
        load_external_data_for_tensor(whole, str(self.folder or "."))
        whole.ClearField("external_data")
        whole.data_location = onnx.TensorProto.DEFAULT
        return whole

    def constant(self, name: str) -> np.ndarray[Any, np.dtype[Any]] | None:
        """The value of an initializer or ``Constant`` node, or None for anything computed."""
        from onnx import numpy_helper

        if name in self._initializers:
            array: np.ndarray[Any, np.dtype[Any]] = numpy_helper.to_array(self.initializer(name))
            return array
        node = self.producers.get(name)
        if node is not None and node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    array = numpy_helper.to_array(attribute.t)
                    return array
        return None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of an initializer, without reading its data; None for anything else."""
        tensor = self._initializers.get(name)
        return None if tensor is None else tuple(int(dim) for dim in tensor.dims)

    @cached_property
    def constants(self) -> frozenset[str]:
        """Tensors that no activation reaches: initializers and what is computed from them alone."""
        found = {*self._initializers, ""}
        for node in self.nodes:
            if all(name in found for name in node.input):
                found.update(node.output)
        return frozenset(found)

    @cached_property
    def types(self) -> dict[str, int]:
        """ONNX element type of every tensor that shape inference can tell."""
        import onnx

        inferred = onnx.shape_inference.infer_shapes(self.proto) if self.proto.ByteSize() < 1 << 31 else self.proto
        types = {tensor.name: int(tensor.data_type) for tensor in self.proto.graph.initializer}
        for info in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
            if info.type.tensor_type.elem_type:
                types[info.name] = int(info.type.tensor_type.elem_type)
        return types

    @property
    def has_qdq(self) -> bool:
        return any(node.op_type in QDQ for node in self.nodes)


def dequantised(graph: Graph) -> set[str]:
    """Tensors whose values come out of a ``DequantizeLinear``, also through operators that only move them."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.op_type == "DequantizeLinear" or (node.op_type in MOVEMENT and node.input and node.input[0] in found):
            found.update(node.output)
    return found


def float_graph(model: Path | Any) -> Graph:
    """The floating-point graph of a model: as it is, or without its Q/DQ nodes where it has some."""
    graph = Graph(model)
    return Graph(without_qdq(graph)) if graph.has_qdq else graph


def without_qdq(graph: Graph) -> Any:
    """The model that a Q/DQ graph stands for in floating point, as a ``ModelProto`` with weights read in.

    A pair on an activation or on a float weight is taken out. Where only the INT8 form of a weight is there, it stays,
    dequantised: its float original cannot be had back.
    """
    import onnx
    from onnx import numpy_helper

    model = onnx.ModelProto()
    model.CopyFrom(graph.proto)
    renamed: dict[str, str] = {}
    folded: list[Any] = []
    for node in graph.nodes:
        if node.op_type != "DequantizeLinear":
            continue
        source = graph.producers.get(node.input[0])
        if source is not None and source.op_type == "Clip":  # of a pair with fewer than 256 steps
            source = graph.producers.get(source.input[0])
        if source is not None and source.op_type == "QuantizeLinear":
            renamed[node.output[0]] = source.input[0]
        elif (values := graph.constant(node.input[0])) is not None:
            folded.append(numpy_helper.from_array(_dequantised_constant(graph, node, values), node.output[0]))
    kept = [node for node in graph.nodes if not _of_pair(node, graph) or _is_left(node, renamed, folded, graph)]
    del model.graph.node[:]
    outputs = set(graph.outputs)
    for node in kept:
        copy = model.graph.node.add()
        copy.CopyFrom(node)
        copy.input[:] = [_followed(name, renamed) for name in node.input]
    for name in outputs & renamed.keys():
        model.graph.node.append(
            onnx.helper.make_node("Identity", [_followed(name, renamed)], [name], name=f"{name}_float")
        )
    used = {name for node in model.graph.node for name in node.input} | outputs
    initializers = [graph.initializer(t.name) for t in graph.proto.graph.initializer if t.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*initializers, *folded])
    return model


def _of_pair(node: Any, graph: Graph) -> bool:
    """A Q, a DQ, or a Clip of the integers between them."""
    source = graph.producers.get(node.input[0]) if node.op_type == "Clip" else None
    return node.op_type in QDQ or (source is not None and source.op_type == "QuantizeLinear")


def _is_left(node: Any, renamed: dict[str, str], folded: Iterable[Any], graph: Graph) -> bool:
    """A Q or DQ that is not one of a pair: kept, so that the graph stays whole."""
    if node.op_type == "DequantizeLinear":
        return node.output[0] not in renamed and node.output[0] not in {tensor.name for tensor in folded}
    readers = graph.consumers.get(node.output[0], [])
    return node.output[0] in graph.outputs or any(
        _is_left(reader, renamed, folded, graph) if reader.op_type == "Clip" else reader.op_type != "DequantizeLinear"
        for reader in readers
    )


def _followed(name: str, renamed: dict[str, str]) -> str:
    while name in renamed:
        name = renamed[name]
    return name


def _dequantised_constant(
    graph: Graph, node: Any, values: np.ndarray[Any, np.dtype[Any]]
) -> np.ndarray[Any, np.dtype[Any]]:
    """(q - zero point) * scale along the node's axis, in the scale's type."""
    scale = graph.constant(node.input[1])
    if scale is None:
        raise InputError(f"the scale {node.input[1]!r} of {node.name!r} is computed at run time, expected a constant")
    zero = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    shape = [1] * values.ndim
    if scale.size > 1:
        shape[axis] = -1
    shifted = values.astype(np.int64) - (0 if zero is None else zero.astype(np.int64).reshape(shape))
    result: np.ndarray[Any, np.dtype[Any]] = (shifted.astype(scale.dtype) * scale.reshape(shape)).astype(scale.dtype)
    return result
