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
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.core.ort import make_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["CaptureSession", "open_capture"]

_DOMAIN: Final = "com.microsoft.nchwc"
_LARGEST_BLOCK: Final = 16
"""Channels; a multiple of it is not padded by a smaller block either."""
_LEAST_SHARE: Final = 0.1
"""Of the weights that are convolutions': a transformer behind one convolution has nothing to gain."""
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

    Where convolutions are not the most of the model, or its optimised form cannot be written (too large), the tensors
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
    """Convolutions have a good part of the weights: what it costs is a copy of all of them."""
    import onnx

    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer):
        return False
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in proto.graph.initializer}
    total = sum(sizes.values())
    convolved = [sizes.get(node.input[1], 0) for node in proto.graph.node if node.op_type == "Conv"]
    return bool(convolved) and total <= _MOST_WEIGHTS and sum(convolved) >= _LEAST_SHARE * total


def _open_blocked(proto: Any, capture: Sequence[str], threads: int, external_data_dir: Path) -> CaptureSession | None:
    """None where it cannot be done, for whatever reason: the ordinary session then works or says what is wrong."""
    import onnx

    try:
        with _scratch() as path:
            # Of this session only the optimised graph is wanted.
            make_session(
                proto, capture=capture, threads=threads, external_data_dir=external_data_dir, save_optimised=path
            )
            optimised = onnx.load_model_from_string(path.read_bytes())
        outputs = _without_conversions(optimised.graph, capture)
        return CaptureSession(make_session(optimised, optimise=False, threads=threads), outputs)
    except Exception:
        return None


@contextmanager
def _scratch() -> Iterator[Path]:
    """A file in memory, so that a process that is killed leaves nothing behind; on disk where there are none."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        number = os.memfd_create("optimised.onnx")
        try:
            yield Path(f"/proc/self/fd/{number}")
        finally:
            os.close(number)
    else:
        with tempfile.TemporaryDirectory(prefix="quantize-", ignore_cleanup_errors=True) as folder:
            yield Path(folder) / "optimised.onnx"


def _without_conversions(graph: Any, capture: Sequence[str]) -> tuple[str, ...]:
    """Make what is in front of a captured tensor's conversion the graph's output; the outputs, as in ``capture``."""
    import onnx

    wanted = set(capture)
    instead: dict[str, str] = {}
    for node in graph.node:
        if node.domain == _DOMAIN and node.op_type == "ReorderOutput" and node.output[0] in wanted:
            numbers = {attribute.name: attribute.i for attribute in node.attribute}
            if numbers["channels"] % _LARGEST_BLOCK == 0 and not numbers.get("channels_last"):
                instead[node.output[0]] = node.input[0]
    read = _read_tensors(graph)
    nodes = [node for node in graph.node if not (node.output[0] in instead and node.output[0] not in read)]
    outputs = [onnx.ValueInfoProto(name=instead[v.name]) if v.name in instead else v for v in graph.output]
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.output.extend(outputs)
    return tuple(instead.get(name, name) for name in capture)


def _read_tensors(graph: Any) -> set[str]:
    """Names that nodes read, those inside of If and Loop too."""
    found = {name for node in graph.node for name in node.input}
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *((attribute.g,) if attribute.HasField("g") else ())):
                found |= _read_tensors(inner) | {output.name for output in inner.output}
    return found
