"""TensorRT's calibration cache (TensorRT 10 and older): text, one scale per tensor of the network as imported.

First line ``TRT-<version>-<algorithm>``, such as ``TRT-8600-EntropyCalibration2``; then ``tensor: hex``, the eight
lower-case hexadecimal digits of the big-endian IEEE 754 float32 amax / 127. Tensor names may hold spaces, colons and
brackets, so a line is split at its last ``": "``. Weights are not in it. With a header of another version or algorithm
TensorRT calibrates again. IInt8LegacyCalibrator's cache has another first line, ``0 <cutoff> <quantile>``, two
hexadecimal float64 (seen with 8.6.0); it is read and not written.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipeline.core.errors import InputError, did_you_mean
from pipeline.core.files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["ALGORITHMS", "CalibrationCache", "cache_text", "parse_cache", "read_cache", "write_cache"]

ALGORITHMS: Final = ("EntropyCalibration", "EntropyCalibration2", "MinMaxCalibration")
"""What a header that we write may name."""

_HEADER: Final = re.compile(r"TRT-(\d+)-(\w+)")
_LEGACY_HEADER: Final = re.compile(r"\d+ [0-9a-f]{16} [0-9a-f]{16}")
_SEPARATOR: Final = ": "


@dataclass(frozen=True)
class CalibrationCache:
    """A cache that was read and checked."""

    header: str
    """The first line."""
    scales: Mapping[str, float]
    """Tensor name to amax / 127, exactly the float32 in the file; in its order."""

    @property
    def version(self) -> str:
        """TensorRT's version without dots, such as ``8600``; empty in the legacy calibrator's cache."""
        return "" if _LEGACY_HEADER.fullmatch(self.header) else self.header.split("-")[1]

    @property
    def algorithm(self) -> str:
        return "LegacyCalibration" if _LEGACY_HEADER.fullmatch(self.header) else self.header.split("-")[2]


def cache_text(scales: Mapping[str, float], *, version: str = "8600", algorithm: str = "EntropyCalibration2") -> str:
    """The cache as text, in the order of ``scales``.

    Raises:
        InputError: an unknown algorithm, a version that is not digits, a name that a line cannot hold, or a scale that
            is not a positive, normal float32.
    """
    if algorithm not in ALGORITHMS:
        raise InputError(f"TensorRT has no calibration algorithm {algorithm!r}; {did_you_mean(algorithm, ALGORITHMS)}")
    if not version.isdecimal():
        raise InputError(f"TensorRT version {version!r} in a calibration cache must be digits, such as 8600")
    lines = [f"TRT-{version}-{algorithm}"]
    for name, scale in scales.items():
        if not name or "\n" in name or "\r" in name:
            raise InputError(f"tensor name {name!r} cannot stand in a calibration cache", remedy="rename the tensor")
        try:
            data = struct.pack(">f", scale)
        except OverflowError:
            data = struct.pack(">f", math.inf)
        _check(name, struct.unpack(">f", data)[0], "the calibration cache")
        lines.append(f"{name}{_SEPARATOR}{data.hex()}")
    return "\n".join(lines) + "\n"


def write_cache(
    path: Path, scales: Mapping[str, float], *, version: str = "8600", algorithm: str = "EntropyCalibration2"
) -> None:
    """Write :func:`cache_text` atomically; the same errors."""
    write_text(path, cache_text(scales, version=version, algorithm=algorithm))


def parse_cache(text: str, origin: str) -> CalibrationCache:
    """The scales in the text of a cache; ``origin`` names it in messages.

    Raises:
        InputError: no cache, a damaged line, a tensor twice, or a scale that is zero, negative, NaN or infinite (as
            TensorRT writes when a calibration failed).
    """
    header, *lines = text.splitlines() or [""]
    match = _HEADER.fullmatch(header.strip())
    legacy = _LEGACY_HEADER.fullmatch(header.strip())
    if match is None and legacy is None:
        raise InputError(
            f"{origin} is not a TensorRT calibration cache: its first line is {header[:40]!r}",
            remedy="it should be such as TRT-8600-EntropyCalibration2",
        )
    if match is not None and match[2] not in ALGORITHMS:
        raise InputError(f"{origin}: unknown calibration algorithm {match[2]!r}; {did_you_mean(match[2], ALGORITHMS)}")
    scales: dict[str, float] = {}
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        name, separator, digits = line.rstrip().rpartition(_SEPARATOR)
        if not separator or not name or not re.fullmatch(r"[0-9a-fA-F]{8}", digits):
            raise InputError(f"{origin}, line {number}: {line[:60]!r} is not `tensor: eight hexadecimal digits`")
        if name in scales:
            raise InputError(f"{origin}, line {number}: tensor {name!r} comes twice")
        scale: float = struct.unpack(">f", bytes.fromhex(digits))[0]
        _check(name, scale, f"{origin}, line {number}")
        scales[name] = scale
    return CalibrationCache(header.strip(), scales)


def read_cache(path: Path) -> CalibrationCache:
    """:func:`parse_cache` of a file.

    Raises:
        InputError: as :func:`parse_cache`, or the file is missing or not text.
    """
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise InputError(f"calibration cache {path} does not exist") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a TensorRT calibration cache: it is not text") from error
    return parse_cache(text, str(path))


def _check(name: str, scale: float, where: str) -> None:
    if not (math.isfinite(scale) and scale > 0.0):
        raise InputError(
            f"{where}: tensor {name!r} has the scale {scale:g}, it must be positive and finite",
            remedy="its calibration failed: calibrate again with data that reaches this tensor",
        )
