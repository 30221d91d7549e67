"""Gaussian noise that depends on its key and position alone, fast enough to make anew for every evaluation.

Value i of the noise with key k is Phi^-1((m + 1/2) / 65536), m being 16 of the 64 bits of SplitMix64's output number
i // 4 from the state k: a normal distribution in 65536 steps of equal probability (up to 4.3 standard deviations),
scaled to variance 1. The key is a hash of the seed, the draw, the tensor and the sample, so that FP32 and every INT8
graph get the same noise whatever the batch size, the order or the machine.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fill_noise", "noise_key"]

_STEPS: Final = 1 << 16


def noise_key(*parts: str | int) -> int:
    """64 bits from what the noise is for."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@lru_cache(maxsize=1)
def _normal_table() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Quantiles of the normal distribution at the middles of 65536 steps, float32, variance 1."""
    from statistics import NormalDist

    inverse = NormalDist().inv_cdf
    upper = np.array([inverse((step + 0.5) / _STEPS) for step in range(_STEPS // 2, _STEPS)])
    both = np.concatenate([-upper[::-1], upper])
    return np.asarray(both / np.sqrt(np.mean(both**2)), np.float32)


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., None]:
    from calibrators.kernels import compiled

    def fill(out: Any, key: Any, scale: Any, table: Any) -> None:
        mask, four = np.uint64(0xFFFF), np.uint64(4)
        whole = out.size // 4
        for group in range(whole + 1):
            bits = key + np.uint64(group + 1) * np.uint64(0x9E3779B97F4A7C15)
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits = bits ^ (bits >> np.uint64(31))
            start = np.uint64(group) * four  # unsigned: numba leaves out its wrap-around of negative indices
            if group < whole:
                out[start] = scale * table[bits & mask]
                out[start + np.uint64(1)] = scale * table[(bits >> np.uint64(16)) & mask]
                out[start + np.uint64(2)] = scale * table[(bits >> np.uint64(32)) & mask]
                out[start + np.uint64(3)] = scale * table[bits >> np.uint64(48)]
            else:
                for lane in range(out.size - 4 * whole):
                    out[start + np.uint64(lane)] = scale * table[(bits >> np.uint64(16 * lane)) & mask]

    return compiled(fill)


def fill_noise(out: np.ndarray[Any, np.dtype[np.float32]], key: int, scale: float) -> None:
    """Fill ``out`` (C-contiguous float32, any shape) with noise of standard deviation ``scale``.

    Raises:
        ValueError: ``out`` is not contiguous, or of another type.
    """
    if not out.flags.c_contiguous or out.dtype != np.float32:
        raise ValueError(f"a C-contiguous float32 array is needed, got {out.dtype} with strides {out.strides}")
    _kernel()(out.reshape(-1), np.uint64(key), np.float32(scale), _normal_table())
