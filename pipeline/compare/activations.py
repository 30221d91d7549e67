"""Which tensors are the outputs of activation layers, and the graph with noise added to them.

An activation layer is one operator (``Relu``, ``Clip``, ``HardSwish`` ...), or a value multiplied with a function of
itself: x * Sigmoid(x) is SiLU, x * Clip(x + 3, 0, 6) / 6 HardSwish, x * Tanh(Softplus(x)) Mish,
x * (1 + Erf(x / c)) / 2 GELU. What lies inside such a product is part of the layer and gets no noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeline.core.errors import InputError
from pipeline.core.operators import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

__all__ = ["NOISE_PREFIX", "activation_outputs", "add_noise_inputs"]

NOISE_PREFIX: Final = "noise:"
"""Before the tensor's name: the name of the graph input that carries its noise."""

_UNARY: Final = ACTIVATIONS | {"Erf"}
_WITH_CONSTANT: Final = frozenset({"Add", "Div", "Mul", "Sub"})
_LONGEST_GATE: Final = 6
"""Operators between a value and the factor computed from it (GELU's has three, Mish's two)."""


def activation_outputs(model: ir.Model) -> tuple[str, ...]:
    """Names of the tensors that activation layers of the main graph give to other nodes, in graph order."""
    import onnx_ir as ir

    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)
    inside: set[ir.Value] = set()
    found: list[ir.Value] = []
    for node in model.graph:
        if node.op_type == "Mul" and (gate := _own_gate(node)) is not None:
            inside.update(gate)
            found.append(_scaled(node.outputs[0]))
        elif node.op_type in ACTIVATIONS:
            found.append(node.outputs[0])
    return tuple(
        str(value.name)
        for value in dict.fromkeys(found)
        if value not in inside and value.uses() and (value.dtype is None or value.dtype in floats)
    )


def _constant(value: ir.Value | None) -> bool:
    if value is None:
        return False
    producer = value.producer()
    return value.const_value is not None or (producer is not None and producer.op_type == "Constant")


def _variable_input(node: ir.Node) -> ir.Value | None:
    """The one input that is no constant, of an operator that has one; None for others."""
    if node.op_type in _UNARY:
        return node.inputs[0]
    if node.op_type in _WITH_CONSTANT and len(node.inputs) == 2:
        variable = [value for value in node.inputs if not _constant(value)]
        return variable[0] if len(variable) == 1 else None
    return None


def _back(value: ir.Value) -> list[ir.Value]:
    """``value`` and the values it is computed from, one constant or unary operator after the other."""
    path = [value]
    for _ in range(_LONGEST_GATE):
        producer = path[-1].producer()
        source = None if producer is None else _variable_input(producer)
        if source is None:
            break
        path.append(source)
    return path


def _own_gate(node: ir.Node) -> list[ir.Value] | None:
    """For x * f(x): the values inside the layer. None when the factors do not have one origin."""
    first, second = node.inputs[0], node.inputs[1]
    if first is None or second is None or first is second or _constant(first) or _constant(second):
        return None
    for plain, gate in ((first, second), (second, first)):
        plain_path, gate_path = _back(plain), _back(gate)
        for origin in plain_path:
            if origin not in gate_path[1:]:
                continue
            scaling = plain_path[: plain_path.index(origin)]
            function = gate_path[: gate_path.index(origin)]
            operators = {producer.op_type for value in function if (producer := value.producer()) is not None}
            if operators & _UNARY and not any(
                (producer := value.producer()) is not None and producer.op_type in _UNARY for value in scaling
            ):
                return [*scaling, *function]
    return None


def _scaled(value: ir.Value) -> ir.Value:
    """``value``, or what a constant factor behind it makes of it (GELU's half, HardSwish's sixth)."""
    consumers = list(value.consumers())
    if len(consumers) != 1 or value.is_graph_output() or consumers[0].op_type not in ("Mul", "Div"):
        return value
    return consumers[0].outputs[0] if _variable_input(consumers[0]) is value else value


def add_noise_inputs(model: ir.Model, tensors: Sequence[str]) -> None:
    """Let every reader of each tensor read it plus a new float32 graph input ``noise:TENSOR``, in place.

    A tensor that is a graph output as well leaves the graph without noise.

    Raises:
        InputError: the graph lacks one of the tensors.
    """
    import onnx_ir as ir

    values = {str(value.name): value for node in model.graph for value in node.outputs}
    for name in tensors:
        value = values.get(name)
        if value is None:
            raise InputError(
                f"the graph has no tensor {name!r}, an activation layer's output in the FP32 graph",
                remedy="both graphs need the same activation layers: quantise the prepared model itself",
            )
        uses = list(value.uses())
        noise = ir.Value(name=NOISE_PREFIX + name, shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT))
        model.graph.inputs.append(noise)
        summand: ir.Value = noise
        added: list[ir.Node] = []
        if value.dtype not in (None, ir.DataType.FLOAT):
            cast = ir.node("Cast", [noise], attributes={"to": value.dtype}, name=f"{NOISE_PREFIX}{name}:cast")
            added.append(cast)
            summand = cast.outputs[0]
        add = ir.node("Add", [value, summand], name=f"{NOISE_PREFIX}{name}:add")
        added.append(add)
        noisy = add.outputs[0]
        noisy.name, noisy.shape, noisy.type = f"{name}:noisy", value.shape, value.type
        producer = value.producer()
        if producer is None:
            raise InputError(f"tensor {name!r} is a graph input, no activation layer's output")
        model.graph.insert_after(producer, added)
        for use in uses:
            use.node.replace_input_with(use.idx, noisy)
