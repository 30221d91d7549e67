"""On the machine that serves: compile an artifact, check it, look into it, measure it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import package
from pipeline.artifact import Artifact
from pipeline.core.errors import CheckFailed, InputError
from pipeline.engine.from_artifact import build_from_artifact
from pipeline.engine.records import EngineRecord
from pipeline.engine.runner import Runner
from pipeline.engine.suite import run_suite
from pipeline.engine.view import view_engine
from tests.engine.artifacts import manifest
from tests.engine.gpu import DATA, GPU, IMAGES, TIMEOUT_S, options, scratch, stored

pytestmark = GPU


def artifact(folder: Path, *, factor: float = 1.0) -> Artifact:
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
    return package.run(files, manifest((IMAGES,), shape=("N", 16, 16, 16)), folder=folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = artifact(tmp_path_factory.mktemp("artifact") / "net").folder
    done = build_from_artifact(folder, options=options(fp16=True), timeout_s=TIMEOUT_S)
    assert done.check is not None
    assert done.check.relative_l2["y"] < 0.05
    assert done.check.samples == 4
    return Artifact.open(folder)


def test_the_engine_is_listed_and_runs(built: Artifact) -> None:
    assert built.differences() == []
    assert "engines/tensorrt/layers.json" in built.manifest.files
    assert built.manifest.targets["tensorrt"]["check"]["samples"] == 4
    with Runner.from_artifact(built.folder, cuda_graphs=True) as runner:
        assert runner({"x": np.ones((2, 16, 16, 16), np.float32)})["y"].shape == (2, 10)


def test_the_layers_have_times(built: Artifact) -> None:
    view = view_engine(built, "tensorrt", batch=4)
    assert view.times_ms
    named = {layer.name for layer in view.layers}
    assert len(named & set(view.times_ms)) >= len(view.times_ms) // 2, (sorted(named), sorted(view.times_ms))


def test_an_engine_that_disagrees_with_the_record_is_not_added(tmp_path: Path) -> None:
    folder = artifact(tmp_path / "net", factor=2.0).folder
    with pytest.raises(CheckFailed, match="differs from the recorded one"):
        build_from_artifact(folder, options=options(), timeout_s=TIMEOUT_S)
    assert not list((folder / "engines").iterdir())
    assert Artifact.open(folder).manifest.targets == {}


def test_an_engine_of_another_version_is_refused_before_tensorrt_sees_it(built: Artifact) -> None:
    path = built.folder / "engines/tensorrt/build.json"
    record = EngineRecord.model_validate_json(path.read_bytes()).model_copy(update={"tensorrt": "8.5.3.1"})
    with pytest.raises(InputError, match=r"built with version 8\.5\.3\.1"):
        Runner(built.folder / "engines/tensorrt/model.plan", record=record)


def test_the_suite_measures_engine_and_baseline(built: Artifact) -> None:
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
    assert {m.batch for m in result.edge} == {1, 8}
    assert len(result.load) == len(result.overlap) == 4
    assert all(m.throughput > 0 for m in (*result.warm, *result.edge))
    assert len(result.verdicts) == 4
