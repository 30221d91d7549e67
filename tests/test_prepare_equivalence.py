"""The measure of difference between two models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.config import Profile
from pipeline.equivalence import difference, differences, example_shapes, random_feeds, rounding_noise, run_model
from pipeline.records import TensorSpec

IMAGE = TensorSpec(name="x", dtype="float32", shape=("N", 3, "H", 8))
FIXED = TensorSpec(name="k", dtype="int64", shape=(4,))


def test_relative_to_the_largest_value() -> None:
    found = difference({"a": np.array([1.0, -4.0])}, {"a": np.array([1.2, -4.0])})
    assert found.error == pytest.approx(0.05)
    assert found.position == (0,)
    assert found.describe() == "output 'a' differs by 0.05 of its largest value (at (0,) it is 1.2 instead of 1)"


def test_worst_output_counts() -> None:
    before = {"a": np.ones(2), "b": np.ones((2, 2))}
    after = {"a": np.ones(2) * 1.1, "b": np.array([[1, 1], [1, 1.5]])}
    assert difference(before, after).output == "b"
    assert difference(before, after).position == (1, 1)
    assert differences(before, after)["a"].error == pytest.approx(0.1)


def test_values_that_are_not_finite() -> None:
    strange = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert difference({"a": strange}, {"a": strange.copy()}).error == 0
    for position, value in ((0, 1.0), (1, -np.inf), (2, np.nan), (3, np.inf)):
        changed = strange.copy()
        changed[position] = value
        found = difference({"a": strange}, {"a": changed})
        assert found.error == np.inf
        assert found.position == (position,)


def test_all_zero_and_empty() -> None:
    assert difference({"a": np.zeros(3)}, {"a": np.zeros(3)}).error == 0
    assert difference({"a": np.zeros(3)}, {"a": np.full(3, 1e-9)}).error == np.inf
    assert difference({"a": np.zeros((0, 3))}, {"a": np.zeros((0, 3))}).error == 0


def test_another_shape() -> None:
    found = difference({"a": np.zeros((2, 3))}, {"a": np.zeros((3, 2))})
    assert found.error == np.inf
    assert found.describe() == "output 'a' has the shape (3, 2) instead of (2, 3)"


@pytest.mark.parametrize("dtype", [np.int64, np.bool_])
def test_share_of_whole_numbers_that_differ(dtype: type) -> None:
    before = np.zeros(10, dtype)
    after = before.copy()
    after[[3, 7]] = 1
    found = difference({"a": before}, {"a": after})
    assert found.error == pytest.approx(0.2)
    assert found.position == (3,)


def test_shapes_to_try() -> None:
    profile = Profile.parse("x=1x3x32x8,4x3x64x8,8x3x96x8")
    shapes = example_shapes([IMAGE, FIXED], [profile])
    assert shapes[:2] == [{"x": (1, 3, 32, 8), "k": (4,)}, {"x": (4, 3, 64, 8), "k": (4,)}]
    assert shapes[2] == {"x": (2, 3, 64, 8), "k": (4,)}
    assert len(shapes) == len({str(item) for item in shapes})
    assert example_shapes([FIXED]) == [{"k": (4,)}]
    other = Profile.parse("k=4")
    assert example_shapes([IMAGE, FIXED], [other])[0] == {"x": (2, 3, 64, 8), "k": (4,)}


def test_random_feeds_are_reproducible() -> None:
    mask = TensorSpec(name="m", dtype="bool", shape=(5,))
    shapes = {"x": (2, 3, 4, 8), "k": (4,), "m": (5,)}
    first, second = (random_feeds([IMAGE, FIXED, mask], shapes, seed=3) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    assert [first[name].dtype for name in first] == [np.float32, np.int64, np.bool_]
    assert set(first["k"].tolist()) <= {0, 1}


def _amplifier(path: Path, factor: float) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "f"], ["m"]), helper.make_node("Sin", ["m"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N",))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N",))],
        [numpy_helper.from_array(np.float32(factor), "f")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_rounding_noise_grows_with_the_amplification(tmp_path) -> None:
    feeds = {"x": np.linspace(1, 2, 100, dtype=np.float32)}
    noises = []
    for factor in (1.0, 1e4):
        path = _amplifier(tmp_path / "m.onnx", factor)
        (expected,) = run_model(path, [feeds], capture=["m"])
        assert list(expected) == ["y", "m"]
        noises.append(rounding_noise(path, feeds, expected))
    assert noises[0]["y"] < 1e-6
    assert noises[1]["y"] > 1e-4
    assert noises[1]["m"] < 1e-6
