"""Whether a tensor in FP16 becomes infinite where the float network is finite.

onnxruntime's CPU provider computes FP16 nodes in float32, so that what overflows on a card stays finite here and the
outputs look sound. Each float16 tensor's largest magnitude is therefore computed inside of the graph
(:mod:`pipeline.magnitudes`) in the run that the verification makes anyway. Only a tensor that reaches what FP16 rounds
to infinity is read as a whole, and held against the float network's: a mask of -inf may be infinite in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from pipeline.core.errors import CheckFailed
from pipeline.errors.capture import read_fp32, read_int8
from pipeline.magnitudes import add_magnitudes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import OrtReading
    from pipeline.errors.graphs import Graph

__all__ = ["HalfWatch", "half_tensors"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_FLOAT16: Final = 10
"""``onnx.TensorProto.FLOAT16``."""
_INFINITE: Final = 65520.0
"""The least magnitude that rounds to infinity: half a step beyond 65504."""


def half_tensors(graph: Graph) -> tuple[str, ...]:
    """Float16 tensors that ``graph`` computes, in its order, by the types that its file states (the quantise stage
    states them all)."""
    stated = (*graph.proto.graph.value_info, *graph.proto.graph.output)
    halves = {info.name for info in stated if info.type.tensor_type.elem_type == _FLOAT16}
    if not halves:
        return ()
    return tuple(
        name for node in graph.nodes for name in node.output if name in halves and name not in graph.constants
    )


class HalfWatch:
    """Judges every batch of a verification.

    Args:
        fp32: the float network, without Q/DQ nodes.
        int8: the network with FP16 in it.
    """

    def __init__(self, fp32: Graph, int8: Graph) -> None:
        self._fp32, self._int8 = fp32, int8
        self._tensors = half_tensors(int8)
        self._magnitudes: dict[str, str] = {}

    def readings(self, tensors: Sequence[str], fp32_only: Sequence[str] = ()) -> tuple[OrtReading, OrtReading]:
        """``tensors`` of the FP32 graph, with ``fp32_only``, and of the INT8 graph, with what :meth:`check` needs."""
        proto = None
        if self._tensors:
            proto = type(self._int8.proto)()
            proto.CopyFrom(self._int8.proto)
            self._magnitudes = add_magnitudes(proto, self._tensors, finite=False)
        int8 = read_int8(self._int8, [*tensors, *self._magnitudes.values()], proto=proto)
        return read_fp32(self._fp32, [*tensors, *fp32_only]), int8

    def check(self, batch: Batch, values: Mapping[str, Array]) -> None:
        """Look at ``values``, which the reading gave for ``batch``.

        Raises:
            CheckFailed: an FP16 tensor overflows; the first one of the graph and its sample are named.
        """
        # a NaN beside it hides how large the largest is
        doubtful = [name for name, output in self._magnitudes.items() if not float(values[output]) < _INFINITE]
        if not doubtful:
            return
        origins = {name: _origin(name, self._int8, self._fp32) for name in doubtful}
        known = sorted({origin for origin in origins.values() if origin is not None})
        halves = read_int8(self._int8, doubtful)(batch)
        floats = read_fp32(self._fp32, known)(batch)
        for name in doubtful:
            origin = origins[name]
            self._compare(name, halves[name], None if origin is None else floats[origin], batch.samples)

    def _compare(self, name: str, half: Array, reference: Array | None, samples: Sequence[int]) -> None:
        overflows = np.abs(half.astype(np.float32)) >= _INFINITE
        if reference is not None and reference.shape == half.shape:
            overflows &= np.isfinite(reference)
        if not overflows.any():
            return
        place = np.unravel_index(int(np.argmax(overflows)), overflows.shape)
        row = int(place[0]) if half.ndim and half.shape[0] == len(samples) else 0
        value = float(half[place]) if reference is None else float(reference[place])
        raise CheckFailed(
            f"tensor {name!r} overflows in FP16, which ends at 65504, for sample {samples[row]}: {value:.4g} there in "
            "float32. onnxruntime computes FP16 in float32 and does not show it, TensorRT makes infinities and NaN",
            remedy=_OUTPUT if name in self._int8.outputs else _REMEDY,
        )


_REMEDY: Final = (
    "calibrate on data that reach as far as this sample (what reaches far there stays float32), or leave "
    "--precision fp16 out; --exclude only keeps nodes from INT8"
)
_OUTPUT: Final = "keep this output float32: leave --fp16-io outputs (both) out"


def _origin(name: str, int8: Graph, fp32: Graph) -> str | None:
    """The tensor of ``fp32`` that the tensor ``name`` of ``int8`` has the values of; None: there is none.

    Nodes keep their names when FP16 is written into a graph. A Cast that is not in ``fp32`` was added then.
    """
    producer = int8.producers.get(name)
    while producer is not None and producer.name not in fp32.by_name and producer.op_type == "Cast":
        name = producer.input[0]
        producer = int8.producers.get(name)
    if producer is None:
        return name if name in fp32.inputs else None
    twin = fp32.by_name.get(producer.name)
    index = list(producer.output).index(name)
    return str(twin.output[index]) if twin is not None and index < len(twin.output) else None
