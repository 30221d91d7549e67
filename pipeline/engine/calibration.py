"""Implicit INT8 on TensorRT <= 10: a calibrator that hands over a finished calibration cache and measures nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.engine.compat import Api

__all__ = ["cache_for", "make_calibrator"]

_HEADER = re.compile(r"TRT-(\d+)-(\w+)$")
_ALGORITHM = "EntropyCalibration2"


def header(api: Api) -> str:
    """First line of a cache that this version accepts, such as ``TRT-8600-EntropyCalibration2``.

    The number is major * 1000 + minor * 100 + patch, from 10 on major * 10000 + minor * 100 + patch.
    """
    major, minor, patch = (int(part) for part in api.version.split(".")[:3])
    number = major * (1000 if major < 10 else 10000) + minor * 100 + patch
    return f"TRT-{number}-{_ALGORITHM}"


def cache_for(api: Api, path: Path) -> bytes:
    """The cache in ``path`` under the header that this version wants: with another one TensorRT would recalibrate.

    Raises:
        InputError: the file is missing or is no calibration cache, or a scale in it is not a positive number.
    """
    try:
        first, *lines = path.read_text().splitlines() or [""]
    except FileNotFoundError as error:
        raise InputError(f"calibration cache {path} does not exist") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a calibration cache: it is not text") from error
    if not _HEADER.match(first.strip()):
        raise InputError(
            f"{path} is not a calibration cache: its first line is {first[:60]!r}, expected TRT-VERSION-ALGORITHM"
        )
    entries = [line for line in lines if line.strip()]
    if not entries:
        raise InputError(f"calibration cache {path} has no scales")
    for line in entries:
        name, separator, digits = line.rpartition(": ")
        if not separator or not re.fullmatch(r"[0-9a-f]{1,8}", digits.strip()):
            raise InputError(f"calibration cache {path}: {line!r} is not of the form 'tensor: hexadecimal float32'")
        exponent = int(digits, 16) >> 23 & 0xFF
        if int(digits, 16) >> 31 or int(digits, 16) == 0 or exponent == 0xFF:
            raise InputError(
                f"calibration cache {path}: the scale of {name!r} is not a positive finite number ({digits})"
            )
    return "\n".join([header(api), *entries, ""]).encode()


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
