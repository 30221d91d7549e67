"""A user's metric: called once per batch with the outputs of the model, gives one number per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .loading import Complaint

__all__ = ["serve_metric"]

_Array = np.ndarray[Any, np.dtype[Any]]
_OUTPUT = "output/"


def serve_metric(
    target: Any,
    receive: Callable[[], tuple[dict[str, Any], dict[str, _Array]]],
    send: Callable[[dict[str, Any], dict[str, _Array]], None],
) -> None:
    """Answer each batch until the parent says that there are no more.

    Args:
        target: called with ``outputs`` (name to array, samples along the first axis), ``samples`` (their numbers) and
            ``labels`` (class indices, or None).
        receive: the next message: ``samples``, ``labels`` where there are any, and ``output/NAME`` arrays.
        send: sends a header and arrays.
    """
    if not callable(target):
        raise Complaint(f"the metric is {type(target).__name__}, not a callable", "name a function")
    while True:
        header, arrays = receive()
        if header["kind"] == "end":
            return
        outputs = {name.removeprefix(_OUTPUT): array for name, array in arrays.items() if name.startswith(_OUTPUT)}
        samples = arrays["samples"]
        values = target(outputs, samples, arrays.get("labels"))
        send({"kind": "values"}, {"values": _numbers(values, len(samples))})


def _numbers(values: Any, count: int) -> _Array:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise Complaint(
            f"the metric returned {type(values).__name__}, which is no array of numbers", "return one number per sample"
        ) from error
    if array.shape != (count,):
        raise Complaint(
            f"the metric returned an array of shape {array.shape} for {count} samples", "return one number per sample"
        )
    return array
