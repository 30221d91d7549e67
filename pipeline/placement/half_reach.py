"""How far the tensors of a float graph reach, and whether FP16, which ends at 65504, holds them.

Two things say so. Measured figures do where a pass over data was made (:mod:`pipeline.magnitudes`). And constants do,
always: a mask is made from a constant such as -1e9 by subtracting, multiplying and selecting, and samples without a
masked position never show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.placement.ops import LAYOUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from pipeline.placement.graph import GraphView

__all__ = ["FP16_LARGEST", "MARGIN", "Reach", "fits", "nearly_fits", "reaches"]

FP16_LARGEST: Final = 65504.0
MARGIN: Final = 4.0
"""Times that a tensor must reach beyond what is known of it before FP16 overflows. Other data reach further than the
few samples that were measured (468 images or sentences at most 1.6 times as far as 32 did, in every tensor of
EfficientNet-Lite0 and MiniLM), INT8 in front changes what comes, and partial sums of a product may lie beyond it."""

_HALF_STEP: Final = 2.0**-11
"""Largest relative rounding error of FP16."""
_COPIES: Final = (
    *LAYOUT, "Slice", "Split", "Gather", "GatherElements", "GatherND", "Expand", "Tile", "Trilu", "Cast", "Neg", "Abs",
    "Relu", "MaxPool",
)  # fmt: skip
"""Their outputs have values of the first input, up to the sign."""
_JOINS: Final = {"Add": None, "Sub": None, "Sum": None, "Concat": None, "Where": (1, 2), "Pad": (0, 2),
                 "ScatterND": (0, 2), "ScatterElements": (0, 2)}  # fmt: skip
"""The largest of several inputs comes through: of all of them, or of those with these indices."""


@dataclass(frozen=True)
class Reach:
    """The largest finite magnitude that is known of a tensor."""

    magnitude: float
    by_constants: bool
    """It follows from the graph's constants; False: it was measured."""

    @property
    def beyond(self) -> bool:
        """FP16 may not hold the tensor, by :data:`MARGIN`."""
        return self.magnitude > FP16_LARGEST / MARGIN

    def reason(self, name: str) -> str:
        """Why the tensor ``name`` is not held in FP16."""
        how = " by the graph's constants" if self.by_constants else ""
        end = "FP16 ends at 65504" if self.magnitude > FP16_LARGEST else "too near to FP16's end at 65504"
        return f"{name!r} reaches {self.magnitude:.3g}{how}, {end}"


def reaches(graph: GraphView, measured: Mapping[str, float] | None = None) -> dict[ir.Value, Reach]:
    """What is known of every computed tensor of ``graph``; tensors of which nothing is known are left out.

    Args:
        measured: tensor to the largest magnitude it has on data.
    """
    measured = measured or {}
    known = _Constants(graph, measured).found
    found = {value: Reach(magnitude, by_constants=True) for value, magnitude in known.items()}
    values = [*graph.model.graph.inputs, *(value for node in graph.nodes for value in node.outputs)]
    for value in values:
        magnitude = measured.get(value.name or "")
        if magnitude is not None and magnitude >= known.get(value, 0.0):
            found[value] = Reach(magnitude, by_constants=False)
    return found


class _Constants:
    """Magnitudes that come from constants which are far beyond what activations have.

    Such a constant goes on through operators that copy, join, add and multiply; it ends at the others (a Softmax makes
    zeros of a mask). A factor of which nothing is known, or that is zero on all data, counts as 1: what a mask is.
    """

    def __init__(self, graph: GraphView, measured: Mapping[str, float]) -> None:
        self.graph = graph
        self.measured = measured
        self.found: dict[ir.Value, float] = {}
        self._magnitudes: dict[ir.Value, float] = {}
        for node in graph.nodes:
            outputs = [value for value in node.outputs if graph.is_float(value)]
            magnitude = self._of(node) if outputs else 0.0
            if magnitude > 0.0:
                self.found.update(dict.fromkeys(outputs, magnitude))

    def _of(self, node: ir.Node) -> float:
        op, inputs = self.graph.op(node), list(node.inputs)
        if op == "ConstantOfShape":
            value = node.attributes.get("value")
            return _far(_largest(value.as_tensor().numpy())) if value is not None else 0.0
        if not inputs:
            return 0.0
        if op in _COPIES:
            return self._far(inputs[0])
        if op in _JOINS:
            places = _JOINS[op] or range(len(inputs))
            return max((self._far(inputs[index]) for index in places if index < len(inputs)), default=0.0)
        if op in ("Min", "Max", "Clip"):  # their constants are limits
            computed = [value for value in inputs if not self.graph.is_constant(value)]
            far = max((self._far(value) for value in computed), default=0.0)
            limits = [self.graph.scalar(value) for value in inputs[1:]] if op == "Clip" else []
            if len(limits) == 2 and all(limit is not None for limit in limits):
                far = min(far, max(abs(limit) for limit in limits if limit is not None))
            return far
        if op == "Mul" and any(self._far(value) for value in inputs):
            return self._factor(inputs[0]) * self._factor(inputs[1])
        if op == "Div":
            divisor = self._magnitude(inputs[1])
            return self._far(inputs[0]) / (divisor or 1.0)
        return 0.0

    def _far(self, value: ir.Value | None) -> float:
        """The magnitude of a far constant, or that comes from one; else 0."""
        if value is None:
            return 0.0
        return self.found.get(value, 0.0) or _far(self._magnitude(value))

    def _factor(self, value: ir.Value | None) -> float:
        if value is None:
            return 1.0
        return self._far(value) or self._magnitude(value) or self.measured.get(value.name or "", 0.0) or 1.0

    def _magnitude(self, value: ir.Value | None) -> float:
        """Of a constant; 0 of anything computed."""
        if value is None:
            return 0.0
        if value not in self._magnitudes:
            array = self.graph.array(value)
            self._magnitudes[value] = 0.0 if array is None else _largest(array)
        return self._magnitudes[value]


def _far(magnitude: float) -> float:
    return magnitude if magnitude > FP16_LARGEST / MARGIN else 0.0


def _largest(array: np.ndarray[Any, Any]) -> float:
    """The largest finite magnitude of floats; 0 of anything else, and where there is none."""
    if array.dtype.kind != "f":
        return 0.0
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def fits(array: np.ndarray[Any, Any]) -> bool:
    """True when FP16 holds every value: none becomes infinite, and none that is not zero becomes zero."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = array.astype(np.float16)
    return bool(np.isfinite(narrow).all() and ((narrow == 0) == (array == 0)).all())


def nearly_fits(array: np.ndarray[Any, Any]) -> bool:
    """True when FP16 changes ``array`` as a whole by no more than it rounds a single value, relative L2."""
    with np.errstate(over="ignore", under="ignore"):
        change = array.astype(np.float16).astype(np.float64) - array
    return bool(np.linalg.norm(change) <= _HALF_STEP * np.linalg.norm(array.astype(np.float64)))
