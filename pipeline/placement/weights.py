"""INT8 scales of constant weights: symmetric, the range of each output channel as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LEVELS", "quantize_weights", "weight_amax", "weight_scales"]

LEVELS: Final = 127
"""INT8 is used from -127 to 127, so that the range is symmetric."""

_SMALLEST_SCALE: Final = 2.0**-63
"""The product of two such scales (activation and weight) is still a normal float32."""


def weight_amax(weights: NDArray[Any], axis: int | None, name: str = "") -> NDArray[np.float32]:
    """Greatest magnitude along ``axis`` (float32, one per slice), or of the whole tensor (shape ()) for None.

    Raises:
        InputError: a weight is NaN or infinite.
    """
    magnitude = np.abs(weights.astype(np.float32))
    if not np.isfinite(magnitude).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(magnitude))[0])
        raise InputError(
            f"weight {name!r} of shape {weights.shape} holds {weights[index]} at {index}",
            remedy="repair the model, or leave the node that reads it float with --exclude",
        )
    if axis is None:
        return np.asarray(magnitude.max(initial=0.0), np.float32)
    others = tuple(i for i in range(weights.ndim) if i != axis)
    return np.asarray(magnitude.max(axis=others, initial=0.0), np.float32)


def weight_scales(amax: NDArray[np.float32]) -> NDArray[np.float32]:
    """amax / 127 in float32.

    TensorRT wants positive scales. A channel whose weights are all zero (any scale represents it) takes the tensor's
    greatest scale; a tensor of zeros takes 1; scales that are too small for float32 products are raised to 2**-63.
    """
    scales = (amax / np.float32(LEVELS)).astype(np.float32)
    greatest = float(scales.max(initial=0.0))
    empty = np.float32(greatest if greatest > 0.0 else 1.0)
    return np.maximum(np.where(amax == 0.0, empty, scales), np.float32(_SMALLEST_SCALE)).astype(np.float32)


def quantize_weights(weights: NDArray[Any], scales: NDArray[np.float32], axis: int | None) -> NDArray[np.int8]:
    """round half to even (w / scale), clamped to [-127, 127]; what QuantizeLinear computes, but for -128."""
    if axis is not None:
        shape = [1] * weights.ndim
        shape[axis] = scales.size
        scales = scales.reshape(shape)
    steps = np.rint(weights.astype(np.float32) / scales)
    return np.asarray(np.clip(steps, -LEVELS, LEVELS), np.int8)
