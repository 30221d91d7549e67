"""Messages between parent and child over a pipe: a JSON header and arrays as raw bytes.

One message: the header's length (4 bytes, little-endian), the header (UTF-8 JSON), then for each entry of its
``arrays`` list, ``[name, dtype, shape]``, the array's bytes in C order.
"""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ARRAYS", "read_message", "write_all", "write_message"]

ARRAYS = "arrays"
_LENGTH = struct.Struct("<I")
_Array = np.ndarray[Any, np.dtype[Any]]


def write_all(descriptor: int, data: memoryview | bytes) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]


def write_message(descriptor: int, header: Mapping[str, Any], arrays: Mapping[str, _Array] | None = None) -> None:
    """Send ``header`` and ``arrays``."""
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in (arrays or {}).items()}
    full = {**header, ARRAYS: [[name, array.dtype.str, list(array.shape)] for name, array in contiguous.items()]}
    text = json.dumps(full).encode()
    write_all(descriptor, _LENGTH.pack(len(text)) + text)
    for array in contiguous.values():
        if array.nbytes:
            write_all(descriptor, array.reshape(-1).view(np.uint8).data)


def read_message(read_into: Callable[[memoryview], None]) -> tuple[dict[str, Any], dict[str, _Array]]:
    """Receive one message. ``read_into`` fills a buffer or raises ``EOFError``."""
    length = bytearray(_LENGTH.size)
    read_into(memoryview(length))
    text = bytearray(_LENGTH.unpack(length)[0])
    read_into(memoryview(text))
    header = json.loads(text)
    arrays: dict[str, _Array] = {}
    for name, dtype, shape in header.pop(ARRAYS):
        array = np.empty(tuple(shape), dtype=np.dtype(dtype))
        if array.nbytes:
            read_into(array.reshape(-1).view(np.uint8).data)
        arrays[name] = array
    return header, arrays
