"""The quantise stage: files, ranges, groups, determinism, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import calibrators
from calibrators import TensorStatistics
from calibrators.accumulate import add_batch
from calibrators.cache import read_cache
from pipeline.config import PlacementConfig
from pipeline.core.errors import InputError
from pipeline.core.ort import make_session
from pipeline.placement import ActivationPoint, PlacementPlan, make_plan
from pipeline.quantize import QuantizeResult, activation_ranges, clipped_energy, merge_tensors, run
from tests.placement.tiny import Tiny

CONFIG = PlacementConfig()


def joined() -> Tiny:
    """Two convolutions into a Concat, a residual block, ReLU6."""
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.constant("low", 0.0)
    net.constant("high", 6.0)
    parts = [net.op("Clip", [net.conv(x, f"c{i}", 16, 16), "low", "high"], f"r{i}") for i in range(2)]
    y = net.conv(net.op("Concat", parts, "cat", axis=1), "c2", 32, 16)
    net.conv(net.op("Add", [y, x], "add"), "y", 16, 16)
    return net


def statistics(model: Path, plan: PlacementPlan, batches: int = 3, seed: int = 0) -> dict[str, TensorStatistics]:
    if not plan.tensors:
        return {}
    session = make_session(model, capture=plan.tensors)
    found = {name: TensorStatistics() for name in plan.tensors}
    for index in range(batches):
        feeds = {"x": np.random.default_rng(seed + index).standard_normal((2, 16, 8, 8)).astype(np.float32)}
        for name, value in zip(plan.tensors, session.run(list(plan.tensors), feeds), strict=True):
            add_batch(found[name], value, index)
    return found


def quantise(folder: Path, net: Tiny | None = None, **options: Any) -> tuple[QuantizeResult, PlacementPlan]:
    folder.mkdir(exist_ok=True)
    model = (net or joined()).save(folder, "y")
    config = options.pop("config", CONFIG)
    plan = make_plan(model, config)
    calibrator = calibrators.get(options.pop("calibrator", "minmax"))
    stats = statistics(model, plan)
    return run(model, plan, stats, calibrator, folder=folder / "out", config=config, **options), plan


def test_files_and_result(tmp_path: Path) -> None:
    result, plan = quantise(tmp_path)
    assert result.tensors == tuple(point.tensor for point in plan.activations) == ("x", "r0", "r1", "cat", "add")
    assert (result.weights, result.quantized_nodes, result.nodes) == (4, 6, 8)
    assert result.warnings == ()
    names = {path.name for path in result.folder.iterdir()}
    assert names == {"model.int8.onnx", "scales.json", "calibration.cache", "placement.json"}
    scales = json.loads((result.folder / "scales.json").read_text())
    assert scales["schema"] == 1
    model = onnx.load(result.model_path)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    cache = read_cache(result.folder / "calibration.cache").scales
    for name, entry in scales["tensors"].items():
        assert set(entry) == {"amax", "scale", "calibrator", "samples", "min", "max", "zeros"}
        assert np.float32(entry["scale"]) == constants[f"{name}_scale"] == np.float32(cache[name])
        assert np.float32(entry["scale"]) == np.float32(np.float32(entry["amax"]) / np.float32(127))
    assert scales["tensors"]["x"]["samples"] == 3 * 2 * 16 * 8 * 8
    assert scales["tensors"]["r0"]["zeros"] > 0
    for entry in scales["weights"].values():
        assert entry["axis"] == 0
        assert len(entry["amax"]) == len(entry["scale"])
    stored = json.loads((result.folder / "placement.json").read_text())
    assert PlacementPlan.model_validate({key: stored[key] for key in PlacementPlan.model_fields}) == plan


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"config": PlacementConfig(precision="fp16")}])
def test_equal_inputs_give_equal_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    folders = [quantise(tmp_path / name, **options)[0].folder for name in ("a", "b")]
    for name in ("model.int8.onnx", "scales.json", "calibration.cache", "placement.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_group_has_one_scale_from_merged_statistics(tmp_path: Path) -> None:
    result, plan = quantise(tmp_path, calibrator="entropy")
    tensors = json.loads((result.folder / "scales.json").read_text())["tensors"]
    assert tensors["r0"]["scale"] == tensors["r1"]["scale"] == tensors["cat"]["scale"]
    stats = statistics(tmp_path / "tiny.onnx", plan)
    whole = merge_tensors([stats["r0"], stats["r1"]])
    assert tensors["cat"]["amax"] == calibrators.resolve_amax(whole, calibrators.get("entropy"))[0]


def test_merged_statistics_are_those_of_the_concatenation() -> None:
    """Against TensorStatistics itself: histogram, extremes, counts and batch maxima of the joined tensor."""
    random = np.random.default_rng(4)
    parts, whole = [TensorStatistics() for _ in range(3)], TensorStatistics()
    for index in range(4):
        values = [random.standard_normal(500).astype(np.float32) * 10**k for k in range(3)]
        for part, value in zip(parts, values, strict=True):
            add_batch(part, value, index)
        add_batch(whole, np.concatenate(values), index)
    merged = merge_tensors(parts)
    assert np.array_equal(merged.bins, whole.bins)
    assert (merged.exponent, merged.minimum, merged.maximum) == (whole.exponent, whole.minimum, whole.maximum)
    assert (merged.elements, merged.zeros) == (whole.elements, whole.zeros)
    assert np.array_equal(merged.batch_index, whole.batch_index)
    assert np.array_equal(merged.batch_amax, whole.batch_amax)
    assert (merged.batch_percentiles >= whole.batch_percentiles - 1e-12).all()
    assert merge_tensors(parts[:1]) is parts[0]


def point(tensor: str, **options: Any) -> ActivationPoint:
    return ActivationPoint(tensor=tensor, consumers=(("n", 0),), rule="test", **options)


def constant_statistics(value: float) -> TensorStatistics:
    stats = TensorStatistics()
    add_batch(stats, np.array([-value, value], np.float32), 0)
    return stats


def test_known_range_is_an_upper_limit() -> None:
    minmax = calibrators.get("minmax")
    stats = {"a": constant_statistics(8.0), "b": constant_statistics(3.0)}
    ranges, _ = activation_ranges([point("a", known_amax=6.0), point("b", known_amax=6.0)], stats, minmax)
    assert ranges == {"a": 6.0, "b": 3.0}
    members = [point("a", group="a", known_amax=6.0), point("b", group="a")]
    assert activation_ranges(members, stats, minmax)[0] == {"a": 8.0, "b": 8.0}


def test_a_derived_tensor_takes_the_range_of_its_source() -> None:
    points = [point("a", group="a"), point("b", group="a", source="a")]
    ranges, _ = activation_ranges(points, {"a": constant_statistics(2.0)}, calibrators.get("minmax"))
    assert ranges == {"a": 2.0, "b": 2.0}


def test_degenerate_tensors_are_warned_about(tmp_path: Path) -> None:
    ranges, warnings = activation_ranges([point("a")], {"a": constant_statistics(0.0)}, calibrators.get("minmax"))
    assert ranges == {"a": 1.0}
    assert warnings == ["a: all-zero: all 2 values are zero in calibration; amax 1 is used"]


def test_a_range_that_cuts_the_signal_off_is_warned_about() -> None:
    """98 % of the values below 0.05, the signal at 0.3: a shape for which the divergence prefers to clip."""
    random = np.random.default_rng(6)
    stats = TensorStatistics()
    noise, signal = random.uniform(0.0, 0.045, 98_000), random.normal(0.33, 0.02, 1_700)
    add_batch(stats, np.concatenate([noise, signal]).astype(np.float32), 0)
    ranges, warnings = activation_ranges(
        [point("a")], {"a": stats}, calibrators.get("percentile", {"percentile": 90.0})
    )
    assert ranges["a"] < 0.05
    lost = float((np.maximum(signal - ranges["a"], 0) ** 2).sum() / ((noise**2).sum() + (signal**2).sum()))
    assert clipped_energy(stats, ranges["a"]) == pytest.approx(lost, rel=0.01)
    (warning,) = warnings
    assert warning.startswith("a: percentile clips at 0.0")
    assert f"{100 * lost:.0f} % of the signal is lost" in warning
    assert activation_ranges([point("a")], {"a": stats}, calibrators.get("minmax"))[1] == []


def test_missing_statistic(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no calibration statistics of the tensor 'b' \(1 missing\)"):
        activation_ranges([point("a"), point("b")], {"a": constant_statistics(1.0)}, calibrators.get("minmax"))


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    net = Tiny()
    net.conv(net.input("x", "n", 16, 8, 8), "y", 16, 16)
    values = numpy_helper.to_array(net.constants["y.weight"]).copy()
    values[3, 0, 1, 1] = np.nan
    net.constant("y.weight", values)
    with pytest.raises(InputError, match=r"weight 'y.weight' of shape \(16, 16, 3, 3\) holds nan at \(3, 0, 1, 1\)"):
        quantise(tmp_path, net)


def test_plan_of_another_model(tmp_path: Path) -> None:
    model = joined().save(tmp_path, "y")
    plan = make_plan(model, CONFIG)
    changed = (plan.weights[0].model_copy(update={"node": "gone"}), *plan.weights[1:])
    with pytest.raises(InputError, match="quantises input 1 of node 'gone', which is no constant of this graph"):
        run(
            model, plan.model_copy(update={"weights": changed}), statistics(model, plan), calibrators.get("minmax"),
            folder=tmp_path / "out", config=CONFIG,
        )  # fmt: skip


def test_a_network_with_nothing_to_quantise(tmp_path: Path) -> None:
    net = Tiny()
    net.op("Softmax", [net.input("x", "n", 16, 8, 8)], "y")
    result, plan = quantise(tmp_path, net)
    assert plan.tensors == result.tensors == ()
    assert any("no node is quantised" in text for text in result.warnings)


def test_a_graph_that_came_quantised(tmp_path: Path) -> None:
    """Nothing is quantised twice; the scales are the graph's own."""
    first, _ = quantise(tmp_path)
    plan = make_plan(first.model_path, CONFIG)
    assert plan.prequantized
    assert plan.tensors == ()
    result = run(first.model_path, plan, {}, calibrators.get("minmax"), folder=tmp_path / "again", config=CONFIG)
    once, twice = onnx.load(first.model_path), onnx.load(result.model_path)
    assert [node.name for node in twice.graph.node] == [node.name for node in once.graph.node]
    own, kept = (
        json.loads((folder / "scales.json").read_text())["tensors"] for folder in (first.folder, result.folder)
    )
    assert {name: entry["scale"] for name, entry in kept.items()} == {name: e["scale"] for name, e in own.items()}
    assert {entry["calibrator"] for entry in kept.values()} == {"given"}


def test_what_a_repair_replaced_is_not_kept(tmp_path: Path) -> None:
    first, _ = quantise(tmp_path)
    model = onnx.load(first.model_path)
    conv = next(node for node in model.graph.node if node.op_type == "Conv" and len(node.input) > 2)
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.arange(16, dtype=np.int32), "bias_int32"),
            numpy_helper.from_array(np.float32(0.5), "bias_scale"),
        ]
    )
    index = list(model.graph.node).index(conv)
    node = onnx.helper.make_node("DequantizeLinear", ["bias_int32", "bias_scale"], ["bias_dq"], name="bias.dq")
    model.graph.node.insert(index, node)
    conv.input[2] = "bias_dq"
    path = tmp_path / "given.onnx"
    onnx.save(model, path)
    result = run(path, make_plan(path, CONFIG), {}, calibrators.get("minmax"), folder=tmp_path / "q", config=CONFIG)
    graph = onnx.load(result.model_path).graph
    assert any("int32 constants" in text for text in result.warnings)
    assert {value.name for value in graph.initializer} <= {name for node in graph.node for name in node.input}


@pytest.mark.parametrize(("name", "header"), [("minmax", "MinMaxCalibration"), ("entropy", "EntropyCalibration2")])
def test_cache_names_the_algorithm(tmp_path: Path, name: str, header: str) -> None:
    result, _ = quantise(tmp_path, calibrator=name)
    assert (result.folder / "calibration.cache").read_text().startswith(f"TRT-8600-{header}\n")


def test_weights_above_two_gigabytes_lie_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import quantize

    monkeypatch.setattr(quantize, "_LARGEST_FILE", 1000)
    result, _ = quantise(tmp_path)
    assert (result.folder / "model.int8.onnx.data").is_file()
    feeds = {"x": np.ones((1, 16, 8, 8), np.float32)}
    monkeypatch.undo()
    whole, _ = quantise(tmp_path / "whole")
    outputs = [make_session(item.model_path, optimise=False).run(None, feeds)[0] for item in (result, whole)]
    assert np.array_equal(*outputs)
