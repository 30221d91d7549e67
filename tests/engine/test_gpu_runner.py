"""Running engines on a card."""

from __future__ import annotations

import gc
import resource
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import Profile
from pipeline.core.errors import CheckFailed, InputError, ToolError
from pipeline.engine.bench import Candidate, measure_compute, measure_overlap
from pipeline.engine.capture import RECORDED, Capture, Recorded
from pipeline.engine.compat import load_api
from pipeline.engine.cuda import open_device
from pipeline.engine.device import describe_device
from pipeline.engine.recorded import Samples
from pipeline.engine.records import EngineRecord
from pipeline.engine.runner import Runner
from pipeline.engine.ways import Way, ways_to_capture
from tests.engine.gpu import DATA, GPU, TIMEOUT_S, distance, engine, options, stored

pytestmark = GPU

TWO_PROFILES = ("x=1x16x16x16,1x16x16x16,1x16x16x16", "x=2x16x16x16,8x16x16x16,16x16x16x16")


def runner(model: str = "conv_qdq", *profiles: str, **fields: object) -> Runner:
    plan, record = engine(model, *profiles)
    return Runner(plan, record=record, **fields)


def images(count: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (count, 16, 16, 16)).astype(np.float32)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("model", "limit"), [("conv_fp32", 5e-3), ("conv_qdq", 0.03), ("conv_static", 5e-3)])
def test_results_equal_onnxruntimes(model: str, limit: float, graphs: bool) -> None:
    feeds, expected = stored(model)
    with runner(model, cuda_graphs=graphs) as run:
        first, second = run(feeds), run(feeds)
    assert distance(first["y"], expected["y"]) < limit
    assert np.array_equal(first["y"], second["y"])


@pytest.mark.parametrize("graphs", [False, True])
def test_every_batch_of_every_profile(graphs: bool) -> None:
    data = images(16)
    with runner("conv_qdq", *TWO_PROFILES, cuda_graphs=graphs, graphs_kept=3) as run:
        whole = run({"x": data})["y"]
        for count in (1, 2, 16, 7, 1, 3, 16, 2):
            found = run({"x": data[:count]})["y"]
            assert found.shape == (count, 10)
            assert distance(found, whole[:count]) < 0.03
        assert not run.uncaptured


def test_integer_inputs_and_two_dynamic_dimensions() -> None:
    feeds, expected = stored("two_inputs")
    with runner("two_inputs") as run:
        assert distance(run(feeds)["y"], expected["y"]) < 1e-5


def test_an_output_whose_size_depends_on_the_data() -> None:
    feeds, expected = stored("nonzero")
    with runner("nonzero", cuda_graphs=True) as run:
        assert np.array_equal(run(feeds)["y"], expected["y"])
        many = run({"x": np.ones((64, 8), np.float32)})["y"]
        assert many.shape == (2, 512)
        none = run({"x": -np.ones((4, 8), np.float32)})["y"]
        assert none.shape == (2, 0)
        assert any("depends on the data" in reason for reason in run.uncaptured.values())


def test_many_threads_share_one_runner() -> None:
    data = images(8)
    with runner(in_flight=3, cuda_graphs=True) as run:
        expected = run({"x": data})["y"]
        wrong: list[str] = []

        def work(number: int) -> None:
            for turn in range(30):
                count = 1 + (number + turn) % 8
                if distance(run({"x": data[:count]})["y"], expected[:count]) > 0.03:
                    wrong.append(f"thread {number}, turn {turn}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_map_keeps_the_order() -> None:
    data = images(8)
    with runner(in_flight=3) as run:
        expected = run({"x": data})["y"]
        found = list(run.map({"x": data[number % 8 : number % 8 + 1]} for number in range(40)))
    for number, outputs in enumerate(found):
        assert distance(outputs["y"][0], expected[number % 8]) < 0.03


def test_pinned_inputs_without_a_copy() -> None:
    feeds, expected = stored("conv_qdq")
    with runner() as run, run.request({"x": feeds["x"].shape}) as request:
        request.inputs["x"][...] = feeds["x"]
        request.submit()
        assert distance(request.wait()["y"], expected["y"]) < 0.03


def test_wrong_feeds_are_named() -> None:
    good = images(2)
    with runner() as run:
        for feeds, message in (
            ({}, "input 'x' .* is missing"),
            ({"z": good, "x": good}, "no input 'z'"),
            ({"x": good.astype(np.float64)}, "dtype float64, the engine wants float32"),
            ({"x": good[:, :8]}, "has shape"),
            ({"x": images(9)}, "nearest 8x16x16x16"),
        ):
            with pytest.raises(InputError, match=message):
                run(feeds)
        with pytest.warns(RuntimeWarning, match="not contiguous"):
            turned = run({"x": good.transpose(0, 1, 3, 2)})["y"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = run({"x": good.transpose(0, 1, 3, 2)})["y"]
        assert np.array_equal(turned, again)
        assert distance(turned, run({"x": np.ascontiguousarray(good.transpose(0, 1, 3, 2))})["y"]) == 0


def test_engines_that_cannot_run_here_are_refused(tmp_path: Path) -> None:
    plan, record = engine("conv_qdq")
    device = describe_device()
    other = record.model_copy(update={"device": device.model_copy(update={"compute_capability": "7.5", "name": "T4"})})
    with pytest.raises(InputError, match=r"built for compute capability 7\.5 \(T4\)"):
        Runner(plan, record=other)
    with pytest.raises(InputError, match=r"built with version 8\.5\.1"):
        Runner(plan, record=record.model_copy(update={"tensorrt": "8.5.1"}))
    broken = tmp_path / "broken.plan"
    broken.write_bytes(b"not an engine" * 100)
    with pytest.raises(ToolError, match="cannot load"):
        Runner(broken)
    cut = tmp_path / "cut.plan"
    cut.write_bytes(plan.read_bytes()[:4096])
    with pytest.raises(ToolError, match="cannot load"):
        Runner(cut)
    with Runner(plan, record=record) as run:  # and the process is none the worse for it
        assert run({"x": images(1)})["y"].shape == (1, 10)


def test_layer_times_have_every_layer() -> None:
    feeds, _ = stored("conv_qdq")
    with runner() as run:
        times = run.layer_times(feeds, runs=5)
        again = run(feeds)
    assert len(times) >= 3
    assert all(ms >= 0 for ms in times.values())
    assert again["y"].shape == (4, 10)


def captured(model: str, tensors: Sequence[str], **fields: object) -> tuple[Capture, dict[str, np.ndarray]]:
    """A capture that ran once, against the stored outputs, and what it gave. The builder's level is TensorRT's own."""
    feeds, expected = stored(model)
    with Capture(
        DATA / f"{model}.onnx",
        tensors,
        reference=lambda _: Samples(feeds, {"y": expected["y"]}),
        options=options(optimization_level=None),
        timeout_s=TIMEOUT_S,
        warn=lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2),
        **fields,
    ) as capture:
        return capture, capture(feeds)


def farthest(capture: Capture, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """Relative L2 to onnxruntime's layers and the layer; a tensor in INT8 after the same quantisation."""
    distances = []
    for layer, values in expected.items():
        name = layer if layer in found else capture.ends.get(layer, layer)
        if name not in found:
            continue
        wanted = values if name == layer else np.clip(values, 0, 6)  # the only activation in front of a quantiser
        if (scale := capture.scales.get(name)) is not None:
            wanted = np.clip(np.rint(wanted / np.float32(scale)), -128, 127) * np.float32(scale)
        distances.append((distance(found[name], wanted), name))
    return max(distances)


@pytest.mark.parametrize("recorded", RECORDED)
def test_a_capture_equals_onnxruntimes_layers(recorded: Recorded) -> None:
    """In pieces of the profile's batch; whatever survives fusion is the same with debug tensors."""
    if recorded == "debug tensors" and not load_api("tensorrt").debug_tensors:
        pytest.skip("this TensorRT has no unfused debug tensors")
    two = [Profile.parse("x=2x16x16x16,2x16x16x16,2x16x16x16")]
    capture, found = captured("conv_qdq", ["r1", "r2", "gone"], profiles=two, recorded=recorded)
    assert capture.recorded.startswith("debug tensors" if recorded == "debug tensors" else "marked ")
    assert "gone" not in found
    assert "r1" in found or recorded == "debug tensors"
    assert farthest(capture, found, stored("conv_qdq")[1])[0] < 0.03


@pytest.mark.parametrize("recorded", RECORDED)
def test_the_layers_of_a_mobile_network(recorded: Recorded) -> None:
    """Depthwise convolutions with a scale for each channel, ReLU6, residual sums: 8.6.0 computed other values where
    their float outputs were marked."""
    if recorded == "debug tensors" and not load_api("tensorrt").debug_tensors:
        pytest.skip("this TensorRT has no unfused debug tensors")
    _, expected = stored("depthwise_qdq")
    capture, found = captured("depthwise_qdq", list(expected), recorded=recorded)
    print(f"{capture.recorded}: {farthest(capture, found, expected)}")
    assert farthest(capture, found, expected)[0] < 0.05
    if capture.way.kind != "debug tensors":
        assert capture.way.kind == "marked INT8 tensors"
        deep = [f"{layer}_r" for layer in expected if layer.endswith(("_expand", "_deep"))]
        assert set(found) == {"stem_r", *deep, "b0_sum", "b1_project", "y"}


@pytest.mark.parametrize("way", ways_to_capture("marked outputs", debug=False, int8=True, level=None), ids=str)
def test_no_way_passes_with_other_layers(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with the right outputs has the right layers. One that is refused says here why."""
    monkeypatch.setattr("pipeline.engine.capture.ways_to_capture", lambda *args, **fields: (way,))
    _, expected = stored("depthwise_qdq")
    try:
        capture, found = captured("depthwise_qdq", list(expected))
    except (CheckFailed, ToolError) as error:
        pytest.skip(f"refused: {error.message}")
    assert farthest(capture, found, expected)[0] < 0.05


@pytest.mark.parametrize("half", [False, True])
def test_a_clip_behind_a_float_layer_cuts_off_values_and_not_integers(half: bool) -> None:
    feeds, expected = stored("clip_qdq")
    plan, record = engine("clip_qdq", fp16=half)
    assert [m.text for m in record.messages if m.text.endswith("y_clipped, z_clipped")]
    with Runner(plan, record=record) as run:
        found = run(feeds)
    for name, values in expected.items():
        assert distance(found[name], values) < 0.02, name


def test_measurements_are_complete() -> None:
    with runner(in_flight=2) as plain, runner(in_flight=2, cuda_graphs=True) as graph:
        candidates = [Candidate("plain", plain, False), Candidate("graph", graph, True)]
        for found in measure_compute(candidates, {"x": (4, 16, 16, 16)}, rounds=2):
            assert 0 < found.p50_ms <= found.p90_ms <= found.p99_ms
            assert found.throughput > 0
            assert found.launch_us > 0
            assert found.captured == found.cuda_graph
        overlap = measure_overlap(candidates[1], {"x": (8, 16, 16, 16)}, in_flight=2, seconds=0.1)
        assert overlap.overlapped > 0


def test_a_closed_runner_says_so() -> None:
    run = runner()
    run.close()
    run.close()
    with pytest.raises(InputError, match="closed"):
        run({"x": images(1)})


@pytest.mark.alone
def test_a_thousand_runners_leave_no_memory_behind() -> None:
    plan, record = engine("conv_qdq")
    data, feeds = plan.read_bytes(), {"x": images(1)}
    device = open_device()

    def cycle(record: EngineRecord) -> None:
        with Runner(data, record=record, cuda_graphs=True) as run:
            run(feeds)

    def in_use() -> tuple[int, int]:
        gc.collect()
        with device.active():
            return device.free_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    for _ in range(20):
        cycle(record)
    free_before, host_before = in_use()
    for _ in range(1000):
        cycle(record)
    free_after, host_after = in_use()
    assert free_before - free_after < 8 << 20
    assert host_after - host_before < 64 << 20


def test_half_inputs_halve_the_copy() -> None:
    feeds, expected = stored("conv_qdq")
    plan, record = engine("conv_qdq", half_inputs=True, fp16=True)
    with Runner(plan, record=record) as run:
        assert run.inputs[0].dtype == "float16"
        assert distance(run({"x": feeds["x"].astype(np.float16)})["y"], expected["y"]) < 0.05


def test_half_outputs_are_given_as_float16() -> None:
    feeds, expected = stored("conv_qdq")
    plan, record = engine("conv_qdq", half_outputs=True, fp16=True)
    with Runner(plan, record=record) as run:
        assert (run.inputs[0].dtype, run.outputs[0].dtype) == ("float32", "float16")
        assert distance(run(feeds)["y"], expected["y"]) < 0.05


@pytest.mark.parametrize("half", [False, True])
def test_a_graph_with_float16_inputs_and_outputs(half: bool) -> None:
    """As `quantize build --fp16-io both` writes it."""
    feeds, expected = stored("conv_qdq_half_io")
    plan, record = engine("conv_qdq_half_io", fp16=half)
    with Runner(plan, record=record) as run:
        assert (run.inputs[0].dtype, run.outputs[0].dtype) == ("float16", "float16")
        assert distance(run(feeds)["y"], expected["y"]) < 0.05
        wide = run.taken({"x": feeds["x"].astype(np.float32)})
        assert np.array_equal(run(wide)["y"], run(feeds)["y"])
