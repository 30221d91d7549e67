"""What each node costs: multiply-accumulates, or measured time where there is a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.errors.capture import OrtReading
from pipeline.mixed.borders import Borders

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pipeline.data.batching import Batch
    from pipeline.errors.graphs import Graph
    from pipeline.mixed.borders import Passes

__all__ = ["Costs", "count_macs", "node_costs"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_MACS_PER_VALUE = 64
"""What a value that is moved counts where a node has no multiply-accumulates: about as many as a GPU's INT8 units do in
the time that its memory needs for it."""


@dataclass(frozen=True)
class Costs:
    """Cost of one sample, by node."""

    macs: Mapping[str, int]
    """Multiply-accumulates of every node that has some."""
    saved: Mapping[str, float]
    """What INT8 saves at a node, in :attr:`unit`."""
    unit: str
    """``MACs`` or ``ms``."""
    borders: Borders | None = None
    """Of measured times: what comes on top where INT8 and float meet."""

    def int8_share(self, quantized: Collection[str]) -> float:
        """Share of the network's multiply-accumulates that run in INT8."""
        total = sum(self.macs.values())
        return sum(count for node, count in self.macs.items() if node in quantized) / total if total else 0.0

    def lost(self, restored: Collection[str]) -> float:
        """What putting these nodes back in float costs, in :attr:`unit`."""
        own = sum(self.saved.get(node, 0.0) for node in restored)
        return own if self.borders is None else own + self.borders.ms(restored)

    def added(self, restored: Collection[str], more: Collection[str]) -> float:
        """What ``more`` costs where ``restored`` is in float already; the cheapest node's cost at least.

        A node that costs nothing to restore would come first whatever it gains, and one between two nodes in float can
        cost less than nothing.
        """
        return max(self.lost({*restored, *more}) - self.lost(restored), self._least)

    @cached_property
    def _least(self) -> float:
        return min((cost for cost in self.saved.values() if cost > 0), default=1.0)


def node_costs(
    graph: Graph,
    batch: Batch,
    times: Mapping[str, tuple[float, float]] | None = None,
    *,
    passes: Passes | None = None,
    quantized: Collection[str] = (),
) -> Costs:
    """Costs at the shapes of ``batch``'s first sample.

    Args:
        graph: the FP32 network.
        passes: of the engines that ``times`` are of; None: borders between INT8 and float cost nothing.
        quantized: nodes in INT8 where nothing is given back.
        times: node to its time in INT8 and in float, in ms; nodes left out save nothing. None: multiply-accumulates,
            and for nodes without any 64 for every value they read (an Add in float reads four times the bytes).
    """
    shapes = _shapes(graph, batch)
    macs: dict[str, int] = {}
    for node in graph.nodes:
        if node.op_type in _WEIGHTED:
            count = count_macs(node, [shapes.get(name) for name in node.input], shapes.get(node.output[0]))
            if count:
                macs[node.name] = count
    if times is not None:
        borders = None if passes is None else Borders(graph, shapes, quantized, passes)
        return Costs(macs, {node: max(0.0, float32 - int8) for node, (int8, float32) in times.items()}, "ms", borders)
    moved = {
        node.name: float(_MACS_PER_VALUE * sum(_size(shapes.get(name)) for name in node.input)) for node in graph.nodes
    }
    return Costs(macs, {**moved, **{node: float(count) for node, count in macs.items()}}, "MACs")


def count_macs(node: Any, inputs: list[tuple[int, ...] | None], output: tuple[int, ...] | None) -> int:
    """Multiply-accumulates of one weighted node; 0 where a shape is not known."""
    if output is None or len(inputs) < 2 or inputs[0] is None or inputs[1] is None:
        return 0
    first, second = inputs[0], inputs[1]
    if node.op_type == "Conv":
        return int(np.prod(output)) * int(np.prod(second[1:]))
    if node.op_type == "ConvTranspose":
        return int(np.prod(first)) * int(np.prod(second[1:]))
    transposed = node.op_type == "Gemm" and any(a.name == "transA" and a.i for a in node.attribute)
    return int(np.prod(output)) * int(first[0] if transposed else first[-1])


def _size(shape: tuple[int, ...] | None) -> int:
    return int(np.prod(shape)) if shape is not None else 0


def _shapes(graph: Graph, batch: Batch) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor around the weighted and the movable nodes, seen by running one sample."""
    found: dict[str, tuple[int, ...]] = {}
    wanted: dict[str, None] = {}
    for node in graph.nodes:
        for name in (*node.input, *node.output):
            shape = graph.shape(name)
            if shape is not None:
                found[name] = shape
            elif name and name not in graph.constants:
                wanted[name] = None
    reading = OrtReading(
        graph.proto, list(wanted), label="the FP32 graph", optimise=True, external_data_dir=graph.folder
    )
    count = len(batch.samples) if reading.static_batch else 1
    values = reading.run({name: array[:count] for name, array in batch.feeds.items()})
    found.update({name: tuple(array.shape) for name, array in values.items()})
    return found
