"""Calibration caches for implicit INT8, and timing caches on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import InputError
from pipeline.engine import timing_cache
from pipeline.engine.calibration import cache_for, make_calibrator
from pipeline.engine.compat import Api
from tests.engine.conftest import CARD

API = Api(
    trt=SimpleNamespace(IInt8EntropyCalibrator2=type("IInt8EntropyCalibrator2", (), {"__init__": lambda self: None})),
    rtx=False,
    version="8.6.0",
)


def test_a_cache_gets_the_header_that_this_version_wants(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.write_text(
        "TRT-7000-EntropyCalibration2\nonnx::Conv_3: 3c010204\n(Unnamed Layer* 2) [Constant]_output: 3f800000\n"
    )
    lines = cache_for(API, path).decode().splitlines()
    assert lines == [
        "TRT-8600-EntropyCalibration2",
        "onnx::Conv_3: 3c010204",
        "(Unnamed Layer* 2) [Constant]_output: 3f800000",
    ]


@pytest.mark.parametrize(
    "content", [b"hello\nx: 3c010204\n", b"\xff\xfe", b"TRT-8600-EntropyCalibration2\nx: 7f800000\n"]
)
def test_damaged_caches_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"calibration cache|positive and finite"):
        cache_for(API, path)


def test_a_missing_cache_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"calibration cache .* does not exist"):
        cache_for(API, tmp_path / "none")


def test_the_calibrator_hands_the_cache_over_and_notices_when_it_is_not_taken() -> None:
    calibrator, asked = make_calibrator(API, b"cache")
    assert calibrator.read_calibration_cache() == b"cache"
    assert calibrator.get_batch_size() == 1
    calibrator.write_calibration_cache(b"other")
    assert asked == []
    assert calibrator.get_batch(["x", "y"]) is None
    assert asked == ["x, y"]


class Cache:
    def __init__(self, data: bytes) -> None:
        self.entries = set(data.split(b",")) - {b""}

    def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
        self.entries |= other.entries
        return True

    def serialize(self) -> bytes:
        return b",".join(sorted(self.entries))


class Config:
    """TensorRT's part: bytes that begin with ``bad`` are rejected."""

    current: Any = None

    def create_timing_cache(self, data: bytes) -> Cache | None:
        return None if data.startswith(b"bad") else Cache(data)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        self.current = cache
        return b"other card" not in cache.entries

    def get_timing_cache(self) -> Cache:
        return self.current


def test_the_file_is_named_after_version_card_and_driver(tmp_path: Path) -> None:
    path = timing_cache.cache_file(tmp_path, API, CARD)
    assert path.name == "tensorrt-8.6.0_fake-card_9.0_driver-1.2.3.cache"


def test_a_cache_is_new_then_reused_and_grows(tmp_path: Path) -> None:
    path, config = tmp_path / "deep" / "t.cache", Config()
    cache, state = timing_cache.attach(config, path)
    assert state == "new"
    cache.entries.add(b"one")
    timing_cache.save(config, path)
    second = Config()
    cache, state = timing_cache.attach(second, path)
    assert state == "reused"
    assert cache.entries == {b"one"}


def test_what_another_process_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    path, config = tmp_path / "t.cache", Config()
    cache, _ = timing_cache.attach(config, path)
    cache.entries.add(b"mine")
    path.write_bytes(b"theirs")
    timing_cache.save(config, path)
    assert path.read_bytes() == b"mine,theirs"


@pytest.mark.parametrize("content", [b"bad bytes", b"other card"])
def test_a_cache_that_tensorrt_rejects_is_started_afresh(tmp_path: Path, content: bytes) -> None:
    path, config = tmp_path / "t.cache", Config()
    path.write_bytes(content)
    cache, state = timing_cache.attach(config, path)
    assert state == "rejected"
    assert cache.entries == set()
    cache.entries.add(b"one")
    if content == b"bad bytes":
        timing_cache.save(config, path)
        assert path.read_bytes() == b"one"


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert timing_cache.default_folder() == tmp_path / "quantize" / "timing"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert timing_cache.default_folder() == tmp_path / ".cache" / "quantize" / "timing"
