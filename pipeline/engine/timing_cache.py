"""Timing caches on disk: what one build measured, the next need not measure again.

One file per TensorRT version, card and driver, since a measurement means nothing elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.engine.compat import Api
    from pipeline.engine.records import DeviceInfo

__all__ = ["attach", "cache_file", "default_folder", "save"]


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/quantize/timing`` or ``~/.cache/quantize/timing``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quantize" / "timing"


def cache_file(folder: Path, api: Api, device: DeviceInfo) -> Path:
    """Such as ``tensorrt-8.6.0_nvidia-h200_9.0_driver-580.159.04.cache``."""
    card = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return folder / f"tensorrt-{api.version}_{card}_{device.compute_capability}_driver-{device.driver}.cache"


def attach(config: Any, path: Path) -> tuple[Any, str]:
    """Give ``config`` the cache in ``path``, or an empty one where there is none or TensorRT rejects it.

    Returns:
        The cache, and ``reused``, ``new`` or TensorRT's reason for a rejection.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    if data:
        cache = config.create_timing_cache(data)
        if cache is not None and config.set_timing_cache(cache, False):
            return cache, "reused"
    cache = config.create_timing_cache(b"")
    config.set_timing_cache(cache, False)
    return cache, "rejected" if data else "new"


def save(config: Any, path: Path) -> None:
    """Write what the build knows now; measurements that another process wrote meanwhile are kept."""
    current = config.get_timing_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        if path.exists():
            other = config.create_timing_cache(path.read_bytes())
            if other is not None:
                current.combine(other, False)
        write_bytes(path, bytes(memoryview(current.serialize())))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.with_name(f".{path.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
