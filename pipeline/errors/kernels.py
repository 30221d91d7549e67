"""Compiled loops of the error report. numba keeps them on the disk: compiling takes a second each, in every process.

Only the functions of :mod:`pipeline.errors.metrics` and :mod:`pipeline.errors.activations` that call them import this
module. All loops use one thread on purpose: callers spread tensors over threads, which a busy machine slows far less
than barriers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calibrators.kernels import compiled

__all__ = ["activation_sums", "pair_sums", "scale_energies"]

_SUMS = {"error_model": "python", "fastmath": {"reassoc", "contract"}}
"""Options of loops that only add up; their order of addition is free."""


def _pair_sums(reference: Any, other: Any, sums: Any) -> None:
    """sums: (samples, 6)"""
    for row in range(reference.shape[0]):
        a_square = 0.0
        b_square = 0.0
        d_square = 0.0
        product = 0.0
        largest = np.float32(0.0)
        peak = np.float32(0.0)
        for index in range(reference.shape[1]):
            a = np.float64(reference[row, index])
            b = np.float64(other[row, index])
            d = a - b
            a_square += a * a
            b_square += b * b
            d_square += d * d
            product += a * b
            largest = max(largest, np.float32(abs(d)))
            peak = max(peak, abs(reference[row, index]))
        sums[row, 0] = a_square
        sums[row, 1] = b_square
        sums[row, 2] = d_square
        sums[row, 3] = product
        sums[row, 4] = largest
        sums[row, 5] = peak


pair_sums = compiled(_pair_sums, **_SUMS)


def _energies(values: Any, scale: Any, sums: Any) -> None:
    """sums: (6,), of one piece."""
    threshold = np.float32(127.0) * scale
    clipped = 0
    clipped_energy = 0.0
    rounded_energy = 0.0
    energy = 0.0
    zeros = 0
    largest = np.float32(0.0)
    for index in range(values.size):
        x = values[index]
        size = abs(x)
        code = min(max(np.rint(x / scale), np.float32(-128.0)), np.float32(127.0))
        error = np.float64(x) - np.float64(code) * np.float64(scale)
        square = error * error
        clipped_energy += square if size > threshold else 0.0
        rounded_energy += 0.0 if size > threshold else square
        clipped += 1 if size > threshold else 0
        zeros += 1 if size == np.float32(0.0) else 0
        energy += np.float64(x) * np.float64(x)
        largest = max(largest, size)
    sums[0] = clipped
    sums[1] = clipped_energy
    sums[2] = rounded_energy
    sums[3] = energy
    sums[4] = zeros
    sums[5] = largest


energies = compiled(_energies, **_SUMS)


def _activation_sums(values: Any, scale: Any, to_bin: Any, sums: Any, histogram: Any) -> None:
    """sums: (samples, 6), histogram: (bins + 1,), added to; a bin is 1 / ``to_bin`` wide."""
    # Two loops over pieces that stay in the cache: sums vectorise, counting does not.
    bins = histogram.size - 1
    top = np.float32(bins)
    part = np.zeros(6)
    counts = np.zeros((4, bins + 1), np.int64)  # neighbours count apart: equal ones would wait for each other
    for row in range(values.shape[0]):
        for start in range(0, values.shape[1], 65536):
            piece = values[row, start : start + 65536]
            energies(piece, scale, part)
            for column in range(5):
                sums[row, column] += part[column]
            sums[row, 5] = max(sums[row, 5], part[5])
            for index in range(piece.size):
                counts[index & 3, int(min(abs(piece[index]) * to_bin, top))] += 1
    histogram += counts.sum(axis=0)


activation_sums = compiled(_activation_sums, error_model="python")


def _scale_energies(values: Any, scales: Any, sums: Any) -> None:
    """sums: (samples, scales)."""
    for number in range(scales.size):
        scale = scales[number]
        inverse = np.float32(1.0) / scale
        for row in range(values.shape[0]):
            total = np.float64(0.0)
            for index in range(values.shape[1]):
                x = values[row, index]
                code = min(max(np.rint(x * inverse), np.float32(-128.0)), np.float32(127.0))
                error = x - code * scale
                total += np.float64(error) * np.float64(error)
            sums[row, number] = total


scale_energies = compiled(_scale_energies, **_SUMS)
