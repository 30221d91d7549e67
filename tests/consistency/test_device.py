"""The check on the device, with a stand-in for the engine; scripts/gpu_tests.sh runs it on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.artifact import INT8_MODEL, SAMPLES, Artifact
from pipeline.consistency.compare import assert_consistent
from pipeline.consistency.device import check_on_device, check_outputs, check_probe, check_scales, device_text
from pipeline.consistency.loading import load_context
from pipeline.core.errors import InputError, ToolError
from pipeline.engine.records import EngineRecord
from tests.consistency.contexts import context
from tests.consistency.graphs import X_SCALE, Y_SCALE, write_artifact

SCALE = float(np.float32(0.02))
EXPECTED = context("artifact", {"t": SCALE * 127})


def on_grid(scale: float, count: int = 500, spread: float = 40) -> np.ndarray:
    steps = np.clip(np.rint(np.random.default_rng(1).standard_normal(count) * spread), -128, 127)
    return (steps * np.float32(scale)).astype(np.float32)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (on_grid(SCALE), "ok"),
        (on_grid(SCALE * (1 + 0.5e-5)), "ok"),
        (on_grid(SCALE * (1 + 2e-5)), "other scale"),
        (on_grid(SCALE * 2), "other scale"),
        (on_grid(SCALE / 2), "other scale"),
        (on_grid(SCALE * 1.3), "other scale"),
        (np.random.default_rng(0).standard_normal(500).astype(np.float32), "not quantised"),
        (np.zeros(500, np.float32), "undetermined"),
        (np.array([2 * SCALE, 4 * SCALE, 0.0], np.float32), "undetermined"),
        (np.array([SCALE, 3 * SCALE, 0.0], np.float32), "ok"),
        (np.full(500, np.nan, np.float32), "not quantised"),
    ],
)
def test_verdict_on_a_tensor(values: np.ndarray, verdict: str) -> None:
    (check,) = check_scales({"t": values}, EXPECTED)
    assert check.verdict == verdict


def test_an_unknown_tensor() -> None:
    with pytest.raises(InputError, match="artifact has no per-tensor scale of 'u', which the engine shows"):
        check_scales({"u": on_grid(1.0)}, EXPECTED)


def test_outputs() -> None:
    fp32 = np.ones((4, 5), np.float32)
    int8 = fp32 * np.float32(1.05)
    recorded = {"int8/y": int8, "fp32/y": fp32}
    (check,) = check_outputs({"y": int8 * np.float32(1.04)}, recorded)
    assert check.passed
    assert check.relative_l2 == pytest.approx(0.04, rel=1e-4)
    assert check.allowed == pytest.approx(0.05, rel=1e-4)
    for wrong in (int8 * np.float32(1.06), int8[:2], np.full_like(int8, np.nan)):
        assert not check_outputs({"y": wrong}, recorded)[0].passed
    with pytest.raises(InputError, match="the artifact has no recorded output 'z'"):
        check_outputs({"z": fp32}, recorded)


class FakeEngine:
    """Answers as an engine of the small graph would, with scales of its own."""

    x_scale, y_scale = float(X_SCALE), float(Y_SCALE)
    outputs: dict[str, np.ndarray]
    opened: list[str]

    def __init__(self, plan: Path, *, target: str, record: Any = None) -> None:
        assert plan.read_bytes() == b"probe"
        type(self).opened.append("probe")
        self.probe = True

    @staticmethod
    def taken(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return feeds

    @classmethod
    def from_artifact(cls, folder: Path, *, target: str) -> FakeEngine:
        cls.opened.append("engine")
        engine = cls.__new__(cls)
        engine.probe = False
        return engine

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert feeds["x"].shape == (40, 4)
        if not self.probe:
            return {"z": self.outputs["z"]}
        return {"z": on_grid(self.y_scale), "x_dq": on_grid(self.x_scale)}


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_artifact(tmp_path / "art")
    with np.load(folder / SAMPLES) as samples:
        outputs = {"z": samples["int8/z"]}

    def build(model: Path, *, plan_path: Path, options: Any, **rest: Any) -> EngineRecord:
        assert model == folder / INT8_MODEL
        assert options.mark_outputs == ("x_dq",)  # z is an output of the graph already
        FakeEngine.opened.append("build")
        plan_path.write_bytes(b"probe")
        return EngineRecord(
            target="tensorrt", tensorrt="8.6.0", plan_sha256="0", plan_bytes=5, build_seconds=1.0, peak_memory_bytes=1,
            peak_gpu_memory_bytes=None, device=None, profiles=(), options=options, timing_cache="off", layers=None,
            messages=(),
        )  # fmt: skip

    monkeypatch.setattr("pipeline.engine.runner.Runner", FakeEngine)
    monkeypatch.setattr("pipeline.engine.builder.build_engine", build)
    monkeypatch.setattr(FakeEngine, "outputs", outputs, raising=False)
    monkeypatch.setattr(FakeEngine, "opened", [], raising=False)
    return folder


def test_outputs_alone(artifact: Path) -> None:
    check = check_on_device(artifact)
    assert check.passed
    assert (check.samples, check.scales, check.hidden) == (40, (), ("x", "y"))
    assert FakeEngine.opened == ["engine"]


def test_the_probe_is_built_once(artifact: Path, tmp_path: Path) -> None:
    for _ in range(2):
        check = check_on_device(artifact, probe=tmp_path / "probe.plan")
        assert check.passed
        assert [(scale.tensor, scale.verdict) for scale in check.scales] == [("x", "ok"), ("y", "ok")]
        assert check.hidden == ()
    assert FakeEngine.opened == ["engine", "build", "probe", "engine", "probe"]
    assert_consistent([load_context(artifact), check.context])


def test_the_probe_alone(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_probe(artifact, probe=tmp_path / "probe.plan")
    assert FakeEngine.opened == ["build", "probe"]
    assert [scale.verdict for scale in check.scales] == ["ok", "ok"]
    assert [output.output for output in check.outputs] == ["z"]
    assert not check.passed  # the stand-in's probe returns other values than were recorded


def test_another_way_to_return_the_tensors_is_tried(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.engine import builder

    works, tried = builder.build_engine, []

    def build(model: Path, *, options: Any, **rest: Any) -> EngineRecord:
        tried.append(options.mark_how)
        if options.mark_how != "itself":
            raise ToolError("TensorRT builds no engine:\n  Assertion failed")
        return works(model, options=options, **rest)

    monkeypatch.setattr("pipeline.engine.builder.build_engine", build)
    assert check_on_device(artifact, probe=tmp_path / "probe.plan").passed
    assert tried == ["doubled", "dequantised again", "itself"]

    def never(model: Path, **rest: Any) -> EngineRecord:
        raise ToolError("TensorRT builds no engine")

    monkeypatch.setattr("pipeline.engine.builder.build_engine", never)
    with pytest.raises(ToolError, match="builds no engine"):
        check_on_device(artifact, probe=tmp_path / "other.plan")


def test_the_probe_of_another_graph_is_not_used(artifact: Path, tmp_path: Path) -> None:
    check_on_device(artifact, probe=tmp_path / "probe.plan")
    (tmp_path / "probe.source").write_text("0" * 64)
    check_on_device(artifact, probe=tmp_path / "probe.plan")
    assert FakeEngine.opened.count("build") == 2


def test_a_device_with_another_scale(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "x_scale", float(X_SCALE) * 1.001)
    check = check_on_device(artifact, probe=tmp_path / "probe.plan")
    assert not check.passed
    (wrong,) = check.wrong
    assert (wrong.tensor, wrong.verdict) == ("x", "other scale")
    assert wrong.relative == pytest.approx(1e-3, rel=1e-2)


def test_a_device_with_other_outputs(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "outputs", {"z": FakeEngine.outputs["z"] * 1.2})
    assert not check_on_device(artifact).passed


def test_damaged_samples(artifact: Path) -> None:
    (artifact / SAMPLES).write_bytes(b"PK")
    Artifact.open(artifact).updated(files=(SAMPLES,))
    with pytest.raises(InputError, match=r"samples\.npz cannot be read"):
        check_on_device(artifact)


def test_text(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2 quantised tensors are not visible in this engine; --probe PLAN builds an engine that shows them" in (
        device_text(check_on_device(artifact))
    )
    good = device_text(check_on_device(artifact, probe=tmp_path / "probe.plan"))
    assert "scales: 2 of 2 visible tensors within 1e-05 of the artifact" in good
    monkeypatch.setattr(FakeEngine, "x_scale", float(X_SCALE) * 1.5)
    bad = device_text(check_on_device(artifact, probe=tmp_path / "probe.plan"))
    assert "x: other scale: measured 0.0464999975, the artifact has 0.0309999995" in bad
