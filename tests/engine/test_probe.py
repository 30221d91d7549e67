"""Which targets work here, and `quantize doctor`."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from pipeline.cli.doctor import command as doctor
from pipeline.core.errors import ToolError
from pipeline.engine import device, probe
from pipeline.engine.probe import TargetStatus, default_targets
from tests.engine.conftest import CARD


@pytest.fixture(autouse=True)
def _fresh() -> None:
    probe.probe.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: SimpleNamespace())


def test_rtx_works_with_the_real_builder() -> None:
    pytest.importorskip("tensorrt_rtx")
    status = probe.probe("rtx")
    assert status.works, status.reason
    assert status.version
    assert "build" in status.reason
    if device.no_device_reason():
        assert "engines cannot run here: no NVIDIA driver" in status.reason


def test_onnx_works_where_onnxruntime_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.probe("onnx").works
    probe.probe.cache_clear()
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    status = probe.probe("onnx")
    assert (status.works, status.reason) == (False, "onnxruntime is not installed")


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    for target, extra in (("rtx", "rtx"), ("tensorrt", "gpu")):
        status = probe.probe(target)
        assert (status.works, status.version) == (False, None)
        assert f"pip install 'quantize-trt[{extra}]'" in status.reason


def test_tensorrt_without_a_driver_is_never_started(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "no_device_reason", lambda: "no NVIDIA driver: test")
    monkeypatch.setattr(probe.subprocess, "run", lambda *a, **k: pytest.fail("it was started"))
    assert probe.probe("tensorrt").reason.startswith("no NVIDIA driver: test")


@pytest.mark.parametrize(
    ("code", "words"), [(-11, "its process ended with signal 11: last words"), (3, "ended with status 3: last words")]
)
def test_a_crash_is_a_reason(installed: None, monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    done = subprocess.CompletedProcess([], code, stdout="", stderr="first\nlast words\n")
    monkeypatch.setattr(probe, "no_device_reason", lambda: None)
    monkeypatch.setattr(probe.subprocess, "run", lambda *a, **k: done)
    status = probe.probe("tensorrt")
    assert not status.works
    assert words.split(": ")[0] in status.reason
    assert "last words" in status.reason


def test_a_builder_that_hangs_is_a_reason(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*arguments: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(probe.subprocess, "run", hang)
    assert "no builder within" in probe.probe("rtx").reason


@pytest.mark.parametrize(
    ("target", "card", "works", "words"),
    [
        ("tensorrt", CARD, True, "builds and runs on the Fake card"),
        ("rtx", CARD, True, "builds here; engines do not run on the Fake card, whose compute capability is 9.0"),
        ("rtx", CARD.model_copy(update={"compute_capability": "8.9"}), True, "builds and runs on the Fake card"),
        ("rtx", None, True, "builds here; engines cannot run here"),
    ],
)
def test_what_the_child_says(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    card: object,
    works: bool,
    words: str,
) -> None:
    logger = SimpleNamespace(ERROR=1)
    trt = SimpleNamespace(
        Builder=lambda logger: object(), Logger=type("Logger", (), {"ERROR": 1, "__init__": lambda s, x: None})
    )
    monkeypatch.setattr(probe, "load_api", lambda name: SimpleNamespace(version="1.2.3", trt=trt))
    monkeypatch.setattr(probe, "describe_device", lambda: card)
    assert logger.ERROR
    probe.main([target])
    status = TargetStatus.model_validate_json(capsys.readouterr().out)
    assert status.works == works
    assert status.version == "1.2.3"
    assert words in status.reason


def test_a_builder_that_does_not_start_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> None:
        raise ToolError("factory function returned nullptr")

    monkeypatch.setattr(probe, "load_api", broken)
    probe.main(["tensorrt"])
    status = TargetStatus.model_validate_json(capsys.readouterr().out)
    assert (status.works, status.reason) == (False, "factory function returned nullptr")


def test_the_default_targets_are_those_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    working = {"tensorrt", "onnx"}
    monkeypatch.setattr(
        probe, "probe", lambda name: TargetStatus(name=name, works=name in working, version=None, reason="")
    )
    assert default_targets() == ("tensorrt", "onnx")


def test_doctor_says_it_all() -> None:
    result = CliRunner().invoke(doctor, [])
    assert result.exit_code == 0
    for words in ("rtx", "tensorrt", "onnx", "cores", "Python", "numpy", "driver"):
        assert words in result.output
    value = json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)
    assert [status["name"] for status in value["targets"]] == ["rtx", "tensorrt", "onnx"]
    assert value["packages"]["numpy"]


class Library:
    """A driver library whose calls return chosen statuses."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: self.statuses.get(name, 0)


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (None, "no NVIDIA driver: libcuda.so.1 cannot be loaded"),
        (Library(cuInit=100), "the NVIDIA driver finds no device"),
        (Library(cuInit=803), "cuInit returns 803"),
        (Library(), "the NVIDIA driver finds no device"),
    ],
)
def test_why_there_is_no_device(monkeypatch: pytest.MonkeyPatch, library: Library | None, words: str) -> None:
    monkeypatch.setattr(device, "_library", lambda name: library)
    assert words in (device.no_device_reason() or "")
    assert device.describe_device() is None
    assert device.device_count() == 0


def test_a_driver_that_describes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_library", lambda name: Library(cuDeviceGetName=1))
    monkeypatch.setattr(device, "no_device_reason", lambda: None)
    monkeypatch.setattr(device, "device_count", lambda: 1)
    with pytest.raises(ToolError, match="does not describe device 0"):
        device.describe_device()


def test_without_nvml_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_library", lambda name: None)
    assert device.driver_version() is None
    assert device.MemoryMeter().used_bytes() is None
    monkeypatch.setattr(
        device, "_library", lambda name: Library(nvmlSystemGetDriverVersion=1, nvmlDeviceGetMemoryInfo=1)
    )
    assert device.driver_version() is None
    assert device.MemoryMeter().used_bytes() is None
