"""Compiled Kullback-Leibler divergences of all candidate thresholds of a histogram.

Each candidate costs one term per quantisation level instead of one per bin: with c the counts, the expanded
distribution is constant on the non-empty bins of a level, so KL(P||Q) needs only sums of c, of c ln c and of
non-empty bins over the level, all differences of cumulative sums.

The logarithm is our own, of basic operations only, so that a threshold does not depend on the machine's maths library.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from calibrators.kernels import compiled

__all__ = ["divergences"]

_LN2 = math.log(2.0)
_MANTISSA = np.int64(0x000FFFFFFFFFFFFF)
_HALF_EXPONENT = np.int64(0x3FE0000000000000)
_SQRT_HALF = math.sqrt(0.5)


@compiled
def _logarithms(values: Any, bits: Any, result: Any) -> None:
    """ln of positive normal float64 ``values`` to 2 units in the last place; 0 for 0. ``bits``: their memory as int64.

    v = m 2^e with m in [sqrt(1/2), sqrt(2)); ln m = 2 atanh((m - 1) / (m + 1)) by its series, written out because a
    loop over the terms would not be vectorised.
    """
    mantissa_bits = np.empty(values.size, np.int64)
    mantissas = mantissa_bits.view(np.float64)
    for k in range(values.size):
        mantissa_bits[k] = (bits[k] & _MANTISSA) | _HALF_EXPONENT
    for k in range(values.size):
        m = mantissas[k]
        e = np.float64((bits[k] >> np.int64(52)) - np.int64(1022))
        small = m < _SQRT_HALF
        m = m * 2.0 if small else m
        e = e - 1.0 if small else e
        s = (m - 1.0) / (m + 1.0)
        q = s * s
        p = 1.0 / 23.0
        p = p * q + 1.0 / 21.0
        p = p * q + 1.0 / 19.0
        p = p * q + 1.0 / 17.0
        p = p * q + 1.0 / 15.0
        p = p * q + 1.0 / 13.0
        p = p * q + 1.0 / 11.0
        p = p * q + 1.0 / 9.0
        p = p * q + 1.0 / 7.0
        p = p * q + 1.0 / 5.0
        p = p * q + 1.0 / 3.0
        p = p * q + 1.0
        value = e * _LN2 + 2.0 * s * p
        result[k] = value if values[k] > 0.0 else 0.0


@compiled
def divergences(counts: Any, log2_levels: Any) -> Any:
    """KL(P||Q) for i = levels .. n bins kept, float64 (n - levels + 1,); +inf where Q is 0 and P is not.

    Bin k belongs to level floor(k * levels / i).

    Args:
        counts: float64 (n,), non-negative, not all zero.
        log2_levels: the number of quantisation levels, a power of two and at most n, is 2**log2_levels.
    """
    levels = 1 << log2_levels
    n = counts.size
    logs = np.empty(n)
    _logarithms(counts, counts.view(np.int64), logs)
    mass, plogp, filled = np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1)
    for k in range(n):
        mass[k + 1] = mass[k] + counts[k]
        plogp[k + 1] = plogp[k] + counts[k] * logs[k]
        filled[k + 1] = filled[k] + (1.0 if counts[k] > 0.0 else 0.0)
    total = mass[n]
    result = np.empty(n - levels + 1)
    edge_mass, edge_filled = np.empty(levels + 1), np.empty(levels + 1)
    # Three more terms share the loop of the logarithms: the last bin with all that lies outside, inside, total.
    spread, terms = np.empty(levels + 3), np.empty(levels + 3)
    spread_bits = spread.view(np.int64)
    for kept in range(levels, n + 1):
        inside, last = mass[kept], counts[kept - 1]
        outside = total - inside
        if inside == 0.0 or (outside > 0.0 and last == 0.0):
            result[kept - levels] = np.inf
            continue
        for j in range(levels + 1):
            edge = np.uintp((j * kept + levels - 1) >> log2_levels)
            edge_mass[j] = mass[edge]
            edge_filled[j] = filled[edge]
        for j in range(levels):
            spread[j] = (edge_mass[j + 1] - edge_mass[j]) / max(edge_filled[j + 1] - edge_filled[j], 1.0)
        spread[levels], spread[levels + 1], spread[levels + 2] = last + outside, inside, total
        _logarithms(spread, spread_bits, terms)
        a, b, c, d = 0.0, 0.0, 0.0, 0.0  # four sums: an addition need not wait for the one before
        for j in range(0, levels - levels % 4, 4):
            a += (edge_mass[j + 1] - edge_mass[j]) * terms[j]
            b += (edge_mass[j + 2] - edge_mass[j + 1]) * terms[j + 1]
            c += (edge_mass[j + 3] - edge_mass[j + 2]) * terms[j + 2]
            d += (edge_mass[j + 4] - edge_mass[j + 3]) * terms[j + 3]
        for j in range(levels - levels % 4, levels):
            a += (edge_mass[j + 1] - edge_mass[j]) * terms[j]
        cross = outside * terms[levels - 1] + ((a + b) + (c + d))
        own = plogp[kept - 1] + spread[levels] * terms[levels]
        result[kept - levels] = (own - cross) / total + terms[levels + 1] - terms[levels + 2]
    return result
