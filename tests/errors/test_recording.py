"""Recording on the GPU machine, with onnxruntime in TensorRT's place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.artifact import INT8_MODEL, SAMPLES, Artifact
from pipeline.core.errors import CheckFailed, InputError
from pipeline.data.batching import Batch
from pipeline.engine import capture
from pipeline.engine.recorded import EngineCheck
from pipeline.errors.capture import OrtReading
from pipeline.errors.recorded import RecordedReading
from pipeline.errors.recording import Meta, int8_sha256, main, positions, write_recording
from pipeline.errors.table import read_table
from pipeline.reports.error_report import report_artifact
from tests.errors.artifacts import images, make_artifact
from tests.errors.networks import batches, network
from tests.test_calibrate import Recorded

net = network()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An artifact and a recording of it, which every test gets copies of."""
    folder = tmp_path_factory.mktemp("made")
    made = make_artifact(folder / "net", net).folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "Capture", FakeCapture)
        assert main([str(made), str(folder / "engine.npz"), "--values", "64"]) == 0
    return folder


@pytest.fixture
def artifact(made, tmp_path):
    return shutil.copytree(made / "net", tmp_path / "net")


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
        meta = write_recording(stream, named, feeds, numbers, target="tensorrt", int8="5" * 64)
    assert meta.sizes == (2, 2, 2)
    reading = RecordedReading(tmp_path / "engine.npz")
    x = np.concatenate([batch["x"] for batch in feeds])
    values = reading(Batch(0, (11, 12), {"x": x[1:3]}))
    for number, name in enumerate(("samples", "/a/../b:0", "meta", "0/0")):
        np.testing.assert_array_equal(values[name], x[1:3] + number)


def rewritten(path: Path, arrays: dict | None = None, *, without: str = "", **fields) -> Path:
    """The recording with other arrays, without one, or with other fields in its JSON (None: without the field)."""
    with np.load(path) as found:
        kept = {name: found[name] for name in found.files if name != without}
    meta = json.loads(str(kept["meta"])) | fields
    meta = {name: value for name, value in meta.items() if value is not None}
    np.savez(path, **{**kept, "meta": np.array(json.dumps(meta)), **(arrays or {})})
    return path


@pytest.fixture
def recording(made, engine, tmp_path):
    return shutil.copy(made / "engine.npz", tmp_path / "engine.npz")


def refused(artifact, path, message):
    with pytest.raises(InputError, match=message) as error:
        report_artifact(artifact, engine_tensors=path, out=path.parent / "out")
    assert error.value.message.startswith(str(path)), "the file is named"
    assert error.value.remedy


ROW = np.zeros((1, 64), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"meta": np.array("{")}, "its array 'meta' is damaged: Invalid JSON"),
        ({"meta": np.zeros(3)}, "its array 'meta' is damaged"),
        ({"samples": np.array([10])}, "its parts have 2 samples, 'samples' has 1"),
        ({"samples": np.array(["10", "11"])}, r"'samples' has dtype <U2 and shape \(2,\), the first is .*'10'"),
        ({"samples": np.array([[10], [11]])}, r"'samples' has dtype int64 and shape \(2, 1\), the first is .*10"),
        ({"samples": np.array([10.0, np.nan])}, "'samples' has dtype float64 .*: expected whole numbers in one row"),
        ({"samples": np.array([10.5, 11.5])}, "'samples' has dtype float64 .* the first is .*10.5"),
        ({"samples": np.array([True, False])}, "'samples' has dtype bool"),
        ({"samples": np.array([], np.int64)}, r"'samples' has dtype int64 and shape \(0,\): expected"),
        ({"samples": np.array([10, -1])}, "'samples' holds -1, expected sample numbers from 0 on"),
        ({"samples": np.array([10, 10])}, "'samples' holds 10 2 times, expected each sample once"),
        ({"0/0": np.zeros((0, 4))}, r"tensor 'relu' has shape \(0, 4\), expected 1 rows"),
        ({"0/0": np.float32(1)}, r"tensor 'relu' has shape \(\), expected 1 rows"),
        ({"1/0": np.array(["a"])}, "tensor 'relu' has dtype <U1, expected real numbers"),
        ({"1/0": np.zeros(1, [("a", "f4")])}, r"tensor 'relu' has dtype \[\('a', '<f4'\)\], expected real numbers"),
        ({"1/0": ROW > 0}, "tensor 'relu' has dtype bool, expected real numbers"),
        ({"0/0": ROW.astype(np.complex64)}, "tensor 'relu' has dtype complex64, expected real numbers"),
        ({"0/0": np.array([None])}, "tensor 'relu' has dtype object, expected real numbers"),
        ({"0/0": np.zeros(1, [("\u0100", "f4")])}, r"tensor 'relu' cannot be read: its header is of version \(3, 0\)"),
        ({"1/0": ROW[:, :9]}, r"tensor 'relu' has shape \(1, 9\) for a sample of part 1, \(1, 64\) for one of part 0"),
        ({"1/0": ROW.reshape(1, 8, 8)}, r"tensor 'relu' has shape \(1, 8, 8\) for a sample of part 1, \(1, 64\) for"),
        ({"1/0": np.zeros((2, 32))}, r"tensor 'relu' has shape \(2, 32\) for a sample of part 1, \(1, 64\) for one of"),
        ({"1/0": np.zeros((2, 64))}, "tensor 'relu' has 128 values a sample, its array 'meta' says 64 were kept"),
        ({"2/0": ROW}, "it has an array '2/0' of no part and tensor that its array 'meta' names"),
        ({"0/9": ROW}, "it has an array '0/9' of no part and tensor that its array 'meta' names"),
    ],
)
@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_damaged_arrays(artifact, recording, arrays, message):
    refused(artifact, rewritten(recording, arrays), f".*{message}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": [3, -1]}, r"sizes.1: Input should be greater than 0, got -1"),
        ({"sizes": [2, 0]}, r"sizes.1: Input should be greater than 0, got 0"),
        ({"sizes": [0.5, 1.5]}, r"sizes.0: Input should be a valid integer"),
        ({"sizes": [2]}, "it has an array '1/0' of no part and tensor"),
        ({"scales": {"relu": 0.0}}, "scales.relu: Input should be greater than 0, got 0.0"),
        ({"scales": {"relu": -0.1}}, "scales.relu: Input should be greater than 0, got -0.1"),
        ({"scales": {"relu": float("nan")}}, "scales.relu: Input should be .*, got nan"),
        ({"scales": {"relu": float("inf")}}, "scales.relu: Input should be a finite number, got inf"),
        ({"outputs": {"logits": float("nan")}}, "outputs.logits: Input should be .*, got nan"),
        ({"kept": -1}, "kept: Input should be greater than or equal to 0, got -1"),
        ({"kept": 32}, "tensor 'relu' has 64 values a sample, its array 'meta' says 32 were kept"),
        ({"tensors": ["relu", "relu", "logits"]}, "tensors: the tensor 'relu' is there twice"),
        ({"tensors": ["relu", "other", "logits"]}, "it has a tensor 'other', and neither the FP32 nor the INT8 graph"),
        ({"tensors": ["relu", "sum"]}, "it has an array '0/2' of no part and tensor"),
        ({"tensors": ["relu", "sum", "logits", "last"]}, "part 0 of tensor 'last' is missing"),
        ({"ends": {"stem": "nothing"}}, "it has a tensor 'nothing', and neither the FP32 nor the INT8 graph has one"),
        ({"absent": ["0/0"]}, "it has an array '0/0' of no part and tensor"),
        ({"more": 1}, "more: Extra inputs are not permitted"),
        ({"int8_sha256": "f" * 64}, r"of another INT8 graph \(ffffffffffff\) than the artifact's \([0-9a-f]{12}\)"),
        ({"int8_sha256": None}, "it does not say of which INT8 graph and samples it is: an earlier version wrote it"),
        ({"samples_sha256": None}, "it does not say of which INT8 graph and samples it is"),
        ({"samples_sha256": ["e" * 64]}, "its hashes have 1 samples, 'samples' has 2"),
        ({"samples_sha256": ["e" * 64] * 2}, r"sample 10 was recorded with other inputs \(eeeeeeeeeeee\) than it is"),
    ],
)
def test_damaged_descriptions(artifact, recording, fields, message):
    refused(artifact, rewritten(recording, **fields), f".*{message}")


@pytest.mark.parametrize("entry", ["0/0", "1/0", "1/1"])
def test_a_missing_part_is_not_called_fused(artifact, recording, entry):
    name = ("relu", "sum")[int(entry[-1])]
    refused(artifact, rewritten(recording, without=entry), f".*part {entry[0]} of tensor '{name}' is missing")


def test_damaged_values(artifact, recording):
    """The header is whole and the values are not: seen when they are read."""
    with zipfile.ZipFile(recording) as archive:
        place = archive.getinfo("1/0.npy")
    damaged = bytearray(recording.read_bytes())
    damaged[place.header_offset + 30 + len("1/0.npy") + 300] ^= 0xFF
    recording.write_bytes(damaged)
    refused(artifact, recording, ".*tensor 'relu' cannot be read: .*CRC")


def test_truncated(artifact, recording):
    recording.write_bytes(recording.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"engine\.npz is not a readable \.npz file"):
        report_artifact(artifact, engine_tensors=recording, out=recording.parent / "out")


def test_of_another_artifact_with_the_same_names(recording, tmp_path):
    """Other weights, and the same weights with other ranges."""
    for name, other in (("weights", network(seed=1)), ("ranges", network({"relu": 2.0}))):
        folder = make_artifact(tmp_path / name, other).folder
        refused(folder, recording, ".*it is of another INT8 graph")


def test_with_other_data(artifact, recording, tmp_path):
    """Its sample 10 is another one than that kept in the artifact."""
    data = images(tmp_path / "data.npy", seed=5)
    with pytest.raises(InputError, match="sample 10 was recorded with other inputs") as error:
        report_artifact(artifact, data=str(data), batch_size=1, engine_tensors=recording, out=tmp_path / "out")
    assert "leave --data out" in str(error.value.remedy)


def test_a_tensor_that_the_engine_shows_in_some_parts(artifact, engine, tmp_path, monkeypatch):
    """That is no damage: the file says so."""
    whole = FakeCapture.__call__
    seen = []

    def without(self, feeds):
        seen.append(1)
        return {name: array for name, array in whole(self, feeds).items() if name != "sum" or len(seen) == 2}

    monkeypatch.setattr(FakeCapture, "__call__", without)
    path = tmp_path / "engine.npz"
    assert main([str(artifact), str(path)]) == 0
    with np.load(path) as found:
        meta = Meta.model_validate_json(str(found["meta"]))
    assert meta.absent == (f"0/{meta.tensors.index('sum')}",)
    with np.load(artifact / SAMPLES) as kept:
        x, (first, second) = kept["inputs/x"], kept["samples"].tolist()
    reading = RecordedReading(path, layers=("relu", "sum"))
    assert set(reading(Batch(0, (first,), {"x": x[:1]}))) == {"relu"}
    assert set(reading(Batch(1, (second,), {"x": x[1:]}))) == {"relu", "sum"}


def test_a_plain_file_cannot_be_checked(artifact, tmp_path):
    """Which is said; a name that no graph has, and what the file lacks, are not called fused."""
    with np.load(artifact / SAMPLES) as kept:
        numbers, feeds = kept["samples"], {"x": kept["inputs/x"]}
    values = OrtReading(net.int8, ["sum", "logits"], label="", optimise=False).run(feeds)
    progress = Recorded()
    np.savez(tmp_path / "plain.npz", samples=numbers, **values)
    report_artifact(artifact, engine_tensors=tmp_path / "plain.npz", out=tmp_path / "out", progress=progress)
    assert any("does not say of which INT8 graph and samples it is" in text for text in progress.warnings)
    table = read_table(tmp_path / "out" / "errors.parquet")
    assert set(table[table.layer == "stem"].engine) == {"not compared: it is not in plain.npz"}
    assert set(table[table.layer == "sum"].engine) == {"shown"}
    np.savez(tmp_path / "plain.npz", samples=numbers, other=values["sum"])
    refused(artifact, tmp_path / "plain.npz", ".*it has a tensor 'other', and neither the FP32 nor the INT8 graph has")


def test_int8_graph_with_weights_beside_it(artifact):
    opened = Artifact.open(artifact)
    one = int8_sha256(opened)
    assert one == opened.manifest.files[INT8_MODEL].sha256
    beside = f"{INT8_MODEL}.data"
    (artifact / beside).write_bytes(b"weights")
    two = int8_sha256(opened.updated(files=(beside,)))
    (artifact / beside).write_bytes(b"others")
    assert len({one, two, int8_sha256(opened.updated(files=(beside,)))}) == 3


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
    Artifact.open(artifact).updated(files=(SAMPLES,))
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
