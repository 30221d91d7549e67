"""Borders between INT8 and float: what they cost beside the layers themselves.

A layer that goes back to float takes its neighbours along: the INT8 kernel in front of it has to write float, another
pass brings that into the form that float kernels read, and its result is quantised by one more pass for an INT8 reader.
None of that is in the layer times of an engine that is all INT8 or all float. It is counted in bytes, at the rate of
the pass that quantises the input in the measured INT8 engine.

On an H200 with TensorRT 8.6.0 four nodes of EfficientNet-Lite0 lost 0.05 ms by the layer times and 0.21 ms in the
engine; with its borders it is 0.21 ms (``scripts/experiments/results-errors.md``). One engine was measured so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.operators import ACTIVATIONS
from pipeline.errors.graphs import MOVEMENT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pipeline.errors.graphs import Graph

__all__ = ["Borders", "Passes"]

_INTO_FLOAT = (4 - 1) + (4 + 2)
"""Bytes a value: the INT8 kernel writes FP32 in place of INT8, a pass reads that and writes FP16."""
_INTO_INT8 = 2 + 1
"""A pass reads FP16 and writes INT8."""
_CARRIED = ACTIVATIONS | MOVEMENT | {"Mul"}
"""What runs in the kernel of the layer in front, in INT8 and in float, or only moves values."""


@dataclass(frozen=True)
class Passes:
    """What a pass over a tensor takes on the card where the layer times were measured."""

    ms_per_byte: float
    least_ms: float
    """Of the shortest one seen: a launch takes its time."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the inputs, in that measurement."""

    def ms(self, bytes_: float) -> float:
        return max(self.least_ms, self.ms_per_byte * bytes_)


class Borders:
    """The borders that arise when quantised nodes go back to float.

    Args:
        graph: the FP32 network.
        shapes: of its tensors, for any number of samples; a tensor that is missing has no border.
        quantized: nodes in INT8 where nothing is given back.
    """

    def __init__(
        self, graph: Graph, shapes: Mapping[str, tuple[int, ...]], quantized: Collection[str], passes: Passes
    ) -> None:
        self._graph, self._shapes, self._passes = graph, shapes, passes
        self._quantized = frozenset(quantized)
        ratios = [
            np.prod(shape, dtype=float) / np.prod(shapes[name], dtype=float)
            for name, shape in passes.shapes.items()
            if name in shapes and 0 not in shapes[name]
        ]
        self._scale = float(max(ratios, default=1.0))

    def tensors(self, restored: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Tensors that go from INT8 into float, and those that go from float into INT8, with ``restored`` in float."""
        into_float, into_int8 = set(), set()
        for name in restored:
            node = self._graph.by_name.get(name)
            if node is None:
                continue
            into_float |= {tensor for tensor in node.input if self._is_int8(self._maker(tensor), restored)}
            for output in node.output:
                into_int8 |= {tensor for tensor, reader in self._readers(output) if self._is_int8(reader, restored)}
        return frozenset(into_float), frozenset(into_int8)

    def ms(self, restored: Collection[str]) -> float:
        """What the borders take, in ms, at the measured shapes."""
        wide, narrow = self.tensors(restored)
        return sum(self._ms(name, _INTO_FLOAT) for name in wide) + sum(self._ms(name, _INTO_INT8) for name in narrow)

    def _ms(self, name: str, bytes_per_value: int) -> float:
        shape = self._shapes.get(name)
        if shape is None:
            return 0.0
        return self._passes.ms(bytes_per_value * self._scale * float(np.prod(shape, dtype=float)))

    def _is_int8(self, node: Any, restored: Collection[str]) -> bool:
        return node is not None and node.name in self._quantized and node.name not in restored

    def _maker(self, tensor: str) -> Any:
        """The node whose kernel writes ``tensor``, activations and movements left out; None: an input, a constant."""
        node = self._graph.producers.get(tensor)
        while node is not None and node.name not in self._quantized and node.op_type in _CARRIED:
            node = next((self._graph.producers[name] for name in node.input if name in self._graph.producers), None)
        return node

    def _readers(self, tensor: str) -> Iterator[tuple[str, Any]]:
        """Each node that reads ``tensor``, perhaps behind activations and movements, with what it reads."""
        for node in self._graph.consumers.get(tensor, ()):
            if node.name in self._quantized or node.op_type not in _CARRIED:
                yield tensor, node
            else:
                for output in node.output:
                    yield from self._readers(output)
