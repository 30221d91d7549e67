"""Standard deviation of each activation layer's output in the float model, the unit of relative noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.compare.archive import read_batches
from pipeline.compare.task import Done
from pipeline.core.errors import CheckFailed
from pipeline.core.ort import make_session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.compare.task import FileSet

__all__ = ["moments"]


def moments(files: Mapping[str, FileSet], options: Mapping[str, Any]) -> Done:
    """Files ``fp32`` and ``samples``, option ``tensors``: ``std`` float64 (tensors,).

    Sums are float64 over the values of all samples.

    Raises:
        CheckFailed: a tensor holds a NaN or infinity.
    """
    tensors: list[str] = list(options["tensors"])
    session = make_session(files["fp32"].path, capture=tensors, threads=1)
    inputs = [spec.name for spec in session.get_inputs()]
    count, total, squares = (np.zeros(len(tensors)) for _ in range(3))
    for batch in read_batches(files["samples"].path):
        for row, values in enumerate(session.run(tensors, {name: batch.feeds[name] for name in inputs})):
            flat = values.reshape(-1)
            count[row] += flat.size
            total[row] += np.add.reduce(flat, dtype=np.float64)
            squares[row] += np.einsum("i,i->", flat, flat, dtype=np.float64)
    mean = total / np.maximum(count, 1)
    std = np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean**2, 0.0))
    if not np.isfinite(std).all():
        raise CheckFailed(
            f"tensor {tensors[int(np.argmin(np.isfinite(std)))]!r} holds a NaN or infinity in the FP32 graph",
            remedy="a broken weight or a value out of range: mend the model, or leave the sample out",
        )
    return Done({"std": std})
