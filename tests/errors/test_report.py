"""`quantize errors` and `quantize diff` on a small artifact."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from pipeline.artifact import CALIBRATION, PLACEMENT, SAMPLES, Artifact
from pipeline.cli.diff import command as diff_command
from pipeline.cli.errors import command as errors_command
from pipeline.core.errors import InputError
from pipeline.data import open_source
from pipeline.errors.diff import diff_artifacts
from pipeline.errors.report import report_artifact
from tests.errors.artifacts import images, make_artifact
from tests.errors.networks import CLASSES, batches, network

net = network({"relu": 1.2})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_artifact(tmp_path_factory.mktemp("artifacts") / "net", net).folder


@pytest.fixture
def artifact(made, tmp_path):
    shutil.copytree(made, tmp_path / "net")
    return tmp_path / "net"


def _labels(path, count):
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["index", "class_index"])
        writer.writerows((i, i % CLASSES) for i in range(count))
    return path


def test_report_replaces_the_artifacts_own_and_its_hashes(artifact):
    report = report_artifact(artifact)
    assert report.samples == 2  # kept by the verify stage
    assert "kept in the artifact" in report.data
    expected = {"errors.parquet", "errors.csv", "errors.png", "metrics.png", "calibrators.png", "report.html"}
    assert set(report.files) == expected
    assert Artifact.open(artifact).differences() == []
    assert {path.name for path in (artifact / "reports").iterdir()} >= expected
    assert report.worst[0]["local"] >= report.worst[1]["local"]
    assert [row["op"] for row in report.operators] != []
    assert report.comparison == ()


def test_every_calibrator_is_compared(artifact):
    import calibrators

    report_artifact(artifact)
    page = (artifact / "reports" / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert set(data["calibrators"]) == set(calibrators.names())
    assert set(data["calibrators"]["minmax"]) == set(net.amax)


def test_other_data_with_labels_elsewhere(artifact, tmp_path):
    before = (artifact / "manifest.json").read_bytes()
    data, labels = images(tmp_path / "data.npy"), _labels(tmp_path / "labels.csv", 24)
    report = report_artifact(artifact, data=str(data), labels=labels, out=tmp_path / "elsewhere")
    assert report.samples == 24
    assert report.top1_fp32 is not None
    assert report.top1_int8 is not None
    assert (tmp_path / "elsewhere" / "report.html").is_file()
    assert (artifact / "manifest.json").read_bytes() == before
    assert report_artifact(artifact, data=str(data), samples=5, out=tmp_path / "five").samples == 5


def test_the_very_data_of_the_calibration_is_split_as_in_the_build(tmp_path):
    data = images(tmp_path / "data.npy")
    inputs = Artifact.open(make_artifact(tmp_path / "probe", net).folder).manifest.inputs
    sha256 = open_source(str(data), inputs, None).sha256()
    artifact = make_artifact(tmp_path / "net", net, data_sha256=sha256).folder
    report = report_artifact(artifact, data=str(data), out=tmp_path / "out")
    assert report.samples == 18  # 24 less the 6 it was calibrated on
    assert "held aside" in report.data


def test_recorded_engine_and_fused_layers(artifact, tmp_path):
    from pipeline.errors.capture import OrtReading

    with np.load(artifact / SAMPLES) as kept:
        numbers, feeds = kept["samples"], {"x": kept["inputs/x"]}
    values = OrtReading(net.int8, ["stem", "logits"], label="", optimise=False).run(feeds)
    np.savez(tmp_path / "engine.npz", samples=numbers, **values)
    report = report_artifact(artifact, engine_tensors=tmp_path / "engine.npz", out=tmp_path / "out")
    assert "recorded in engine.npz" in report.engine
    assert "4 of 6 layers are fused and cannot be shown" in (tmp_path / "out" / "report.html").read_text()


def test_engine_with_marked_outputs(artifact, tmp_path, monkeypatch):
    """The wiring to TensorRT, with onnxruntime in its place."""
    from types import SimpleNamespace

    from pipeline.engine import capture, runner
    from pipeline.errors.capture import OrtReading

    asked = {}

    def build(model, tensors, profiles, *, plan_path, target):
        asked.update(tensors=tensors, profiles=profiles, target=target)
        return SimpleNamespace(tensorrt="8.6.0")

    class FakeRunner:
        def __init__(self, plan, *, target, record):
            self.reading = OrtReading(net.int8, asked["tensors"], label="", optimise=False)

        def __call__(self, feeds):
            return self.reading.run(feeds)

        def close(self):
            asked["closed"] = True

    monkeypatch.setattr(capture, "build_capture", build)
    monkeypatch.setattr(runner, "Runner", FakeRunner)
    report = report_artifact(artifact, engine="tensorrt", out=tmp_path / "out")
    assert report.engine == "the engine (tensorrt 8.6.0, tensors marked as outputs)"
    assert asked["tensors"] == ("stem", "branch", "sum", "padded", "last", "logits")
    assert str(asked["profiles"][0]) == "x=1x3x8x8,2x3x8x8,2x3x8x8"
    assert asked["closed"]


def test_qat_side_by_side(artifact, tmp_path):
    trained = network({"relu": 2.5}, weight_scale=1.1)
    onnx.save(trained.int8, tmp_path / "qat.onnx")
    data = images(tmp_path / "data.npy", 8)
    report = report_artifact(artifact, data=str(data), qat=tmp_path / "qat.onnx", out=tmp_path / "out")
    assert report.comparison[0].startswith("relative L2: PTQ ")
    page = (tmp_path / "out" / "report.html").read_text()
    sections = {
        s["title"]: s for s in json.loads(page.partition('id="data">')[2].partition("</script>")[0])["sections"]
    }
    whole = sections["QAT against PTQ"]["rows"]
    figure, ptq, qat, difference, *parts = whole[0]
    assert figure == "relative L2"
    assert difference == pytest.approx(qat - ptq)
    assert sum(parts) == pytest.approx(difference, abs=1e-9)
    rows = {row[0]: row for row in sections["QAT against PTQ, layer by layer"]["rows"]}
    assert rows["branch_conv"][7] == pytest.approx(2.5 / 1.2, rel=1e-4)
    assert all(value is not None for value in rows["branch_conv"][2:6])


# -- the commands ------------------------------------------------------------------------------------------------------


def test_errors_command(artifact):
    done = CliRunner().invoke(errors_command, [str(artifact)], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "relative L2 error by operator type" in done.output
    assert "output logits: relative L2" in done.output
    assert "report.html" in done.output


def test_errors_command_json(artifact, tmp_path):
    done = CliRunner().invoke(errors_command, [str(artifact), "--json", "-q", "--out", str(tmp_path / "out")])
    value = json.loads(done.stdout)
    assert value["samples"] == 2
    assert value["worst"][0]["cause"] in ("weights", "clipping", "rounding")


def test_diff_command(artifact, tmp_path):
    other = make_artifact(tmp_path / "other", network({"relu": 2.4}), calibrator="entropy").folder
    done = CliRunner().invoke(diff_command, [str(artifact), str(other)], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "branch_conv" in done.output
    assert "2.0000" in done.output
    assert "last_conv" not in done.output  # nothing differs there
    assert "entropy" in done.output
    found = json.loads(CliRunner().invoke(diff_command, [str(artifact), str(other), "--json"]).stdout)
    by_node = {layer["node"]: layer for layer in found["layers"]}
    assert by_node["branch_conv"]["range_ratio"] == pytest.approx(2.0, rel=1e-6)
    assert found["same_samples"] is True
    assert by_node["logits" if "logits" in by_node else "fc_node"]["error_b"] > 0
    everything = CliRunner().invoke(diff_command, [str(artifact), str(other), "--all"], env={"COLUMNS": "100"})
    assert "last_conv" in everything.output


def test_diff_of_an_artifact_with_itself(artifact):
    found = diff_artifacts(artifact, artifact)
    assert found.settings == {}
    assert all(layer.same for layer in found.layers)
    assert all(layer.error_change == 0 for layer in found.layers)


# -- bad input ---------------------------------------------------------------------------------------------------------


def _fails(artifact, *options):
    done = CliRunner().invoke(errors_command, [str(artifact), "-q", *map(str, options)])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return done.stderr


def test_no_artifact(tmp_path):
    assert "has no manifest.json and is no artifact" in _fails(tmp_path)


def test_damaged_placement(artifact):
    (artifact / PLACEMENT).write_text("{")
    assert "placement.json cannot be read" in _fails(artifact)


def test_damaged_samples(artifact):
    (artifact / SAMPLES).write_bytes(b"PK")
    assert "samples.npz cannot be read" in _fails(artifact)


def test_damaged_statistics(artifact):
    (artifact / CALIBRATION).write_bytes(b"PK")
    assert "is not a calibration file" in _fails(artifact)


def test_missing_data(artifact, tmp_path):
    assert "does not exist" in _fails(artifact, "--data", tmp_path / "nowhere")


def test_labels_without_data(artifact, tmp_path):
    assert "labels and preprocessing belong to --data" in _fails(artifact, "--labels", _labels(tmp_path / "l.csv", 3))


def test_labels_of_other_data(artifact, tmp_path):
    data, labels = images(tmp_path / "data.npy", 8), _labels(tmp_path / "labels.csv", 3)
    assert "labels" in _fails(artifact, "--data", data, "--labels", labels)


def test_bad_preprocessing(artifact, tmp_path):
    assert "--preprocess 'imagnet'" in _fails(artifact, "--data", tmp_path, "--preprocess", "imagnet")


def test_two_engines(artifact, tmp_path):
    assert "leave one of the two out" in _fails(artifact, "--engine", "rtx", "--engine-tensors", tmp_path / "e.npz")


def test_qat_of_another_network(artifact, tmp_path):
    model = onnx.ModelProto()
    model.CopyFrom(net.int8)
    model.graph.input[0].name = "image"
    for node in model.graph.node:
        node.input[:] = ["image" if name == "x" else name for name in node.input]
    onnx.save(model, tmp_path / "qat.onnx")
    assert "has the inputs ['image'], the artifact's model ['x']" in _fails(artifact, "--qat", tmp_path / "qat.onnx")
    assert "does not exist" in _fails(artifact, "--qat", tmp_path / "none.onnx")


def test_diff_of_different_networks(artifact, tmp_path):
    from pipeline.artifact import INT8_MODEL
    from tests.errors.networks import chain

    other = make_artifact(tmp_path / "other", net).folder
    onnx.save(chain(2).int8, other / INT8_MODEL)
    with pytest.raises(InputError, match="not the same network"):
        diff_artifacts(artifact, other)


def test_nothing_quantised(artifact):
    path = artifact / PLACEMENT
    values = json.loads(path.read_text())
    for decision in values["decisions"]:
        decision["quantized"] = False
    path.write_text(json.dumps(values))
    assert "has no quantised layer" in _fails(artifact)


def test_samples_of_the_verification_are_those_kept(artifact):
    with np.load(artifact / SAMPLES) as kept:
        np.testing.assert_array_equal(kept["inputs/x"][:2], batches()[0].feeds["x"])
