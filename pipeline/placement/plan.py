"""The placement plan: which tensors get a Q/DQ pair, by which rule, and why every other node stays float.

A plan is plain data (frozen pydantic records), so it can be stored, hashed and shown. Making one reads the graph's
structure only, no tensor values beyond the constants in it.
"""

from __future__ import annotations

from pipeline.records import Record

__all__ = ["ActivationPoint", "NodeDecision", "PlacementPlan", "WeightPoint"]


class ActivationPoint(Record):
    """One Q/DQ pair on an activation: per tensor, symmetric, INT8.

    However many nodes read the tensor's INT8 form, there is one pair; readers not listed keep the float tensor.
    """

    tensor: str
    consumers: tuple[tuple[str, int], ...]
    """Who reads the DQ's output: node name and input index, in graph order."""
    rule: str
    group: str | None = None
    """Points with the same group share one scale: TensorRT fuses across them only when the scales are equal. Their
    statistics are merged exactly before the calibrator runs."""
    known_amax: float | None = None
    """The largest magnitude the tensor can have, where the graph itself says so (``Clip`` to 0..6: 6.0). A calibrated
    amax above it is lowered to it."""
    source: str | None = None
    """Another point's tensor which this one's values come out of unchanged (pooling, slicing, reshaping): its range
    holds here too, so that this tensor is not calibrated itself. It is in the same group."""


class WeightPoint(Record):
    """A constant operand that becomes INT8, symmetric in [-127, 127]."""

    tensor: str
    node: str
    input_index: int
    axis: int | None
    """Axis with one scale per slice (the output channels); None: one scale for the whole tensor."""
    rule: str


class NodeDecision(Record):
    """What was decided for one node of the graph."""

    node: str
    op: str
    outputs: tuple[str, ...]
    quantized: bool
    """True where the node computes on INT8 inputs."""
    rule: str
    reason: str


class PlacementPlan(Record):
    """Every decision for one graph, in graph order."""

    activations: tuple[ActivationPoint, ...] = ()
    weights: tuple[WeightPoint, ...] = ()
    decisions: tuple[NodeDecision, ...] = ()
    prequantized: bool = False
    """The graph came with Q/DQ nodes (quantisation-aware training, another tool): nothing is added to it, and there is
    nothing to calibrate."""
    notes: tuple[str, ...] = ()
    """What the user should know about the plan as a whole, such as a repair of the Q/DQ nodes that were there."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors to calibrate, in graph order."""
        return tuple(point.tensor for point in self.activations if point.source is None)

    @property
    def quantized_nodes(self) -> tuple[str, ...]:
        return tuple(decision.node for decision in self.decisions if decision.quantized)
