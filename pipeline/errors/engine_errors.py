"""An engine's tensors against FP32 and against the Q/DQ graph, layer by layer, and what cannot be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.errors.hidden import why_hidden
from pipeline.errors.metrics import METRICS, rows_per_sample
from pipeline.errors.recording import positions
from pipeline.errors.streaming import compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import Arrays, EngineSource
    from pipeline.errors.graphs import Graph

__all__ = ["FUSED", "INT8_MARKED", "SHOWN", "EngineErrors", "other_layout"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

SHOWN = "shown"
FUSED = "fused"
INT8_MARKED = "marked INT8 tensors"
"""Beginning of the way (:class:`pipeline.engine.ways.Way`) for which the graph says why a layer is not shown."""
_ALIKE = 0.5
"""Cosine to the Q/DQ graph below which a debug tensor is looked at for another memory layout."""


class EngineErrors:
    """Fills the ``engine_`` columns from one reading of an engine.

    A layer is compared by its own tensor where the engine shows that; else, where it was fused with the activation
    behind it (one node, or several element-wise ones), by what comes out of that. A tensor that came as INT8 is
    compared with the Q/DQ graph's after the same quantisation, and with FP32 as it is: that error has the rounding of
    its own quantiser in it, which the state says.
    """

    def __init__(self, engine: EngineSource, layers: Sequence[str], int8: Graph) -> None:
        self._engine = engine
        self._int8 = int8
        self._layers = tuple(layers)
        self._states: dict[str, str] = {}
        self.samples = 0
        """With any tensor from the engine."""

    @property
    def label(self) -> str:
        return self._engine.label

    @property
    def recorded(self) -> str:
        return self._engine.account.recorded

    @property
    def tensors(self) -> tuple[str, ...]:
        """What the graphs must show beside the layers' own tensors."""
        return tuple(dict.fromkeys(self._engine.account.ends.values()))

    def state(self, layer: str) -> str:
        """How the engine shows the layer, or why not."""
        if layer in self._states:
            return self._states[layer]
        for name in (layer, self._engine.account.ends.get(layer)):
            if name is not None and (reason := self._engine.account.unshown.get(name)):
                return f"not compared: {reason}"
        marked = self._engine.account.recorded.startswith(INT8_MARKED)
        return f"{FUSED}: {why_hidden(self._int8, layer) if marked else 'the engine cannot show it'}"

    def add(self, block: Mapping[str, Floats], part: Batch, reference: Arrays, other: Arrays) -> None:
        """Fill the rows of ``block``, shape (layers, samples) by column.

        Raises:
            CheckFailed: a NaN or infinity in the engine, or a marked output of another shape than in FP32.
        """
        arrays = self._engine(part)
        if arrays:
            self.samples += len(part.samples)
        for row, layer in enumerate(self._layers):
            for name in (layer, self._engine.account.ends.get(layer)):
                if name is not None and name in arrays:
                    self._states[layer] = self._compare(block, row, layer, name, part, arrays, reference, other)
                    break

    def _compare(
        self,
        block: Mapping[str, Floats],
        row: int,
        layer: str,
        name: str,
        part: Batch,
        arrays: Arrays,
        reference: Arrays,
        other: Arrays,
    ) -> str:
        account, label = self._engine.account, self._engine.label
        scale = account.scales.get(name)
        array, float_array, int8_array = arrays[name], reference[name], other[name]
        if scale is not None:
            int8_array = (np.clip(np.rint(int8_array / np.float32(scale)), -128, 127) * scale).astype(np.float32)
        thinned = ""
        rows = rows_per_sample(float_array, len(part.samples)) if account.kept else None
        if rows is not None and rows.shape[1] > account.kept and int8_array.size == rows.size:
            chosen = positions(rows.shape[1], account.kept)
            thinned = f", from {account.kept} of {rows.shape[1]} values a sample"
            float_array, int8_array = rows[:, chosen], int8_array.reshape(rows.shape)[:, chosen]
        if _without_ones(array.shape) == _without_ones(float_array.shape):  # kernels see a vector as an image of 1 x 1
            array = array.reshape(float_array.shape)
        if account.recorded == "debug tensors":
            if array.shape != float_array.shape:
                return f"not compared: the engine has it with shape {array.shape}, the graph with {float_array.shape}"
            if other_layout(array, int8_array, len(part.samples)):
                return "not compared: the engine's memory layout is not row-major"
        for_fp32 = compared(name, float_array, array, part.samples, label=label)
        for_int8 = compared(name, int8_array, array, part.samples, label=label)
        for metric in METRICS:
            block[f"engine_{metric}"][row] = for_fp32.metric(metric)
        block["engine_int8_relative_l2"][row] = for_int8.relative_l2
        where = "" if name == layer else f" as {name}, after the activation"
        return SHOWN + where + ("" if scale is None else ", in INT8") + thinned


def other_layout(array: Array, expected: Array, samples: int) -> bool:
    """Whether ``array`` looks like the values of ``expected`` in another order: TensorRT tells no layout.

    Place by place they have little to do with each other, sorted they agree much better. A broken kernel can look like
    this too, so such a tensor is reported as not compared, never as good.
    """
    rows, wanted = rows_per_sample(array, samples), rows_per_sample(expected, samples)
    if rows is None or wanted is None:
        return False
    a, b = rows.astype(np.float64), wanted.astype(np.float64)
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    if norms == 0 or not np.isfinite(norms) or float((a * b).sum()) / norms >= _ALIKE:
        return False
    distance = np.linalg.norm(a - b)
    return bool(np.linalg.norm(np.sort(a, axis=1) - np.sort(b, axis=1)) < 0.5 * distance)


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)
