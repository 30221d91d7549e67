"""TensorRT's calibration cache: format, checks, and TensorRT 8.6.0's own files read and written back."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrators.cache import cache_text, parse_cache, read_cache, write_cache
from pipeline.core.errors import InputError

DATA = Path(__file__).parent / "data"
OWN = sorted(path for path in DATA.glob("*.cache") if "legacy" not in path.name)


def test_format(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", {"x": float(np.float32(1.0) / np.float32(127.0)), "a: b [1]": 0.5})
    assert (tmp_path / "c").read_text() == "TRT-8600-EntropyCalibration2\nx: 3c010204\na: b [1]: 3f000000\n"
    cache = read_cache(tmp_path / "c")
    assert cache.scales == {"x": struct.unpack(">f", bytes.fromhex("3c010204"))[0], "a: b [1]": 0.5}
    assert (cache.version, cache.algorithm) == ("8600", "EntropyCalibration2")


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1).filter(
            lambda t: t == t.strip()
        ),
        st.floats(min_value=2.0**-120, max_value=2.0**120, width=32),
    )
)
def test_round_trip(scales: dict[str, float]) -> None:
    assert parse_cache(cache_text(scales), "cache").scales == scales


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_tensorrts_own_caches(path: Path) -> None:
    cache = read_cache(path)
    assert cache.version == "8600"
    assert len(cache.scales) > 100
    assert cache_text(cache.scales, version=cache.version, algorithm=cache.algorithm) == path.read_text()


def test_there_are_caches_to_test_with() -> None:
    assert len(OWN) >= 4


@pytest.mark.parametrize("batch", [8, 32])
def test_the_legacy_calibrators_cache_is_read_and_not_written(batch: int) -> None:
    cache = read_cache(DATA / f"efficientnet-lite0-legacy-batch{batch}.cache")
    assert (cache.version, cache.algorithm) == ("", "LegacyCalibration")
    assert len(cache.scales) == 52
    assert cache.scales["x"] == struct.unpack(">f", bytes.fromhex("3c010204"))[0]
    with pytest.raises(InputError, match="no calibration algorithm 'LegacyCalibration'"):
        cache_text(cache.scales, algorithm=cache.algorithm)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cache is not a TensorRT calibration cache: its first line is ''"),
        ("x: 3c010204\n", "its first line is 'x: 3c010204'"),
        ("TRT-8600-Entropy\nx: 3c010204", "unknown calibration algorithm 'Entropy'; did you mean 'EntropyCalibration'"),
        ("TRT-8600-MinMaxCalibration\nx 3c010204", "line 2: 'x 3c010204' is not `tensor: eight hexadecimal digits`"),
        ("TRT-8600-MinMaxCalibration\nx: 3c01020", "line 2: 'x: 3c01020' is not"),
        ("TRT-8600-MinMaxCalibration\nx: 3c010204\nx: 3c010204", "line 3: tensor 'x' comes twice"),
        ("TRT-8600-MinMaxCalibration\nx: 00000000", "line 2: tensor 'x' has the scale 0, it must be positive"),
        ("TRT-8600-MinMaxCalibration\nx: bf800000", "tensor 'x' has the scale -1, it must be positive"),
        ("TRT-8600-MinMaxCalibration\nx: 7f800000", "tensor 'x' has the scale inf, it must be positive"),
        ("TRT-8600-MinMaxCalibration\nx: 7fc00000", "tensor 'x' has the scale nan, it must be positive"),
    ],
)
def test_damaged_caches(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_cache(text, "cache")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("scales", "options", "message"),
    [
        ({"x": 0.0}, {}, "tensor 'x' has the scale 0"),
        ({"x": math.nan}, {}, "tensor 'x' has the scale nan"),
        ({"x": math.inf}, {}, "tensor 'x' has the scale inf"),
        ({"x": 1e39}, {}, "tensor 'x' has the scale inf"),
        ({"x": 1e-60}, {}, "tensor 'x' has the scale 0"),
        ({"x\ny": 1.0}, {}, r"tensor name 'x\ny' cannot stand in a calibration cache"),
        ({"": 1.0}, {}, "tensor name '' cannot stand"),
        (
            {},
            {"algorithm": "MinMax"},
            "TensorRT has no calibration algorithm 'MinMax'; did you mean 'MinMaxCalibration'",
        ),
        ({}, {"version": "8.6"}, "TensorRT version '8.6' in a calibration cache must be digits"),
    ],
)
def test_what_cannot_be_written(
    tmp_path: Path, scales: dict[str, float], options: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        write_cache(tmp_path / "c", scales, **options)
    assert message in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_cache(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="it is not text"):
        read_cache(tmp_path / "binary")
