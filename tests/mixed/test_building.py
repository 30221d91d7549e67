"""`quantize build` with a target: the whole of it on small networks, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from pipeline.artifact import Artifact
from pipeline.cli import main
from pipeline.config import BuildConfig
from pipeline.core.errors import CheckFailed
from pipeline.core.ort import make_session
from pipeline.mixed.evaluate import Evaluator
from pipeline.reports.points import search_table
from pipeline.stages import build
from tests.mixed.setting import silu_blocks
from tests.mixed.test_times import write
from tests.placement.test_equalise import depthwise

PROFILE = "x=1x3x16x16,4x3x16x16,8x3x16x16"


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str


def quantize(*args: str | Path) -> Outcome:
    result = CliRunner().invoke(main, list(map(str, args)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def sqnr(artifact: Path, x: np.ndarray[Any, Any]) -> float:
    """Of the artifact's INT8 graph against its float one, in dB."""
    fp32, int8 = (
        make_session(artifact / f"model.{kind}.onnx", optimise=False).run(None, {"x": x})[0].astype(np.float64)
        for kind in ("fp32", "int8")
    )
    return float(10 * np.log10(np.square(fp32).sum() / np.square(fp32 - int8).sum()))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """net.onnx (SiLU blocks, random weights), data.npz (60 samples, one with an outlier) and labels.csv (FP32's)."""
    import torch

    from tests.zoo.export import export_onnx

    module = silu_blocks(3)
    folder = tmp_path_factory.mktemp("inputs")
    axes = {"x": {0: "N"}, "logits": {0: "N"}}
    export_onnx(module, {"x": torch.zeros(2, 3, 16, 16)}, folder / "net.onnx", outputs=["logits"], dynamic_axes=axes)
    x = np.random.default_rng(0).normal(0, 1, (60, 3, 16, 16)).astype(np.float32)
    x[0, 0, 0, 0] = 60.0
    np.savez(folder / "data.npz", x=x)
    (logits,) = make_session(folder / "net.onnx").run(None, {"x": x})
    rows = "".join(f"{number},{label}\n" for number, label in enumerate(logits.argmax(axis=1)))
    (folder / "labels.csv").write_text("index,class_index\n" + rows)
    return folder


def plain_arguments(inputs: Path, out: Path, *more: str | Path) -> list[str | Path]:
    return [
        "build", inputs / "net.onnx", "--data", inputs / "data.npz", "--out", out, "--profile", PROFILE,
        "--target", "onnx", "--samples", "20", "--calibrator", "minmax", *more,
    ]  # fmt: skip


def arguments(inputs: Path, out: Path, *more: str | Path) -> list[str | Path]:
    """Of a search."""
    return plain_arguments(inputs, out, "--search-samples", "12", *more)


@pytest.fixture(scope="module")
def searched(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("searched") / "net"
    done = quantize(*arguments(inputs, out, "--min-sqnr", "32dB"))
    assert done.code == 0, done.stderr
    assert "mixed precision, SQNR of at least 32 dB" in done.stdout
    assert "searching: " in done.stderr
    return out


def _unseen(x: np.ndarray[Any, Any]) -> list[int]:
    """Every other of the samples that are left when 20 evenly spaced ones calibrate."""
    calibrated = {number * len(x) // 20 for number in range(20)}
    return [number for number in range(len(x)) if number not in calibrated][1::2]


def test_the_artifact_meets_the_target_and_says_how(inputs: Path, searched: Path) -> None:
    artifact = Artifact.open(searched)
    assert artifact.differences() == []
    entry = artifact.manifest.mixed
    assert entry["reached"]
    assert entry["text"] == "SQNR of at least 32 dB"
    assert (entry["search_samples"], entry["check_samples"], entry["unseen_samples"]) == (12, 20, 20)
    table = json.loads(artifact.path("reports/pareto.json").read_text())
    artifact.path("reports/pareto.png")
    plain = next(point for point in table["points"] if not point["repaired"] and not point["restored"])
    built = table["points"][entry["point"]]
    assert not plain["meets"]
    assert built["meets"]
    assert built["restored"] == entry["restored"] != []
    assert 0 < built["int8_share"] < 1
    # What the manifest verifies was not looked at by the search.
    assert artifact.manifest.verification["samples"] == 20
    assert built["unseen"]["samples"] == 20
    numbers = np.load(artifact.path("samples.npz"))["samples"].tolist()
    x = np.load(inputs / "data.npz")["x"]
    assert sqnr(searched, x[20:]) > 31.5
    assert sqnr(searched, x[numbers]) > 28
    summary = artifact.path("reports/summary.md").read_text()
    assert "## Mixed precision" in summary
    verified = entry["verified"]
    assert verified["sqnr_db"] == pytest.approx(sqnr(searched, x[_unseen(x)]), abs=1e-3)
    assert verified["samples"] == 20
    meets = "meets" if verified["meets"] else "misses"
    assert f"As verified it {meets} the target: SQNR {verified['sqnr_db']:.2f} dB." in summary


def test_explain_says_that_the_search_gave_nodes_back(inputs: Path, searched: Path) -> None:
    """And not that the user had excluded them; with what each of them does for the target, as in the manifest."""
    shutil.copytree(searched, copy := searched.with_name("explained"))
    (first, *_) = Artifact.open(copy).manifest.mixed["restored"]
    outside = [node.name for node in onnx.load(inputs / "net.onnx").graph.node if node.op_type == "Gemm"]
    mine = quantize(*arguments(inputs, copy, "--min-sqnr", "32dB", "--exclude", *outside))
    assert mine.code == 0, mine.stderr
    entry = Artifact.open(copy).manifest.mixed
    shown = json.loads(quantize("explain", copy, "--float", "--json").stdout)
    by_user = {item["node"] for item in shown if item["reason"] == "excluded by the user"}
    assert by_user == set(outside)
    given_back = {item["node"]: item for item in shown if item["rule"] == "mixed-precision"}
    assert set(given_back) == set(entry["restored"]) != set()
    measured = {node: unit for unit in entry["given_back"] for node in unit["nodes"]}
    assert set(measured) == set(given_back)
    for node, item in given_back.items():
        unit = measured[node]
        assert item["reason"] == (
            "given back to float by the search for SQNR of at least 32 dB: alone it takes the SQNR on 12 search "
            f"samples from {unit['sqnr_before_db']:.2f} to {unit['sqnr_after_db']:.2f} dB, at a cost of "
            f"{unit['cost']:,.0f} MACs in float"
        )
        assert unit["sqnr_after_db"] > unit["sqnr_before_db"]
    assert first in json.loads(quantize("explain", searched, first, "--json").stdout)[0]["node"]


def test_a_point_is_planned_once(inputs: Path, searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the plan of the whole build: the search's own are made in its stage, which is unchanged."""
    from pipeline import placement

    planned: list[Path] = []
    original = placement.make_plan
    monkeypatch.setattr(placement, "make_plan", lambda *args: (planned.append(args[0]), original(*args))[1])
    shutil.copytree(searched, copy := searched.with_name("planned"))
    assert quantize(*arguments(inputs, copy, "--choose", "1")).code == 0
    assert len(planned) == 2


def test_inspect_shows_the_table(searched: Path) -> None:
    shown = quantize("inspect", searched)
    assert shown.code == 0
    assert "mixed precision, SQNR of at least 32 dB: points to --choose from" in shown.stdout
    assert " built " in shown.stdout


def test_any_point_is_rebuilt_without_a_search(inputs: Path, searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluator, "_measured", lambda self, candidate: pytest.fail("measured again"))
    taken = Artifact.open(searched).manifest.mixed["point"]
    before = (searched / "model.int8.onnx").read_bytes()
    done = quantize(*arguments(inputs, searched, "--choose", "0"))
    assert done.code == 0, done.stderr
    assert "mixed: unchanged" in done.stderr
    assert "warning: point 0 was asked for: SQNR" in done.stdout
    assert Artifact.open(searched).manifest.mixed["point"] == 0
    assert (searched / "model.int8.onnx").read_bytes() != before
    x = np.load(inputs / "data.npz")["x"]
    assert sqnr(searched, x[20:]) < 31
    for more in (["--choose", str(taken)], ["--min-sqnr", "32dB"]):
        assert quantize(*arguments(inputs, searched, *more)).code == 0
        assert (searched / "model.int8.onnx").read_bytes() == before


def test_a_point_out_of_range(inputs: Path, searched: Path) -> None:
    last = len(Artifact.open(searched).manifest.mixed["points"]) - 1
    done = quantize(*arguments(inputs, searched, "--choose", "99"))
    assert done.code == 2
    assert f"--choose 99: the table has the points 0 to {last}" in done.stderr


def test_a_point_without_a_search(inputs: Path, searched: Path, tmp_path: Path) -> None:
    done = quantize(*arguments(inputs, tmp_path / "net", "--choose", "1"))
    assert done.code == 2
    assert f"--choose 1: there is no search in {tmp_path / 'net'} to choose from" in done.stderr
    assert not (tmp_path / "net").exists()
    other = quantize(*arguments(inputs, searched, "--choose", "1", "--search-samples", "8"))
    assert other.code == 2
    assert "has no finished search for this model, data, options" in other.stderr
    fresh = quantize(*arguments(inputs, searched, "--choose", "1", "--fresh"))
    assert fresh.code == 2
    assert "--choose 1 takes a point of an earlier search, and --fresh takes nothing from it" in fresh.stderr


def test_a_target_out_of_reach_is_said_and_the_nearest_written(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "net"
    done = quantize(*arguments(inputs, out, "--min-sqnr", "190dB", "--json"))
    assert done.code == 1
    shown = json.loads(done.stdout)
    error = shown["error"]
    assert (shown["artifact"], shown["exit_code"]) == (str(out), 1)
    assert shown["mixed"]["points"]
    assert shown["verification"]["samples"] == 20
    told = quantize(*arguments(inputs, out, "--min-sqnr", "190dB"))
    assert told.code == 1
    assert "points to --choose from" in told.stdout
    assert error.startswith("SQNR of at least 190 dB is not reached by any mix; the nearest has SQNR ")
    artifact = Artifact.open(out)
    assert artifact.differences() == []
    entry = artifact.manifest.mixed
    assert not entry["reached"]
    assert any("is not reached by any mix" in warning for warning in artifact.manifest.warnings)
    best = entry["points"][entry["point"]]["figures"]["sqnr_db"]
    assert best == max(point["figures"]["sqnr_db"] for point in entry["points"])
    assert f"SQNR {best:.2f} dB" in error
    assert min(point["int8_share"] for point in entry["points"]) > 0  # the float network would reach any target
    config = BuildConfig(
        model=str(inputs / "net.onnx"), data=str(inputs / "data.npz"), out=out, profiles=(PROFILE,), targets=("onnx",),
        samples=20, calibrator={"name": "minmax"}, mixed={"min_sqnr": 190, "samples": 12},
    )  # fmt: skip
    with pytest.raises(CheckFailed, match="is not reached by any mix"):
        build(config)
    assert build(config.model_copy(update={"mixed": config.mixed.model_copy(update={"choose": 0})})).manifest.mixed


def test_top_one_from_a_configuration_file(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "build.yaml").write_text(
        f"model: {inputs / 'net.onnx'}\ndata: {inputs / 'data.npz'}\nout: {tmp_path / 'net'}\nprofiles: ['{PROFILE}']\n"
        f"targets: [onnx]\nsamples: 20\nlabels: {inputs / 'labels.csv'}\nmixed: {{max_drop: 5%, samples: 8}}\n"
    )
    done = quantize("build", "-c", tmp_path / "build.yaml", "--json")
    assert done.code == 0, done.stderr
    manifest = json.loads(done.stdout)
    point = manifest["mixed"]["points"][manifest["mixed"]["point"]]
    assert manifest["mixed"]["text"] == "top-1 drop of at most 5 points"
    assert point["figures"]["top1_fp32"] == 1.0
    table = search_table(manifest["mixed"])
    column = table.header.index("drop, points")
    assert table.rows[table.built][column] == f"{100 - 100 * point['figures']['top1']:.2f}"
    assert point["figures"]["top1"] >= 0.95
    assert manifest["verification"]["top1_fp32"] == 1.0
    flags = quantize("build", "-c", tmp_path / "build.yaml", "--min-agreement", "90%")
    assert flags.code == 2
    assert "--max-drop and --min-agreement are given; a search has one target" in flags.stderr


def test_labels_that_do_not_fit(inputs: Path, tmp_path: Path) -> None:
    none = quantize(*arguments(inputs, tmp_path / "net", "--max-drop", "1%"))
    assert none.code == 2
    assert "--max-drop is about top-1, which needs labels" in none.stderr
    (tmp_path / "labels.csv").write_text("index,class_index\n" + "".join(f"{i},10\n" for i in range(60)))
    wrong = quantize(*arguments(inputs, tmp_path / "net", "--max-drop", "1%", "--labels", tmp_path / "labels.csv"))
    assert wrong.code == 2
    assert "has label 10, but output 'logits' has 10 classes from 0" in wrong.stderr


def test_few_samples_are_not_parted_and_it_is_said(inputs: Path, tmp_path: Path) -> None:
    done = quantize(*arguments(inputs, tmp_path / "net", "--min-sqnr", "1dB", "--verify-samples", "10", "--json"))
    assert done.code == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert (manifest["mixed"]["check_samples"], manifest["mixed"]["unseen_samples"]) == (10, 0)
    assert manifest["verification"]["samples"] == 10
    assert any("only 10 samples are held aside: the figures are of the samples by" in w for w in manifest["warnings"])


def test_a_search_killed_midway_goes_on(inputs: Path, tmp_path: Path) -> None:
    """kill -9 after a measurement; the next run measures only the rest and finds the same."""
    out = tmp_path / "net"
    command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments(inputs, out, "--min-sqnr", "190dB"))]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    measured = 0
    deadline = time.monotonic() + 120
    while not measured and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
        for path in out.glob(".work/.mixed-*.partial/evaluations.json"):
            measured = len(json.loads(path.read_text())["figures"])
    assert child.poll() is None, "it ended before it could be killed"
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert not (out / "manifest.json").exists()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1, again.stderr
    assert "measurements of an earlier one" in again.stderr
    whole = tmp_path / "whole"
    assert quantize(*arguments(inputs, whole, "--min-sqnr", "190dB")).code == 1
    for name in ("model.int8.onnx", "reports/pareto.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_measured_layer_times_are_the_cost(inputs: Path, tmp_path: Path) -> None:
    """Every convolution saves 1 ms but one, which saves next to nothing."""
    nodes = [node.name for node in onnx.load(inputs / "net.onnx").graph.node if node.op_type == "Conv"]
    slow = dict.fromkeys(nodes, 2.0) | {nodes[2]: 1.001}
    files = [write(tmp_path / "int8.json", dict.fromkeys(nodes, 1.0)), write(tmp_path / "float.json", slow)]
    args = arguments(inputs, tmp_path / "net", "--min-sqnr", "28dB")
    done = quantize(*args, "--layer-times", *files, "--json")
    assert done.code == 0, done.stderr
    entry = json.loads(done.stdout)["mixed"]
    assert entry["unit"] == "ms"
    table = json.loads((tmp_path / "net" / "reports" / "pareto.json").read_text())
    costs = {item["nodes"][0]: item["cost"] for item in table["sensitivities"]}
    assert [costs[name] for name in nodes] == pytest.approx([1.0, 1.0, 0.001, 1.0])
    built = entry["points"][entry["point"]]
    assert built["lost"] == pytest.approx(sum(slow[name] - 1.0 for name in entry["restored"]))
    swapped = quantize(*args, "--layer-times", *reversed(files), "--json")
    assert "warning: INT8 is slower than float in the layer times" in swapped.stderr
    assert any("INT8 is slower than float" in text for text in json.loads(swapped.stdout)["warnings"])
    missing = quantize(*args, "--layer-times", files[0], tmp_path / "none.json")
    assert missing.code == 2
    assert f"layer times {tmp_path / 'none.json'} do not exist" in missing.stderr


def test_another_target_measures_only_what_is_new(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    original = Evaluator._measured

    def counted(self: Evaluator, candidate: Any) -> Any:
        measured.append(f"{self.name}:{candidate.key}")
        return original(self, candidate)

    monkeypatch.setattr(Evaluator, "_measured", counted)
    assert quantize(*arguments(inputs, tmp_path / "net", "--min-sqnr", "190dB")).code == 1
    first = list(measured)
    assert quantize(*arguments(inputs, tmp_path / "net", "--min-sqnr", "32dB")).code == 0
    assert len(set(measured)) == len(measured)
    assert len(measured) < 1.5 * len(first)
    again = quantize(*arguments(inputs, tmp_path / "net", "--min-sqnr", "32dB", "--search-samples", "8"))
    assert again.code == 0
    assert "measurements of an earlier one" not in again.stderr


# -- equalised channels ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose depthwise convolution has input channels of very different size."""
    folder = tmp_path_factory.mktemp("uneven")
    depthwise("Relu").save(folder, "y").rename(folder / "net.onnx")
    x = np.random.default_rng(1).standard_normal((60, 16, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x)
    return folder


def _uneven_arguments(uneven: Path, out: Path, *more: str) -> list[str | Path]:
    profile = "x=1x16x8x8,2x16x8x8,4x16x8x8"
    return [*plain_arguments(uneven, out), "--profile", profile, "--samples", "20", *more]


@pytest.mark.parametrize(
    "flags", [["--equalise"], ["--min-sqnr", "33dB", "--search-samples", "12"]], ids=["option", "repair"]
)
def test_equalised_channels(uneven: Path, tmp_path: Path, flags: list[str]) -> None:
    args = _uneven_arguments(uneven, tmp_path / "net", *flags)
    del args[args.index("--profile") : args.index("--profile") + 2]
    done = quantize(*args)
    assert done.code == 0, done.stderr
    artifact = Artifact.open(tmp_path / "net")
    assert artifact.differences() == []
    x = np.load(uneven / "data.npz")["x"]
    before, after = (
        make_session(path, optimise=False).run(None, {"x": x})[0]
        for path in (uneven / "net.onnx", artifact.path("model.fp32.onnx"))
    )
    np.testing.assert_array_equal(before, after)  # powers of two: the same bits
    assert sqnr(tmp_path / "net", x) > 33
    assert artifact.manifest.verification["outputs"][0]["relative_l2_mean"] < 0.03
    assert all(layer["relative_l2_mean"] < 0.1 for layer in artifact.manifest.verification["worst"])
    onnx.checker.check_model(onnx.load(artifact.path("model.int8.onnx")))
    if flags == ["--equalise"]:
        assert artifact.manifest.mixed == {}
        plain = _uneven_arguments(uneven, tmp_path / "plain")
        del plain[plain.index("--profile") : plain.index("--profile") + 2]
        assert quantize(*plain).code == 0
        compared = quantize("diff", tmp_path / "plain", tmp_path / "net")
        assert compared.code == 0, compared.stderr
        return
    table = json.loads(artifact.path("reports/pareto.json").read_text())
    record = table["repairs"][0]
    assert record["kind"] == "equalise"
    assert record["kept"]
    built = table["points"][artifact.manifest.mixed["point"]]
    assert built["equalised"]
    assert built["restored"] == []
    plain = next(point["number"] for point in table["points"] if not point["repaired"])
    assert quantize(*args, "--choose", str(plain)).code == 0
    assert sqnr(tmp_path / "net", x) < 33
