"""The one statistic every calibrator reads, and its file.

For a tensor x the statistic holds a histogram of |x| whose bin width is a power of two: bin k counts the values with
floor(|x| / w) = k. The width is the least one (not below 2**:data:`MIN_EXPONENT`) at which the greatest |x| fits, so it
depends on the data's maximum alone. When a larger value comes, the width doubles and neighbouring bins are added in
pairs; as floor(floor(x/w) / 2) = floor(x / 2w), nothing is lost. The histogram is therefore a function of the
multiset of values: batch size, order, number of workers and machines cannot change a bit of it, and
:meth:`TensorStatistics.merge` is exact, commutative and associative.

Beside it: extremes, counts, and, for the moving averages, the maximum and some percentiles of every batch by global
batch index. A batch's percentiles come from that batch's own histogram at its own width, so they depend on the batch
only. All counts are int64 and all sums are of integers.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "BINS",
    "MIN_EXPONENT",
    "PERCENTILES",
    "SCHEMA",
    "TensorStatistics",
    "load_statistics",
    "save_statistics",
]

BINS: Final = 8192
"""Bins of the histogram. The maximum lies in the upper half, so at least 4096 are in use, two for each of the 2048 that
`entropy` wants; scripts/histogram_bins.py shows what fewer and more do to every calibrator."""

MIN_EXPONENT: Final = -126 - BINS.bit_length() + 1
"""Least exponent of the bin width: the range of the bins is then 2**-126, below which float32 is denormal."""

PERCENTILES: Final = (90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99, 99.995, 99.999, 99.9999)
"""Percentiles of |x| kept for every batch (an `ema-percentile` calibrator can ask for these)."""

SCHEMA: Final = 1
_KIND: Final = "quantize calibration statistics"


@dataclass(eq=False)
class TensorStatistics:
    """Statistic of one tensor (module docstring). Starts empty; the empty one is the neutral element of merge."""

    bins: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    """int64 (BINS,): finite values by magnitude, zeros included in bin 0."""
    exponent: int = MIN_EXPONENT
    """The bin width is 2**exponent."""
    minimum: float = math.inf
    """Least finite value (float32), +inf when there is none."""
    maximum: float = -math.inf
    elements: int = 0
    """All values seen, NaN and infinities included."""
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    batch_index: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 (batches,): global batch indices, ascending, each once."""
    batch_amax: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 (batches,): greatest finite |x| of each batch."""
    batch_percentiles: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(PERCENTILES)), np.float64))
    """float64 (batches, len(PERCENTILES))."""

    @property
    def amax(self) -> float:
        """Greatest finite |x|; 0.0 when there is none."""
        return max(abs(self.minimum), abs(self.maximum)) if self.finite else 0.0

    @property
    def finite(self) -> int:
        """Number of finite values, the sum of the bins."""
        return self.elements - self.nans - self.infs

    @property
    def width(self) -> float:
        """Bin width in the tensor's unit."""
        return math.ldexp(1.0, self.exponent)

    def percentile(self, percentile: float) -> float:
        """The ``percentile`` (0..100) of |x|, interpolated within its bin; 0.0 when there is no value."""
        return float(self.percentiles((percentile,))[0])

    def percentiles(self, wanted: Sequence[float]) -> NDArray[np.float64]:
        """Several percentiles of |x|, float64 in the order of ``wanted``, which ascends."""
        from calibrators.kernels import percentiles

        values: NDArray[np.float64] = percentiles(self.bins, self.width, self.amax, np.array(wanted, np.float64))
        return values

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """The statistic of both data sets together: exact, commutative and associative.

        Raises:
            InputError: both hold the same batch; its values would count twice.
        """
        result = TensorStatistics(self.bins.copy(), self.exponent, self.minimum, self.maximum, self.elements)
        result.zeros, result.nans, result.infs = self.zeros, self.nans, self.infs
        result.batch_index, result.batch_amax = self.batch_index, self.batch_amax
        result.batch_percentiles = self.batch_percentiles
        result.absorb(other)
        return result

    def absorb(self, other: TensorStatistics) -> None:
        """:meth:`merge` in place.

        Raises:
            InputError: both hold the same batch; this statistic is then unchanged.
        """
        index = np.concatenate([self.batch_index, other.batch_index])
        order = np.argsort(index, kind="stable")
        index = index[order]
        if (twice := index[1:][index[1:] == index[:-1]]).size:
            raise InputError(
                f"batch {int(twice[0])} is in both statistics ({twice.size} such in all); it would count twice",
                remedy="merge passes over different batches of the data, each batch in one pass only",
            )
        exponent = max(self.exponent, other.exponent)
        self.bins = _coarsened(self.bins, exponent - self.exponent)
        self.bins += _coarsened(other.bins, exponent - other.exponent)
        self.exponent = exponent
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self.elements += other.elements
        self.zeros += other.zeros
        self.nans += other.nans
        self.infs += other.infs
        self.batch_index = index
        self.batch_amax = np.concatenate([self.batch_amax, other.batch_amax])[order]
        self.batch_percentiles = np.concatenate([self.batch_percentiles, other.batch_percentiles])[order]

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        if not isinstance(other, TensorStatistics):
            return NotImplemented
        return self._scalars() == other._scalars() and all(
            np.array_equal(a, b) for a, b in zip(self._arrays(), other._arrays(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def _scalars(self) -> tuple[float, ...]:
        return (self.exponent, self.minimum, self.maximum, self.elements, self.zeros, self.nans, self.infs)

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return (self.bins, self.batch_index, self.batch_amax, self.batch_percentiles)


def _coarsened(bins: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
    """The histogram at 2**shift times the width."""
    if shift == 0:
        return bins
    group = 1 << min(shift, BINS.bit_length() - 1)
    result = np.zeros_like(bins)
    result[: BINS // group] = bins.reshape(-1, group).sum(axis=1)
    return result


def save_statistics(path: Path, statistics: Mapping[str, TensorStatistics], meta: Mapping[str, Any]) -> None:
    """Write an ``.npz`` atomically; equal statistics and meta give equal bytes, in whatever order they come.

    Members (no pickle): ``header`` (JSON in UTF-8: kind, schema, bins, percentiles, tensor names, meta), ``bins``
    int64 (tensors, BINS), ``counts`` int64 (tensors, 5: exponent, elements, zeros, nans, infs), ``extremes`` float64
    (tensors, 2), ``batches`` int64 (tensors,), and the batch sequences of all tensors joined in that order.
    """
    names = sorted(statistics)
    chosen = [statistics[name] for name in names]
    header = {
        "kind": _KIND,
        "schema": SCHEMA,
        "bins": BINS,
        "percentiles": list(PERCENTILES),
        "tensors": names,
        "meta": dict(meta),
    }
    text = json.dumps(header, sort_keys=True, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    empty = TensorStatistics()
    members: dict[str, NDArray[Any]] = {
        "header": np.frombuffer(text.encode(), np.uint8),
        "bins": np.stack([s.bins for s in chosen]) if chosen else np.zeros((0, BINS), np.int64),
        "counts": np.array([[s.exponent, s.elements, s.zeros, s.nans, s.infs] for s in chosen], np.int64).reshape(
            -1, 5
        ),
        "extremes": np.array([[s.minimum, s.maximum] for s in chosen], np.float64).reshape(-1, 2),
        "batches": np.array([s.batch_index.size for s in chosen], np.int64),
        "batch_index": np.concatenate([s.batch_index for s in (*chosen, empty)]),
        "batch_amax": np.concatenate([s.batch_amax for s in (*chosen, empty)]),
        "batch_percentiles": np.concatenate([s.batch_percentiles for s in (*chosen, empty)]),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in members.items():
            piece = io.BytesIO()
            np.lib.format.write_array(piece, array, version=(1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), piece.getvalue())  # ZipInfo's own date: 1980-01-01
    write_bytes(path, buffer.getvalue())


def load_statistics(path: Path) -> tuple[dict[str, TensorStatistics], dict[str, Any]]:
    """Read and check a file of :func:`save_statistics`: the statistics by tensor name, and the meta.

    Raises:
        InputError: the file is missing, truncated, damaged, or not a calibration file of this schema.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            members = {name: archive[name] for name in archive.files}
        header = json.loads(members["header"].tobytes().decode())
    except FileNotFoundError as error:
        raise InputError(f"calibration file {path} does not exist", remedy="`quantize calibrate` writes one") from error
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} is not a calibration file, or it is truncated: {error}", remedy="run `quantize calibrate` again"
        ) from error
    if not isinstance(header, dict) or header.get("kind") != _KIND:
        raise InputError(f"{path} is an .npz file but not a calibration file", remedy="`quantize calibrate` writes one")
    layout = {"schema": SCHEMA, "bins": BINS, "percentiles": list(PERCENTILES)}
    if different := [key for key, value in layout.items() if header.get(key) != value]:
        key = different[0]
        raise InputError(
            f"calibration file {path} has {key} {header.get(key)}, this version reads {layout[key]}",
            remedy="run `quantize calibrate` again with this version",
        )
    try:
        return _unpack(header["tensors"], members), header["meta"]
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise InputError(
            f"calibration file {path} is inconsistent: {error}", remedy="run `quantize calibrate` again"
        ) from error


def _check_values(name: str, found: TensorStatistics) -> None:
    """No range is made of figures that no pass can have given.

    Raises:
        ValueError: there is such a one.
    """
    low, high, limit = found.minimum, found.maximum, found.width * BINS
    if found.finite and not -limit <= low <= high <= limit:
        raise ValueError(f"{name!r} has values from {low:g} to {high:g}, its bins go to {limit:g}")
    if (np.diff(found.batch_index) <= 0).any() or (found.batch_index < 0).any():
        raise ValueError(f"the batch numbers of {name!r} do not rise from 0 on")
    for what, figures in (("greatest value", found.batch_amax), ("percentile", found.batch_percentiles)):
        if (wrong := figures[~((figures >= 0) & np.isfinite(figures))]).size:
            raise ValueError(f"a {what} of a batch of {name!r} is {wrong[0]:g}")


def _unpack(names: list[str], members: Mapping[str, NDArray[Any]]) -> dict[str, TensorStatistics]:
    sizes = members["batches"]
    expected = {
        "bins": ((len(names), BINS), np.int64),
        "counts": ((len(names), 5), np.int64),
        "extremes": ((len(names), 2), np.float64),
        "batches": ((len(names),), np.int64),
        "batch_index": ((int(sizes.sum()),), np.int64),
        "batch_amax": ((int(sizes.sum()),), np.float32),
        "batch_percentiles": ((int(sizes.sum()), len(PERCENTILES)), np.float64),
    }
    for member, (shape, dtype) in expected.items():
        if members[member].shape != shape or members[member].dtype != dtype:
            found = f"{members[member].dtype} {members[member].shape}"
            raise ValueError(f"{member} is {found}, expected {np.dtype(dtype)} {shape}")
    result, stop = {}, 0
    for row, name in enumerate(names):
        start, stop = stop, stop + int(sizes[row])
        exponent, elements, zeros, nans, infs = (int(value) for value in members["counts"][row])
        statistics = TensorStatistics(
            members["bins"][row].copy(),
            exponent,
            float(members["extremes"][row, 0]),
            float(members["extremes"][row, 1]),
            elements,
            zeros,
            nans,
            infs,
            members["batch_index"][start:stop].copy(),
            members["batch_amax"][start:stop].copy(),
            members["batch_percentiles"][start:stop].copy(),
        )
        if int(statistics.bins.sum()) != statistics.finite or (statistics.bins < 0).any():
            raise ValueError(f"the bins of {name!r} hold {int(statistics.bins.sum())} values, not {statistics.finite}")
        _check_values(name, statistics)
        result[name] = statistics
    return result
