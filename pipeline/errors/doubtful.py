"""Which tensors are far from FP32, and where FP32 itself is so near zero that a relative error says nothing.

An error is relative to the sample's own norm. Where a network answers "nothing here" (a text detector on a photograph
without text: 1e-7 everywhere) that divides by almost nothing, so each sample is also held against the tensor's range:
the largest absolute FP32 value over all samples, or 1 for a sigmoid, whose range is known. One rule for outputs and
layers, in `quantize build` and `quantize errors`: relative L2, SQNR and cosine of such a sample are left out, said and
counted; its absolute error counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from pipeline.errors.graphs import Graph

__all__ = ["ALMOST_ZERO", "FAR", "FAR_OF_RANGE", "Judgement", "almost_zero", "judge", "known_range"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Mask: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

ALMOST_ZERO = 1e-3
"""Share of the tensor's range below which every value of a sample counts as zero."""
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
    worst: int
    """Position of the sample that has it."""
    almost_zero: Mask
    """Shape (samples,), see :func:`almost_zero`."""
    far: int
    """Samples with a relative L2 above ``FAR`` whose largest error exceeds ``FAR_OF_RANGE`` of the range."""


def known_range(graph: Graph, tensor: str) -> float:
    """Largest absolute value that the operator behind ``tensor`` can give: 1 for a sigmoid, 0 where it is not known."""
    node = graph.producers.get(tensor)
    while node is not None and node.op_type in _SAME_VALUES:
        node = graph.producers.get(node.input[0])
    return 1.0 if node is not None and node.op_type in _BOUNDED else 0.0


def almost_zero(peaks: Floats, at_least: Floats | float = 0.0) -> Mask:
    """Where FP32 is within ``ALMOST_ZERO`` of the tensor's range from zero everywhere in the sample.

    Args:
        peaks: largest absolute FP32 value, shape (..., samples).
        at_least: the range is so large, shape (...).
    """
    ranges = np.maximum(peaks.max(axis=-1, initial=0.0), at_least)
    mask: Mask = peaks < ALMOST_ZERO * ranges[..., None]
    return mask


def judge(peaks: Floats, max_abs: Floats, relative_l2: Floats, at_least: float = 0.0) -> Judgement:
    """Hold every sample (at least one; the three are of shape (samples,)) against the range, ``at_least`` so large."""
    value_range = max(float(peaks.max()), at_least)
    worst = int(max_abs.argmax())
    return Judgement(
        value_range=value_range,
        max_abs=float(max_abs[worst]),
        worst=worst,
        almost_zero=almost_zero(peaks, at_least),
        far=int(((relative_l2 > FAR) & (max_abs > FAR_OF_RANGE * value_range)).sum()),
    )
