"""`quantize errors` and `quantize diff` on a small artifact."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from pipeline.artifact import CALIBRATION, INT8_MODEL, PLACEMENT, SAMPLES, STAGED, WORK, Artifact, DataOptions
from pipeline.cli.diff import command as diff_command
from pipeline.cli.errors import command as errors_command
from pipeline.cli.inspect import command as inspect_command
from pipeline.cli.verify import command as verify_command
from pipeline.core.errors import InputError
from pipeline.data import batched, open_source, select, split_source
from pipeline.data.parting import parted
from pipeline.errors.diff import diff_artifacts
from pipeline.errors.table import read_table
from pipeline.errors.verified import verified_numbers
from pipeline.reports import error_report
from pipeline.reports.error_report import report_artifact
from pipeline.reports.summary import summary_markdown
from pipeline.runner import StageRunner
from tests.errors.artifacts import images, make_artifact
from tests.errors.networks import CLASSES, batches, chain, network

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


FILES = {"errors.parquet", "errors.csv", "errors.png", "metrics.png", "calibrators.png", "report.html"}
KEPT = "the 2 samples kept in the artifact, of 6 that it was verified on"


def test_a_report_of_fewer_samples_leaves_the_builds_as_it_is(artifact):
    before = {path.name: path.read_bytes() for path in (artifact / "reports").iterdir()}
    found = CliRunner().invoke(errors_command, [str(artifact)])
    assert found.exit_code == 0, found.output
    said = " ".join(found.output.split())
    assert "the report on the 6 samples that the build verified on stays in reports" in said
    assert f"measured on {KEPT} (--data gives more)" in said
    other = artifact / "reports" / "other-samples"
    assert f"see {other / 'report.html'}" in said
    assert {path.name for path in other.iterdir()} == FILES
    assert {path.name: path.read_bytes() for path in (artifact / "reports").iterdir() if path.is_file()} == before
    assert Artifact.open(artifact).differences() == []


def test_report_of_the_verified_samples_replaces_the_builds_and_its_hashes(tmp_path):
    """All that it was verified on is kept, so that both reports are of the same samples."""
    artifact = make_artifact(tmp_path / "net", net, data=batches(2)).folder
    report = report_artifact(artifact)
    assert report.samples == 2
    assert report.data == "the 2 samples kept in the artifact (--data gives more)"
    assert report.folder == artifact / "reports"
    assert set(report.files) == FILES
    assert {path.name for path in (artifact / "reports").iterdir()} >= FILES
    assert Artifact.open(artifact).differences() == []
    assert report.worst[0]["local"] >= report.worst[1]["local"]
    assert [row["op"] for row in report.operators] != []
    assert report.comparison == ()


def _built_on(tmp_path, spec=None):
    """An artifact with the data of its build: 24 samples, 6 calibrated, 12 of the others verified."""
    data = images(tmp_path / "data.npy")
    options = DataOptions(data=spec or str(data), preprocess=None, batch_size=2, on_nonfinite="error")
    inputs = make_artifact(tmp_path / "probe", net).manifest.inputs
    source = open_source(str(data), inputs, None)
    numbers = split_source(source, inputs, samples=6, verify=12, labelled=False).verification
    verified = list(batched(select(source, numbers), 2, inputs))
    made = make_artifact(tmp_path / "net", net, data_sha256=source.sha256(), data=verified, options=options)
    return made.folder, data, sorted(numbers)


def test_without_data_the_builds_own_samples_are_measured(tmp_path):
    artifact, data, numbers = _built_on(tmp_path)
    of_build = {}
    with (artifact / "reports" / "errors.csv").open() as stream:
        for row in csv.DictReader(stream):
            of_build[row["layer"], int(row["sample"])] = float(row["relative_l2"])
    for given in (None, str(data)):
        report = report_artifact(artifact, data=given)
        assert report.data.endswith("12 samples, held aside from calibration")
        assert report.folder == artifact / "reports"
        table = read_table(report.folder / "errors.parquet")
        assert sorted(set(table["sample"])) == numbers
        found = {(row.layer, row.sample): row.relative_l2 for row in table.itertuples()}
        assert found == pytest.approx(of_build, rel=1e-4)
    assert Artifact.open(artifact).differences() == []


def test_the_builds_data_are_other_ones_now(tmp_path):
    artifact, data, _ = _built_on(tmp_path)
    images(data, 24, seed=5)
    report = report_artifact(artifact)
    assert report.data.endswith(f"(the data in {data} are other ones than the build's; --data gives more)")
    data.unlink()
    report = report_artifact(artifact)
    assert report.data.endswith(f"(the build's data, {data}, are not there; --data gives more)")
    assert report.folder == artifact / "reports" / "other-samples"
    np.save(data, np.zeros((3, 3), np.float32))
    assert "(the build's data cannot be read: " in report_artifact(artifact).data


def test_code_that_a_manifest_names_is_not_run(tmp_path):
    (tmp_path / "samples.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef make():\n    yield 1\n")
    artifact, *_ = _built_on(tmp_path, spec=f"{tmp_path / 'samples.py'}:make")
    assert "are not there" in report_artifact(artifact).data
    assert not (tmp_path / "ran").exists()


def test_other_data_and_fewer_samples_go_beside_the_builds(tmp_path):
    artifact, data, _ = _built_on(tmp_path)
    before = (artifact / "reports" / "errors.csv").read_bytes()
    for options in ({"data": str(data), "samples": 4}, {"data": str(images(tmp_path / "other.npy", 30, seed=3))}):
        report = report_artifact(artifact, **options)
        assert report.folder == artifact / "reports" / "other-samples"
    assert (artifact / "reports" / "errors.csv").read_bytes() == before
    assert Artifact.open(artifact).differences() == []


def test_samples_that_the_search_never_saw_are_found_again(tmp_path):
    data = images(tmp_path / "data.npy", 40)
    artifact = make_artifact(tmp_path / "net", net)
    source = open_source(str(data), artifact.manifest.inputs, None)
    aside = split_source(source, artifact.manifest.inputs, samples=6, verify=20, labelled=False)
    unseen = parted(aside.verification, 1, held_aside=True).unseen
    record = artifact.manifest.data.model_copy(update={"verification_samples": 10})
    manifest = artifact.manifest.model_copy(
        update={"data": record, "mixed": {"check_samples": 10, "unseen_samples": 10}}
    )
    assert verified_numbers(manifest, source, sorted(unseen)[:2]) == unseen
    assert verified_numbers(manifest, source, sorted(unseen)[1:3]) is None, "other samples than those recorded"


def test_every_calibrator_is_compared(artifact):
    import calibrators

    report = report_artifact(artifact)
    page = (report.folder / "report.html").read_text()
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


def test_plain_file_with_some_layers(artifact, tmp_path):
    from pipeline.errors.capture import OrtReading

    with np.load(artifact / SAMPLES) as kept:
        numbers, feeds = kept["samples"], {"x": kept["inputs/x"]}
    values = OrtReading(net.int8, ["stem", "logits"], label="", optimise=False).run(feeds)
    np.savez(tmp_path / "engine.npz", samples=numbers, **values)
    report = report_artifact(artifact, engine_tensors=tmp_path / "engine.npz", out=tmp_path / "out")
    assert "recorded in engine.npz" in report.engine
    page = (tmp_path / "out" / "report.html").read_text()
    assert "0 of 6 layers are fused and cannot be shown" in page, "a file that lacks a layer does not say why"
    assert "4 of 6 layers could not be compared" in page


@pytest.fixture
def tensorrt(monkeypatch):
    """The wiring to TensorRT, with onnxruntime in its place; a version's class list decides what it can do."""
    from types import SimpleNamespace

    from pipeline.engine import capture
    from pipeline.errors.capture import OrtReading
    from tests.engine.test_compat import api as listed_api

    asked = {"version": "8.6", "ways": [], "wrong": lambda way: False}

    def build(model, tensors, profiles, *, plan_path, target, way, **rest):
        asked["ways"].append(way)
        asked.update(tensors=tensors, profiles=profiles, target=target)

    class FakeRunner:
        def __init__(self, plan, *, target, record):
            self.profiles = asked["profiles"]
            self.inputs = [SimpleNamespace(name="x")]
            self.device = None

        def __call__(self, feeds):
            way, marks = asked["ways"][-1], asked["tensors"]
            values = OrtReading(net.int8, ["logits", *marks], label="", optimise=False).run(self.spoilt(feeds))
            if way.how == "itself":
                return values
            doubled = {f"{name}::doubled": 2 * values[name] for name in marks if name != "logits"}
            return {"logits": values["logits"], **doubled}

        def taken(self, feeds):
            return feeds

        def spoilt(self, feeds):
            return {"x": feeds["x"] * np.float32(3 if asked["wrong"](asked["ways"][-1]) else 1)}

        def run_watched(self, feeds, listener):
            host = listed.trt.TensorLocation.HOST
            names = ["relu_q", "sum", "pooled", "logits"]
            for name, values in OrtReading(net.int8, names, label="", optimise=False).run(feeds).items():
                kind = listed.trt.DataType.INT8 if name == "relu_q" else listed.trt.DataType.FLOAT
                values = asked.get("layout", lambda name, values: values)(name, np.ascontiguousarray(values))
                listener.process_debug_tensor(values.ctypes.data, host, kind, values.shape, name, 0)
            return OrtReading(net.int8, ["logits"], label="", optimise=False).run(self.spoilt(feeds))

        def close(self):
            asked["closed"] = True

    def load(target):
        nonlocal listed
        listed = listed_api(asked["version"])
        kinds = {listed.trt.DataType.INT8: np.int8, listed.trt.DataType.FLOAT: np.float32}
        listed.trt.nptype = kinds.__getitem__
        listed.trt.IDebugListener = type("IDebugListener", (), {"__init__": lambda self: None})
        return listed

    listed = None
    monkeypatch.setattr(capture, "load_api", load)
    monkeypatch.setattr(capture, "no_device_reason", lambda: None)
    monkeypatch.setattr(capture, "build_capture", build)
    monkeypatch.setattr(capture, "Runner", FakeRunner)
    return asked


def test_engine_with_marked_int8_tensors(artifact, tensorrt):
    """relu and sum as the next layers read them; against onnxruntime's graph the errors are nothing."""
    way = "marked INT8 tensors, doubled, level 0"
    report = report_artifact(artifact, engine="tensorrt")
    assert report.engine == "the engine (tensorrt 8.6.0)"
    assert report.recorded == way
    assert report.engine_layers == {
        "fused": 3,
        "shown": 1,
        "shown by the activation behind in INT8": 1,
        "shown in INT8": 1,
    }
    assert [str(one) for one in tensorrt["ways"]] == [way]
    assert tensorrt["tensors"] == ("sum_dq", "relu_dq")
    assert str(tensorrt["profiles"][0]) == "x=1x3x8x8,2x3x8x8,2x3x8x8"
    assert tensorrt["closed"]
    table = read_table(report.folder / "errors.parquet")
    assert set(table.engine_recorded) == {way}
    state = table.groupby("layer").engine.first().to_dict()
    assert state["stem"] == "shown as relu, after the activation, in INT8"
    assert state["sum"] == "shown, in INT8"
    assert state["logits"] == "shown"
    assert {name: state[name] for name in ("branch", "padded", "last")} == {
        "branch": "fused: Add joins it with another tensor before anything is quantised",
        "padded": "fused: Conv reads it before anything is quantised",
        "last": "fused: GlobalAveragePool reads it before anything is quantised",
    }
    assert report.engine_hidden == {state[name].removeprefix("fused: "): 1 for name in ("branch", "padded", "last")}
    shown = table[table.layer.isin(["stem", "sum", "logits"])]
    assert (shown.engine_int8_relative_l2 < 1e-6).all()
    assert (shown.engine_relative_l2 > 1e-3).all(), "to FP32 the rounding counts"
    page = (report.folder / "report.html").read_text()
    assert f"Recorded: {way}." in page
    assert "its activation and its quantiser stay one kernel" in page
    assert "Not shown: 1 layer, Add joins it with another tensor before anything is quantised." in page
    assert Artifact.open(artifact).manifest.verification["engine"]["recorded"] == way


def test_engine_with_marked_outputs(artifact, tmp_path, tensorrt):
    """Where the engines with marked INT8 tensors compute something else, the float tensors that do not."""
    tensorrt["wrong"] = lambda way: way.kind == "marked INT8 tensors"
    arguments = [str(artifact), "--engine", "tensorrt", "--out", str(tmp_path / "out"), "--json"]
    found = CliRunner().invoke(errors_command, arguments)
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["recorded"] == "marked outputs, TensorRT's own level"
    assert report["engine_layers"] == {"shown": 6}
    assert tensorrt["tensors"] == ("stem", "branch", "sum", "padded", "last", "logits")
    warned = " ".join(found.stderr.split())
    for way in tensorrt["ways"][:-1]:
        assert f"not recorded as {way}: output 'logits' of the engine differs from the recorded one by" in warned
    page = (tmp_path / "out" / "report.html").read_text()
    assert "the engine that serves may run other kernels" in page
    table = read_table(tmp_path / "out" / "errors.parquet")
    assert set(table.engine_recorded) == {"marked outputs, TensorRT's own level"}
    assert (table.engine_int8_relative_l2 < 1e-6).all()


def test_engines_that_compute_something_else_are_not_reported(artifact, tmp_path, tensorrt):
    """Against the samples kept in the artifact, and with --data against onnxruntime on the same samples."""
    before = (artifact / "manifest.json").read_bytes()
    data = str(images(tmp_path / "data.npy"))
    for version, options in (("8.6", []), ("10.16", ["--data", data, "--samples", "3"])):
        tensorrt.update(version=version, wrong=lambda way: True, ways=[])
        found = CliRunner().invoke(errors_command, [str(artifact), "--engine", "tensorrt", *options])
        assert found.exit_code == 1, found.output
        assert "shows its tensors and gives its outputs; nothing of these engines is reported" in " ".join(
            found.output.split()
        )
        assert len(tensorrt["ways"]) == 5 + (version == "10.16")
        assert (artifact / "manifest.json").read_bytes() == before
    assert Artifact.open(artifact).differences() == []


def test_an_engine_on_other_data(artifact, tmp_path, tensorrt):
    data = str(images(tmp_path / "data.npy"))
    report = report_artifact(artifact, data=data, samples=3, engine="tensorrt", out=tmp_path / "out")
    assert report.recorded == "marked INT8 tensors, doubled, level 0"
    assert (read_table(tmp_path / "out" / "errors.csv").engine_int8_relative_l2.dropna() < 1e-6).all()


def test_engine_with_debug_tensors(artifact, tmp_path, tensorrt):
    """relu is there in INT8 under its quantiser's name, and stands for stem, which was fused with it."""
    tensorrt["version"] = "10.16"
    report = report_artifact(artifact, engine="tensorrt")
    assert report.recorded == "debug tensors"
    assert report.engine == "the engine (tensorrt 10.16.1.11)"
    assert report.engine_layers == {"fused": 3, "shown": 2, "shown by the activation behind in INT8": 1}
    table = read_table(report.folder / "errors.parquet")
    state = table.groupby("layer").engine.first().to_dict()
    assert state["stem"] == "shown as relu, after the activation, in INT8"
    assert state["sum"] == state["logits"] == "shown"
    assert state["branch"] == state["padded"] == state["last"] == "fused: the engine cannot show it"
    fused = table[table.layer == "branch"]
    assert fused.engine_relative_l2.isna().all()
    shown = table[table.layer == "stem"]
    assert (shown.engine_int8_relative_l2 < 1e-6).all(), "the same codes as the Q/DQ graph's"
    assert (shown.engine_relative_l2 > 1e-3).all(), "to FP32 the rounding counts"
    page = (report.folder / "report.html").read_text()
    assert "3 of 6 layers are fused and cannot be shown. Recorded: debug tensors." in page
    assert "after the same quantisation" in page
    engine = Artifact.open(artifact).manifest.verification["engine"]
    assert engine["recorded"] == "debug tensors"
    assert Artifact.open(artifact).differences() == []
    report_artifact(artifact)
    assert "engine" not in Artifact.open(artifact).manifest.verification


def test_a_debug_tensor_in_another_layout_is_not_compared(artifact, tmp_path, tensorrt):
    def channels_last(name, values):
        if name != "sum":
            return values
        return np.ascontiguousarray(values.transpose(0, 2, 3, 1)).reshape(values.shape)

    tensorrt.update(version="10.16", layout=channels_last)
    report = report_artifact(artifact, engine="tensorrt", out=tmp_path / "out")
    assert report.engine_layers["not compared"] == 1
    table = read_table(tmp_path / "out" / "errors.csv")
    rows = table[table.layer == "sum"]
    assert set(rows.engine) == {"not compared: the engine's memory layout is not row-major"}
    assert rows.engine_relative_l2.isna().all()
    assert (
        "1 of 6 layers could not be compared, though they are not fused"
        in (tmp_path / "out" / "report.html").read_text()
    )


def test_a_debug_tensor_of_another_shape(artifact, tmp_path, tensorrt):
    shapes = {"logits": lambda values: values.reshape(*values.shape, 1, 1), "sum": lambda values: values[:, :2].copy()}
    tensorrt.update(version="10.16", layout=lambda name, values: shapes.get(name, lambda v: v)(values))
    report_artifact(artifact, engine="tensorrt", out=tmp_path / "out")
    table = read_table(tmp_path / "out" / "errors.csv")
    assert set(table[table.layer == "logits"].engine) == {"shown"}
    state = "not compared: the engine has it with shape (2, 2, 8, 8), the graph with (2, 4, 8, 8)"
    assert set(table[table.layer == "sum"].engine) == {state}


def test_debug_tensors_asked_of_8_6(artifact, tensorrt, tmp_path):
    arguments = [
        str(artifact),
        "--engine",
        "tensorrt",
        "--engine-capture",
        "debug-tensors",
        "--out",
        str(tmp_path / "o"),
    ]
    found = CliRunner().invoke(errors_command, arguments)
    assert found.exit_code == 2
    assert "they take TensorRT 10.12 or newer" in " ".join(found.output.split())
    assert not (tmp_path / "o").exists()


def test_the_command_says_what_was_recorded(artifact, tensorrt, tmp_path):
    tensorrt["version"] = "11.4"
    for way, words in (("marked-outputs", "marked INT8 tensors, doubled, level 0"), (None, "debug tensors")):
        arguments = [str(artifact), "--engine", "tensorrt", "--out", str(tmp_path / "o")]
        found = CliRunner().invoke(errors_command, arguments + (["--engine-capture", way] if way else []))
        assert found.exit_code == 0, found.output
        said = " ".join(found.output.split())
        assert f"recorded: {words}; layers:" in said
        reason = "not shown, 1: GlobalAveragePool reads it" if way else "not shown, 3: the engine cannot show it"
        assert reason in said


def test_a_way_to_capture_needs_an_engine(artifact):
    with pytest.raises(InputError, match="a way to capture an engine's tensors is named, and no engine"):
        report_artifact(artifact, engine_capture="debug tensors")


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
    assert "layers that make the largest error themselves, relative L2" in done.output
    assert "output logits: relative L2" in done.output
    assert "report.html" in done.output


def test_errors_command_json(artifact, tmp_path):
    done = CliRunner().invoke(errors_command, [str(artifact), "--json", "-q", "--out", str(tmp_path / "out")])
    value = json.loads(done.stdout)
    assert value["samples"] == 2
    assert value["worst"][0]["cause"] in ("weights", "clipping", "rounding")


@pytest.fixture(scope="module")
def dim(tmp_path_factory):
    """An artifact of which one of four samples is almost zero in every layer."""
    data = batches(4, 4)
    data[0].feeds["x"][2] *= np.float32(1e-5)
    return make_artifact(tmp_path_factory.mktemp("dim") / "net", chain(3, side=8), data=data).folder


_REMARK = (
    "3 of 3 layers have samples in which FP32 is almost zero (below 0.001 of the layer's range; 'conv0' in 1 of 4): "
    "their relative error says nothing and is left out, their absolute error counts"
)


def test_samples_that_are_almost_zero_are_said_in_table_page_and_json(dim, tmp_path):
    arguments = [str(dim), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(errors_command, arguments, env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert _REMARK in shown
    assert re.search(
        r"output relu2: relative L2 0\.\d+ \(worst 0\.\d+\), cosine 0\.9\d+, largest absolute error [\d.e-]+ "
        r"of a range of [\d.]+; FP32 is almost zero in 1 of 4 samples",
        shown,
    )
    value = json.loads(CliRunner().invoke(errors_command, [*arguments, "--json", "-q"]).stdout)
    assert value["almost_zero"] == {"conv0": 1, "conv1": 1, "conv2": 1}
    assert value["outputs"]["relu2"]["almost_zero"] == 1
    assert value["outputs"]["relu2"]["relative_l2_max"] < 0.2
    assert [layer["almost_zero"] for layer in value["worst"]] == [1, 1, 1]
    assert all(layer["max_abs"] > 0 for layer in value["worst"])
    page = (tmp_path / "out" / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert _REMARK in data["notes"]
    assert [layer["almost_zero"] for layer in data["layers"]] == [1, 1, 1]
    outputs = data["sections"][0]
    assert outputs["columns"][3:5] == ["largest absolute error", "range"]
    assert "almost zero in 1 of 4 samples" in outputs["rows"][0][-1]


def test_report_and_verification_give_the_same_figures(dim, tmp_path):
    report = report_artifact(dim, out=tmp_path / "out")
    verified = Artifact.open(dim).manifest.verification
    assert report.outputs["relu2"].model_dump() == pytest.approx(verified["outputs"][0])
    assert report.almost_zero == verified["almost_zero_layers"]
    own = {layer["layer"]: layer for layer in report.worst}
    for layer in verified["worst"]:
        found = own[layer["layer"]]
        assert found["accumulated"] == pytest.approx(layer["relative_l2_mean"])
        assert (found["max_abs"], found["almost_zero"]) == pytest.approx((layer["max_abs"], layer["almost_zero"]))


def test_summary_has_absolute_errors_and_says_what_is_almost_zero(dim):
    manifest = Artifact.open(dim).manifest
    text = summary_markdown(manifest)
    assert "| output | relative L2, mean | worst sample | largest absolute error | range | cosine, mean |" in text
    assert "`relu2`: FP32 is almost zero in 1 of 4 samples" in text
    assert "| layer | operator | mean | worst sample | largest absolute error |" in text
    assert f"{_REMARK}." in text
    (row,) = (line for line in text.splitlines() if line.startswith("| `conv0`"))
    (figures,) = (layer for layer in manifest.verification["worst"] if layer["layer"] == "conv0")
    assert f"| {figures['max_abs']:.4g} |" in row
    (output,) = (line for line in text.splitlines() if line.startswith("| `relu2`"))
    assert f"| {manifest.verification['outputs'][0]['max_abs']:.4g} |" in output


def test_summary_of_an_earlier_versions_manifest(dim):
    """Without absolute errors: they are not made up."""
    layer = {"layer": "a", "node": "n", "op": "Conv", "relative_l2_mean": 0.1, "relative_l2_max": 0.2}
    output = {"name": "y", "relative_l2_mean": 0.5, "relative_l2_max": 0.6, "cosine_mean": 0.9, "cosine_min": 0.8}
    figures = {"samples": 2, "layers": 1, "outputs": [output], "worst": [layer]}
    text = summary_markdown(Artifact.open(dim).manifest.model_copy(update={"verification": figures}))
    assert "| `y` | 0.50000 | 0.60000 | - | - | 0.900000 | - |" in text
    assert "| `a` | Conv | 0.10000 | 0.20000 | - |" in text


def test_inspect_has_absolute_errors_and_says_what_is_almost_zero(dim):
    done = CliRunner().invoke(inspect_command, [str(dim)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "largest absolute error" in shown
    assert "FP32 is almost zero in 1 of 4 samples" in shown
    assert "3 of 3 layers have samples in which FP32 is almost zero" in shown


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


def test_diff_where_fp32_is_almost_zero(artifact, tmp_path):
    """No relative error is no number, and no difference either; the absolute one is among the figures."""
    other = make_artifact(tmp_path / "other", network({"relu": 2.4})).folder
    report = artifact / "reports" / "errors.csv"
    rows = list(csv.DictReader(report.open()))
    for row in rows:
        row["relative_l2"] = "" if row["node"] == "branch_conv" else row["relative_l2"]
    with report.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    Artifact.open(artifact).updated(files=("reports/errors.csv",))
    found = diff_artifacts(artifact, other)
    by_node = {layer.node: layer for layer in found.layers}
    assert by_node["branch_conv"].error_a is None
    assert by_node["branch_conv"].error_change is None
    assert by_node["last_conv"].error_a > 0
    first, second = found.settings["output largest error"]
    assert float(first) != float(second)


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


@pytest.mark.parametrize("last", ["errors.csv", "metrics.png", "report.html"])
def test_a_report_that_is_cut_off_leaves_the_artifact_whole(artifact, monkeypatch, last):
    """As where the disk is full, or the process is killed."""
    from pipeline.core import files

    before = {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()}
    assert Artifact.open(artifact).differences() == []
    whole = files.atomic_file

    @contextmanager
    def full(path):
        if path.name == last:
            raise InputError("no space left on the disk")
        with whole(path) as stream:
            yield stream

    with monkeypatch.context() as patch:
        patch.setattr(files, "atomic_file", full)
        for module in list(sys.modules.values()):
            if getattr(module, "atomic_file", None) is whole:
                patch.setattr(module, "atomic_file", full)
        with pytest.raises(InputError, match="no space left"):
            report_artifact(artifact)
    after = {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file() and WORK not in path.parts}
    assert after == {path: content for path, content in before.items() if WORK not in path.parts}
    assert Artifact.open(artifact).differences() == []
    report_artifact(artifact)
    assert Artifact.open(artifact).differences() == []
    assert not list((artifact / WORK).glob(".errors*"))


@pytest.mark.parametrize("moved", [0, 2, 5])
def test_a_report_that_is_killed_while_it_is_put_in_place_is_finished_by_the_next(
    artifact, tmp_path, monkeypatch, moved
):
    class Killed(BaseException):
        pass

    staging, left, replace = artifact / STAGED, [None] * moved, Path.replace

    def killed(source, target):
        if staging in source.parents and staging not in target.parents:
            if not left:
                raise Killed
            left.pop()
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            report_artifact(artifact, data=str(images(tmp_path / "other.npy")))
    listed = Artifact.open(artifact).manifest.files
    found = Artifact.open(artifact).differences()
    assert [difference.kind for difference in found] == ["unplaced"] * (len(FILES) - moved)
    verified = CliRunner().invoke(verify_command, [str(artifact)])
    assert verified.exit_code == 1
    assert f"{found[0].file}: still in .work/.errors.partial, for `quantize errors` was cut off" in verified.stderr
    assert f"`quantize errors {artifact}` puts its report in place" in verified.stderr
    monkeypatch.setattr(error_report, "write_reports", Mock(side_effect=InputError("no space left on the disk")))
    with pytest.raises(InputError, match="no space"):
        report_artifact(artifact)
    again = Artifact.open(artifact)
    assert again.differences() == []
    assert again.manifest.files == listed
    assert not staging.exists()


def test_what_a_killed_report_left_is_not_put_into_another_build(artifact, tmp_path):
    """Nor what was cut off before it was listed: the manifest knows neither."""
    old = artifact / STAGED / "reports" / "errors.csv"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    assert Artifact.open(artifact).differences() == []
    report_artifact(artifact, data=str(images(tmp_path / "other.npy")))
    assert Artifact.open(artifact).differences() == []
    assert (artifact / "reports" / "errors.csv").read_text() != "old"
    assert not (artifact / STAGED).exists()


def test_a_report_waits_for_no_build(artifact):
    with StageRunner(artifact / WORK).locked():
        said = _fails(artifact)
    assert f"another build (process {os.getpid()}) is at work in {artifact}" in said


@pytest.mark.parametrize("name", ["model.fp32.onnx", "model.int8.onnx"])
def test_an_empty_model_is_no_network_without_layers(artifact, tmp_path, name):
    shutil.copytree(artifact, tmp_path / "empty")
    (tmp_path / "empty" / name).write_bytes(b"")
    Artifact.open(tmp_path / "empty").updated(files=(name,))
    for command in (lambda: diff_artifacts(artifact, tmp_path / "empty"), lambda: report_artifact(tmp_path / "empty")):
        with pytest.raises(InputError, match=f"empty/{name} is not a readable ONNX model: it has no graph"):
            command()


def test_no_artifact(tmp_path):
    assert "has no manifest.json and is no artifact" in _fails(tmp_path)


def test_damaged_placement(artifact):
    (artifact / PLACEMENT).write_text("{")
    Artifact.open(artifact).updated(files=(PLACEMENT,))
    assert "placement.json cannot be read" in _fails(artifact)


def test_damaged_samples(artifact):
    (artifact / SAMPLES).write_bytes(b"PK")
    Artifact.open(artifact).updated(files=(SAMPLES,))
    assert "samples.npz cannot be read" in _fails(artifact)


def test_damaged_statistics(artifact):
    (artifact / CALIBRATION).write_bytes(b"PK")
    Artifact.open(artifact).updated(files=(CALIBRATION,))
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
    other = make_artifact(tmp_path / "other", net).folder
    onnx.save(chain(2).int8, other / INT8_MODEL)
    Artifact.open(other).updated(files=(INT8_MODEL,))
    with pytest.raises(InputError, match="not the same network"):
        diff_artifacts(artifact, other)


def test_nothing_quantised(artifact):
    path = artifact / PLACEMENT
    values = json.loads(path.read_text())
    for decision in values["decisions"]:
        decision["quantized"] = False
    path.write_text(json.dumps(values))
    Artifact.open(artifact).updated(files=(PLACEMENT,))
    assert "has no quantised layer" in _fails(artifact)


def test_samples_of_the_verification_are_those_kept(artifact):
    with np.load(artifact / SAMPLES) as kept:
        np.testing.assert_array_equal(kept["inputs/x"][:2], batches()[0].feeds["x"])
