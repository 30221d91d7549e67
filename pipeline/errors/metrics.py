"""How far one array is from another: six figures per sample in one sweep, and the figures that follow from them.

For the FP32 values a and the INT8 values b of one sample, with d = a - b:

- relative L2 = ‖d‖₂ / ‖a‖₂. Where a is all zeros, ‖b‖₂ takes the place of ‖a‖₂: 0 when b is zero too, else 1 (all of
  it is error).
- SQNR in dB = -20 log10(relative L2); +inf where a and b are equal.
- cosine = a·b / (‖a‖₂ ‖b‖₂); 1 where both are zero, 0 where one is.
- max absolute error = max |d|.
- peak = max |a|; where it is small against the other samples', the first three say nothing (:mod:`.doubtful`).

Sums are float64 over the values in memory order, whatever the number of threads, so they are reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np

__all__ = ["METRICS", "PEAK", "PairSums", "pair_sums", "relative_l2", "rows_per_sample", "warm_up"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

METRICS = ("relative_l2", "sqnr_db", "cosine", "max_abs")
PEAK = "fp32_max_abs"
"""Column of :attr:`PairSums.peak`."""


@dataclass(frozen=True)
class PairSums:
    """Sums over each sample's values; every field is float64 of shape (samples,)."""

    reference_square: Floats
    other_square: Floats
    difference_square: Floats
    product: Floats
    max_abs: Floats
    peak: Floats
    """Largest absolute value of the reference."""

    def repeated(self, samples: int) -> PairSums:
        """The sums of the one sample held, for ``samples`` of them."""
        return PairSums(*(np.repeat(getattr(self, field.name), samples) for field in fields(self)))

    @property
    def relative_l2(self) -> Floats:
        return relative_l2(self.difference_square, self.reference_square, self.other_square)

    @property
    def sqnr_db(self) -> Floats:
        with np.errstate(divide="ignore"):
            return -20.0 * np.log10(self.relative_l2)

    @property
    def cosine(self) -> Floats:
        norms = np.sqrt(self.reference_square) * np.sqrt(self.other_square)
        both_zero = (self.reference_square == 0) & (self.other_square == 0)
        value = np.divide(self.product, norms, out=np.zeros_like(norms), where=norms > 0)
        return np.where(both_zero, 1.0, np.clip(value, -1.0, 1.0))

    @property
    def finite(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """False for a sample with a NaN or infinity on either side, shape (samples,)."""
        return np.isfinite(self.reference_square) & np.isfinite(self.other_square)

    def metric(self, name: str) -> Floats:
        """One of :data:`METRICS`, or :data:`PEAK`."""
        values: Floats = self.peak if name == PEAK else getattr(self, name)
        return values


def relative_l2(difference_square: Floats, reference_square: Floats, other_square: Floats) -> Floats:
    """‖d‖ / ‖a‖ from squares, with the rule for an all-zero a given at the top of this module."""
    denominator = np.where(reference_square > 0, reference_square, other_square)
    ratio = np.divide(difference_square, denominator, out=np.zeros_like(difference_square), where=denominator > 0)
    return np.sqrt(ratio)


def rows_per_sample(values: Array, samples: int) -> Array | None:
    """``values`` as C-contiguous float32 of shape (samples, values per sample).

    The first axis is the samples' own, or has a whole multiple of them, sample by sample (heads or windows folded into
    the batch). None: the tensor has no axis for the samples.
    """
    if values.ndim == 0 or values.shape[0] == 0 or values.shape[0] % samples:
        return None
    return np.ascontiguousarray(values.reshape(samples, -1), dtype=np.float32)


def warm_up() -> None:
    """Compile or load the sweep now, before several threads ask for it at once."""
    one = np.zeros((1, 1), np.float32)
    pair_sums(one, one)


def pair_sums(reference: Array, other: Array) -> PairSums:
    """Sums for two float32 arrays of shape (samples, values per sample), C-contiguous. Releases the interpreter lock.

    Raises:
        ValueError: the shapes differ.
    """
    from pipeline.errors import kernels

    if reference.shape != other.shape or reference.ndim != 2:
        raise ValueError(
            f"two arrays of the same shape (samples, values) expected, got {reference.shape} and {other.shape}"
        )
    sums = np.zeros((reference.shape[0], len(fields(PairSums))))
    kernels.pair_sums(reference, other, sums)
    return PairSums(*(np.ascontiguousarray(column) for column in sums.T))
