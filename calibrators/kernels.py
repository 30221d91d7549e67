"""Compiled loops of the statistic: one sweep over a tensor gives extremes, counts and the |x| histogram.

The tensor is read once, in blocks that stay in the L1/L2 cache: vectorised extremes of a block first, then its bins.
Extremes are taken on the integer image of the floats, so NaN and infinity are seen without any float comparison and no
relaxed float arithmetic is needed. Bin indices are |x| times a power of two, which is exact.

Imported inside functions, or by modules that are (numba takes a third of a second to load).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

__all__ = ["BLOCK", "compiled", "percentiles", "sweep"]

BLOCK = 8192
"""Elements per block: 32 KiB of float32, and 16 KiB of bin indices beside them."""

_LANES = 4
"""Partial histograms: neighbouring elements often share a bin, and one counter would wait for its own last store."""

_SPARE = 16
"""Bins for zeros: half of a ReLU's output is zero, and would go into one counter of each lane."""

_ABS = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)
_INT_MAX = np.int32(0x7FFFFFFF)
_INT_MIN = np.int32(-0x80000000)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, **options: Any) -> Function:
    """Compile without the interpreter lock; cached on the disk where numba finds a folder it can write.

    Division by zero follows IEEE 754, not Python: a check before each division would keep loops scalar.

    Args:
        options: of ``numba.njit``, in place of these.
    """
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # "no locator available": neither __pycache__ nor the user's cache folder is writable
        return numba.njit(**options)(function)  # type: ignore[no-any-return]


@compiled
def _extremes(bits: Any) -> Any:
    """Least and greatest ordered key, number of zeros. x ^ ((x >> 31) & 0x7FFFFFFF) orders like the float itself."""
    low, high, zeros = _INT_MAX, _INT_MIN, np.int32(0)
    for i in range(bits.size):
        v = bits[i]
        key = np.int32(v ^ np.int32(np.int32(v >> np.int32(31)) & _ABS))
        low = min(low, key)
        high = max(high, key)
        zeros = np.int32(zeros + np.int32(np.int32(v & _ABS) == np.int32(0)))
    return low, high, zeros


@compiled
def _magnitude(key: Any) -> Any:
    """Bits of |x| from an ordered key."""
    return np.int32(~key) if key < 0 else np.int32(key)


@compiled
def _finite_only(bits: Any, keep: Any) -> Any:
    """Copy the finite values of ``bits`` into ``keep``; returns how many, and the numbers of NaN and infinities."""
    kept, nans, infs = 0, 0, 0
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & _ABS)
        if magnitude > _INF:
            nans += 1
        elif magnitude == _INF:
            infs += 1
        else:
            keep[kept] = bits[i]
            kept += 1
    return kept, nans, infs


@compiled
def _index(values: Any, bits: Any, factor: Any, spare: Any, index: Any) -> None:
    """Bin of each value; zeros, which are counted elsewhere, go in turn into the bins from ``spare`` on."""
    for i in range(values.size):
        k = np.int32(abs(values[i]) * factor)
        away = np.int32(spare + np.int32(i & (_SPARE - 1)))
        index[i] = np.uint16(away if np.int32(bits[i] & _ABS) == np.int32(0) else k)


@compiled
def _scatter(index: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> None:
    quads = index.size // 4
    one = np.uint32(1)
    for j in range(quads):
        i = np.uintp(4) * np.uintp(j)  # unsigned: numba leaves out its wrap-around of negative indices
        c0[index[i]] += one
        c1[index[i + np.uintp(1)]] += one
        c2[index[i + np.uintp(2)]] += one
        c3[index[i + np.uintp(3)]] += one
    for i in range(quads * 4, index.size):
        c0[index[i]] += one


@compiled
def _coarsen(counts: Any, shift: Any) -> None:
    """Multiply the bin width by 2**shift in place: floor(floor(x/w) / 2) == floor(x / 2w)."""
    for lane in range(counts.shape[0]):
        for k in range(counts.shape[1] - _SPARE):
            count = counts[lane, k]
            counts[lane, k] = 0
            counts[lane, k >> min(shift, 63)] += count


@compiled
def sweep(values: Any, bits: Any, exponent: Any, base: Any, total: Any) -> Any:
    """Add ``values`` to the histogram ``total``, in one read.

    Args:
        values: float32 (n,), contiguous, n < 2**31.
        bits: the same memory as int32.
        exponent: bin width of ``total`` is 2**exponent.
        base: width exponent of an all-zero tensor; a block whose greatest magnitude has the biased exponent E needs
            base + E.
        total: int64 (bins,), added to in place, coarsened when a value falls outside.

    Returns:
        (exponent, low, high, zeros, nans, infs): the new exponent and the extremes of the finite values as ordered
        keys (low > high when there is none).
    """
    bins = total.size
    counts = np.zeros((_LANES, bins + _SPARE), np.uint32)
    c0, c1, c2, c3 = counts[0], counts[1], counts[2], counts[3]
    index = np.empty(BLOCK, np.uint16)
    kept_bits = np.empty(BLOCK, np.int32)
    kept_values = kept_bits.view(np.float32)
    low_all, high_all = _INT_MAX, _INT_MIN
    zeros_all, nans_all, infs_all = 0, 0, 0
    width = base  # exponent of the partial counts
    wide = True
    factor64 = 2.0 ** float(-base)
    spare = np.int32(bins)
    for start in range(0, values.size, BLOCK):
        stop = min(values.size, start + BLOCK)
        block_values, block_bits = values[start:stop], bits[start:stop]
        low, high, zeros = _extremes(block_bits)
        if max(_magnitude(low), _magnitude(high)) >= _INF:
            kept, nans, infs = _finite_only(block_bits, kept_bits)
            nans_all += nans
            infs_all += infs
            block_values, block_bits = kept_values[:kept], kept_bits[:kept]
            low, high, zeros = _extremes(block_bits)
            if kept == 0:
                continue
        low_all, high_all, zeros_all = min(low_all, low), max(high_all, high), zeros_all + zeros
        needed = base + (max(_magnitude(low), _magnitude(high)) >> 23)
        if needed > width:
            _coarsen(counts, needed - width)
            width = needed
            wide = -width > 127
            factor64 = 2.0 ** float(-width)
        target = index[: block_values.size]
        if wide:  # the factor, a power of two above 2**127, needs float64
            _index(block_values, block_bits, factor64, spare, target)
        else:
            _index(block_values, block_bits, np.float32(factor64), spare, target)
        _scatter(target, c0, c1, c2, c3)
    if exponent < width:
        shift = min(width - exponent, 63)
        for k in range(bins):
            count = total[k]
            total[k] = 0
            total[k >> shift] += count
        exponent = width
    shift = min(exponent - width, 63)
    for k in range(bins):
        total[k >> shift] += np.int64(c0[k]) + np.int64(c1[k]) + np.int64(c2[k]) + np.int64(c3[k])
    total[0] += zeros_all
    return exponent, low_all, high_all, zeros_all, nans_all, infs_all


@compiled
def percentiles(bins: Any, width: Any, amax: Any, wanted: Any) -> Any:
    """Percentiles of |x| from its histogram, float64, one for each of ``wanted`` (0..100, ascending).

    The wanted rank is percentile / 100 * n of n values; the values of a bin are taken to lie evenly between its edges,
    those of the last used bin between its lower edge and ``amax``. 0.0 when there is no value.

    Args:
        bins: int64 (bins,).
        width: bin width.
        amax: greatest |x|.
        wanted: float64 (percentiles,).
    """
    result = np.zeros(wanted.size)
    total = np.int64(0)
    for k in range(bins.size):
        total += bins[k]
    if total == 0:
        return result
    k, below = 0, np.int64(0)
    for i in range(wanted.size):
        rank = wanted[i] / 100.0 * np.float64(total)
        while bins[k] == 0 or (np.float64(below + bins[k]) < rank and below + bins[k] < total):
            below += bins[k]
            k += 1
        lower = k * width
        inside = (rank - np.float64(below)) / np.float64(bins[k])
        value = lower + (min((k + 1) * width, amax) - lower) * min(max(inside, 0.0), 1.0)
        result[i] = min(value, amax)
    return result
