"""On the machine that serves: compile an artifact, check it, look into it, measure it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import package
from pipeline.artifact import Artifact
from pipeline.core.errors import CheckFailed, InputError
from pipeline.engine import bench, fastest, suite
from pipeline.engine.bench import Measurement, measure_compute
from pipeline.engine.dispatch import FastestRunner, float_engine, serve
from pipeline.engine.fastest import Fastest
from pipeline.engine.from_artifact import build_from_artifact
from pipeline.engine.records import EngineRecord
from pipeline.engine.runner import Runner
from pipeline.engine.suite import run_suite
from pipeline.engine.view import view_engine
from tests.engine.artifacts import manifest
from tests.engine.gpu import DATA, GPU, IMAGES, TIMEOUT_S, distance, options, scratch, stored

pytestmark = GPU


ONE, MANY = "x=1x16x16x16,1x16x16x16,1x16x16x16", "x=2x16x16x16,4x16x16x16,8x16x16x16"


def artifact(folder: Path, *, factor: float = 1.0, profiles: tuple[str, ...] = (IMAGES,)) -> Artifact:
    """The convolution fixture as an artifact; ``factor`` spoils the recorded outputs."""
    source = folder.with_name(folder.name + "-source")
    source.mkdir()
    (feeds, expected), (_, fp32) = stored("conv_qdq"), stored("conv_fp32")
    np.savez(source / "samples.npz", **{"inputs/x": feeds["x"], "int8/y": factor * expected["y"], "fp32/y": fp32["y"]})
    files = {
        "samples.npz": source / "samples.npz",
        "model.int8.onnx": DATA / "conv_qdq.onnx",
        "model.fp32.onnx": DATA / "conv_fp32.onnx",
        "calibration.cache": DATA / "conv_fp32.cache",
    }
    return package.run(files, manifest(profiles, shape=("N", 16, 16, 16)), folder=folder)


def favoured(candidates, shapes, **rest) -> list[Measurement]:
    """The real measurement, after which float has won at batch 1 and lost elsewhere."""
    int8, other = measure_compute(candidates, shapes, **rest)
    assert int8.captured
    assert other.captured
    assert min(*int8.rounds_ms, *other.rounds_ms) > 0
    low, high = 0.5 * min(int8.rounds_ms), 2 * max(int8.rounds_ms)
    return [int8, other.model_copy(update={"rounds_ms": (low, low) if int8.batch == 1 else (high, high)})]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """With a float plan for batch 1."""
    folder = artifact(tmp_path_factory.mktemp("artifact") / "net", profiles=(ONE, MANY)).folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastest, "measure_compute", favoured)
        done = build_from_artifact(folder, options=options(fp16=True), fastest=True, rounds=2, timeout_s=TIMEOUT_S)
    assert done.check is not None
    assert done.check.relative_l2["y"] < 0.05
    assert done.check.samples == 4
    assert done.fastest is not None
    assert done.fastest.float_profiles == {0}
    assert done.fastest.check is not None
    assert done.fastest.check.relative_l2["y"] < 0.02
    return Artifact.open(folder)


def test_the_engine_is_listed_and_runs(built: Artifact) -> None:
    assert built.differences() == []
    assert "engines/tensorrt/layers.json" in built.manifest.files
    assert built.manifest.targets["tensorrt"]["check"]["samples"] == 4
    with Runner.from_artifact(built.folder, cuda_graphs=True) as runner:
        assert runner({"x": np.ones((2, 16, 16, 16), np.float32)})["y"].shape == (2, 10)


@pytest.mark.parametrize("graphs", [False, True])
def test_each_batch_is_served_by_the_plan_that_won_it(built: Artifact, graphs: bool) -> None:
    (feeds, int8), (_, fp32) = stored("conv_qdq"), stored("conv_fp32")
    found = float_engine(built, "tensorrt")
    assert found is not None
    assert [str(profile) for profile in found[1].profiles] == [ONE]
    with serve(built.folder, cuda_graphs=graphs, in_flight=2) as both, Runner.from_artifact(built.folder) as alone:
        assert isinstance(both, FastestRunner)
        one = {"x": feeds["x"][:1]}
        assert both.plan_for({"x": (1, 16, 16, 16)}) == "float"
        assert distance(both(one)["y"], fp32["y"][:1]) < 0.02
        assert not np.array_equal(both(one)["y"], alone(one)["y"])
        assert both.plan_for({"x": (4, 16, 16, 16)}) == "int8"
        assert distance(both(feeds)["y"], int8["y"]) < 0.05
        answers = list(both.map({"x": feeds["x"][: 1 + number % 4]} for number in range(20)))
        for number, outputs in enumerate(answers):
            wanted = fp32["y"][:1] if number % 4 == 0 else int8["y"][: 1 + number % 4]
            assert distance(outputs["y"], wanted) < 0.05
        assert not both.uncaptured


def test_the_layers_have_times(built: Artifact) -> None:
    view = view_engine(built, "tensorrt", batch=4)
    assert view.times_ms
    named = {layer.name for layer in view.layers}
    assert len(named & set(view.times_ms)) >= len(view.times_ms) // 2, (sorted(named), sorted(view.times_ms))


def test_an_engine_of_another_version_is_refused_before_tensorrt_sees_it(built: Artifact) -> None:
    path = built.folder / "engines/tensorrt/build.json"
    record = EngineRecord.model_validate_json(path.read_bytes()).model_copy(update={"tensorrt": "8.5.3.1"})
    with pytest.raises(InputError, match=r"built with version 8\.5\.3\.1"):
        Runner(built.folder / "engines/tensorrt/model.plan", record=record)


def test_the_suite_measures_what_serves_and_the_baseline(built: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((bench, "_ROUND_SECONDS"), (suite, "_LOAD_SECONDS"), (suite, "_OVERLAP_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    result = run_suite(
        [built.folder],
        batches=[1, 4],
        against=["fp16"],
        sets=["warm", "edge", "load"],
        rounds=2,
        in_flight=2,
        cache=scratch() / "baselines",
    )
    assert len(result.warm) == 2 * 2 * 2
    plans = {(m.batch, m.plan) for m in result.warm if m.name == "net fastest"}
    assert plans == {(1, "float"), (4, "int8")}
    assert [choice.chosen for choice in result.engines[0].choices] == ["float", "int8"]
    assert {m.batch for m in result.edge} == {1, 2, 8}
    assert len(result.load) == len(result.overlap) == 4
    assert all(m.throughput > 0 for m in (*result.warm, *result.edge))
    assert len(result.verdicts) == 4


def test_an_engine_that_disagrees_with_the_record_is_not_added(tmp_path: Path) -> None:
    folder = artifact(tmp_path / "net", factor=2.0).folder
    with pytest.raises(CheckFailed, match="differs from the recorded one"):
        build_from_artifact(folder, options=options(), timeout_s=TIMEOUT_S)
    assert not list((folder / "engines").iterdir())
    assert Artifact.open(folder).manifest.targets == {}


def test_the_figures_of_a_real_measurement_decide(tmp_path: Path) -> None:
    folder = artifact(tmp_path / "net").folder
    done = build_from_artifact(
        folder, options=options(fp16=True, half_inputs=True), fastest=True, rounds=2, timeout_s=TIMEOUT_S
    )
    assert done.fastest is not None
    (choice,) = done.fastest.choices
    assert (choice.chosen == "float") == (max(choice.float_rounds_ms) < min(choice.int8_rounds_ms))
    written = Artifact.open(folder)
    assert written.differences() == []
    assert ("engines/tensorrt/float.plan" in written.manifest.files) == bool(done.fastest.float_profiles)
    assert Fastest.model_validate(written.manifest.targets["tensorrt"]["fastest"]) == done.fastest
    with serve(folder) as runner:
        assert runner.inputs[0].dtype == "float16"
        assert runner({"x": np.ones((2, 16, 16, 16), np.float16)})["y"].shape == (2, 10)
