"""The script that measures on a GPU machine: what it packs, and the order of its steps (fake card, fake builds)."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.core.errors import CheckFailed, InputError, ToolError
from pipeline.engine.bench import Measurement
from pipeline.engine.records import BuildOptions, LayerCounts
from scripts import gpu_builds, gpu_calibrator, gpu_common, gpu_pack, gpu_run
from tests.engine import graphs
from tests.engine.fakes import plan
from tests.engine.records import measurement, record

PROFILES = (((1, 3, 4, 4),) * 3, ((2, 3, 4, 4), (4, 3, 4, 4), (8, 3, 4, 4)))


# Opset 19 to 17


def newer(*nodes: onnx.NodeProto, opset: int = 19) -> onnx.ModelProto:
    constants = {"s": np.float32(0.1), "z": np.int8(0), "axes": np.array([2, 3], np.int64)}
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


PAIR = (
    helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], saturate=1),
    helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
)


def test_a_graph_of_opset_19_is_written_in_opset_17_and_computes_the_same(tmp_path: Path) -> None:
    mean = helper.make_node("ReduceMean", ["d", "axes"], ["y"], keepdims=1, noop_with_empty_axes=0)
    onnx.save(newer(*PAIR, mean), tmp_path / "m.onnx")
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)}
    path = gpu_pack.lowered_file(tmp_path / "m.onnx", tmp_path / "out", feeds)
    lowered = onnx.load(path)
    assert [entry.version for entry in lowered.opset_import] == [17]
    assert list(helper.get_node_attr_value(lowered.graph.node[2], "axes")) == [2, 3]
    assert list(lowered.graph.node[2].input) == ["d"]
    assert gpu_pack.lowered_file(path, tmp_path / "again", feeds) == path


@pytest.mark.parametrize(
    ("node", "opset", "words"),
    [
        (helper.make_node("Pad", ["d", "axes"], ["y"]), 19, "Pad .* of opset 19 is not the same in opset 17"),
        (helper.make_node("ReduceMean", ["d", "k"], ["y"]), 19, "computes its axes"),
        (helper.make_node("ReduceMean", ["d"], ["y"], noop_with_empty_axes=1), 19, "noop_with_empty_axes"),
        (helper.make_node("ReduceMax", ["d", "axes"], ["y"]), 21, "is not the same"),
        (helper.make_node("Reshape", ["d", "axes"], ["y"], strange=1), 19, "attribute strange, which opset 17 lacks"),
    ],
)
def test_what_means_something_else_in_opset_17_is_refused(node: onnx.NodeProto, opset: int, words: str) -> None:
    model = newer(node, opset=opset)
    with pytest.raises(InputError, match=words):
        gpu_pack.lower_opset(model)


def test_a_lowered_graph_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(newer(helper.make_node("ReduceMean", ["x", "axes"], ["y"])), tmp_path / "m.onnx")
    wrong = newer(helper.make_node("ReduceMean", ["x"], ["y"], axes=[1]), opset=17)
    monkeypatch.setattr(gpu_pack, "lower_opset", lambda model: wrong)
    with pytest.raises(CheckFailed, match="computes something else in opset 17"):
        gpu_pack.lowered_file(tmp_path / "m.onnx", tmp_path / "out", {"x": np.ones((1, 3, 4, 4), np.float32)})


# A run


class Session:
    """A folder as `receive` leaves it, and builds that are remembered."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.out, self.built, self.refused = folder / "at", folder / "out", [], set()
        (self.at / "net").mkdir(parents=True)
        self.out.mkdir()
        for name in ("fp32", "int8", "modelopt"):
            graphs.conv(self.at / "net" / f"{name}.onnx", shape=("N", 3, 4, 4))
        spec = {"models": {"net": {"mean": [127.0], "std": [128.0]}}}
        (self.at / "spec.json").write_text(json.dumps(spec))
        (self.at / "net" / "calibration.cache").write_text("TRT-8600-EntropyCalibration2\n")
        images = np.random.default_rng(0).integers(0, 255, (6, 3, 4, 4)).astype(np.uint8)
        np.savez(self.at / "images.npz", images=images, labels=np.zeros(1, np.int64))
        monkeypatch.setattr(gpu_run, "build_engine", self.build)
        monkeypatch.setattr(gpu_run, "describe_device", lambda: None)

    def build(self, model: Path, *, plan_path: Path, timeout_s: float, options: BuildOptions, **rest: object):
        assert options.avg_timing_iterations == 2
        variant = plan_path.parent.name
        if variant in self.refused:
            raise ToolError(f"no {variant}")
        self.built.append((variant, plan_path.name, timeout_s))
        plan_path.parent.mkdir(parents=True, exist_ok=True)
        plan_path.write_bytes(plan(profiles=PROFILES))
        counts = LayerCounts(layers=9, convolutions_int8=2, convolutions_float=0, reformats=1)
        both = counts.model_copy(update={"per_profile": (counts, counts)})
        return record(layers=both)

    def run(self, **changes: object) -> dict:
        args = Namespace(
            at=self.at,
            out=self.out,
            models=[],
            variants=[*gpu_run.VARIANTS, gpu_run.FASTEST],
            first=list(gpu_run.FIRST),
            batches=[1, 4],
            profiles="1:1:1,2:4:8",
            budget_s=300.0,
            reserve_s=50.0,
            level=None,
            timing_iterations=2,
            rounds=2,
            in_flight=2,
        )
        vars(args).update(changes)
        gpu_run.Bench(args).run()
        return json.loads((self.out / "results.json").read_text())


@pytest.fixture
def session(card: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(gpu_run.Bench, "overlap", lambda self, model: None)  # batch 64, which the fakes do not have
    monkeypatch.setattr(gpu_run.Bench, "layers", lambda self, model: None)
    monkeypatch.setattr(gpu_common.tempfile, "gettempdir", lambda: str(tmp_path))
    return Session(tmp_path, monkeypatch)


def test_what_is_built_first_is_measured_before_the_rest_is_built(session: Session) -> None:
    session.refused = {"modelopt", "int8-half-in", "fp32"}
    results = session.run()
    assert [name for name, file, _ in session.built if file == "model.plan"] == list(gpu_run.FIRST)
    assert all(seconds <= 250 for _, file, seconds in session.built if file == "model.plan")
    assert set(results["failures"]) == {"net/modelopt", "net/int8-half-in", "net/fp32"}
    assert {m["name"] for m in results["measured"]["net"]["4"]} == {*gpu_run.FIRST, gpu_run.CONTROL}
    assert "9, 2 / 0, 1, 0; 9, 2 / 0, 1, 0" in (session.out / "table.md").read_text()


def test_a_later_run_goes_on_and_measures_all_together(session: Session) -> None:
    session.refused = {"modelopt", "int8-half-in", "fp32"}
    session.run()
    session.refused, session.built = set(), []
    results = session.run()
    assert [name for name, *_ in session.built] == ["modelopt", "int8-half-in", "fp32"]
    names = {m["name"] for m in results["measured"]["net"]["1"]}
    assert names == {*gpu_run.FIRST, "modelopt", "int8-half-in", "fp32", gpu_run.CONTROL}
    assert results["failures"] == {}
    assert set(results["accuracy"]["net"]) == names - {gpu_run.CONTROL}


def test_images_on_which_engine_and_onnxruntime_differ_are_named(session: Session) -> None:
    assert gpu_common.differing(np.array([7, 8, 9, 9]), np.array([7, 1, 9, 2])) == {1: [8, 1], 3: [9, 2]}
    with np.load(session.at / "images.npz") as stored:
        arrays = {**stored, "net/int8": stored["images"].astype(int).argmax(-1)}  # what the fake engine gives
    np.savez(session.at / "images.npz", **arrays)
    figures = session.run(variants=["int8"])["accuracy"]["net"]["int8"]
    assert (figures["agreement"], figures["differ"]) == (1.0, {})


def test_without_an_engine_there_is_nothing_to_measure(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.refused = set(gpu_run.VARIANTS)
    results = session.run()
    assert "measured" not in results
    assert "net: no engine to measure" in capsys.readouterr().out


def test_no_build_begins_when_only_the_reserve_is_left(session: Session) -> None:
    session.run(budget_s=10.0)
    assert session.built == []


def test_overlap_and_layers_of_every_engine(
    card: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_common.tempfile, "gettempdir", lambda: str(tmp_path))
    large = (PROFILES[0], ((2, 3, 4, 4), (64, 3, 4, 4), (128, 3, 4, 4)))
    monkeypatch.setattr(f"{__name__}.PROFILES", large)
    results = Session(tmp_path, monkeypatch).run(variants=["int8"], batches=[64], profiles="1:1:1,2:64:128")
    assert results["overlap"]["net"]["int8"]["batch"] == 64
    assert results["layer_counts"]["net"]["int8"]["layers"] == 1
    folder = tmp_path / "at/engines/net/int8"
    assert json.loads((folder / "layer-times-64.json").read_text()) == {"first": 0.5, "second": 0.25}
    assert "(64, 3, 4, 4) on profile 1" in (folder / "layers-64.json").read_text()
    assert "failures" not in results


MS = {("int8", 1): 1.0, ("fp16", 1): 0.5, ("int8", 4): 1.0, ("fp16", 4): 2.0}


def given_times(candidates, shapes, *, rounds: int, places: int, samples) -> list[Measurement]:
    """Stands in for ``measure_compute``; what picks takes as long as what it picked."""
    found = []
    for candidate in candidates:
        batch, runner = shapes["x"][0], candidate.runner
        picked = {"int8": "int8", "float": "fp16", None: candidate.name}[runner.plan_for(shapes)]
        ms = MS.get((picked, batch), 3.0)
        entry = measurement(candidate.name, ms, ms * 1.01, batch=batch, graph=candidate.cuda_graph)
        found.append(entry.model_copy(update={"plan": runner.plan_for(shapes)}))
    return found


def test_the_runner_that_picks_is_measured_between_its_two_plans(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "measure_compute", given_times)
    session.refused = {"modelopt", "int8-half-in", "fp32"}
    results = session.run(batches=[1, 2, 4])
    fastest = results["fastest"]["net"]
    choices = fastest["choices"]["choices"]
    assert [(c["float_ms"], c["verdict"], c["chosen"]) for c in choices] == [
        (pytest.approx(0.5025), "faster", "float"),
        (pytest.approx(2.01), "slower", "int8"),
    ]
    for batch, plan_name, count in (("1", "float", 6), ("2", "int8", 3), ("4", "int8", 3)):
        found = fastest["batches"][batch]
        assert len(found) == count
        assert {m["plan"] for m in found if m["name"] == "fastest"} == {plan_name}
    text = (session.out / "table.md").read_text()
    assert "| x=1x3x4x4,1x3x4x4,1x3x4x4 | 1.0050 | 0.5025 | faster | fp16 |" in text
    assert "| fp16 | faster | within noise |" in text
    assert "| int8 | within noise | faster |" in text
    assert "failures" not in results or "net/fastest" not in results["failures"]


def test_a_choice_stays_once_its_optimum_was_measured(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "measure_compute", given_times)
    variants = ["int8", "fp16", "fastest"]
    first = session.run(batches=[1, 2], variants=variants)["fastest"]["net"]
    assert [c["verdict"] for c in first["choices"]["choices"]] == ["faster", "not measured"]
    assert {m["plan"] for m in first["batches"]["2"] if m["name"] == "fastest"} == {"int8"}
    assert "| - | - | not measured | int8 |" in (session.out / "table.md").read_text()
    monkeypatch.setitem(MS, ("fp16", 4), 0.1)
    monkeypatch.setitem(MS, ("fp16", 1), 9.0)
    second = session.run(batches=[1, 2, 4], variants=variants)["fastest"]["net"]
    assert [c["chosen"] for c in second["choices"]["choices"]] == ["float", "float"]
    assert second["batches"]["1"] == first["batches"]["1"]
    assert {m["plan"] for m in second["batches"]["2"] if m["name"] == "fastest"} == {"float"}
    assert set(second["batches"]) == {"1", "2", "4"}


@pytest.mark.parametrize("variants", [["int8", "fastest"], ["int8", "fp16"]])
def test_without_both_plans_or_unasked_nothing_is_picked(session: Session, variants: list[str]) -> None:
    assert "fastest" not in session.run(variants=variants)


def test_a_measurement_has_the_card_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(gpu_common.tempfile, "gettempdir", lambda: str(tmp_path))
    with gpu_common.card(alone=False), gpu_common.card(alone=False):
        pass
    with gpu_common.card(alone=True), (tmp_path / "quantize-gpu-bench.use.lock").open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_ways_of_building_are_measured_together(
    card: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tmp_path, monkeypatch)
    asked = {}

    def build(model: Path, *, plan_path: Path, options: BuildOptions, profiles: list, timeout_s: float, **rest: object):
        name = plan_path.parent.name
        asked[name] = (model.name, options.avg_timing_iterations, options.optimization_level, len(profiles), timeout_s)
        assert (options.calibration_cache is None) == (name != "implicit")
        if name == "refused":
            raise ToolError("no such engine")
        plan_path.parent.mkdir(parents=True, exist_ok=True)
        plan_path.write_bytes(plan(profiles=PROFILES))
        return record()

    monkeypatch.setattr(gpu_builds, "build_engine", build)
    texts = ["plain=int8", "static=int8,profiles=static,iterations=4", "implicit=implicit,level=5", "refused=int8"]
    texts += ["one=int8,profiles=1", "again=@plain", "none=@refused"]
    builds = [gpu_builds.Build.parse(text) for text in texts]
    gpu_builds.run(session.at, "net", session.out, builds, [1, 4], 300.0)
    assert {name: found[:4] for name, found in asked.items()} == {
        "plain": ("int8.onnx", None, None, 2),
        "static": ("int8.onnx", 4, None, 3),
        "implicit": ("fp32.onnx", None, 5, 2),
        "refused": ("int8.onnx", None, None, 2),
        "one": ("int8.onnx", None, None, 1),
    }
    assert all(found[4] <= 240 for found in asked.values())
    results = json.loads((session.out / "builds.json").read_text())
    assert results["builds"]["refused"] == {"failure": "no such engine"}
    assert {m["name"] for m in results["measured"]["1"]} == {"plain", "static", "implicit", "one", "again"}
    assert {m["name"] for m in results["measured"]["4"]} == {"plain", "implicit", "again"}  # static: 1, 64 and 128
    asked.clear()
    gpu_builds.run(session.at, "net", session.out, builds, [4], 300.0)
    assert asked.keys() == {"refused"}  # the others lie there
    gpu_builds.run(session.at, "net", session.out, builds, [4], 10.0)
    assert json.loads((session.out / "builds.json").read_text())["measured"] == {}


@pytest.mark.parametrize(
    "text", ["a=fp8", "a=int8,profiles=all", "a=int8,profiles=-1", "a=int8,speed=9", "a=int8,level=high", "a=int8,half"]
)
def test_a_way_of_building_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        gpu_builds.Build.parse(text)


def test_the_calibrator_runs_once_and_its_failure_is_told(tmp_path: Path) -> None:
    """Here without a card, or on a model that is none: a process of its own fails, and says why."""
    (tmp_path / "net").mkdir()
    with pytest.raises(ToolError, match=r"(?s)TensorRT's calibrator failed on net: .*spec\.json"):
        gpu_calibrator.calibration_cache(tmp_path, "net")
    (tmp_path / "net" / "calibration.cache").write_text("TRT-8600-EntropyCalibration2\n")
    assert gpu_calibrator.calibration_cache(tmp_path, "net") == tmp_path / "net" / "calibration.cache"
