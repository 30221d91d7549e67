"""Largest magnitudes of a graph's tensors, computed inside of the graph: what comes out of a run is one number each.

Nothing of the tensors is held beside what the graph needs itself, however large they are and however many are asked
for. :func:`run` makes a light pass of the float model so, which tells where FP16 would overflow
(:mod:`pipeline.placement.half`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.core.ort import read_graph
from pipeline.core.progress import SILENT, Progress
from pipeline.errors.capture import OrtReading, micro_batches
from pipeline.records import StageResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.data.batching import Batch

__all__ = ["SAMPLES", "MagnitudesResult", "add_magnitudes", "run", "widened"]

SAMPLES: Final = 32
"""Samples of a pass. What others reach beyond these is covered by the margin of whoever uses the figures."""
_PREFIX: Final = "largest magnitude of "
_LARGEST: Final = float(np.finfo(np.float32).max)


class MagnitudesResult(StageResult):
    """What a pass found. No files."""

    samples: int
    largest: dict[str, float]
    """Tensor to its largest finite magnitude; 0 where it has no finite value."""


def run(
    model: Path,
    tensors: Sequence[str],
    batches: Iterable[Batch],
    *,
    folder: Path,
    progress: Progress = SILENT,
    total: int | None = None,
) -> MagnitudesResult:
    """The largest finite magnitude of each of ``tensors`` over ``batches``.

    Infinities and NaN are passed over: a mask of -inf is nothing wrong. Samples are run one by one, except where the
    model's batch is static.

    Args:
        model: ONNX file of the float model, opset 12 or later.
        tensors: float32 activations, graph inputs among them.
        total: number of samples, for the progress.

    Raises:
        InputError: a tensor or the data of an input is not there.
        ToolError: onnxruntime refuses the model or fails on a sample.
    """
    largest: dict[str, float] = dict.fromkeys(tensors, 0.0)
    samples = 0
    if tensors:
        proto = read_graph(model)
        outputs = add_magnitudes(proto, tensors, finite=True)
        reading = OrtReading(
            proto, list(outputs.values()), label="the float graph", optimise=True, external_data_dir=model.parent
        )
        del proto
        with progress.task("measuring how far tensors reach", total=total, unit="samples") as task:
            for batch in batches:
                for part in micro_batches(batch, None if reading.static_batch else 1):
                    values = reading.run(part.feeds)
                    largest = widened(largest, {name: float(values[output]) for name, output in outputs.items()})
                    samples += len(part.samples)
                    task.advance(len(part.samples))
    return MagnitudesResult(samples=samples, largest=largest).at(folder)


def widened(largest: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    """``largest`` with what more samples reach. A tensor without a value has -inf in ``found``, which counts as 0."""
    return {name: max(known, found[name], 0.0) for name, known in largest.items()}


def add_magnitudes(proto: Any, tensors: Sequence[str], *, finite: bool) -> dict[str, str]:
    """Add to the ``onnx.ModelProto`` nodes that compute the largest magnitude of ``tensors`` (any float type).

    Args:
        finite: pass over infinities and NaN. Otherwise an infinity is the largest.

    Returns:
        Tensor to the name of its magnitude: a float32 scalar, -inf for a tensor without elements.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph = proto.graph
    if finite and tensors:
        limits = {f"{_PREFIX}all": np.float32(_LARGEST), f"{_PREFIX}none": np.float32(0.0)}
        graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in limits.items())
    found = {}
    for tensor in tensors:
        result = f"{_PREFIX}{tensor}"
        steps = [("Cast", [tensor], {"to": TensorProto.FLOAT}), ("Abs", [f"{result}/Cast"], {})]
        last = f"{result}/Abs"
        if finite:  # a comparison with NaN is false
            steps += [
                ("LessOrEqual", [last, f"{_PREFIX}all"], {}),
                ("Where", [f"{result}/LessOrEqual", last, f"{_PREFIX}none"], {}),
            ]
            last = f"{result}/Where"
        for op, inputs, attributes in steps:
            output = f"{result}/{op}"
            graph.node.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        graph.node.append(helper.make_node("ReduceMax", [last], [result], name=result, keepdims=0))
        found[tensor] = result
    return found
