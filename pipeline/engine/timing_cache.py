"""Timing caches on disk: what one build measured, the next need not measure again.

One file per TensorRT version, card, driver and number of timing iterations, since a measurement means nothing
elsewhere. TensorRT's bytes follow a line of ours with that name and their SHA-256: neither call of 8.6 refuses bytes
that are no cache, so a damaged or renamed file has to be found here.

TensorRT may take one part and refuse another. Reading its own cache, 8.6 reports "Myelin error" and "The timing cache
will not be used!" where the part for Myelin (graphs that are compiled whole, such as attention) is a bare title without
an entry; the kernels' times are used all the same. So its words do not tell how much it took. That is measured here, by
the length of what it would write again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.core.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.engine.compat import Api
    from pipeline.engine.records import DeviceInfo

__all__ = ["Attached", "attach", "cache_file", "default_folder", "pack", "save", "unpack"]

_MAGIC = b"quantize timing cache "
_LOST_BYTES, _LOST_SHARE = 256, 0.01
"""Less than this is missing: a part's title, not measurements (104 bytes each in 8.6)."""


@dataclass(frozen=True)
class Attached:
    """A cache that a builder configuration has, and where it came from."""

    cache: Any
    state: Literal["new", "reused", "partly reused"]
    remark: str = ""
    """Why a file that exists was not taken, or not wholly; empty: nothing to say."""
    read: bytes = b""
    """The file as it was when the cache was read, where that was taken."""


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/quantize/timing`` or ``~/.cache/quantize/timing``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quantize" / "timing"


def cache_file(folder: Path, api: Api, device: DeviceInfo, iterations: int | None = None) -> Path:
    """Such as ``tensorrt-8.6.0_nvidia-h200_9.0_driver-580.159.04.cache``.

    Args:
        iterations: runs that each timing is the mean of, where that is not TensorRT's one: a build that asks for more
            must not choose its kernels by the times of one that asked for fewer.
    """
    card = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    timing = f"_timing-{iterations}" if iterations not in (None, 1) else ""
    return folder / f"tensorrt-{api.version}_{card}_{device.compute_capability}_driver-{device.driver}{timing}.cache"


def pack(data: bytes, name: str) -> bytes:
    """TensorRT's ``data`` behind the line that tells whether it is whole, and whether it still has its ``name``."""
    head = json.dumps({"name": name, "sha256": hashlib.sha256(data).hexdigest()})
    return _MAGIC + head.encode() + b"\n" + data


def unpack(content: bytes, name: str) -> bytes:
    """TensorRT's bytes out of a file's ``content``.

    Raises:
        ValueError: the reason why they cannot be used.
    """
    line, _, data = content.partition(b"\n")
    if not line.startswith(_MAGIC):
        raise ValueError("it does not begin as the files of quantize do")
    try:
        head = json.loads(line[len(_MAGIC) :])
        owner, digest = head["name"], head["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("its first line is damaged") from error
    if digest != hashlib.sha256(data).hexdigest():
        raise ValueError("it is damaged: its bytes have another SHA-256 than its first line says")
    if owner != name:
        raise ValueError(f"it was written as {owner}: for another version, card, driver or number of iterations")
    return data


def attach(config: Any, path: Path) -> Attached:
    """Give ``config`` the cache in ``path``, or an empty one where there is none or it cannot be used."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return _empty(config)
    try:
        data = unpack(content, path.name)
    except ValueError as error:
        return _empty(config, f"{error}; it is started afresh")
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        return _empty(config, "TensorRT rejects it; it is started afresh")
    empty = _size(config.create_timing_cache(b""))
    whole, taken = len(data) - empty, _size(cache) - empty
    lost = whole - taken
    if whole < 0 or (whole > 0 and taken <= 0):  # less than TensorRT writes for no measurement at all
        return _empty(config, "TensorRT finds nothing in it; it is started afresh")
    if lost > max(_LOST_BYTES, _LOST_SHARE * whole):
        remark = f"TensorRT takes {taken} of its {whole} bytes, and measures the rest again"
        return Attached(cache, "partly reused", remark, content)
    return Attached(cache, "reused", "", content)


def _empty(config: Any, remark: str = "") -> Attached:
    cache = config.create_timing_cache(b"")
    config.set_timing_cache(cache, False)
    return Attached(cache, "new", remark)


def _size(current: Any) -> int:
    return len(memoryview(current.serialize()))


def save(config: Any, path: Path, attached: Attached) -> None:
    """Write what the build knows now; measurements that another process wrote meanwhile are kept."""
    current = config.get_timing_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        content = path.read_bytes() if path.exists() else b""
        if content and content != attached.read:
            try:
                other = config.create_timing_cache(unpack(content, path.name))
            except ValueError:
                other = None  # attach has said so, or the next one that reads it would have
            if other is not None:
                current.combine(other, False)
        write_bytes(path, pack(bytes(memoryview(current.serialize())), path.name))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.with_name(f".{path.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
