"""Statistics as a compact, self-checking message between ranks, and their digest.

A message holds the statistics of a list of tensors that sender and receiver agreed on before, so it carries no names.
For each tensor (all little-endian):

====================  =======================================================================================
length                uint32, of the tensor's zlib stream
zlib stream (level 1) exponent int16; minimum, maximum float64; elements, zeros, nans, infs int64 (50 bytes);
                      used bins uint32, bytes per count uint8 (1, 2, 4 or 8, by the largest count);
                      the used bins, counts split into planes by significance (the high planes are nearly zero);
                      batches uint32, then batch indices int64, amax float32 and percentiles float64
====================  =======================================================================================

zlib ends every stream with a checksum. The digest is taken over the uncompressed form.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrators.statistics import BINS, PERCENTILES, TensorStatistics
from pipeline.core.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["digest_statistics", "pack", "unpack"]

_HEAD = struct.Struct("<hddqqqqIB")
_BATCHES = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
_LEVEL = 1
"""zlib's level: 6 is three times slower and saves a few per cent."""

Array = np.ndarray[Any, np.dtype[Any]]


def _plain(statistics: TensorStatistics) -> bytes:
    """The canonical bytes of one statistic: equal statistics give equal bytes."""
    bins = statistics.bins
    used = int(np.flatnonzero(bins)[-1]) + 1 if bins.any() else 0
    largest = int(bins.max())
    width = next(size for size in (1, 2, 4, 8) if largest < 1 << (8 * size - (size == 8)))
    planes = bins[:used].astype(f"<u{width}").view(np.uint8).reshape(used, width).T
    head = _HEAD.pack(
        statistics.exponent,
        statistics.minimum,
        statistics.maximum,
        statistics.elements,
        statistics.zeros,
        statistics.nans,
        statistics.infs,
        used,
        width,
    )
    return b"".join(
        (
            head,
            planes.tobytes(),
            _BATCHES.pack(statistics.batch_index.size),
            statistics.batch_index.astype("<i8").tobytes(),
            statistics.batch_amax.astype("<f4").tobytes(),
            statistics.batch_percentiles.astype("<f8").tobytes(),
        )
    )


def _parse(data: bytes) -> TensorStatistics:
    exponent, minimum, maximum, elements, zeros, nans, infs, used, width = _HEAD.unpack_from(data)
    at = _HEAD.size
    planes = np.frombuffer(data, np.uint8, used * width, at).reshape(width, used)
    at += used * width
    bins = np.zeros(BINS, np.int64)
    bins[:used] = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1)
    (batches,) = _BATCHES.unpack_from(data, at)
    at += _BATCHES.size
    columns: list[Array] = []
    for dtype, count in (("<i8", batches), ("<f4", batches), ("<f8", batches * len(PERCENTILES))):
        column = np.frombuffer(data, dtype, count, at)
        columns.append(column.astype(column.dtype.newbyteorder("=")))
        at += column.nbytes
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes are left over")
    result = TensorStatistics(bins, exponent, minimum, maximum, elements, zeros, nans, infs)
    result.batch_index, result.batch_amax = columns[0], columns[1]
    result.batch_percentiles = columns[2].reshape(batches, len(PERCENTILES))
    if int(bins.sum()) != result.finite:
        raise ValueError(f"the bins hold {int(bins.sum())} values, the counts say {result.finite}")
    return result


def pack(statistics: Mapping[str, TensorStatistics], names: Sequence[str]) -> bytes:
    """The message with the statistics of ``names``, in that order."""
    parts: list[bytes] = []
    for name in names:
        stream = zlib.compress(_plain(statistics[name]), _LEVEL)
        parts += (_LENGTH.pack(len(stream)), stream)
    return b"".join(parts)


def unpack(message: bytes, names: Sequence[str]) -> dict[str, TensorStatistics]:
    """The statistics in a message of :func:`pack` for the same ``names``.

    Raises:
        ToolError: the message is damaged or was made for another list of tensors.
    """
    result: dict[str, TensorStatistics] = {}
    at = 0
    for name in names:
        try:
            (length,) = _LENGTH.unpack_from(message, at)
            at += _LENGTH.size
            result[name] = _parse(zlib.decompress(message[at : at + length]))
            at += length
        except (struct.error, zlib.error, ValueError) as error:
            raise ToolError(f"the statistics message is damaged at tensor {name!r}: {error}") from error
    if at != len(message):
        raise ToolError(f"the statistics message is damaged: {len(message) - at} bytes follow the last tensor")
    return result


def digest_statistics(statistics: Mapping[str, TensorStatistics]) -> str:
    """SHA-256 over every tensor's statistic, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(statistics):
        plain = _plain(statistics[name])
        digest.update(f"{name}\0{len(plain)}\0".encode())
        digest.update(plain)
    return digest.hexdigest()
