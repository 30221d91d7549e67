"""Each rewrite of the prepare stage on small graphs, with cases in which it must not act."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.equivalence import difference, run_model
from pipeline.onnxfile import load_model, save_model
from pipeline.onnxgraph import infer_shapes
from pipeline.prepare.names import name_nodes
from pipeline.prepare.scale_shift import ScaleShift, folded
from pipeline.prepare.stage import rewrite
from pipeline.prepare.static_shapes import fold_static_shapes
from pipeline.prepare.unshare import unshare_weights

RNG = np.random.default_rng(0)
node = helper.make_node


def _values(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2.0, shape).astype(np.float32)


NORM = {"g": _values(4), "b": _values(4), "m": _values(4), "v": _values(4)}
BN = ["g", "b", "m", "v"]


def _write(
    path: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    shape: tuple[int | str | None, ...] = ("N", 4, 8, 8),
    outputs: dict[str, int] | None = None,
    opset: int = 17,
    **options,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank)
            for name, rank in (outputs or {"y": len(shape)}).items()
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, **options)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def _rewritten(tmp_path: Path, *arguments, **options) -> tuple[onnx.GraphProto, dict[str, tuple[str, ...]]]:
    """The graph after every rewrite, proved equal to the one before, and what was changed."""
    path = _write(tmp_path / "m.onnx", *arguments, **options)
    model = load_model(path)
    changes = rewrite(model)
    written = save_model(model, tmp_path / "out")
    onnx.checker.check_model(str(written), full_check=True)
    shape = [dim if isinstance(dim, int) else 2 for dim in options.get("shape", ("N", 4, 8, 8))]
    feeds = [{"x": RNG.standard_normal(shape, dtype=np.float32)}]
    (expected,), (found,) = run_model(path, feeds), run_model(written, feeds)
    assert list(expected) == list(found)
    assert difference(expected, found).error < 1e-5
    return onnx.load(written).graph, {change.kind: change.where for change in changes}


def _ops(graph: onnx.GraphProto) -> list[str]:
    return [item.op_type for item in graph.node]


def _tensors(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    return {item.name: numpy_helper.to_array(item) for item in graph.initializer}


# Folding of scale and shift


@pytest.mark.parametrize("bias", [False, True])
def test_batch_normalization_into_conv(tmp_path, bias: bool) -> None:
    weights = {"c.weight": _values(4, 4, 3, 3), "c.bias": _values(4), **NORM}
    inputs = ["x", "c.weight", "c.bias"] if bias else ["x", "c.weight"]
    if not bias:
        del weights["c.bias"]
    nodes = [
        node("Conv", inputs, ["c"], name="conv"),
        node("BatchNormalization", ["c", *BN], ["n"], name="norm", epsilon=1e-2),
        node("Relu", ["n"], ["y"], name="act"),
    ]
    graph, changes = _rewritten(tmp_path, nodes, weights)
    assert _ops(graph) == ["Conv", "Relu"]
    assert graph.node[0].name == "conv"
    assert list(graph.node[0].output) == ["n"]
    assert set(_tensors(graph)) == {"c.weight", "c.bias"}
    assert changes == {"BatchNormalization folded into Conv": ("norm",)}
    scale = NORM["g"] / np.sqrt(NORM["v"] + 1e-2)
    np.testing.assert_allclose(_tensors(graph)["c.weight"], weights["c.weight"] * scale.reshape(4, 1, 1, 1), rtol=1e-6)


@pytest.mark.parametrize("group", [1, 2])
def test_batch_normalization_into_conv_transpose(tmp_path, group: int) -> None:
    weights = {"w": _values(4, 4 // group, 2, 2), **NORM}
    nodes = [
        node("ConvTranspose", ["x", "w"], ["c"], name="up", strides=[2, 2], group=group),
        node("BatchNormalization", ["c", *BN], ["y"], name="norm"),
    ]
    graph, changes = _rewritten(tmp_path, nodes, weights)
    assert _ops(graph) == ["ConvTranspose"]
    assert "BatchNormalization folded into ConvTranspose" in changes


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", [None, (4,), (1, 4), ()])
def test_batch_normalization_into_gemm(tmp_path, transposed: int, bias: tuple[int, ...] | None) -> None:
    weights = {"w": _values(4, 6) if transposed else _values(6, 4), **NORM}
    if bias is not None:
        weights["bias"] = _values(*bias)
    nodes = [
        node("Gemm", ["x", "w", *(["bias"] if bias is not None else [])], ["c"], name="fc", transB=transposed),
        node("BatchNormalization", ["c", *BN], ["y"], name="norm"),
    ]
    graph, _ = _rewritten(tmp_path, nodes, weights, shape=("N", 6))
    assert _ops(graph) == ["Gemm"]


def test_scaled_gemm_is_left_alone(tmp_path) -> None:
    nodes = [
        node("Gemm", ["x", "w"], ["c"], alpha=0.5),
        node("BatchNormalization", ["c", *BN], ["y"]),
    ]
    graph, _ = _rewritten(tmp_path, nodes, {"w": _values(6, 4), **NORM}, shape=("N", 6))
    assert _ops(graph) == ["Gemm", "BatchNormalization"]


@pytest.mark.parametrize(
    ("op", "constant_first", "shape"),
    [
        ("Mul", False, (4, 1, 1)),
        ("Mul", True, (1, 4, 1, 1)),
        ("Mul", False, ()),
        ("Div", False, (1,)),
        ("Add", False, (1, 4, 1, 1)),
        ("Add", True, (1, 1, 1)),
        ("Sub", False, (4, 1, 1)),
        ("Sub", True, (4, 1, 1)),
    ],
)
def test_arithmetic_with_a_constant_into_conv(tmp_path, op: str, constant_first: bool, shape: tuple[int, ...]) -> None:
    inputs = ["k", "c"] if constant_first else ["c", "k"]
    nodes = [node("Conv", ["x", "w"], ["c"], name="conv"), node(op, inputs, ["y"], name="step")]
    graph, changes = _rewritten(tmp_path, nodes, {"w": _values(4, 4, 1, 1), "k": _values(*shape)})
    assert _ops(graph) == ["Conv"]
    assert changes == {f"{op} folded into Conv": ("step",)}


def test_a_chain_is_folded_whole(tmp_path) -> None:
    nodes = [
        node("Conv", ["x", "w", "bias"], ["c"], name="conv"),
        node("Mul", ["one", "c"], ["d"], name="mul"),
        node("Add", ["d", "two"], ["e"], name="add"),
        node("BatchNormalization", ["e", *BN], ["y"], name="norm"),
    ]
    weights = {"w": _values(4, 4, 1, 1), "bias": _values(4), "one": _values(1), "two": _values(1), **NORM}
    graph, changes = _rewritten(tmp_path, nodes, weights)
    assert _ops(graph) == ["Conv"]
    assert list(graph.node[0].output) == ["y"]
    assert set(changes) == {"Mul folded into Conv", "Add folded into Conv", "BatchNormalization folded into Conv"}


@pytest.mark.parametrize(
    ("step", "constant"),
    [
        (node("Div", ["k", "c"], ["y"]), (4, 1, 1)),  # k / x is no scaling
        (node("Add", ["c", "k"], ["y"]), (8,)),  # along the width
        (node("Mul", ["c", "k"], ["y"]), (2, 4, 1, 1)),  # along the batch
        (node("Add", ["c", "k"], ["y"]), (1, 1, 1, 1, 1)),  # raises the rank
        (node("Mul", ["c", "c"], ["y"]), (1,)),
        (node("Add", ["c", "x"], ["y"]), (1,)),
    ],
    ids=["division", "width", "batch", "rank", "square", "residual"],
)
def test_arithmetic_that_is_no_scale_or_shift_per_channel(tmp_path, step, constant: tuple[int, ...]) -> None:
    rank = max(4, len(constant))
    nodes = [node("Conv", ["x", "w"], ["c"]), step]
    graph, _ = _rewritten(tmp_path, nodes, {"w": _values(4, 4, 1, 1), "k": _values(*constant)}, outputs={"y": rank})
    assert _ops(graph)[0] == "Conv"
    assert len(graph.node) == 2


def test_division_by_zero_is_not_folded(tmp_path) -> None:
    path = _write(
        tmp_path / "m.onnx",
        [node("Conv", ["x", "w"], ["c"]), node("Div", ["c", "k"], ["y"])],
        {"w": _values(4, 4, 1, 1), "k": np.zeros(1, np.float32)},
    )
    model = load_model(path)
    rewrite(model)
    assert [item.op_type for item in model.graph] == ["Conv", "Div"]


def test_weights_that_would_overflow_are_not_folded(tmp_path) -> None:
    path = _write(
        tmp_path / "m.onnx",
        [node("Conv", ["x", "w"], ["c"]), node("Mul", ["c", "k"], ["y"])],
        {"w": np.full((4, 4, 1, 1), 1e30, np.float32), "k": np.full(1, 1e30, np.float32)},
    )
    model = load_model(path)
    rewrite(model)
    assert [item.op_type for item in model.graph] == ["Conv", "Mul"]


def test_tensor_with_another_user_or_that_is_an_output_stays(tmp_path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("BatchNormalization", ["c", *BN], ["n"]),
        node("Add", ["n", "c"], ["y"]),
    ]
    graph, _ = _rewritten(tmp_path, nodes, {"w": _values(4, 4, 1, 1), **NORM})
    assert _ops(graph) == ["Conv", "BatchNormalization", "Add"]
    nodes = [node("Conv", ["x", "w"], ["c"]), node("BatchNormalization", ["c", *BN], ["y"])]
    graph, _ = _rewritten(tmp_path, nodes, {"w": _values(4, 4, 1, 1), **NORM}, outputs={"y": 4, "c": 4})
    assert _ops(graph) == ["Conv", "BatchNormalization"]


def test_shared_weight_is_folded_for_one_user_only(tmp_path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="first"),
        node("BatchNormalization", ["c", *BN], ["n"], name="norm"),
        node("Conv", ["n", "w"], ["y"], name="second"),
    ]
    weights = {"w": _values(4, 4, 1, 1), **NORM}
    graph, _ = _rewritten(tmp_path, nodes, weights)
    assert _ops(graph) == ["Conv", "Conv"]
    assert [item.input[1] for item in graph.node] == ["w_1", "w"]
    np.testing.assert_array_equal(_tensors(graph)["w"], weights["w"])


def test_normalization_before_a_conv_stays(tmp_path) -> None:
    nodes = [
        node("BatchNormalization", ["x", *BN], ["n"]),
        node("Conv", ["n", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    graph, _ = _rewritten(tmp_path, nodes, {"w": _values(4, 4, 3, 3), **NORM})
    assert _ops(graph) == ["BatchNormalization", "Conv"]


def test_double_precision_products() -> None:
    weight, outer = np.full((2, 1), 1 / 3, np.float32), ScaleShift(np.array([1e-7, 3e7]), np.array([1.0, -1.0]))
    new, bias = folded(weight, np.array([1.0, 2.0], np.float32), outer, axis=0, groups=1)
    np.testing.assert_array_equal(new[:, 0], np.float64(np.float32(1 / 3)) * np.array([1e-7, 3e7]))
    assert bias is not None
    np.testing.assert_array_equal(bias, [1e-7 + 1, 6e7 - 1])
    assert folded(weight, None, ScaleShift(np.array(2.0), np.zeros(())), axis=0, groups=1)[1] is None


# Pad


def _pad(pads: list[int], value: float | None = None) -> tuple[onnx.NodeProto, dict[str, np.ndarray]]:
    weights = {"p": np.array(pads), **({} if value is None else {"v": np.float32(value)})}
    return node("Pad", ["x", "p", *(["v"] if value is not None else [])], ["q"], name="pad"), weights


@pytest.mark.parametrize("value", [None, 0.0])
@pytest.mark.parametrize("own", [None, [1, 0, 0, 2]])
def test_pad_into_conv(tmp_path, value: float | None, own: list[int] | None) -> None:
    pad, weights = _pad([0, 0, 1, 2, 0, 0, 3, 0], value)
    attributes = {} if own is None else {"pads": own}
    nodes = [pad, node("Conv", ["q", "w"], ["y"], name="conv", strides=[2, 2], **attributes)]
    graph, changes = _rewritten(tmp_path, nodes, {"w": _values(4, 4, 3, 3), **weights})
    assert _ops(graph) == ["Conv"]
    found = {item.name: list(item.ints) for item in graph.node[0].attribute}
    assert found["pads"] == [a + b for a, b in zip([1, 2, 3, 0], own or [0] * 4, strict=True)]
    assert changes == {"Pad folded into Conv": ("pad",)}


def test_pad_into_two_convs_of_one_dimension(tmp_path) -> None:
    pad, weights = _pad([0, 0, 1, 0, 0, 2])
    nodes = [
        pad,
        node("Conv", ["q", "w"], ["a"], name="a"),
        node("Conv", ["q", "u"], ["b"], name="b", auto_pad="VALID"),
        node("Add", ["a", "b"], ["y"]),
    ]
    weights |= {"w": _values(4, 4, 3), "u": _values(4, 4, 3)}
    graph, _ = _rewritten(tmp_path, nodes, weights, shape=("N", 4, 8))
    assert _ops(graph) == ["Conv", "Conv", "Add"]


@pytest.mark.parametrize(
    ("pads", "value", "mode", "consumer"),
    [
        ([0, 0, 1, 1, 0, 0, 1, 1], 0.5, "constant", "Conv"),
        ([0, 0, 1, 1, 0, 0, 1, 1], None, "reflect", "Conv"),
        ([0, 0, -1, 0, 0, 0, 0, 0], None, "constant", "Conv"),
        ([1, 0, 0, 0, 0, 0, 0, 0], None, "constant", "Conv"),
        ([0, 0, 1, 1, 0, 0, 1, 1], None, "constant", "MaxPool"),
        ([0, 0, 1, 1, 0, 0, 1, 1], None, "constant", "SAME"),
    ],
    ids=["value", "reflect", "crop", "batch", "pool", "auto"],
)
def test_pads_that_stay(tmp_path, pads: list[int], value: float | None, mode: str, consumer: str) -> None:
    pad, weights = _pad(pads, value)
    pad.attribute.append(helper.make_attribute("mode", mode))
    if consumer == "MaxPool":
        nodes = [pad, node("MaxPool", ["q"], ["y"], kernel_shape=[3, 3])]
    else:
        auto = {"auto_pad": "SAME_UPPER"} if consumer == "SAME" else {}
        nodes = [pad, node("Conv", ["q", "w"], ["y"], **auto)]
        weights["w"] = _values(4, 4, 3, 3)
    graph, changes = _rewritten(tmp_path, nodes, weights)
    assert _ops(graph)[0] == "Pad"
    assert "Pad folded into Conv" not in changes


def test_pad_that_something_else_reads_stays(tmp_path) -> None:
    pad, weights = _pad([0, 0, 1, 1, 0, 0, 1, 1])
    nodes = [pad, node("Conv", ["q", "w"], ["c"]), node("Relu", ["q"], ["y"])]
    graph, _ = _rewritten(tmp_path, nodes, {"w": _values(4, 4, 3, 3), **weights}, outputs={"y": 4, "c": 4})
    assert sorted(_ops(graph)) == ["Conv", "Pad", "Relu"]


# Kernel shapes


def _kernels(graph: onnx.GraphProto) -> dict[str, list[int] | None]:
    return {
        item.name: next((list(a.ints) for a in item.attribute if a.name == "kernel_shape"), None)
        for item in graph.node
        if item.op_type in ("Conv", "ConvTranspose")
    }


def test_kernel_shapes_are_stated(tmp_path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="lacks"),
        node("ConvTranspose", ["c", "t"], ["u"], name="lacks_too"),
        node("Conv", ["u", "v"], ["y"], name="has", kernel_shape=[3, 2]),
    ]
    weights = {"w": _values(4, 4, 3, 2), "t": _values(4, 4, 5, 1), "v": _values(4, 4, 3, 2)}
    graph, _ = _rewritten(tmp_path, nodes, weights)
    assert _kernels(graph) == {"lacks": [3, 2], "lacks_too": [5, 1], "has": [3, 2]}


def test_the_kernel_of_a_quantised_weight_is_stated_and_that_of_an_unknown_one_is_not(tmp_path) -> None:
    nodes = [
        node("QuantizeLinear", ["w", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("Conv", ["x", "d"], ["c"], name="quantised"),
        node("Conv", ["x", "x"], ["y"], name="unknown"),
    ]
    weights = {"w": _values(4, 4, 3, 3), "s": np.float32(0.1), "z": np.int8(0)}
    path = _write(tmp_path / "m.onnx", nodes, weights, shape=("N", 4, "H", "W"), outputs={"c": 4, "y": 4})
    model = load_model(path)
    rewrite(model)
    save_model(model, tmp_path / "out")
    assert _kernels(onnx.load(tmp_path / "out" / "model.onnx").graph) == {"quantised": [3, 3], "unknown": None}


# Weights of one's own


def test_shared_weights_are_copied(tmp_path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="a"),
        node("Conv", ["a", "w"], ["b"], name="b"),
        node("Conv", ["b", "w"], ["y"], name="c"),
    ]
    graph, changes = _rewritten(tmp_path, nodes, {"w": _values(4, 4, 1, 1)})
    assert [item.input[1] for item in graph.node] == ["w", "w_1", "w_2"]
    assert changes == {"weight copied for a second user": ("w", "w")}
    first, *others = _tensors(graph).values()
    assert all(np.array_equal(first, other) for other in others)


def test_copies_share_memory_until_they_are_written(tmp_path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    model = load_model(_write(tmp_path / "m.onnx", nodes, {"w": _values(8, 8)}))
    assert unshare_weights(model) == ["w"]
    first, second = (value.const_value for value in model.graph.initializers.values())
    assert first is not None
    assert second is not None
    assert np.shares_memory(first.numpy(), second.numpy())


def test_embedding_and_its_transposed_use(tmp_path) -> None:
    nodes = [
        node("ArgMax", ["x"], ["ids"], axis=-1, keepdims=0),
        node("Gather", ["w", "ids"], ["e"], name="embed"),
        node("MatMul", ["x", "w"], ["m"], name="project"),
        node("Add", ["m", "e"], ["y"]),
    ]
    graph, changes = _rewritten(tmp_path, nodes, {"w": _values(8, 8)})
    assert [item.input[1] for item in graph.node if item.op_type == "MatMul"] == ["w_1"]
    assert changes["weight copied for a second user"] == ("w",)


def test_biases_and_scalars_stay_shared(tmp_path) -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"]),
        node("Conv", ["a", "u", "b"], ["r"]),
        node("Clip", ["r", "low"], ["s"]),
        node("Clip", ["s", "low"], ["y"]),
    ]
    weights = {"w": _values(4, 4, 1, 1), "u": _values(4, 4, 1, 1), "b": _values(4), "low": np.float32(0.1)}
    graph, changes = _rewritten(tmp_path, nodes, weights)
    assert changes.get("weight copied for a second user") is None
    assert [item.input[2] for item in graph.node[:2]] == ["b", "b"]


# Constants, names, nodes without effect


@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_empty_inputs_of_resize_are_left_out(tmp_path, by: str) -> None:
    inputs = ["x", "roi", "scales"] if by == "scales" else ["x", "roi", "none", "sizes"]
    weights = {
        "roi": np.empty(0, np.float32),
        "scales": np.float32([1, 1, 2, 2]),
        "none": np.empty(0, np.float32),
        "sizes": np.int64([2, 4, 16, 16]),
    }
    graph, changes = _rewritten(
        tmp_path,
        [helper.make_node("Resize", inputs, ["y"], "grow", mode="nearest")],
        {name: array for name, array in weights.items() if name in inputs},
    )
    assert list(graph.node[0].input) == (["x", "", "scales"] if by == "scales" else ["x", "", "", "sizes"])
    assert [value.name for value in graph.initializer] == [by]
    assert changes["empty input of Resize left out"] == ("grow",)


def test_constants_are_worked_out(tmp_path) -> None:
    nodes = [
        node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "last"], ["d"]),
        node("Cast", ["d"], ["f"], to=TensorProto.FLOAT),
        node("MatMul", ["x", "wt"], ["m"]),
        node("Div", ["m", "f"], ["y"]),
    ]
    weights = {"w": _values(5, 8), "last": np.array([3])}
    graph, changes = _rewritten(tmp_path, nodes, weights)
    assert _ops(graph) == ["MatMul", "Div"]
    assert set(_tensors(graph)) == {"wt", "f"}
    assert set(changes["tensor made constant"]) >= {"wt", "f"}
    assert graph.node[0].input[1] == "wt"


def test_shape_arithmetic_of_the_tracing_exporter(tmp_path) -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axis"], ["n1"]),
        node("Gather", ["s", "two"], ["h"]),
        node("Div", ["h", "two"], ["half"]),
        node("Unsqueeze", ["half", "axis"], ["h1"]),
        node("Concat", ["n1", "minus", "h1"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["y"]),
    ]
    weights = {"zero": np.array(0), "two": np.array(2), "axis": np.array([0]), "minus": np.array([-1])}
    graph, changes = _rewritten(tmp_path, nodes, weights, outputs={"y": 3})
    assert {"h", "half", "h1"} <= set(changes["tensor made constant"])
    assert "n" not in changes["tensor made constant"]
    assert _ops(graph) == ["Shape", "Gather", "Unsqueeze", "Concat", "Reshape"]


@pytest.mark.parametrize(
    ("step", "weights", "expected"),
    [
        (node("Shape", ["x"], ["r"], start=1, end=3), {}, [4, 8]),
        (node("Slice", ["s", "a", "b"], ["r"]), {"a": np.array([1]), "b": np.array([4])}, [4, 8, 8]),
        (node("Slice", ["s", "a", "b", "z", "t"], ["r"]), {"a": [1], "b": [9], "z": [0], "t": [2]}, [4, 8]),
        (node("Gather", ["s", "a"], ["r"]), {"a": [-1, 1]}, [8, 4]),
        (node("Mul", ["t", "a"], ["r"]), {"a": [3]}, [12, 24, 24]),
        (node("Add", ["t", "a"], ["r"]), {"a": [1, 2, 3]}, [5, 10, 11]),
        (node("Sub", ["a", "t"], ["r"]), {"a": [9]}, [5, 1, 1]),
        (node("Div", ["a", "t"], ["r"]), {"a": [-9]}, [-2, -1, -1]),
        (node("Concat", ["t", "t"], ["r"], axis=0), {}, [4, 8, 8, 4, 8, 8]),
    ],
)
def test_static_elements_of_a_shape(tmp_path, step, weights: dict[str, list[int]], expected: list[int]) -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Shape", ["x"], ["t"], start=1),
        step,
        node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
        node("ReduceSum", ["f"], ["sum"]),
        node("Add", ["x", "sum"], ["y"]),
    ]
    if step.output[0] == "r" and step.op_type == "Slice" and "t" in step.input:
        nodes.pop(1)
    arrays = {name: np.asarray(array, np.int64) for name, array in weights.items()}
    path = _write(tmp_path / "m.onnx", nodes, arrays)
    model = load_model(path)
    infer_shapes(model)
    fold_static_shapes(model)
    found = model.graph.initializers["r"].const_value
    assert found is not None
    assert found.numpy().tolist() == expected
    graph, _ = _rewritten(tmp_path, nodes, arrays)
    assert _ops(graph) == ["Add"]


def test_unknown_elements_and_faulty_arithmetic_stay(tmp_path) -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Div", ["s", "zero"], ["d"]),
        node("Gather", ["s", "first"], ["n"]),
        node("Gather", ["s", "beyond"], ["b"]),
        node("Concat", ["d", "n", "b"], ["c"], axis=0),
        node("Cast", ["c"], ["f"], to=TensorProto.FLOAT),
        node("ReduceSum", ["f"], ["sum"]),
        node("Add", ["x", "sum"], ["y"]),
    ]
    weights = {"zero": np.array([0]), "first": np.array([0]), "beyond": np.array([7])}
    model = load_model(_write(tmp_path / "m.onnx", nodes, weights))
    infer_shapes(model)
    assert fold_static_shapes(model) == []


def test_constants_do_not_grow_beyond_reason(tmp_path) -> None:
    nodes = [
        node("Expand", ["k", "big"], ["e"]),
        node("ReduceMean", ["e"], ["r"], keepdims=0),
        node("Add", ["x", "r"], ["y"]),
    ]
    weights = {"k": _values(1), "big": np.array([1 << 20])}
    graph, _ = _rewritten(tmp_path, nodes, weights)
    assert "Expand" in _ops(graph)
    weights["big"] = np.array([16])
    graph, _ = _rewritten(tmp_path, nodes, weights)
    assert _ops(graph) == ["Add"]


def test_quantize_and_dequantize_are_never_folded(tmp_path) -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        node("Transpose", ["w"], ["wt"], perm=[1, 0, 2, 3]),
        node("QuantizeLinear", ["wt", "ws", "wz"], ["wq"], axis=0),
        node("DequantizeLinear", ["wq", "ws", "wz"], ["wd"], axis=0),
        node("DequantizeLinear", ["stored", "ws", "wz"], ["sd"], axis=0),
        node("Conv", ["xd", "wd"], ["c"], name="conv"),
        node("BatchNormalization", ["c", *BN], ["n"], name="norm"),
        node("Conv", ["n", "sd"], ["y"], name="last"),
    ]
    weights = {
        "s": np.float32(0.02), "z": np.int8(0), "w": _values(4, 4, 1, 1), "ws": _values(4) / 100,
        "wz": np.zeros(4, np.int8), "stored": RNG.integers(-127, 128, (4, 4, 1, 1)).astype(np.int8), **NORM,
    }  # fmt: skip
    graph, _ = _rewritten(tmp_path, nodes, weights)
    counts = Counter(_ops(graph))
    assert counts == {"QuantizeLinear": 2, "DequantizeLinear": 3, "Conv": 2, "BatchNormalization": 1}
    assert {"xq", "xd", "wq", "wd", "sd"} <= {name for item in graph.node for name in item.output}


def test_nodes_without_effect_go(tmp_path) -> None:
    nodes = [
        node("Identity", ["x"], ["a"], name="same"),
        node("Dropout", ["a", "ratio"], ["d", "unused"], name="drop"),
        node("Mul", ["d", "one"], ["m"], name="times one"),
        node("Cast", ["m"], ["c"], to=TensorProto.FLOAT, name="cast"),
        node("Relu", ["c"], ["r"], name="act"),
        node("Identity", ["r"], ["y"], name="out"),
    ]
    graph, changes = _rewritten(tmp_path, nodes, {"ratio": np.float32(0.5), "one": np.float32(1)})
    assert _ops(graph) == ["Relu"]
    assert list(graph.node[0].output) == ["y"]
    assert changes["Dropout removed"] == ("drop",)
    assert {"same", "out"} <= set(changes["Identity removed"])


def test_identity_from_input_to_output_stays(tmp_path) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Identity", ["x"], ["z"], name="copy")]
    graph, changes = _rewritten(tmp_path, nodes, {}, outputs={"y": 4, "z": 4})
    assert sorted(_ops(graph)) == ["Identity", "Relu"]
    assert "Identity removed" not in changes


def test_identity_of_another_graphs_value_or_of_an_output_stays(tmp_path) -> None:
    def branch(name: str, *inner: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(list(inner), name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["c"]),
        node("Relu", ["x"], ["r"]),
        node(
            "If", ["c"], ["y"],
            then_branch=branch("t", node("Identity", ["r"], ["t"])),
            else_branch=branch("e", node("Neg", ["r"], ["n"]), node("Identity", ["n"], ["e"], name="inner")),
        ),
        node("Identity", ["y"], ["between"], name="between"),
        node("Identity", ["between"], ["z"], name="again"),
    ]  # fmt: skip
    graph, changes = _rewritten(tmp_path, nodes, {"zero": np.float32(0)}, outputs={"y": 4, "z": 4})
    assert changes["Identity removed"] == ("between", "inner")
    assert [item.name for item in graph.output] == ["y", "z"]
    assert [list(item.input) for item in graph.node if item.op_type == "Identity"] == [["y"]]


def test_dropout_with_a_used_mask_and_in_training(tmp_path) -> None:
    nodes = [
        node("Dropout", ["x", "ratio"], ["d", "mask"], name="drop"),
        node("Where", ["mask", "d", "x"], ["y"]),
    ]
    graph, _ = _rewritten(tmp_path, nodes, {"ratio": np.float32(0.5)})
    assert "Dropout" not in _ops(graph)  # the mask is all ones
    nodes = [node("Dropout", ["x", "ratio", "yes"], ["y"])]
    path = _write(tmp_path / "t.onnx", nodes, {"ratio": np.float32(0.5), "yes": np.array(True)})
    model = load_model(path)
    rewrite(model)
    assert [item.op_type for item in model.graph] == ["Dropout"]


def test_names_are_unique_and_stable(tmp_path) -> None:
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Relu", ["a"], ["b"], name="Relu_0"),
        node("Sigmoid", ["b"], ["c"], name="same"),
        node("Tanh", ["c"], ["d"], name="same"),
        node("Relu", ["d"], ["y"]),
    ]
    path = _write(tmp_path / "m.onnx", nodes, {})
    model = load_model(path)
    assert name_nodes(model) == ["Relu_1", "same_0", "Relu_2"]
    assert [item.name for item in model.graph] == ["Relu_1", "Relu_0", "same", "same_0", "Relu_2"]
    assert name_nodes(model) == []


def test_inner_graphs_are_named_and_survive(tmp_path) -> None:
    def branch(name: str, *inner: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(list(inner), name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["c"]),
        node(
            "If",
            ["c"],
            ["y"],
            then_branch=branch("t", node("Conv", ["x", "w"], ["t"])),
            else_branch=branch("e", node("Identity", ["x"], ["i"]), node("Relu", ["i"], ["e"])),
        ),
    ]
    graph, _ = _rewritten(tmp_path, nodes, {"zero": np.float32(0), "w": _values(4, 4, 1, 1)})
    inner = [item.g for item in graph.node[-1].attribute]
    assert sorted(item.op_type for branch in inner for item in branch.node) == ["Conv", "Relu"]
    names = [item.name for item in graph.node] + [item.name for branch in inner for item in branch.node]
    assert all(names)
    assert len(set(names)) == len(names)


def test_functions_are_inlined(tmp_path) -> None:
    body = [node("Relu", ["a"], ["r"]), node("Tanh", ["r"], ["b"])]
    function = helper.make_function("mine", "Block", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    graph = helper.make_graph(
        [node("Block", ["x"], ["y"], domain="mine", name="call")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N", 4))],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=8), tmp_path / "m.onnx")
    model = load_model(tmp_path / "m.onnx")
    changes = rewrite(model)
    assert [item.op_type for item in model.graph] == ["Relu", "Tanh"]
    assert [(change.kind, change.where) for change in changes if change.kind == "function inlined"] == [
        ("function inlined", ("Block",))
    ]
    assert list(model.graph.opset_imports) == [""]


def test_weights_listed_as_inputs_become_constants(tmp_path) -> None:
    graph = helper.make_graph(
        [node("Conv", ["x", "w"], ["c"]), node("BatchNormalization", ["c", *BN], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 4, 8, 8)),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, (4, 4, 1, 1)),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N", 4, 8, 8))],
        [numpy_helper.from_array(array, name) for name, array in {"w": _values(4, 4, 1, 1), **NORM}.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    model = load_model(tmp_path / "m.onnx")
    rewrite(model)
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert [item.op_type for item in model.graph] == ["Conv"]


def test_meaningless_dimensions_become_unknown(tmp_path) -> None:
    path = _write(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {}, shape=(-1, 4, "?", "?"))
    model = load_model(path)
    rewrite(model)
    shape = model.graph.inputs[0].shape
    assert shape is not None
    assert [dim if isinstance(dim, int) else dim.value for dim in shape] == [None, 4, None, None]
