"""Samples in which FP32's outputs are almost zero: relative errors say nothing, by :mod:`pipeline.errors.doubtful`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.compare.archive import read_batches
from pipeline.errors.doubtful import ALMOST_ZERO, almost_zero, known_range
from pipeline.errors.graphs import Graph
from pipeline.errors.metrics import rows_per_sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["almost_zero_outputs"]


def almost_zero_outputs(fp32: Path, outputs: Path) -> Iterator[str]:
    """A sentence for each output of the float model ``fp32`` that is almost zero in some samples.

    Args:
        outputs: the archive with its outputs.
    """
    graph = Graph(fp32)
    peaks: dict[str, list[float]] = {name: [] for name in graph.outputs}
    for batch in read_batches(outputs):
        for name in graph.outputs:
            rows = rows_per_sample(batch.feeds[name], len(batch.samples))
            if rows is not None:
                peaks[name] += np.abs(rows).max(axis=1, initial=0.0).tolist()
    for name, found in peaks.items():
        zero = almost_zero(np.array(found, np.float64), known_range(graph, name))
        if count := int(zero.sum()):
            yield (
                f"FP32's output {name!r} is almost zero in {count} of {len(found)} samples (below {ALMOST_ZERO:g} of "
                "its range): their relative error says nothing, and is left out of output error, cosine and SQNR"
            )
