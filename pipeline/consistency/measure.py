"""The statistics of a rank's own batches, from its cores or from its own GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from calibrators.statistics import TensorStatistics
from pipeline.nonfinite import NonFiniteBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.consistency.group import Group
    from pipeline.consistency.work import Work
    from pipeline.core.progress import Progress
    from pipeline.data import Batch

__all__ = ["Measure", "Measured", "measure_on", "measure_on_cpu", "measure_on_cuda"]

Measure: TypeAlias = "Callable[[Work, Iterator[Batch], Group, Progress], Measured]"


@dataclass
class Measured:
    """What a rank's own batches gave."""

    statistics: dict[str, TensorStatistics]
    batches: list[int] = field(default_factory=list)
    """Indices of the batches in the statistics."""
    skipped: list[int] = field(default_factory=list)
    samples: int = 0


def measure_on(device: str) -> Measure:
    """How a rank measures on ``device``: ``cpu``, or ``cuda`` for the GPU with its local number."""
    return measure_on_cpu if device == "cpu" else measure_on_cuda


def measure_on_cpu(work: Work, batches: Iterator[Batch], group: Group, progress: Progress) -> Measured:
    """Run the float model over ``batches`` in onnxruntime on this rank's cores.

    Raises:
        InputError, ToolError: as :class:`pipeline.activations.ActivationPass`; or a NaN or infinity in an activation.
    """
    from pipeline.activations import ActivationPass

    measured = Measured({name: TensorStatistics() for name in work.tensors})
    passes = ActivationPass(work.model, work.tensors)
    nonfinite = NonFiniteBatches(work.model, work.on_nonfinite, progress)
    with progress.task("calibrating this rank's batches", total=None, unit="samples") as task:
        for found in passes(batches):
            group.check()
            task.advance(len(found.batch.samples))
            if found.nonfinite is not None:
                nonfinite.leave_out(found.nonfinite, found.batch.index, found.batch.samples, found.batch)
                measured.skipped.append(found.batch.index)
                continue
            for name, statistics in found.statistics.items():
                measured.statistics[name].absorb(statistics)
            measured.batches.append(found.batch.index)
            measured.samples += len(found.batch.samples)
    return measured


def measure_on_cuda(work: Work, batches: Iterator[Batch], group: Group, progress: Progress) -> Measured:
    """Run the float model over ``batches`` on the GPU with this rank's local number; the statistics are made there too.

    The statistics are the same bits as the CPU's for the same activations; the activations of GPU and CPU differ by
    rounding.

    Raises:
        InputError: no PyCUDA, no CUDA provider in onnxruntime; a tensor of another type than float32 or float16; a NaN
            or infinity in an activation.
        ToolError: no device, or onnxruntime fails on the model.
    """
    from pipeline.activations import NonFinite
    from pipeline.activations_cuda import CudaActivationPass

    nonfinite = NonFiniteBatches(work.model, work.on_nonfinite, progress)
    queued: list[tuple[int, tuple[int, ...]]] = []
    with CudaActivationPass(
        work.model, work.tensors, skip_nonfinite=nonfinite.skips, device=group.local_rank
    ) as passes:
        with progress.task("calibrating this rank's batches", total=None, unit="samples") as task:
            for batch in passes(batches):
                group.check()
                task.advance(len(batch.samples))
                queued.append((batch.index, tuple(batch.samples)))
        bad = {index: NonFinite(name, nans, infs) for index, name, nans, infs in passes.nonfinite()}
        measured = Measured(passes.collect())
    for index, samples in queued:
        if index in bad:
            nonfinite.leave_out(bad[index], index, samples, None)
            measured.skipped.append(index)
        else:
            measured.batches.append(index)
            measured.samples += len(samples)
    return measured
