"""How the work of ``statistics.cu`` is laid out, and what its records mean: everything that needs no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from calibrators.statistics import BINS, MIN_EXPONENT, PERCENTILES, TensorStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "PARTIAL_BYTES",
    "RECORD",
    "SEGMENT",
    "TUNING",
    "Tuning",
    "compiler_options",
    "cut",
    "macros",
    "to_statistics",
]

SEGMENT: Final = np.dtype([("tensor", "<i4"), ("slot", "<u4"), ("first", "<u8"), ("count", "<u8")])
"""A piece of one tensor, for one thread block; ``slot`` is its number in the order of the tensors."""
PARTIAL_BYTES: Final = 28
RECORD: Final = np.dtype(
    [
        ("binade", "<i4"),
        ("low", "<i4"),
        ("high", "<i4"),
        ("reserved", "<i4"),
        ("elements", "<u8"),
        ("zeros", "<u8"),
        ("nans", "<u8"),
        ("infs", "<u8"),
        ("percentiles", "<f8", (len(PERCENTILES),)),
    ]
)
"""One tensor in one batch; ``low`` and ``high`` are ordered keys of the finite extremes (low > high: none)."""

_WARP: Final = 32


@dataclass(frozen=True)
class Tuning:
    """How the kernels are laid out; the result does not depend on it.

    The defaults are what everything but tests runs. They, and the figures below, come from layouts measured on an H200
    over activations of EfficientNet-Lite0 and ResNet-50 (``scripts/experiments/results-calibration-gpu.md``); those of
    the sweep are of kernels that did not ask for values ahead yet.
    """

    threads: int = 512
    """Per block of the sweep, a power of two. 256, with 4 blocks, are 3 to 7 % slower at batch 64, 45 to 98 % at 8."""
    per_thread: int = 16
    """Elements that a thread holds at a time, 8 or 16. 8, with 3 blocks, are 8 % faster over EfficientNet-Lite0 at
    batch 64, 42 % slower at batch 8, and 22 % and 12 % slower over ResNet-50."""
    blocks_per_sm: int = 2
    """Blocks of the sweep on a multiprocessor: so many are started, and the registers of a thread are kept that few."""
    pieces: int = 4
    """Segments for each block. Each costs its bins twice, written and read: 8 take 49 to 53 % longer at batch 8. 2 end
    less evenly, and take 3 to 5 % longer over EfficientNet-Lite0."""
    finish_threads: int = 512
    """Per block of the second kernel, a power of two. 256 take it 5 to 11 % longer."""
    slices: int = 8
    """Blocks of the second kernel for one tensor, each of which adds up a share of the bins; a power of two. One,
    of 1024 threads, took 18 to 63 % longer; 16, of 256, take 8 to 16 % longer."""

    @property
    def tile(self) -> int:
        return self.threads * self.per_thread

    @property
    def sweep_bytes(self) -> int:
        return 4 * (BINS + _WARP)

    @property
    def finish_bytes(self) -> int:
        return 4 * (BINS + self.finish_threads + 1)


TUNING: Final = Tuning()


def macros(tuning: Tuning) -> dict[str, int]:
    """The definitions that ``statistics.cu`` is compiled with."""
    return {
        "THREADS": tuning.threads,
        "PER_THREAD": tuning.per_thread,
        "BLOCKS_PER_SM": tuning.blocks_per_sm,
        "BINS": BINS,
        "LOG2_BINS": BINS.bit_length() - 1,
        "PERCENTILES": len(PERCENTILES),
        "MIN_EXPONENT": MIN_EXPONENT,
        "FINISH_THREADS": tuning.finish_threads,
        "SLICES": tuning.slices,
    }


def compiler_options(tuning: Tuning) -> list[str]:
    """What nvcc is called with."""
    return ["-O3", *(f"-D{name}={value}" for name, value in macros(tuning).items())]


def cut(sizes: Sequence[int], pieces: int, tile: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Cut tensors into about ``pieces`` segments of whole tiles, as equal as they go.

    Args:
        sizes: elements of each tensor; 0 is allowed.

    Returns:
        The segments (:data:`SEGMENT`), the largest first, so that blocks that take one after the other end together;
        the first slot of each tensor (tensors + 1,).
    """
    tiles = [-(-size // tile) for size in sizes]
    most = max(1, -(-sum(tiles) // pieces))
    segments: list[tuple[int, int, int, int]] = []
    of_tensor = [0]
    for tensor, (size, total) in enumerate(zip(sizes, tiles, strict=True)):
        parts = -(-total // most)
        for part in range(parts):
            first, stop = (tile * (total * k // parts) for k in (part, part + 1))
            segments.append((tensor, len(segments), first, min(stop, size) - first))
        of_tensor.append(len(segments))
    table = np.array(segments, SEGMENT)
    return table[np.argsort(-table["count"].astype(np.int64), kind="stable")], np.array(of_tensor, np.int32)


def to_statistics(
    bins: NDArray[np.int64], binade: int, records: NDArray[Any], batch_index: NDArray[np.int64]
) -> TensorStatistics:
    """One tensor's statistic from its running histogram and the records of its batches, in the order of the batches."""
    result = TensorStatistics(bins.astype(np.int64), binade + MIN_EXPONENT)
    for field in ("elements", "zeros", "nans", "infs"):
        setattr(result, field, int(records[field].sum()))
    seen = records["low"] <= records["high"]
    if seen.any():
        records, batch_index = records[seen], batch_index[seen]
        lows, highs = _floats(records["low"]), _floats(records["high"])
        result.minimum, result.maximum = float(lows.min()), float(highs.max())
        order = np.argsort(batch_index, kind="stable")
        result.batch_index = batch_index[order]
        result.batch_amax = np.maximum(np.abs(lows), np.abs(highs))[order]
        result.batch_percentiles = records["percentiles"][order].copy()
    return result


def _floats(keys: NDArray[np.int32]) -> NDArray[np.float32]:
    """float32 values of ordered keys; -0.0 becomes 0.0."""
    bits = np.where(keys < 0, keys ^ np.int32(0x7FFFFFFF), keys).astype(np.int32)
    values: NDArray[np.float32] = bits.view(np.float32) + np.float32(0.0)
    return values
