"""Changes to a quantised network that cost no speed: equalised channels, other ranges, clipped weights, corrected
biases.

A repair of the weights is written into the float model itself, clipped to the threshold: the quantise stage, which
takes each channel's largest magnitude, then arrives at just that threshold. Ranges are handed to it through a
calibrator that knows which statistic gets another one's range.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from calibrators import Calibrator, TensorStatistics

__all__ = [
    "ChosenRanges",
    "Repairs",
    "clipped",
    "least_squares_thresholds",
    "load_repairs",
    "save_repairs",
    "statistic_key",
]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_FACTORS = tuple(1.0 - 0.02 * step for step in range(26))
"""Thresholds tried for weights, as shares of the largest magnitude: 1 down to 0.5."""


@dataclass(frozen=True)
class Repairs:
    """What is changed, and nothing else."""

    ranges: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """:func:`statistic_key` of a tensor (or group) to the calibrator that gives its range now, and the range."""
    weights: Mapping[str, Array] = field(default_factory=dict)
    """Initializer to its clipped values."""
    biases: Mapping[str, Array] = field(default_factory=dict)
    """Node to its bias, one value per output channel."""
    equalised: bool = False
    """All of it is made to the float model with equalised channels."""

    @property
    def any(self) -> bool:
        return bool(self.equalised or self.ranges or self.weights or self.biases)

    def with_ranges(self, ranges: Mapping[str, tuple[str, float]]) -> Repairs:
        return replace(self, ranges={**self.ranges, **ranges})

    def with_weights(self, weights: Mapping[str, Array]) -> Repairs:
        return replace(self, weights={**self.weights, **weights})

    def with_biases(self, biases: Mapping[str, Array]) -> Repairs:
        return replace(self, biases={**self.biases, **biases})

    @property
    def key(self) -> str:
        """Digest of the content."""
        digest = hashlib.sha256(repr(sorted(self.ranges.items())).encode())
        for kind in (self.weights, self.biases):
            for name in sorted(kind):
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(kind[name]).tobytes())
        if self.equalised:
            digest.update(b"equalised")
        return digest.hexdigest()[:16]


def statistic_key(statistic: TensorStatistics) -> str:
    """A name for a statistic from its content, the same wherever it comes from."""
    digest = hashlib.sha256(statistic.bins.tobytes())
    digest.update(repr((statistic.exponent, statistic.minimum, statistic.maximum, statistic.elements)).encode())
    return digest.hexdigest()[:32]


class ChosenRanges:
    """A calibrator that gives chosen statistics another range and asks ``base`` for all others, once each."""

    def __init__(self, base: Calibrator, ranges: Mapping[str, tuple[str, float]], memory: dict[str, float]) -> None:
        self._base = base
        self._ranges = ranges
        self._memory = memory

    @property
    def name(self) -> str:
        return self._base.name

    @property
    def params(self) -> Mapping[str, float]:
        return self._base.params

    def amax(self, stats: TensorStatistics) -> float:
        key = statistic_key(stats)
        if key in self._ranges:
            return self._ranges[key][1]
        if key not in self._memory:
            self._memory[key] = self._base.amax(stats)
        return self._memory[key]


def least_squares_thresholds(weights: Array, axis: int | None) -> Array:
    """The threshold per slice along ``axis`` (or of the tensor) whose INT8 form is nearest to the weights.

    Minimises Σ (w − s·clamp(round(w/s), ±127))² with s = T/127 over T = max|w| · (1, 0.98, ... 0.5); of equal ones the
    largest. Returns float32, of shape (slices,) or ().
    """
    rows = weights.reshape(1, -1) if axis is None else np.moveaxis(weights, axis, 0).reshape(weights.shape[axis], -1)
    rows = rows.astype(np.float32)
    largest = np.abs(rows).max(axis=1)
    best = largest.copy()
    least = np.full(len(rows), np.inf)
    for factor in _FACTORS:
        threshold = (largest * np.float32(factor)).astype(np.float32)
        scale = np.maximum(threshold / np.float32(127), np.float32(2.0**-63))[:, None]
        error = np.square(rows - np.clip(np.rint(rows / scale), -127, 127) * scale).sum(axis=1, dtype=np.float64)
        better = error < least
        best[better], least[better] = threshold[better], error[better]
    result: Array = best.reshape(()) if axis is None else best
    return result


def clipped(weights: Array, thresholds: Array, axis: int | None) -> Array:
    """``weights`` limited to ±threshold per slice along ``axis``."""
    if axis is not None:
        shape = [1] * weights.ndim
        shape[axis] = -1
        thresholds = thresholds.reshape(shape)
    limited: Array = np.clip(weights, -thresholds, thresholds).astype(weights.dtype)
    return limited


def save_repairs(path: Path, repairs: Repairs) -> None:
    """Write ``repairs`` as ``.npz``, without :attr:`Repairs.equalised`."""
    text = json.dumps(dict(sorted(repairs.ranges.items())), sort_keys=True)
    arrays: dict[str, Any] = {"ranges": np.frombuffer(text.encode(), np.uint8)}
    arrays.update({f"weights/{name}": values for name, values in sorted(repairs.weights.items())})
    arrays.update({f"biases/{name}": values for name, values in sorted(repairs.biases.items())})
    with atomic_file(path) as stream:
        np.savez(stream, **arrays)


def load_repairs(path: Path) -> Repairs:
    """Read what :func:`save_repairs` wrote.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        ranges = {key: (str(name), float(amax)) for key, (name, amax) in json.loads(arrays["ranges"].tobytes()).items()}
    except Exception as error:
        raise InputError(f"{path} cannot be read: {error}", remedy="run the search again") from error
    by_kind: dict[str, dict[str, Any]] = {"weights": {}, "biases": {}}
    for name, values in arrays.items():
        kind, separator, rest = name.partition("/")
        if separator:
            by_kind[kind][rest] = values
    return Repairs(ranges=ranges, weights=by_kind["weights"], biases=by_kind["biases"])
