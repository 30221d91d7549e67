"""Recording on the GPU machine, with onnxruntime in TensorRT's place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.artifact import SAMPLES
from pipeline.core.errors import CheckFailed, InputError
from pipeline.data.batching import Batch
from pipeline.engine import capture
from pipeline.engine.recorded import EngineCheck
from pipeline.errors.capture import OrtReading
from pipeline.errors.recorded import RecordedReading
from pipeline.errors.recording import Meta, main, positions, write_recording
from pipeline.errors.report import report_artifact
from pipeline.errors.table import read_table
from tests.errors.artifacts import make_artifact
from tests.errors.networks import batches, network

net = network()


@pytest.fixture
def artifact(tmp_path):
    return make_artifact(tmp_path / "net", net).folder


class FakeCapture:
    """An engine that has the network's tensors, ``relu`` in INT8, and no ``branch``."""

    tensorrt, recorded = "10.16.1", "debug tensors"

    def __init__(self, model, tensors, **options):
        self.options = options
        FakeCapture.last = self
        self.ends, self.scales, self.unshown = {"stem": "relu"}, {}, {"last": "bfloat16"}
        self.check = EngineCheck(relative_l2={"logits": 0.03}, agreement={"logits": 1.0}, samples=2)
        self._reading = OrtReading(model, ["relu_dq", "sum", "logits"], label="", optimise=False)
        self.batches = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __call__(self, feeds):
        self.batches.append(len(feeds["x"]))
        values = self._reading.run(feeds)
        self.scales = {"relu": float(net.amax["relu"] / 127)}
        return {name.removesuffix("_dq"): array for name, array in values.items()}


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(capture, "Capture", FakeCapture)


def test_recording_feeds_the_report(artifact, engine, tmp_path, capsys):
    assert main([str(artifact), str(tmp_path / "engine.npz"), "--engine-capture", "debug-tensors"]) == 0
    printed = capsys.readouterr().out
    assert "3 tensors of 2 samples (debug tensors)" in printed
    assert "output logits: relative L2 0.0300 to the recorded one" in printed
    assert FakeCapture.last.batches == [1, 1], "one sample at a time: memory does not grow with their number"
    assert FakeCapture.last.options["recorded"] == "debug tensors"
    reference = FakeCapture.last.options["reference"]({"x": np.zeros((1, 3, 8, 8))})
    with np.load(artifact / SAMPLES) as kept:
        np.testing.assert_array_equal(reference.feeds["x"], kept["inputs/x"])
        np.testing.assert_array_equal(reference.expected["logits"], kept["int8/logits"])
    report = report_artifact(artifact, engine_tensors=tmp_path / "engine.npz", out=tmp_path / "out")
    assert "2 of 6 layers are fused" in (tmp_path / "out" / "report.html").read_text()
    assert report.engine == "the engine (tensorrt 10.16.1), recorded in engine.npz"
    assert report.recorded == "debug tensors"
    table = read_table(tmp_path / "out" / "errors.parquet")
    assert set(table[table.layer == "stem"].engine) == {"shown as relu, after the activation, in INT8"}
    assert (table[table.layer.isin(["stem", "sum", "logits"])].engine_int8_relative_l2 < 1e-5).all()


def test_some_values_of_each_tensor(artifact, engine, tmp_path):
    assert main([str(artifact), str(tmp_path / "all.npz")]) == 0
    assert main([str(artifact), str(tmp_path / "some.npz"), "--values", "64"]) == 0
    assert (tmp_path / "some.npz").stat().st_size < (tmp_path / "all.npz").stat().st_size
    tables = {}
    for name in ("all", "some"):
        report_artifact(artifact, engine_tensors=tmp_path / f"{name}.npz", out=tmp_path / name)
        tables[name] = read_table(tmp_path / name / "errors.parquet").query("layer in ['stem', 'sum']")
    assert set(tables["some"].engine) == {
        "shown as relu, after the activation, in INT8, from 64 of 256 values a sample",
        "shown, from 64 of 256 values a sample",
    }
    with np.load(artifact / SAMPLES) as kept:
        feeds = {"x": kept["inputs/x"]}
    a, b = (OrtReading(m, ["sum"], label="", optimise=False).run(feeds)["sum"] for m in (net.fp32, net.int8))
    a, b = (values.reshape(2, -1)[:, positions(256, 64)] for values in (a, b))
    expected = np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)
    found = tables["some"].query("layer == 'sum'").engine_relative_l2
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (tables["some"].engine_int8_relative_l2 < 1e-5).all()


@pytest.mark.parametrize("size", [100, 4096, 401_408, 2**31 + 1])
def test_positions_are_spread_over_the_whole_tensor(size):
    found = positions(size, 64)
    assert len(set(found.tolist())) == 64 or size == 100
    assert (np.diff(found) >= 0).all()
    assert 0 <= found[0] < found[-1] < size
    counts, _ = np.histogram(found, 8, (0, size))
    assert counts.min() >= 6
    assert counts.max() <= 10
    columns, _ = np.histogram(found % 16, 16)
    assert columns.max() < 12, "not the same columns of an image"


@pytest.mark.parametrize("option", ["--samples", "--values"])
def test_counts_below_one(artifact, engine, tmp_path, option, capsys):
    assert main([str(artifact), str(tmp_path / "engine.npz"), option, "0"]) == 2
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_fewer_samples(artifact, engine, tmp_path):
    assert main([str(artifact), str(tmp_path / "engine.npz"), "--samples", "1"]) == 0
    with np.load(tmp_path / "engine.npz") as found:
        assert found["samples"].tolist() == [10]
        meta = Meta.model_validate_json(str(found["meta"]))
        assert meta.sizes == (1,)
        assert found[f"0/{meta.tensors.index('sum')}"].shape == (1, 4, 8, 8)


def test_tensors_with_any_name(tmp_path):
    """Names are in the JSON: a zip file would not take all of them, and `samples` is one of its own."""

    class Named(FakeCapture):
        def __call__(self, feeds):
            return {name: feeds["x"] + number for number, name in enumerate(("samples", "/a/../b:0", "meta", "0/0"))}

    data = batches()
    feeds = [batch.feeds for batch in data]
    numbers = np.array([sample for batch in data for sample in batch.samples])
    named = Named(net.int8, [])
    with (tmp_path / "engine.npz").open("wb") as stream:
        meta = write_recording(stream, named, feeds, numbers, target="tensorrt")
    assert meta.sizes == (2, 2, 2)
    reading = RecordedReading(tmp_path / "engine.npz")
    across = Batch(0, (11, 12), {})
    values = reading(across)
    x = np.concatenate([batch["x"] for batch in feeds])
    for number, name in enumerate(("samples", "/a/../b:0", "meta", "0/0")):
        np.testing.assert_array_equal(values[name], x[1:3] + number)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta": np.array("{")}, "its array 'meta' is damaged"),
        ({"samples": np.array([10])}, "its parts have 2 samples, 'samples' has 1"),
        ({"0/0": np.zeros((0, 4))}, r"tensor 'relu' has shape \(0, 4\), expected 1 rows"),
    ],
)
def test_damaged_recordings(artifact, engine, tmp_path, changes, message):
    path = tmp_path / "engine.npz"
    assert main([str(artifact), str(path)]) == 0
    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files}
    np.savez(path, **{**arrays, **changes})
    with pytest.raises(InputError, match=message):
        report_artifact(artifact, engine_tensors=path, out=tmp_path / "out")


def test_a_recording_of_an_engine_that_nobody_checked(artifact, engine, tmp_path):
    """As the version before wrote them."""
    path = tmp_path / "engine.npz"
    assert main([str(artifact), str(path)]) == 0
    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files}
        meta = Meta.model_validate_json(str(found["meta"]))
    np.savez(path, **{**arrays, "meta": np.array(meta.model_copy(update={"outputs": {}}).model_dump_json())})
    message = r"nobody compared the outputs of the engine .* \(tensorrt 10.16.1, debug tensors\) with the artifact's"
    with pytest.raises(InputError, match=message) as error:
        report_artifact(artifact, engine_tensors=path, out=tmp_path / "out")
    assert "python -m pipeline.errors.recording" in str(error.value.remedy)


def test_an_engine_that_computes_something_else(artifact, engine, tmp_path, capsys, monkeypatch):
    def refuse(self, feeds):
        raise CheckFailed("output 'logits' of the engine differs from the recorded one by 1.1")

    monkeypatch.setattr(FakeCapture, "__call__", refuse)
    assert main([str(artifact), str(tmp_path / "engine.npz")]) == 1
    assert "output 'logits' of the engine differs" in capsys.readouterr().err
    assert not (tmp_path / "engine.npz").exists()


def test_damaged_artifact(artifact, engine, tmp_path, capsys):
    (artifact / SAMPLES).write_bytes(b"PK")
    assert main([str(artifact), str(tmp_path / "engine.npz")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "engine.npz").exists()


def test_a_serving_machine_has_all_it_imports():
    code = (
        "import sys, pipeline.errors.recording\n"
        "heavy = {'onnx', 'onnxruntime', 'torch', 'numba', 'pandas', 'matplotlib', 'rich', 'click'}\n"
        "found = heavy & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
