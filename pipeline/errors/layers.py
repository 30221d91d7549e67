"""The quantised layers of a network: which tensors are compared, and what stands beside what.

Node and tensor names are the same in the FP32 and in the INT8 graph, so a layer is known by its output tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError
from pipeline.errors.graphs import QDQ, Graph, dequantised
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.placement.plan import PlacementPlan

__all__ = ["Layer", "layers_of_graph", "layers_of_plan"]


class Layer(Record):
    """One quantised node and the output by which it is compared."""

    tensor: str
    """Its first output; the key by which readings are aligned."""
    node: str
    op: str


def layers_of_plan(plan: PlacementPlan, fp32: Graph) -> tuple[Layer, ...]:
    """The nodes that ``plan`` quantises, in the topological order of the FP32 graph.

    Raises:
        InputError: the plan names a node that the graph does not have.
    """
    chosen = {decision.node: decision for decision in plan.decisions if decision.quantized}
    layers = _in_graph_order(fp32.nodes, chosen)
    if missing := chosen.keys() - {layer.node for layer in layers}:
        raise InputError(
            f"the placement plan quantises the node {sorted(missing)[0]!r}, which the FP32 graph lacks",
            remedy="the plan belongs to another model; build again",
        )
    return layers


def layers_of_graph(int8: Graph) -> tuple[Layer, ...]:
    """The nodes of a Q/DQ graph that compute on dequantised values, in its own order."""
    sources = dequantised(int8)
    chosen = {
        node.name for node in int8.nodes if node.op_type not in QDQ and any(name in sources for name in node.input)
    }
    return _in_graph_order(int8.nodes, chosen)


def _in_graph_order(nodes: Sequence[Any], chosen: Iterable[str]) -> tuple[Layer, ...]:
    wanted = set(chosen)
    return tuple(Layer(tensor=node.output[0], node=node.name, op=node.op_type) for node in nodes if node.name in wanted)
