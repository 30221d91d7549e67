"""Samples from a user's callable.

It may give an iterable (a generator, list, DataLoader) or be one itself. Each item is an array or tensor, or a dict of
them by input name. An array of the input's rank is a batch and is cut into samples; one of a rank less is one sample.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .loading import Complaint

__all__ = ["send_samples"]

_Array = np.ndarray[Any, np.dtype[Any]]


def send_samples(
    target: Any,
    inputs: list[tuple[str, int | None]],
    wants: Callable[[], bool],
    send: Callable[[dict[str, Any], dict[str, _Array]], None],
) -> None:
    """Send each sample of ``target``, or word of one passed over, in order.

    Args:
        target: what the user's name refers to.
        inputs: name and rank (batch axis included, None: unknown) of each model input.
        wants: whether the next sample is wanted; asked once per sample.
        send: sends a header and arrays.
    """
    names = [name for name, _ in inputs]
    for position, item in enumerate(_items(target)):
        arrays = _by_name(item, names, position)
        for sample in _samples(arrays, dict(inputs), position):
            if wants():
                send({"kind": "sample"}, sample)
            else:
                send({"kind": "skipped"}, {})


def _items(target: Any) -> Iterable[Any]:
    result = target() if callable(target) else target
    if isinstance(result, Mapping) or _is_array(result):
        return [result]
    if isinstance(result, (str, bytes)) or not (hasattr(result, "__iter__") or hasattr(result, "__getitem__")):
        raise Complaint(
            f"the callable must yield arrays or dicts of arrays, it returned {type(result).__name__}",
            "write a generator: `yield array` for each batch or sample",
        )
    return result  # type: ignore[no-any-return]


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    # Only code that has imported torch can yield a tensor.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _by_name(item: Any, names: list[str], position: int) -> dict[str, _Array]:
    if isinstance(item, Mapping):
        found = {str(name): item[name] for name in item}
        if set(found) != set(names):
            raise Complaint(
                f"item {position} has the keys {', '.join(found)}, the model's inputs are {', '.join(names)}",
                "yield dicts with exactly one array per model input",
            )
        return {name: _array(found[name], name, position) for name in names}
    if isinstance(item, tuple):
        raise Complaint(
            f"item {position} is a tuple of {len(item)}",
            "yield the array alone, without labels"
            if len(names) == 1
            else f"yield a dict with the keys {', '.join(names)}",
        )
    if len(names) != 1:
        raise Complaint(
            f"item {position} is {type(item).__name__}, and the model has {len(names)} inputs",
            f"yield a dict with the keys {', '.join(names)}",
        )
    return {names[0]: _array(item, names[0], position)}


def _array(value: Any, name: str, position: int) -> _Array:
    if _is_tensor(value):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # numpy has no such type; float32 holds all its values
            value = value.float()
        return value.numpy()  # type: ignore[no-any-return]
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise Complaint(
            f"item {position}: the value for {name!r} is no array: {error}", "yield numpy arrays or torch tensors"
        ) from error
    if array.dtype.kind not in "fiub":
        raise Complaint(
            f"item {position}: the value for {name!r} is {type(value).__name__} of {array.dtype}, no array of numbers",
            "yield numpy arrays or torch tensors",
        )
    return array


def _samples(arrays: dict[str, _Array], ranks: dict[str, int | None], position: int) -> Iterator[dict[str, _Array]]:
    batch: dict[str, int] = {}
    single: list[str] = []
    for name, array in arrays.items():
        rank = ranks[name]
        if rank is None or array.ndim == rank:
            if array.ndim == 0:
                raise Complaint(
                    f"item {position}: the value for {name!r} is a single number",
                    "yield an array whose first axis is the batch",
                )
            batch[name] = array.shape[0]
        elif array.ndim == rank - 1:
            single.append(name)
        else:
            raise Complaint(
                f"item {position}: the array for {name!r} has the shape {array.shape}, the input has rank {rank}",
                f"yield a batch (rank {rank}) or one sample (rank {rank - 1})",
            )
    if batch and single:
        raise Complaint(
            f"item {position}: {', '.join(batch)} is a batch and {', '.join(single)} one sample",
            "yield both as batches",
        )
    if single:
        yield arrays
        return
    if len(set(batch.values())) > 1:
        raise Complaint(
            f"item {position}: the arrays have different batch sizes: "
            + ", ".join(f"{name} {size}" for name, size in batch.items()),
            "every array needs the same first dimension",
        )
    for row in range(next(iter(batch.values()))):
        yield {name: array[row] for name, array in arrays.items()}
