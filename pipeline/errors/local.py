"""Local error: one layer in INT8, everything before it in FP32.

For each layer a small graph is cut out of the INT8 graph: the layer, the Q/DQ pairs on its inputs, and what only moves
values between them. It is fed with the tensors of the FP32 reading, so the error of the layers before cannot reach it.
The same graph also computes the layer with only its weights and with only its activations quantised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError, ToolError
from pipeline.core.ort import make_session
from pipeline.errors.graphs import MOVEMENT, QDQ, Graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.errors.capture import Arrays
    from pipeline.errors.layers import Layer

__all__ = ["VARIANTS", "LocalLayer", "QuantisedInput", "cut_layer"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

VARIANTS = ("local", "weights", "activations")
"""Everything the layer has in INT8; only its weights; only its activations."""


@dataclass(frozen=True)
class QuantisedInput:
    """An activation that a layer reads through a Q/DQ pair with one scale for the tensor."""

    tensor: str
    scale: float

    @property
    def amax(self) -> float:
        """The threshold: values beyond it are clipped."""
        return self.scale * 127.0


@dataclass(frozen=True)
class LocalLayer:
    """One layer cut out of the INT8 graph, ready to run on FP32 tensors."""

    layer: Layer
    feeds: tuple[str, ...]
    """FP32 tensors it reads."""
    inputs: tuple[QuantisedInput, ...]
    variants: tuple[str, ...]
    """``local`` alone where a layer has only weights or only activations in INT8."""
    quantised_weights: bool
    session: Any = field(repr=False)

    def run(self, arrays: Arrays) -> dict[str, Array]:
        """The layer's output for every variant.

        Raises:
            ToolError: onnxruntime fails on it.
        """
        try:
            values = self.session.run(list(self.variants), {name: arrays[name] for name in self.feeds})
        except Exception as error:
            shapes = {name: arrays[name].shape for name in self.feeds}
            raise ToolError(f"layer {self.layer.node!r} alone fails on inputs {shapes}: {error}") from error
        return dict(zip(self.variants, values, strict=True))


def cut_layer(layer: Layer, fp32: Graph, int8: Graph) -> LocalLayer:
    """Cut ``layer`` out of ``int8``.

    Args:
        fp32: says which tensors can be fed and holds the float weights.

    Raises:
        InputError: a graph lacks the node.
    """
    for graph, label in ((fp32, "FP32"), (int8, "INT8")):
        if layer.node not in graph.by_name:
            raise InputError(f"layer {layer.node!r} does not exist in the {label} graph")
    cut = _Cut(layer, fp32, int8)
    return LocalLayer(
        layer=layer,
        feeds=tuple(cut.feeds),
        inputs=tuple(cut.inputs.values()),
        variants=cut.variants,
        quantised_weights=cut.quantised_weights,
        session=make_session(cut.model(), optimise=False, spin=False),
    )


class _Cut:
    """The one-layer graph while it is made: copies of nodes, once per variant."""

    def __init__(self, layer: Layer, fp32: Graph, int8: Graph) -> None:
        self._layer_node = layer.node
        self.fp32 = fp32
        self.int8 = int8
        self.types = fp32.types
        self.int8_types = int8.types
        self.feeds: dict[str, None] = {}
        self.inputs: dict[str, QuantisedInput] = {}
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._made: dict[tuple[str, str], str] = {}
        self._casts: dict[str, str] = {}
        self._pairs_above = 0
        node = int8.by_name[layer.node]
        self.quantised_weights = has_weights = any(
            self._is_constant(name) and self._through_qdq(name) for name in node.input
        )
        builders: dict[str, Callable[[str, int, str], str]] = {
            "local": lambda name, _, variant: self._tensor(name, variant),
            "weights": lambda name, _, variant: self._tensor(name, variant, bypass=True),
            "activations": self._float_weight,
        }
        for variant in VARIANTS:
            if variant != "local" and not (has_weights and self.inputs):
                continue
            names = [builders[variant](name, position, variant) for position, name in enumerate(node.input)]
            copy = self._copy(node, names, variant)
            copy.output[0] = variant
        self.variants: tuple[str, ...] = tuple(v for v in VARIANTS if any(v in node.output for node in self._nodes))

    def model(self) -> Any:
        import onnx

        graph = onnx.GraphProto(name="layer")
        graph.node.extend(self._nodes)
        graph.initializer.extend(self._initializers.values())
        for name in self.feeds:
            kind = self.types.get(name, onnx.TensorProto.FLOAT)
            graph.input.append(onnx.ValueInfoProto(name=name))
            graph.input[-1].type.tensor_type.elem_type = kind
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.variants)
        proto = self.int8.proto
        return onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=graph)

    def _is_constant(self, name: str) -> bool:
        return name in self.int8.constants

    def _through_qdq(self, name: str) -> bool:
        """Q/DQ nodes are on the way to the tensor, with nothing between that computes."""
        node = self.int8.producers.get(name)
        if node is None:
            return False
        return node.op_type in QDQ or (node.op_type in MOVEMENT and self._through_qdq(node.input[0]))

    def _tensor(self, name: str, variant: str, *, bypass: bool = False) -> str:
        """The tensor's name in the one-layer graph; ``bypass`` leaves activations unquantised."""
        if not name:
            return ""
        if self.int8.is_initializer(name):
            self._initializers.setdefault(name, self.int8.initializer(name))
            return name
        key = (name, variant)
        if key in self._made:
            return self._made[key]
        node = self.int8.producers.get(name)
        if node is None:
            made = self._feed(name)
        elif node.op_type == "DequantizeLinear":
            made = self._pair(node, variant, bypass=bypass)
        elif name in self.fp32.producers and not self._through_qdq(name):
            made = self._feed(name)
        else:
            inputs = [self._tensor(source, variant, bypass=bypass) for source in node.input]
            copy = self._copy(node, inputs, variant)
            # A Split has several outputs, and a layer may read more than one of them.
            self._made.update({(output, variant): made for output, made in zip(node.output, copy.output, strict=True)})
            made = self._made[key]
        self._made[key] = made
        return made

    def _pair(self, node: Any, variant: str, *, bypass: bool) -> str:
        quantiser = self.int8.producers.get(node.input[0])
        constant = self._is_constant(node.input[0])
        if quantiser is not None and quantiser.op_type == "QuantizeLinear" and not constant:
            if bypass:
                return self._tensor(quantiser.input[0], variant, bypass=True)
            if not self._pairs_above:  # a pair in front of a pair quantises the same values: one threshold, not two
                self._note_input(quantiser)
        self._pairs_above += 1
        inputs = [self._tensor(source, variant, bypass=bypass) for source in node.input]
        self._pairs_above -= 1
        return str(self._copy(node, inputs, variant).output[0])

    def _note_input(self, quantiser: Any) -> None:
        scale = self.int8.constant(quantiser.input[1])
        if scale is None or scale.size != 1:
            raise InputError(
                f"the scale {quantiser.input[1]!r} of activation {quantiser.input[0]!r} must be one constant",
                remedy="quantise activations per tensor, as TensorRT needs it",
            )
        name = quantiser.input[0]
        while name not in self.fp32.producers and (cast := self.int8.producers.get(name)) is not None:
            name = cast.input[0]  # the float part is FP16 and the pair's input a conversion of the FP32 tensor
        self.inputs.setdefault(name, QuantisedInput(tensor=name, scale=float(scale.reshape(-1)[0])))

    def _float_weight(self, name: str, position: int, variant: str) -> str:
        """An input for the variant whose activations alone are quantised: constants come from the FP32 graph."""
        if not name or not self._is_constant(name) or not self._through_qdq(name):
            return self._tensor(name, variant)
        node = self.fp32.by_name[self._layer_node]
        original = node.input[position]
        if not self.fp32.is_initializer(original):
            return self._feed(original)
        known = f"{original}::float"
        if known not in self._initializers:
            tensor = self.fp32.initializer(original)
            copy = type(tensor)()
            copy.CopyFrom(tensor)
            copy.name = known
            self._initializers[known] = copy
        return self._cast(known, original, name)

    def _feed(self, name: str) -> str:
        self.feeds[name] = None
        return self._cast(name, name, name)

    def _cast(self, made: str, fp32_name: str, int8_name: str) -> str:
        """``made``, converted where the INT8 graph holds the tensor in another type (its float part in FP16)."""
        import onnx

        have, want = self.types.get(fp32_name), self.int8_types.get(int8_name)
        if have is None or want is None or have == want:
            return made
        if made not in self._casts:
            self._casts[made] = f"{made}::cast"
            self._nodes.append(onnx.helper.make_node("Cast", [made], [self._casts[made]], to=want))
        return self._casts[made]

    def _copy(self, node: Any, inputs: list[str], variant: str) -> Any:
        copy = type(node)()
        copy.CopyFrom(node)
        copy.name = f"{node.name}::{variant}"
        copy.input[:] = inputs
        copy.output[:] = [f"{name}::{variant}" if name else "" for name in node.output]
        self._nodes.append(copy)
        return copy
