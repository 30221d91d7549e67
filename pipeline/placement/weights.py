"""INT8 scales of constant weights: symmetric, the range of each output channel as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LEVELS", "dequantize_weights", "quantize_weights", "weight_amax", "weight_scales"]

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
    filled: NDArray[np.float32] = np.maximum(np.where(amax == 0.0, empty, scales), np.float32(_SMALLEST_SCALE))
    return filled.astype(np.float32)


def quantize_weights(weights: NDArray[Any], scales: NDArray[np.float32], axis: int | None) -> NDArray[np.int8]:
    """w / scale as integers in [-127, 127], rounded so that the sum of every output channel is kept.

    Rounding each weight to the nearest integer leaves an output channel with a sum of errors E = sum(w / scale - q) of
    several steps; the channel's output is then off by E * scale * (mean of the input), which no calibration sees, and
    which a depthwise filter that takes differences amplifies. Here the round(abs(E)) weights with the greatest errors
    of E's sign are rounded the other way, so that abs(E) <= 1/2. No weight is off by a whole step. Ties go to the lower
    index. The idea is that of SQuant (Guo et al., "On-the-Fly Data-Free Quantization via Diagonal Hessian
    Approximation", ICLR 2022), without its split into kernels.

    ``axis`` None: one scale, and one sum for each index of the last axis (the columns of a matrix product).
    """
    rows = np.moveaxis(weights, -1 if axis is None else axis, 0)
    shape = rows.shape
    exact = rows.reshape(shape[0], -1).astype(np.float64) / np.broadcast_to(scales.reshape(-1, 1), (shape[0], 1))
    steps = np.clip(np.rint(exact), -LEVELS, LEVELS)
    error = exact - steps
    total = error.sum(axis=1, keepdims=True)
    sign = np.where(total < 0.0, -1.0, 1.0)
    worth = np.where(np.abs(steps + sign) > LEVELS, 0.0, error * sign)
    order = np.argsort(-worth, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1])[np.newaxis, :], axis=1)
    steps += np.where((rank < np.rint(np.abs(total))) & (worth > 0.0), sign, 0.0)
    return np.asarray(np.moveaxis(steps.reshape(shape), 0, -1 if axis is None else axis), np.int8)


def dequantize_weights(steps: NDArray[np.int8], scales: NDArray[np.float32], axis: int | None) -> NDArray[np.float32]:
    """steps * scale in float32; QuantizeLinear with these scales gives exactly ``steps`` again."""
    if axis is not None:
        shape = [1] * steps.ndim
        shape[axis] = scales.size
        scales = scales.reshape(shape)
    return np.asarray(steps.astype(np.float32) * scales, np.float32)
