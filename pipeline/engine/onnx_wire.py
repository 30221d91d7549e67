"""Just enough of the ONNX file format to look at a graph without the onnx package: nodes, types, opsets, constants.

Protocol buffers' wire format (https://protobuf.dev/programming-guides/encoding) with the field numbers of onnx.proto3.
The file is mapped, not read: the weights are never copied.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.errors import InputError
from pipeline.records import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DTYPES", "Attribute", "Graph", "Model", "Node", "Tensor", "read_model"]

DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
}
"""``TensorProto.DataType`` by number; the rest (float8, int4, ...) is shown as ``type 17``."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT16 = 10
_EXTERNAL = 1  # TensorProto.DataLocation
Buffer = memoryview


def _varint(data: Buffer, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


def _fields(data: Buffer) -> Iterator[tuple[int, int | Buffer]]:
    """``(field number, value)``: an int for the number types, a view for the rest."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind == _FIXED32:
            length = 4
        elif kind == _FIXED64:
            length = 8
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > end:
            raise ValueError("the file ends early")
        yield tag >> 3, data[at : at + length]
        at += length


def _text(value: int | Buffer) -> str:
    if isinstance(value, int):
        raise ValueError("a number where a text was expected")
    return bytes(value).decode()


def _view(value: int | Buffer) -> Buffer:
    if isinstance(value, int):
        raise ValueError("a number where a message was expected")
    return value


def _signed(value: int | Buffer) -> int:
    if not isinstance(value, int):
        raise ValueError("a message where a number was expected")
    return value - (1 << 64) if value >> 63 else value


def _numbers(value: int | Buffer) -> list[int]:
    """One element of a repeated integer field: a single number, or all of them packed."""
    if isinstance(value, int):
        return [_signed(value)]
    numbers, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        numbers.append(_signed(number))
    return numbers


@dataclass
class Tensor:
    """A constant. ``values`` reads small float and integer tensors; weights stay where they are."""

    name: str = ""
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    external: bool = False
    _raw: Buffer | None = None
    _floats: list[float] = field(default_factory=list)
    _ints: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def values(self) -> np.ndarray | None:
        """The elements, flat; None when they lie in another file or are of a type numpy lacks."""
        if self.external or self.dtype not in (
            "float32",
            "float16",
            "float64",
            "uint8",
            "int8",
            "int32",
            "int64",
            "bool",
        ):
            return None
        if self._raw is not None:
            return np.frombuffer(self._raw, dtype=np.dtype(self.dtype).newbyteorder("<"))
        if self.dtype == "float16":  # halves travel as bit patterns in int32_data
            return np.array(self._ints, dtype=np.uint16).view(np.float16)
        return np.array(self._floats or self._ints, dtype=self.dtype)


@dataclass
class Attribute:
    name: str = ""
    integer: int | None = None
    text: str | None = None
    tensor: Tensor | None = None
    number: float | None = None
    integers: list[int] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)


@dataclass
class Node:
    name: str = ""
    op_type: str = ""
    domain: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Attribute] = field(default_factory=dict)

    def label(self) -> str:
        """What identifies the node to a reader: its name, or its first output's."""
        return self.name or (self.outputs[0] if self.outputs else "?")


@dataclass
class Graph:
    name: str = ""
    nodes: list[Node] = field(default_factory=list)
    initializers: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[TensorSpec] = field(default_factory=list)
    outputs: list[TensorSpec] = field(default_factory=list)

    def constants(self) -> dict[str, Tensor]:
        """What stands in the file, by name: initializers and Constant nodes' tensors. Subgraphs have their own."""
        found = dict(self.initializers)
        for node in self.nodes:
            value = node.attributes.get("value") if node.op_type == "Constant" and not node.domain else None
            if value is not None and value.tensor is not None:
                found[node.outputs[0]] = value.tensor
        return found

    def walk(self) -> Iterator[tuple[Graph, Node]]:
        """Every node, those of subgraphs too, with the graph that holds it."""
        for node in self.nodes:
            yield self, node
            for attribute in node.attributes.values():
                for graph in attribute.graphs:
                    yield from graph.walk()


@dataclass
class Model:
    ir_version: int = 0
    opsets: dict[str, int] = field(default_factory=dict)
    graph: Graph = field(default_factory=Graph)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What a caller feeds: the graph's inputs without those that have an initializer."""
        return tuple(spec for spec in self.graph.inputs if spec.name not in self.graph.initializers)

    @property
    def uses_half(self) -> bool:
        """Some tensor of the graph is declared or made float16."""
        if any(spec.dtype == "float16" for spec in (*self.graph.inputs, *self.graph.outputs)):
            return True
        return any(
            node.op_type == "Cast" and node.attributes["to"].integer == _FLOAT16 if "to" in node.attributes else False
            for _, node in self.graph.walk()
        ) or any(tensor.dtype == "float16" for tensor in self.graph.initializers.values())

    @property
    def weight_bytes(self) -> int:
        """Size of the main graph's constants, those in other files too."""
        sizes = {name: np.dtype(name).itemsize for name in DTYPES.values() if name not in ("string", "bfloat16")}
        return sum(tensor.size * sizes.get(tensor.dtype, 1) for tensor in self.graph.initializers.values())

    @property
    def quantised(self) -> bool:
        return any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for _, node in self.graph.walk())


def _tensor(data: Buffer) -> Tensor:
    tensor, dims = Tensor(), []
    for number, value in _fields(data):
        if number == 1:
            dims += _numbers(value)
        elif number == 2:
            code = _signed(value)
            tensor.dtype = DTYPES.get(code, f"type {code}")
        elif number == 4:
            packed = bytes(_view(value))
            tensor._floats += struct.unpack(f"<{len(packed) // 4}f", packed)
        elif number in (5, 7):
            tensor._ints += _numbers(value)
        elif number == 8:
            tensor.name = _text(value)
        elif number == 9:
            tensor._raw = _view(value)
        elif number == 10:
            packed = bytes(_view(value))
            tensor._floats += struct.unpack(f"<{len(packed) // 8}d", packed)
        elif number == 14:
            tensor.external = value == _EXTERNAL
    tensor.shape = tuple(dims)
    return tensor


def _attribute(data: Buffer) -> Attribute:
    attribute = Attribute()
    for number, value in _fields(data):
        if number == 1:
            attribute.name = _text(value)
        elif number == 2:
            attribute.number = float(struct.unpack("<f", _view(value))[0])
        elif number == 3:
            attribute.integer = _signed(value)
        elif number == 4:
            attribute.text = bytes(_view(value)).decode(errors="replace")
        elif number == 5:
            attribute.tensor = _tensor(_view(value))
        elif number in (6, 11):
            attribute.graphs.append(_graph(_view(value)))
        elif number == 8:
            attribute.integers += _numbers(value)
    return attribute


def _node(data: Buffer) -> Node:
    node = Node()
    for number, value in _fields(data):
        if number == 1:
            node.inputs.append(_text(value))
        elif number == 2:
            node.outputs.append(_text(value))
        elif number == 3:
            node.name = _text(value)
        elif number == 4:
            node.op_type = _text(value)
        elif number == 5:
            attribute = _attribute(_view(value))
            node.attributes[attribute.name] = attribute
        elif number == 7:
            node.domain = _text(value)
    return node


def _dimension(data: Buffer) -> int | str:
    dimension: int | str = "?"
    for number, value in _fields(data):
        if number == 1:
            dimension = _signed(value)
        elif number == 2:
            dimension = _text(value) or "?"
    return "?" if dimension == -1 else dimension


def _value_info(data: Buffer) -> TensorSpec:
    name, dtype, shape = "", "unknown", None
    for number, value in _fields(data):
        if number == 1:
            name = _text(value)
        elif number == 2:
            for kind, tensor_type in _fields(_view(value)):
                if kind != 1:  # sequences, maps and optionals have no dtype and shape
                    continue
                for part, content in _fields(_view(tensor_type)):
                    if part == 1:
                        code = _signed(content)
                        dtype = DTYPES.get(code, f"type {code}")
                    elif part == 2:
                        shape = tuple(_dimension(_view(dim)) for tag, dim in _fields(_view(content)) if tag == 1)
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def _graph(data: Buffer) -> Graph:
    graph = Graph()
    for number, value in _fields(data):
        if number == 1:
            graph.nodes.append(_node(_view(value)))
        elif number == 2:
            graph.name = _text(value)
        elif number == 5:
            tensor = _tensor(_view(value))
            graph.initializers[tensor.name] = tensor
        elif number == 11:
            graph.inputs.append(_value_info(_view(value)))
        elif number == 12:
            graph.outputs.append(_value_info(_view(value)))
    return graph


def read_model(path: Path) -> Model:
    """The model in ``path``.

    Raises:
        InputError: the file is missing, empty, no ONNX model, or has no graph.
    """
    try:
        with path.open("rb") as stream:
            if not stream.seek(0, 2):
                raise InputError(f"{path} is empty", remedy="write the ONNX model again")
            data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError as error:
        raise InputError(f"model {path} does not exist") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    model = Model()
    try:
        for number, value in _fields(data):
            if number == 1:
                model.ir_version = _signed(value)
            elif number == 7:
                model.graph = _graph(_view(value))
            elif number == 8:
                domain, version = "", 0
                for part, content in _fields(_view(value)):
                    if part == 1:
                        domain = _text(content)
                    elif part == 2:
                        version = _signed(content)
                model.opsets["" if domain == "ai.onnx" else domain] = version
    except (ValueError, IndexError, struct.error) as error:
        raise InputError(
            f"{path} is not a readable ONNX model: {error}", remedy="write the ONNX model again"
        ) from error
    if not model.graph.outputs:
        raise InputError(
            f"{path} is not a usable ONNX model: its graph has no outputs", remedy="write the ONNX model again"
        )
    return model
