"""Calibration caches for implicit INT8, and timing caches on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.core.errors import InputError
from pipeline.engine import child, timing_cache
from pipeline.engine.calibration import cache_for, make_calibrator
from pipeline.engine.child import Build
from pipeline.engine.compat import Api
from pipeline.engine.records import BuildOptions, Message
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


EMPTY = b"title;"
"""What the cache of nothing is written as."""


class Cache:
    """TensorRT's part: measurements that are words, between semicolons."""

    def __init__(self, data: bytes) -> None:
        self.entries = set(data.removeprefix(EMPTY).split(b";")) - {b""}

    def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
        self.entries |= other.entries
        return True

    def serialize(self) -> bytes:
        return EMPTY + b"".join(entry + b";" for entry in sorted(self.entries))


class Config:
    """Rejects what says ``bad``, takes anything else for a cache, as 8.6 does; drops entries that say ``myelin``."""

    def __init__(self) -> None:
        self.current = Cache(b"")
        self.read: list[bytes] = []

    def create_timing_cache(self, data: bytes) -> Cache | None:
        if data.startswith(b"bad"):
            return None
        if data:
            self.read.append(data)
        cache = Cache(data if data.startswith(EMPTY) else b"")
        cache.entries = {entry for entry in cache.entries if not entry.startswith(b"myelin")}
        return cache

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        self.current = cache
        return b"other card" not in cache.entries

    def get_timing_cache(self) -> Cache:
        return self.current


def write(path: Path, *entries: bytes) -> bytes:
    """The file as `save` writes it."""
    cache = Cache(b"")
    cache.entries = set(entries)
    path.write_bytes(timing_cache.pack(cache.serialize(), path.name))
    return path.read_bytes()


def entries_in(path: Path) -> set[bytes]:
    return Cache(timing_cache.unpack(path.read_bytes(), path.name)).entries


def test_the_file_is_named_after_version_card_driver_and_iterations(tmp_path: Path) -> None:
    path = timing_cache.cache_file(tmp_path, API, CARD)
    assert path.name == "tensorrt-8.6.0_fake-card_9.0_driver-1.2.3.cache"
    assert timing_cache.cache_file(tmp_path, API, CARD, 1) == path
    more = timing_cache.cache_file(tmp_path, API, CARD, 8)
    assert more.name == "tensorrt-8.6.0_fake-card_9.0_driver-1.2.3_timing-8.cache"


def test_a_cache_is_new_then_reused_and_grows(tmp_path: Path) -> None:
    path, config = tmp_path / "deep" / "t.cache", Config()
    attached = timing_cache.attach(config, path)
    assert (attached.state, attached.remark) == ("new", "")
    attached.cache.entries.add(b"one")
    timing_cache.save(config, path, attached)
    second = Config()
    again = timing_cache.attach(second, path)
    assert (again.state, again.remark) == ("reused", "")
    assert again.cache.entries == {b"one"}
    assert second.current is again.cache


def test_a_file_that_nobody_changed_is_not_read_again(tmp_path: Path) -> None:
    path, config = tmp_path / "t.cache", Config()
    write(path, b"one")
    attached = timing_cache.attach(config, path)
    timing_cache.save(config, path, attached)
    assert len(config.read) == 1


def test_what_another_process_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    path, config = tmp_path / "t.cache", Config()
    attached = timing_cache.attach(config, path)
    attached.cache.entries.add(b"mine")
    write(path, b"theirs")
    timing_cache.save(config, path, attached)
    assert entries_in(path) == {b"mine", b"theirs"}


WHOLE = timing_cache.pack(EMPTY + b"one;two;", "t.cache")


@pytest.mark.parametrize(
    ("content", "remark"),
    [
        (b"no timing cache", "does not begin as the files of quantize do"),
        (b"", "does not begin as the files of quantize do"),
        (WHOLE[:-3], "another SHA-256 than its first line says"),
        (WHOLE.replace(b"two", b"twx"), "another SHA-256 than its first line says"),
        (WHOLE.replace(b'"sha256"', b'"sha"'), "its first line is damaged"),
        (WHOLE.replace(b"{", b"["), "its first line is damaged"),
        (timing_cache.pack(EMPTY + b"one;", "other.cache"), "it was written as other.cache"),
        (timing_cache.pack(b"bad bytes", "t.cache"), "TensorRT rejects it"),
        (timing_cache.pack(EMPTY + b"other card;", "t.cache"), "TensorRT rejects it"),
        (timing_cache.pack(b"taken for a cache", "t.cache"), "TensorRT finds nothing in it"),
        (timing_cache.pack(b"less", "t.cache"), "TensorRT finds nothing in it"),
    ],
)
def test_a_cache_that_cannot_be_used_is_started_afresh(tmp_path: Path, content: bytes, remark: str) -> None:
    path, config = tmp_path / "t.cache", Config()
    path.write_bytes(content)
    attached = timing_cache.attach(config, path)
    assert attached.state == "new"
    assert remark in attached.remark
    assert attached.remark.endswith("; it is started afresh")
    assert attached.cache.entries == set()
    assert config.current is attached.cache
    attached.cache.entries.add(b"fresh")
    timing_cache.save(config, path, attached)
    assert b"fresh" in entries_in(path)


def test_a_part_that_tensorrt_does_not_take_is_told(tmp_path: Path) -> None:
    path, config = tmp_path / "t.cache", Config()
    write(path, b"kernel", b"myelin" + b"x" * 300)
    attached = timing_cache.attach(config, path)
    assert attached.state == "partly reused"
    assert attached.remark == "TensorRT takes 7 of its 314 bytes, and measures the rest again"
    write(path, b"kernel", b"myelin title")
    assert timing_cache.attach(config, path).state == "reused"


class Speaking(Config):
    """As 8.6, which reports to the error recorder whenever it reads a cache that has an empty part for Myelin."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build

    def create_timing_cache(self, data: bytes) -> Cache | None:
        if data:
            text = "INVALID_CONFIG: The timing cache will not be used!"
            self.build.receive(Message(severity="error", source="error recorder", text=text))
        return super().create_timing_cache(data)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    monkeypatch.setattr(child, "describe_device", lambda: CARD)
    options = BuildOptions(timing_cache_folder=tmp_path, avg_timing_iterations=4)
    return Build(API, tmp_path / "model.onnx", (), options, SimpleNamespace(send=lambda *rest, **fields: None))


def test_a_build_reads_its_cache_and_saves_it(build: Build, tmp_path: Path) -> None:
    path = timing_cache.cache_file(tmp_path, API, CARD, 4)
    write(path, b"one")
    config = Speaking(build)
    state, save = build._timing_cache(config)
    assert state == "reused"
    assert [(m.severity, m.source) for m in build.messages] == [("error", "timing cache")]
    config.current.entries.add(b"two")
    write(path, b"theirs")
    save()
    assert entries_in(path) == {b"one", b"two", b"theirs"}
    assert {m.source for m in build.messages} == {"timing cache"}
    build.receive(Message(severity="error", source="error recorder", text="later"))
    assert build.messages[-1].source == "error recorder"


def test_a_build_warns_of_a_cache_that_it_cannot_use(build: Build, tmp_path: Path) -> None:
    path = timing_cache.cache_file(tmp_path, API, CARD, 4)
    path.write_bytes(b"no timing cache")
    state, _ = build._timing_cache(Speaking(build))
    assert state == "new"
    (message,) = build.messages
    assert (message.severity, message.source) == ("warning", "check")
    assert message.text == (
        f"timing cache {path.name}: it does not begin as the files of quantize do; it is started afresh"
    )


def test_without_a_cache_nothing_is_read_or_saved(build: Build, tmp_path: Path) -> None:
    build.options = build.options.model_copy(update={"timing_cache": False})
    state, save = build._timing_cache(None)
    save()
    assert state == "off"
    build.options = build.options.model_copy(update={"timing_cache": True})
    build.device = None
    assert build._timing_cache(None)[0] == "not supported"
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert timing_cache.default_folder() == tmp_path / "quantize" / "timing"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert timing_cache.default_folder() == tmp_path / ".cache" / "quantize" / "timing"
