"""Sessions that return captured tensors in the memory layout they are computed in.

On a CPU onnxruntime computes convolutions in blocks of 8 or 16 channels (NCHWc). A captured tensor is a graph output,
and so is brought back to NCHW first: for a network of small convolutions that costs a third of the whole pass. Whoever
reads the values alone, as a histogram does, can do without.

The graph is optimised by onnxruntime with the captured tensors as outputs, as for any other session, and written out.
There each conversion (``ReorderOutput``) of a captured tensor whose channels fill their blocks gives way to the tensor
in front of it. What is computed stays the same, bit for bit.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.core.ort import make_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CaptureSession", "open_capture"]

_DOMAIN: Final = "com.microsoft.nchwc"
_LARGEST_BLOCK: Final = 16
"""Channels; a multiple of it is not padded by a smaller block either."""
_BLOCKED_OPERATORS: Final = ("Conv", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
_MOST_WEIGHTS: Final = 1 << 28
"""A GiB in float32: a protobuf file of 2 GiB and more cannot be written."""


@dataclass(frozen=True)
class CaptureSession:
    """``outputs`` of ``session`` have shape and values of the captured tensors, in the order asked for.

    The order of an output's elements in memory is not defined.
    """

    session: Any
    outputs: tuple[str, ...]

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The captured tensors."""
        return list(self.session.run(self.outputs, feeds))


def open_capture(proto: Any, capture: Sequence[str], *, threads: int, external_data_dir: Path) -> CaptureSession:
    """A session of ``proto`` (an ``onnx.ModelProto``, left as it is) whose outputs are read for their values alone.

    Where the model has no convolution, or its optimised form cannot be written (a full disk, too large), the tensors
    come as from :func:`pipeline.core.ort.make_session`.

    Raises:
        InputError, ToolError: as :func:`pipeline.core.ort.make_session`.
    """
    found = _open_blocked(proto, capture, threads, external_data_dir) if _worth_it(proto) else None
    if found is not None:
        return found
    session = make_session(proto, capture=capture, threads=threads, external_data_dir=external_data_dir)
    return CaptureSession(session, tuple(capture))


def _worth_it(proto: Any) -> bool:
    import onnx

    if not any(node.op_type in _BLOCKED_OPERATORS for node in proto.graph.node):
        return False
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer):
        return False
    weights: int = sum(math.prod(tensor.dims) for tensor in proto.graph.initializer)
    return weights <= _MOST_WEIGHTS


def _open_blocked(proto: Any, capture: Sequence[str], threads: int, external_data_dir: Path) -> CaptureSession | None:
    """None where it cannot be done, for whatever reason: the ordinary session then works or says what is wrong."""
    import onnx

    try:
        with tempfile.TemporaryDirectory(prefix="quantize-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "optimised.onnx"
            # Of this session only the optimised graph is wanted.
            make_session(
                proto, capture=capture, threads=threads, external_data_dir=external_data_dir, save_optimised=path
            )
            optimised = onnx.load(path)
            outputs = _without_conversions(optimised.graph, capture)
        return CaptureSession(make_session(optimised, optimise=False, threads=threads), outputs)
    except Exception:
        return None


def _without_conversions(graph: Any, capture: Sequence[str]) -> tuple[str, ...]:
    """Make what is in front of a captured tensor's conversion the graph's output; the outputs, as in ``capture``."""
    import onnx

    wanted = set(capture)
    instead: dict[str, str] = {}
    for node in graph.node:
        if node.domain == _DOMAIN and node.op_type == "ReorderOutput" and node.output[0] in wanted:
            channels = next(attribute.i for attribute in node.attribute if attribute.name == "channels")
            if channels % _LARGEST_BLOCK == 0:
                instead[node.output[0]] = node.input[0]
    read = {name for node in graph.node for name in node.input}
    nodes = [node for node in graph.node if not (node.output[0] in instead and node.output[0] not in read)]
    outputs = [onnx.ValueInfoProto(name=instead[v.name]) if v.name in instead else v for v in graph.output]
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.output.extend(outputs)
    return tuple(instead.get(name, name) for name in capture)
