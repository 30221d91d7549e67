"""Which outputs are far from FP32, and where FP32 itself is so near zero that a relative error says nothing.

An error is relative to the sample's own norm. Where a network answers "nothing here" (a text detector on a photograph
without text: 1e-7 everywhere) that divides by almost nothing, so each sample is also held against the output's range:
the largest absolute FP32 value over all samples, or 1 for a sigmoid, whose range is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pipeline.errors.graphs import Graph
    from pipeline.errors.outputs import OutputErrors

__all__ = ["ALMOST_ZERO", "FAR", "FAR_OF_RANGE", "Judgement", "judge", "known_range"]

ALMOST_ZERO = 1e-3
"""Share of the output's range below which every value of a sample counts as zero."""
FAR = 0.5
"""Relative L2 from which an output is far from FP32."""
FAR_OF_RANGE = 0.05
"""Share of the output's range that the largest error of a far sample exceeds; less would be noise around zero."""
_BOUNDED = frozenset({"HardSigmoid", "Sigmoid"})
_SAME_VALUES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True)
class Judgement:
    """One output over all samples."""

    value_range: float
    max_abs: float
    """Largest absolute error."""
    max_abs_sample: int
    """Number of the sample that has it."""
    almost_zero: np.ndarray[Any, np.dtype[np.bool_]]
    """Shape (samples,): FP32 is within ``ALMOST_ZERO`` of the range from zero everywhere."""
    far: int
    """Samples with a relative L2 above ``FAR`` whose largest error exceeds ``FAR_OF_RANGE`` of the range."""


def known_range(graph: Graph, output: str) -> float:
    """Largest absolute value that the operator behind ``output`` can give: 1 for a sigmoid, 0 where it is not known."""
    node = graph.producers.get(output)
    while node is not None and node.op_type in _SAME_VALUES:
        node = graph.producers.get(node.input[0])
    return 1.0 if node is not None and node.op_type in _BOUNDED else 0.0


def judge(errors: OutputErrors, at_least: float = 0.0) -> Judgement:
    """Hold every sample of ``errors`` (at least one) against the output's range, which is ``at_least`` so large."""
    peaks, absolute = errors.peaks, errors.max_abs
    value_range = max(float(peaks.max()), at_least)
    worst = int(absolute.argmax())
    return Judgement(
        value_range=value_range,
        max_abs=float(absolute[worst]),
        max_abs_sample=errors.samples[worst],
        almost_zero=peaks < ALMOST_ZERO * value_range,
        far=int(((errors.relative_l2 > FAR) & (absolute > FAR_OF_RANGE * value_range)).sum()),
    )
