"""The pass that measures how far tensors reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from pipeline import magnitudes
from pipeline.core.errors import InputError, ToolError
from pipeline.core.ort import make_session, read_graph
from pipeline.data.batching import Batch
from tests.placement.tiny import Tiny

TENSORS = ("x", "conv", "pooled", "log", "y")


def network(folder: Path, batch: int | str = "n") -> Path:
    """Its Log has -inf where the input of it is 0, and NaN where that is below."""
    net = Tiny()
    net.conv(net.input("x", batch, 16, 8, 8), "conv", 16, 16)
    net.op("Log", [net.op("GlobalMaxPool", [net.op("Relu", ["conv"], "relu")], "pooled")], "log")
    net.op("Sqrt", ["conv"], "y")
    return net.save(folder, "log", "y")


def batches(*sizes: int, scale: float = 1.0) -> list[Batch]:
    found, first = [], 0
    for index, size in enumerate(sizes):
        values = np.random.default_rng(index).standard_normal((size, 16, 8, 8)) * scale
        found.append(Batch(index, tuple(range(first, first + size)), {"x": values.astype(np.float32)}))
        first += size
    return found


def expected(path: Path, data: list[Batch]) -> dict[str, float]:
    session = make_session(path, capture=TENSORS)
    found = dict.fromkeys(TENSORS, 0.0)
    for batch in data:
        values = dict(zip(TENSORS[1:], session.run(list(TENSORS[1:]), batch.feeds), strict=True))
        for name, array in {"x": batch.feeds["x"], **values}.items():
            finite = np.abs(array[np.isfinite(array)])
            found[name] = max(found[name], float(finite.max()) if finite.size else 0.0)
    return found


@pytest.mark.parametrize("batch", ["n", 3])
def test_largest_finite_magnitudes(tmp_path: Path, batch: int | str) -> None:
    path = network(tmp_path, batch)
    data = batches(3, 3)
    data[0].feeds["x"][1] = 0.0
    data[1].feeds["x"][2, 3, 4, 5] = -77.0
    result = magnitudes.run(path, TENSORS, data, folder=tmp_path, total=6)
    assert result.samples == 6
    assert result.folder == tmp_path
    assert result.largest == pytest.approx(expected(path, data), rel=1e-5)
    assert result.largest["x"] == 77.0
    session = make_session(path, capture=["y"])
    assert np.isnan(session.run(["y"], data[0].feeds)[0]).any()


def test_batching_changes_nothing(tmp_path: Path) -> None:
    path = network(tmp_path)
    whole, parts = batches(4), batches(4)
    parts = [Batch(k, (k,), {"x": parts[0].feeds["x"][k : k + 1]}) for k in range(4)]
    found = [magnitudes.run(path, TENSORS, data, folder=tmp_path).largest for data in (whole, parts)]
    assert found[0] == found[1]


def test_infinite_everywhere_and_empty_count_as_nothing(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 4)
    net.constant("none", 0.0)
    net.op("Div", [x, "none"], "infinite")
    net.constant("start", [0], np.int64)
    net.constant("end", [0], np.int64)
    net.constant("axis", [1], np.int64)
    net.op("Slice", [x, "start", "end", "axis"], "empty")
    path = net.save(tmp_path, "infinite", "empty")
    data = [Batch(0, (0, 1), {"x": np.ones((2, 4), np.float32)})]
    result = magnitudes.run(path, ("x", "infinite", "empty"), data, folder=tmp_path)
    assert result.largest == {"x": 1.0, "infinite": 0.0, "empty": 0.0}


def test_float16_and_infinities(tmp_path: Path) -> None:
    proto = onnx.load(network(tmp_path))
    names = magnitudes.add_magnitudes(proto, ["log"], finite=False)
    assert list(names) == ["log"]
    feeds = {"x": np.zeros((1, 16, 8, 8), np.float32)}
    for tensor in proto.graph.initializer:
        if tensor.name == "conv.bias":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(16, np.float32), tensor.name))
    (found,) = make_session(proto, capture=list(names.values())).run(list(names.values()), feeds)
    assert np.isinf(found)


def test_no_tensors_no_pass(tmp_path: Path) -> None:
    def never() -> Any:
        raise AssertionError("data are drawn for nothing")
        yield

    result = magnitudes.run(network(tmp_path), (), never(), folder=tmp_path)
    assert (result.samples, result.largest) == (0, {})


def test_widened() -> None:
    assert magnitudes.widened({"a": 1.0, "b": 5.0}, {"a": 2.0, "b": -np.inf}) == {"a": 2.0, "b": 5.0}


def test_errors(tmp_path: Path) -> None:
    path = network(tmp_path)
    with pytest.raises(InputError, match="the float graph: the data has no input 'x'"):
        magnitudes.run(path, TENSORS, [Batch(0, (0,), {"z": np.ones((1, 2))})], folder=tmp_path)
    with pytest.raises(ToolError, match="the float graph: onnxruntime failed on inputs of shape"):
        magnitudes.run(path, TENSORS, [Batch(0, (0,), {"x": np.ones((1, 2), np.float32)})], folder=tmp_path)
    with pytest.raises(ToolError, match="onnxruntime cannot load"):
        magnitudes.run(path, ("absent",), batches(1), folder=tmp_path)
    assert read_graph(path).graph.node
