"""A rank's own batches on its own GPU: float model and statistics stay there (:mod:`pipeline.activations_cuda`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.consistency.distributed import Measured
from pipeline.nonfinite import NonFiniteBatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.consistency.distributed import Work
    from pipeline.consistency.group import Group
    from pipeline.core.progress import Progress
    from pipeline.data import Batch

__all__ = ["measure_on_cuda"]


def measure_on_cuda(work: Work, batches: Iterator[Batch], group: Group, progress: Progress) -> Measured:
    """Run the float model over ``batches`` on the GPU with this rank's local number.

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
