"""`quantize bench` and `quantize coverage`, on a fake card: what is compared, written and refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from onnx import helper

from pipeline.cli.bench import command as bench
from pipeline.cli.coverage import command as coverage
from pipeline.config import Profile
from pipeline.core.errors import InputError, ToolError
from pipeline.engine import baselines, suite
from pipeline.engine.baselines import baseline_engine
from pipeline.engine.compat import Api
from pipeline.engine.records import EngineRecord
from pipeline.engine.suite import run_suite
from tests.engine import graphs
from tests.engine.artifacts import FakeBuilder, make_artifact
from tests.engine.conftest import CARD


@pytest.fixture
def built(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBuilder:
    fake = FakeBuilder()
    monkeypatch.setattr(baselines, "build_engine", fake)
    card.api.trt.BuilderFlag = SimpleNamespace(FP16=0)
    card.api.trt.IInt8EntropyCalibrator2 = object
    for module in (suite, baselines):
        monkeypatch.setattr(module, "load_api", lambda target: card.api)
        monkeypatch.setattr(module, "describe_device", lambda: CARD)
    monkeypatch.setattr(suite, "_LOAD_SECONDS", 0.05)
    monkeypatch.setattr(suite, "_OVERLAP_SECONDS", 0.02)
    monkeypatch.setattr("pipeline.engine.bench._ROUND_SECONDS", 0.002)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(bench, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_engines_and_baselines_are_compared_and_written(built: FakeBuilder, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", engine=True).folder
    out = tmp_path / "out"
    code, output = run(
        str(folder), "--batch", "1,8", "--against", "fp32,implicit", "--set", "warm,load,edge",
        "--rounds", "2", "--in-flight", "2", "--out", str(out),
    )  # fmt: skip
    assert code == 0, output
    for words in (
        "net int8",
        "net fp32",
        "net implicit",
        "warm",
        "edge",
        "load",
        "throughput with host copies",
        "batch 8",
    ):
        assert words in output
    assert "faster" in output or "slower" in output or "within the noise" in output
    value = json.loads((out / "bench.json").read_text())
    assert len(value["warm"]) == 2 * 3 * 2
    assert {m["batch"] for m in value["edge"]} == {1, 8}
    assert value["device"]["name"] == "Fake card"
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert [options.fp16 for _, _, _, options in built.calls] == [False, True]
    assert [options.calibration_cache is not None for _, _, _, options in built.calls] == [False, True]


def test_baselines_are_built_once(built: FakeBuilder, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "a", engine=True)
    first = baseline_engine(artifact, "fp16", "tensorrt", ())
    assert baseline_engine(artifact, "fp16", "tensorrt", ()) == first
    assert len(built.calls) == 1
    assert first[0].is_relative_to(tmp_path / "cache" / "quantize" / "engines")
    baseline_engine(artifact, "fp32", "tensorrt", ())
    assert len(built.calls) == 2


def test_json_is_machine_readable(built: FakeBuilder, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", engine=True).folder
    result = CliRunner().invoke(bench, [str(folder), "--batch", "4", "--rounds", "2", "--json", "-q"])
    value = json.loads(result.stdout)
    assert [m["name"] for m in value["warm"]] == ["net int8", "net int8"]
    assert value["verdicts"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--batch", "1,x"], 2, "is not a list of numbers"),
        (["--batch", "0"], 2, "is not a list of numbers"),
        (["--against", "bf16"], 2, "'bf16' is unknown here; known: fp32, fp16, implicit"),
        (["--set", "cold"], 2, "'cold' is unknown here; known: warm, load, edge"),
        (["--batch", "9"], 2, "no profile of the engine allows batch 9"),
    ],
)
def test_wrong_options_are_named(
    built: FakeBuilder, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    folder = make_artifact(tmp_path / "a", engine=True).folder
    status, output = run(str(folder), *arguments)
    assert status == code
    assert words in " ".join(output.split())


def test_an_artifact_without_an_engine_is_refused(built: FakeBuilder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no engine for target tensorrt"):
        run_suite([make_artifact(tmp_path / "a").folder], batches=[1])


def test_every_engine_is_there_before_a_baseline_is_built(
    built: FakeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.suite.baseline_engine", lambda *given: pytest.fail("a baseline was built"))
    folders = [make_artifact(tmp_path / "a", engine=True).folder, make_artifact(tmp_path / "b").folder]
    with pytest.raises(InputError, match="b has no engine for target tensorrt"):
        run_suite(folders, batches=[1], against=["fp16"])


def test_what_cannot_run_here_is_said_before_a_baseline_is_built(
    built: FakeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_artifact(tmp_path / "a", engine=True).folder
    monkeypatch.setattr(suite, "describe_device", lambda: CARD.model_copy(update={"compute_capability": "8.0"}))
    with pytest.raises(InputError, match=r"the engine was built for compute capability 9\.0"):
        run_suite([folder], batches=[1], against=["fp16"])
    monkeypatch.setattr(suite, "describe_device", lambda: None)
    monkeypatch.setattr(suite, "no_device_reason", lambda: "no driver")
    with pytest.raises(ToolError, match="nothing can be measured here: no driver"):
        run_suite([folder], batches=[1], against=["fp16"])
    assert built.calls == []


@pytest.fixture
def strongly_typed(built: FakeBuilder, card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    """TensorRT as of version 11: no FP16 flag, no calibrators."""
    trt = SimpleNamespace(BuilderFlag=SimpleNamespace(), __version__="11.4.0")
    api = Api(trt=trt, rtx=False, version="11.4.0")
    for module in (suite, baselines):
        monkeypatch.setattr(module, "load_api", lambda target: api)
    return built


def typed_conv(path: Path) -> None:
    """With the types of all tensors, as prepared models have them."""
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(graphs.conv(path))), path)


def test_where_there_is_no_fp16_flag_the_types_are_in_the_graph(
    strongly_typed: FakeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make_artifact(tmp_path / "a", engine=True)
    typed_conv(artifact.path("model.fp32.onnx"))
    seen: list[onnx.ModelProto] = []

    def read(model: Path, **rest: Any) -> EngineRecord:
        seen.append(onnx.load(model))
        return strongly_typed(model, **rest)

    monkeypatch.setattr(baselines, "build_engine", read)
    baseline_engine(artifact, "fp16", "tensorrt", ())
    baseline_engine(artifact, "fp32", "tensorrt", ())
    half, single = ({value.data_type for value in model.graph.initializer} for model in seen)
    assert onnx.TensorProto.FLOAT16 in half
    assert onnx.TensorProto.FLOAT not in half
    assert single == {onnx.TensorProto.FLOAT}
    assert [value.type.tensor_type.elem_type for value in seen[0].graph.input] == [onnx.TensorProto.FLOAT]
    assert not any(options.fp16 for *_, options in strongly_typed.calls)
    assert not strongly_typed.calls[0][0].exists()  # the copy is gone
    assert artifact.path("model.fp32.onnx").exists()


def test_a_network_without_fp16_has_no_such_baseline(strongly_typed: FakeBuilder, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "a", engine=True)
    graphs.save(artifact.path("model.fp32.onnx"), [helper.make_node("Relu", ["x"], ["y"])], {})
    with pytest.raises(InputError, match="no node can be computed in FP16"):
        baseline_engine(artifact, "fp16", "tensorrt", ())


def test_an_rtx_engine_in_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")
    artifact = make_artifact(tmp_path / "a", engine=True)
    typed_conv(artifact.path("model.fp32.onnx"))
    profile = Profile.parse("x=1x8x16x16,4x8x16x16,8x8x16x16")
    plan, record = baseline_engine(artifact, "fp16", "rtx", (profile,), cache=tmp_path / "cache")
    assert plan.stat().st_size == record.plan_bytes
    assert not record.options.fp16


def test_baselines_that_this_version_lacks(
    strongly_typed: FakeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_artifact(tmp_path / "a", engine=True).folder
    with pytest.raises(InputError, match=r"--against implicit: TensorRT 11\.4\.0 has no implicit INT8"):
        run_suite([folder], batches=[1], against=["implicit"])
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(InputError, match=r"--against fp16 with TensorRT 11\.4\.0 needs the package 'onnx_ir'"):
        run_suite([folder], batches=[1], against=["fp16"])
    assert strongly_typed.calls == []


def test_a_model_with_q_dq_nodes_of_its_own_has_no_float_baseline(built: FakeBuilder, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", engine=True, given=True).folder
    with pytest.raises(InputError, match="a: --against fp32,fp16 needs a float model, and this one came with"):
        run_suite([folder], batches=[1], against=["fp32", "fp16"])


def test_artifacts_of_one_name_are_told_apart_by_their_folders(built: FakeBuilder, tmp_path: Path) -> None:
    folders = [make_artifact(tmp_path / name, engine=True).folder for name in ("a", "b")]
    result = run_suite(folders, batches=[1], rounds=2)
    names = [f"{folder} int8" for folder in folders]
    assert [engine.name for engine in result.engines] == names
    assert {(verdict.first, verdict.second) for verdict in result.verdicts} == {tuple(names)}
    with pytest.raises(InputError, match="a is given twice"):
        run_suite([folders[0], folders[0]], batches=[1])


def test_coverage_shows_shares_and_better_profiles(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a").folder
    requests = tmp_path / "requests.csv"
    requests.write_text("x,count\n1x3,90\n16x3,10\n")
    result = CliRunner().invoke(coverage, [str(folder), str(requests), "--profiles", "2"])
    assert result.exit_code == 0
    for words in (
        "90.0 % of 100 requests covered",
        "no profile allows x=16x3 (10 requests)",
        '--profile "x=1x3,1x3,1x3"',
    ):
        assert words in result.output
    machine = json.loads(CliRunner().invoke(coverage, [str(folder), str(requests), "--json"]).stdout)
    assert machine["now"]["covered"] == 0.9
    assert machine["suggested"]["covered"] == 1.0


def test_coverage_admits_when_nothing_fits_better(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a").folder
    requests = tmp_path / "requests.csv"
    requests.write_text("x\n4x3\n")
    assert "no other profiles" in CliRunner().invoke(coverage, [str(folder), str(requests)]).output


def test_coverage_refuses_a_file_that_does_not_fit(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a").folder
    requests = tmp_path / "requests.csv"
    requests.write_text("z\n4x3\n")
    result = CliRunner().invoke(coverage, [str(folder), str(requests)])
    assert result.exit_code == 2
    assert "no input 'z'" in result.output
