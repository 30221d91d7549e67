"""Implicit INT8 on TensorRT <= 10: a calibrator that hands over a finished calibration cache and measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calibrators.cache import cache_text, read_cache

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.engine.compat import Api

__all__ = ["cache_for", "cache_version", "make_calibrator"]


def cache_version(api: Api) -> str:
    """The number in the header of a cache that this version accepts, such as ``8600``.

    major * 1000 + minor * 100 + patch, from 10 on major * 10000 + minor * 100 + patch.
    """
    major, minor, patch = (int(part) for part in api.version.split(".")[:3])
    return str(major * (1000 if major < 10 else 10000) + minor * 100 + patch)


def cache_for(api: Api, path: Path) -> bytes:
    """The cache in ``path`` under the header that this version wants: with another one TensorRT would recalibrate.

    Raises:
        InputError: the file is missing or is no calibration cache, or a scale in it is not a positive number.
    """
    return cache_text(read_cache(path).scales, version=cache_version(api), algorithm="EntropyCalibration2").encode()


def make_calibrator(api: Api, cache: bytes) -> tuple[Any, list[str]]:
    """An ``IInt8EntropyCalibrator2`` that returns ``cache``.

    Returns:
        The calibrator, and a list that gets an entry when TensorRT asks for data: it did not accept the cache.
        (An exception inside a callback would be lost.)
    """
    asked: list[str] = []
    base = api.trt.IInt8EntropyCalibrator2

    class Calibrator(base):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            base.__init__(self)

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: list[str]) -> None:
            asked.append(", ".join(names))

        def read_calibration_cache(self) -> bytes:
            return cache

        def write_calibration_cache(self, cache: Any) -> None:
            """Nothing was measured."""

    return Calibrator(), asked
