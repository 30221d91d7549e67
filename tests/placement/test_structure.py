"""Rules for what lies between the convolutions: Add, Concat, selections, pools, copies, ranges."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.placement.tiny import Tiny, decision, groups, pairs


def block(net: Tiny, x: str, name: str, channels: int = 16) -> str:
    """conv, ReLU, conv, Add of x, ReLU."""
    hidden = net.op("Relu", [net.conv(x, f"{name}.conv1", channels, channels)], f"{name}.relu1")
    out = net.op("Add", [net.conv(hidden, f"{name}.conv2", channels, channels), x], f"{name}.add")
    return net.op("Relu", [out], f"{name}.out")


def test_chain_of_residual_blocks_quantises_the_skip_input_only(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    for name in ("a", "b", "c"):
        x = block(net, x, name)
    net.conv(x, "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    found = pairs(plan)
    for name, skip in (("a", "x"), ("b", "a.out"), ("c", "b.out")):
        assert f"{name}.conv2" not in found
        assert f"{name}.add" not in found
        assert found[skip] == {(f"{name}.conv1", 0), (f"{name}.add", 1)}
        assert decision(plan, f"{name}.add") == (True, "residual-add")
        assert decision(plan, f"{name}.out") == (False, "epilogue")
    assert groups(plan) == []


def test_last_block_keeps_one_form_of_the_skip_tensor(tmp_path: Path) -> None:
    net = Tiny()
    block(net, block(net, net.input("x", "n", 16, 8, 8), "a"), "b")
    found = pairs(net.plan(tmp_path, "b.out"))
    assert found["a.out"] == {("b.conv1", 0), ("b.add", 1)}
    assert "b.out" not in found  # a graph output stays float


@pytest.mark.parametrize(
    ("outputs", "stride", "group", "skip"),
    [
        (16, 1, 1, "shortcut"),  # as wide as what it reads
        (32, 2, 1, "shortcut"),  # writes half as much as it reads
        (32, 1, 1, "conv2"),  # the first block of a ResNet-50
        (128, 2, 1, "conv2"),  # 16x8x8 elements read, 128x4x4 written
        (32, 1, 16, "conv2"),
    ],
)
def test_projection_of_a_residual_block(tmp_path: Path, outputs: int, stride: int, group: int, skip: str) -> None:
    """It is the skip path, unless it writes more than it reads."""
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    hidden = net.op("Relu", [net.conv(x, "conv1", 16, 32, strides=[stride, stride])], "relu1")
    for inputs in (["conv2", "shortcut"], ["shortcut", "conv2"]):
        net.nodes = [node for node in net.nodes if node.name in ("conv1", "relu1")]
        net.conv(hidden, "conv2", 32, outputs)
        net.conv(x, "shortcut", 16, outputs, 1, strides=[stride, stride], group=group)
        net.op("Add", inputs, "add")
        net.conv("add", "y", outputs, 32)
        found = pairs(net.plan(tmp_path, "y"))
        assert found[skip] == {("add", inputs.index(skip))}
        assert ({"conv2", "shortcut"} - {skip}).isdisjoint(found)


def test_skip_that_comes_from_an_add_without_activation(tmp_path: Path) -> None:
    net = Tiny()
    x = net.conv(net.input("x", "n", 16, 8, 8), "stem", 16, 16)
    for name in ("a", "b"):
        x = net.op("Add", [x, net.conv(x, f"{name}.conv", 16, 16)], f"{name}.add")
    net.conv(x, "y", 16, 16)
    found = pairs(net.plan(tmp_path, "y"))
    assert found["a.add"] == {("b.conv", 0), ("b.add", 0)}
    assert "b.conv" not in found


def test_add_behind_an_activation_reads_the_int8_skip(tmp_path: Path) -> None:
    net = Tiny()
    x = net.silu(net.conv(net.input("x", "n", 16, 8, 8), "stem", 16, 16), "act")
    y = net.silu(net.conv(x, "conv", 16, 16), "inner")
    net.conv(net.op("Add", [x, y], "add"), "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    assert pairs(plan)["act"] == {("conv", 0), ("add", 0)}
    for node in ("inner", "inner.sigmoid"):
        assert decision(plan, node) == (False, "epilogue")


def test_convnext_like_block_keeps_a_float_stream(tmp_path: Path) -> None:
    net = Tiny()
    x = net.conv(net.input("x", "n", 16, 8, 8), "stem", 16, 16)
    net.constant("gamma", net.random.uniform(0.1, 1, (16, 1, 1)))
    scaled = net.op("Mul", [net.conv(x, "conv", 16, 16), "gamma"], "scaled")
    net.conv(net.op("Add", [x, scaled], "add"), "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    assert pairs(plan)["stem"] == {("conv", 0)}
    assert decision(plan, "add") == (False, "epilogue")


def test_add_of_a_constant_is_no_residual(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("shift", net.random.standard_normal((1, 16, 8, 8)))
    added = net.op("Add", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16), "shift"], "add")
    net.conv(added, "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    assert decision(plan, "add") == (False, "epilogue")
    assert set(pairs(plan)) == {"x", "add"}


def test_add_that_broadcasts_is_no_residual(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    pooled = net.op("GlobalAveragePool", [x], "pooled")
    net.conv(net.op("Add", [net.conv(x, "conv", 16, 16), pooled], "add"), "y", 16, 16)
    assert decision(net.plan(tmp_path, "y"), "add")[0] is False


def test_concat_shares_one_scale_and_only_its_inputs_are_calibrated(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    parts = [net.op("Relu", [net.conv(x, f"conv{i}", 16, 16)], f"relu{i}") for i in range(2)]
    net.conv(parts[0], "side", 16, 16)
    net.conv(net.op("Concat", parts, "concat", axis=1), "y", 32, 32)
    plan = net.plan(tmp_path, "y", "side")
    assert groups(plan) == [{"relu0", "relu1", "concat"}]
    assert plan.tensors == ("x", "relu0", "relu1")
    assert pairs(plan)["relu0"] == {("side", 0), ("concat", 0)}
    assert decision(plan, "concat") == (True, "concat")


def test_concat_of_concats_is_one_group(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    a, b, c = (net.conv(x, name, 16, 16) for name in "abc")
    inner = net.op("Concat", [a, b], "inner", axis=1)
    net.conv(net.op("Concat", [inner, c], "outer", axis=1), "y", 48, 16)
    assert groups(net.plan(tmp_path, "y")) == [{"a", "b", "c", "inner", "outer"}]


def test_concat_that_nobody_reads_as_int8_stays_float(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.op("Concat", [net.conv(x, "a", 16, 16), net.conv(x, "b", 16, 16)], "y", axis=1)
    plan = net.plan(tmp_path, "y")
    assert decision(plan, "y") == (False, "copy")


def test_concat_with_a_constant_stays_float(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("token", net.random.standard_normal((1, 1, 32)))
    net.weights("w", 32, 48)
    net.op("MatMul", [net.op("Concat", ["token", net.input("x", 1, "n", 32)], "concat", axis=1), "w"], "y")
    assert decision(net.plan(tmp_path, "y"), "concat") == (False, "copy")


def test_concat_through_reshapes_shuffles_channels_at_one_scale(tmp_path: Path) -> None:
    net = Tiny()
    x = net.input("x", 1, 16, 8, 8)
    joined = net.op("Concat", [net.conv(x, "a", 16, 16), net.conv(x, "b", 16, 16)], "joined", axis=1)
    net.constant("split", [1, 2, 16, 8, 8], "int64")
    net.constant("merge", [1, 32, 8, 8], "int64")
    swapped = net.op("Transpose", [net.op("Reshape", [joined, "split"], "r1")], "t", perm=[0, 2, 1, 3, 4])
    net.conv(net.op("Reshape", [swapped, "merge"], "r2"), "y", 32, 32)
    plan = net.plan(tmp_path, "y")
    assert groups(plan) == [{"a", "b", "r2"}]
    assert "joined" not in pairs(plan)
    assert decision(plan, "t") == (False, "copy")


def test_split_behind_a_convolution_shares_its_scale(tmp_path: Path) -> None:
    net = Tiny()
    x = net.silu(net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 32), "act")
    net.constant("sizes", [16, 16], "int64")
    net.op("Split", [x, "sizes"], "left", "right", axis=1)
    y = net.conv("right", "inner", 16, 16)
    net.conv(net.op("Concat", ["left", "right", y], "concat", axis=1), "y", 48, 16)
    plan = net.plan(tmp_path, "y")
    assert groups(plan) == [{"act", "left", "right", "inner", "concat"}]
    assert plan.tensors == ("x", "act", "inner")
    assert decision(plan, "left") == (True, "selection")


def test_selections_behind_a_matrix_product_keep_their_own_scales(tmp_path: Path) -> None:
    net = Tiny()
    net.weights("w", 32, 96)
    net.constant("sizes", [32, 32, 32], "int64")
    packed = net.op("MatMul", [net.input("x", "n", 24, 32), "w"], "packed")
    net.op("Split", [packed, "sizes"], "q", "k", "v", axis=2)
    net.op("MatMul", ["q", net.op("Transpose", ["k"], "kt", perm=[0, 2, 1])], "y")
    plan = net.plan(tmp_path, "y")
    assert set(pairs(plan)) == {"x", "q", "kt"}
    assert groups(plan) == []


def test_max_pool_needs_one_pair_behind_it(tmp_path: Path) -> None:
    net = Tiny()
    x = net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "relu")
    net.conv(net.op("MaxPool", [x], "pool", kernel_shape=[2, 2], strides=[2, 2]), "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    assert set(pairs(plan)) == {"x", "pool"}
    assert decision(plan, "pool") == (False, "pooling")


def test_max_pool_shares_the_scale_of_an_int8_input(tmp_path: Path) -> None:
    net = Tiny()
    x = net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "relu")
    net.conv(net.op("MaxPool", [x], "pool", kernel_shape=[2, 2], strides=[2, 2]), "y", 16, 16)
    net.conv(x, "z", 16, 16)
    plan = net.plan(tmp_path, "y", "z")
    assert groups(plan) == [{"relu", "pool"}]
    assert plan.tensors == ("x", "relu")
    assert pairs(plan)["relu"] == {("pool", 0), ("z", 0)}


def test_global_average_pool_between_int8_layers_reads_int8(tmp_path: Path) -> None:
    net = Tiny()
    net.weights("w", 48, 16)
    x = net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "relu")
    flat = net.op("Flatten", [net.op("GlobalAveragePool", [x], "pool")], "flat")
    net.op("Gemm", [flat, "w"], "y", transB=1)
    plan = net.plan(tmp_path, "y")
    assert set(pairs(plan)) == {"x", "relu", "flat"}
    assert decision(plan, "pool") == (True, "average-pool")
    assert decision(plan, "flat") == (False, "copy")
    assert "relu" not in pairs(net.plan(tmp_path, "y", rules_off=("average-pool",)))


def test_squeeze_and_excitation_stays_float(tmp_path: Path) -> None:
    net = Tiny()
    x = net.op("HardSwish", [net.conv(net.input("x", "n", 32, 8, 8), "conv", 32, 32)], "act")
    gate = net.conv(net.op("GlobalAveragePool", [x], "pool"), "se", 32, 32, 1, pads=[0] * 4)
    scaled = net.op("Mul", [x, net.op("HardSigmoid", [gate], "gate")], "scaled")
    net.conv(scaled, "y", 32, 32, 1, pads=[0] * 4)
    plan = net.plan(tmp_path, "y")
    assert set(pairs(plan)) == {"x", "scaled"}
    assert decision(plan, "gate") == (False, "gate")
    assert decision(plan, "scaled") == (False, "gate")
    assert decision(plan, "act") == (False, "epilogue")


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize(tmp_path: Path, mode: str) -> None:
    net = Tiny()
    net.constant("scales", [1, 1, 2, 2])
    x = net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "relu")
    net.conv(net.op("Resize", [x, "", "scales"], "up", mode=mode), "y", 16, 16)
    plan = net.plan(tmp_path, "y")
    if mode == "nearest":
        assert groups(plan) == [{"relu", "up"}]
        assert decision(plan, "up") == (True, "resize")
    else:
        assert set(pairs(plan)) == {"x", "up"}


def test_interpolation_reads_int8_where_another_reader_does(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("scales", [1, 1, 2, 2])
    x = net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "relu")
    net.conv(net.op("Resize", [x, "", "scales"], "up", mode="linear"), "y", 16, 16)
    net.conv(x, "z", 16, 16)
    plan = net.plan(tmp_path, "y", "z")
    assert pairs(plan)["relu"] == {("up", 0), ("z", 0)}
    assert groups(plan) == []


@pytest.mark.parametrize(
    ("mode", "value", "shared"), [("constant", 0, True), ("reflect", 0, True), ("constant", 1, False)]
)
def test_pad_is_quantised_in_front(tmp_path: Path, mode: str, value: float, shared: bool) -> None:
    net = Tiny()
    net.constant("pads", [0, 0, 0, 0, 0, 0, 1, 1], "int64")
    net.constant("value", value)
    x = net.op("Relu", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)], "relu")
    net.conv(net.op("Pad", [x, "pads", "value"], "padded", mode=mode), "y", 16, 16, pads=[0] * 4)
    plan = net.plan(tmp_path, "y")
    assert groups(plan) == ([{"relu", "padded"}] if shared else [])
    assert ("relu" in pairs(plan)) is shared


def test_layout_shares_the_scale_of_an_int8_input(tmp_path: Path) -> None:
    net = Tiny()
    net.weights("w", 16, 32)
    x = net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)
    net.conv(x, "z", 16, 16)
    net.op("MatMul", [net.op("Transpose", [x], "t", perm=[0, 2, 3, 1]), "w"], "y")
    plan = net.plan(tmp_path, "y", "z")
    assert groups(plan) == [{"conv", "t"}]
    assert decision(plan, "t") == (True, "layout")


def test_clip_gives_the_known_range(tmp_path: Path) -> None:
    net = Tiny()
    net.constant("low", 0.0)
    net.constant("high", 6.0)
    x = net.op("Clip", [net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16), "low", "high"], "clip")
    net.conv(net.op("MaxPool", [x], "pool", kernel_shape=[2, 2]), "y", 16, 16)
    known = {point.tensor: point.known_amax for point in net.plan(tmp_path, "y").activations}
    assert known == {"x": None, "pool": 6.0}


def test_layer_norm_gelu_and_recurrence_stay_float_and_say_so(tmp_path: Path) -> None:
    net = Tiny()
    net.weights("w", 32, 48)
    for name, value in (("two", 2.0), ("eps", 1e-5), ("root", 1.414), ("one", 1.0), ("half", 0.5)):
        net.constant(name, value)
    x = net.input("x", 4, "n", 32)
    mean = net.op("ReduceMean", [x], "mean", axes=[-1])
    centred = net.op("Sub", [x, mean], "centred")
    variance = net.op("ReduceMean", [net.op("Pow", [centred, "two"], "square")], "variance", axes=[-1])
    norm = net.op("Div", [centred, net.op("Sqrt", [net.op("Add", [variance, "eps"], "shifted")], "root_")], "norm")
    y = net.op("MatMul", [norm, "w"], "product")
    erf = net.op("Erf", [net.op("Div", [y, "root"], "gelu.div")], "gelu.erf")
    gelu = net.op("Mul", [net.op("Mul", [y, net.op("Add", [erf, "one"], "gelu.add")], "gelu.mul"), "half"], "gelu")
    net.weights("lstm.w", 1, 128, 48)
    net.weights("lstm.r", 1, 128, 32)
    net.op("LSTM", [gelu, "lstm.w", "lstm.r"], "y", hidden_size=32)
    plan = net.plan(tmp_path, "y")
    assert set(pairs(plan)) == {"norm"}
    for node in ("mean", "centred", "square", "variance", "shifted", "root_", "norm"):
        assert decision(plan, node) == (False, "normalisation")
    for node in ("gelu.div", "gelu.erf", "gelu.add", "gelu.mul", "gelu"):
        assert decision(plan, node) == (False, "gelu")
    assert decision(plan, "y") == (False, "recurrent")


def test_control_flow_and_its_readers_stay_float(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    net = Tiny()
    x = net.conv(net.input("x", "n", 16, 8, 8), "conv", 16, 16)
    branches = {}
    for name, op in (("then_branch", "Relu"), ("else_branch", "Neg")):
        out = helper.make_tensor_value_info(f"{name}.out", TensorProto.FLOAT, None)
        branches[name] = helper.make_graph([helper.make_node(op, [x], [f"{name}.out"])], name, [], [out])
    net.op("If", [net.input("c", dtype=TensorProto.BOOL)], "y", **branches)
    plan = net.plan(tmp_path, "y")
    assert decision(plan, "y") == (False, "control-flow")
    assert set(pairs(plan)) == {"x"}
