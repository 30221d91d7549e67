"""ONNX models that compute in float16 or bfloat16: widened to float32, checked, or left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from pipeline.cli import main
from pipeline.config import PlacementConfig
from pipeline.core.errors import CheckFailed
from pipeline.engine.process import Ended
from pipeline.equivalence import difference, run_model
from pipeline.export import ExportResult, run
from pipeline.placement import make_plan

FLOAT, HALF, BRAIN, DOUBLE = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE
SHAPE = ["n", 16, 8, 8]
RNG = np.random.default_rng(0)
W1, W2 = (np.float16(RNG.standard_normal((16, 16, 3, 3)) * 0.2) for _ in range(2))


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray | onnx.TensorProto] | None = None,
    *,
    types: tuple[int, int] = (HALF, HALF),
    functions: list[onnx.FunctionProto] | None = None,
    output: onnx.ValueInfoProto | None = None,
    opset: int = 17,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", types[0], SHAPE)],
        [output or helper.make_tensor_value_info("y", types[1], [None] * 4)],
        [
            numpy_helper.from_array(value, name) if isinstance(value, np.ndarray) else value
            for name, value in (weights or {}).items()
        ],
    )
    domains = [helper.make_opsetid("", opset), *([helper.make_opsetid("mine", 1)] if functions else [])]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=8, functions=functions or []), path)
    return path


def node(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output, **attributes)


def convolutions(path: Path, *, types: tuple[int, int] = (HALF, HALF), last: str = "Conv") -> Path:
    """Two convolutions in float16; with other ``types`` of input and output, casts around them."""
    first, out = ("x" if types[0] == HALF else "x16"), ("y" if types[1] == HALF else "y16")
    nodes = [
        node("Conv", [first, "w1"], "a", pads=[1] * 4),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "w2"], out, pads=[1] * 4),
    ]
    if first != "x":
        nodes.insert(0, node("Cast", ["x"], first, to=HALF))
    if out != "y":
        nodes.append(node("Cast", [out], "y", to=types[1]))
    return save(path, nodes, {"w1": W1, "w2": W2}, types=types)


def export(path: Path) -> ExportResult:
    return run(str(path), folder=path.parent / "export")


def types_of(found: ExportResult) -> list[tuple[str, str]]:
    return [(spec.name, spec.dtype) for spec in (*found.inputs, *found.outputs)]


def operators(path: Path) -> list[str]:
    return [item.op_type for item in onnx.load(path).graph.node]


def compare(path: Path, found: ExportResult, tolerance: float = 2e-3) -> None:
    """The original and the widened model on the same numbers, each in its type."""
    x = RNG.standard_normal((2, 16, 8, 8)).astype(np.float16)
    before = np.float16 if onnx.load(path).graph.input[0].type.tensor_type.elem_type == HALF else np.float32
    (expected,) = run_model(path, [{"x": x.astype(before)}])
    (got,) = run_model(found.model_path, [{"x": x.astype(np.float32)}])
    assert difference(expected, got).error < tolerance


def test_a_float16_model_becomes_float32_and_can_be_quantised(tmp_path: Path) -> None:
    path = convolutions(tmp_path / "m.onnx")
    found = export(path)
    assert types_of(found) == [("x", "float32"), ("y", "float32")]
    model = onnx.load(found.model_path)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name, original in (("w1", W1), ("w2", W2)):
        assert weights[name].dtype == np.float32
        assert np.array_equal(weights[name], original.astype(np.float32)), "exactly"
    assert operators(found.model_path) == ["Conv", "Relu", "Conv"]
    compare(path, found)
    assert found.notes == (
        "m.onnx: 2 constants widened from float16 to float32, exactly; 0 casts between the two removed",
    )
    assert found.warnings == (
        "m.onnx computes in float16 (first in 'x'); INT8 is calibrated and placed in float32, so it was widened to "
        "that, with float32 instead of float16 at x, y; `--precision fp16 --fp16-io both` makes FP16 of what is not "
        "INT8, and of these inputs and outputs",
    )
    assert make_plan(found.model_path, PlacementConfig()).quantized_nodes == ("a", "y")


@pytest.mark.parametrize(
    ("types", "options", "casts"),
    [
        ((FLOAT, FLOAT), "`--precision fp16` makes FP16 of what is not INT8", 2),
        ((HALF, FLOAT), "`--precision fp16 --fp16-io inputs` makes FP16 of what is not INT8, and of these inputs", 1),
        ((FLOAT, HALF), "`--precision fp16 --fp16-io outputs` makes FP16 of what is not INT8, and of these outputs", 1),
    ],
)
def test_casts_at_the_border_vanish(tmp_path: Path, types: tuple[int, int], options: str, casts: int) -> None:
    """As converters write it with ``keep_io_types``."""
    path = convolutions(tmp_path / "m.onnx", types=types)
    found = export(path)
    assert types_of(found) == [("x", "float32"), ("y", "float32")]
    assert "Cast" not in operators(found.model_path)
    compare(path, found)
    assert found.warnings[0].endswith(options)
    assert found.notes[0].endswith(f"; {casts} casts between the two removed")


def test_casts_that_change_more_than_the_width_stay(tmp_path: Path) -> None:
    """From and to integers, and to float64."""
    nodes = [
        node("Cast", ["x"], "i", to=TensorProto.INT32),
        node("Cast", ["i"], "h", to=HALF),
        node("Mul", ["h", "w"], "m"),
        node("Cast", ["m"], "d", to=DOUBLE),
        node("Sqrt", ["d"], "s"),
        node("Cast", ["s"], "y", to=HALF),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"w": np.float16(np.abs(W1[:, :1, 0, 0, None]))}, types=(FLOAT, HALF))
    found = export(path)
    graph = onnx.load(found.model_path).graph
    kinds = [helper.get_attribute_value(item.attribute[0]) for item in graph.node if item.op_type == "Cast"]
    assert kinds == [TensorProto.INT32, FLOAT, DOUBLE, FLOAT]
    assert "computes in float16 (first in 'w')" in found.warnings[0]


def test_constants_types_and_bodies_are_widened(tmp_path: Path) -> None:
    """Constant, ConstantOfShape, and both bodies of an If that read an outer float16 tensor."""
    bodies = {}
    for name, op in (("then_branch", "Mul"), ("else_branch", "Add")):
        inner = [
            node("Constant", [], f"{name}.c", value=numpy_helper.from_array(np.float16([2.0]), "c")),
            node(op, ["h", f"{name}.c"], f"{name}.o"),
        ]
        out = helper.make_tensor_value_info(f"{name}.o", HALF, [None] * 4)
        bodies[name] = helper.make_graph(inner, name, [], [out])
    nodes = [
        node("Cast", ["x"], "h", to=HALF),
        node("Shape", ["x"], "shape"),
        node("ConstantOfShape", ["shape"], "ones", value=numpy_helper.from_array(np.float16([1.0]), "v")),
        node("ReduceMax", ["x"], "top", keepdims=0),
        node("Greater", ["top", "limit"], "large"),
        node("If", ["large"], "chosen", **bodies),
        node("Add", ["chosen", "ones"], "y16"),
        node("Cast", ["y16"], "y", to=FLOAT),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"limit": np.asarray(0.5, np.float32)}, types=(FLOAT, FLOAT))
    found = export(path)
    compare(path, found)
    onnx.checker.check_model(str(found.model_path), full_check=True)
    assert half_tensors(onnx.load(path).graph)
    assert not half_tensors(onnx.load(found.model_path).graph)


def test_type_attributes_are_widened(tmp_path: Path) -> None:
    nodes = [node("EyeLike", ["eye"], "unit", dtype=HALF), node("MatMul", ["x", "unit"], "y")]
    found = export(save(tmp_path / "m.onnx", nodes, {"eye": np.zeros((8, 8), np.float32)}))
    assert not half_tensors(onnx.load(found.model_path).graph)
    x = RNG.standard_normal((2, 16, 8, 8)).astype(np.float32)
    (got,) = run_model(found.model_path, [{"x": x}])
    assert np.array_equal(got["y"], x)
    assert "EyeLike" in found.warnings[1], "which onnxruntime does not have in float16"


def half_tensors(graph: onnx.GraphProto) -> list[str]:
    found = [tensor.name for tensor in graph.initializer if tensor.data_type in (HALF, BRAIN)]
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in (HALF, BRAIN):
            found.append(value.name)
    for item in graph.node:
        for attribute in item.attribute:
            if attribute.t.data_type in (HALF, BRAIN) or (attribute.name in ("to", "dtype") and attribute.i == HALF):
                found.append(item.name)
            if attribute.HasField("g"):
                found += half_tensors(attribute.g)
    return found


def test_functions_are_inlined_and_widened(tmp_path: Path) -> None:
    constant = node("Constant", [], "c", value=numpy_helper.from_array(np.float16([3.0]), "c"))
    function = helper.make_function(
        "mine", "Triple", ["a"], ["b"], [constant, node("Mul", ["a", "c"], "b")], [helper.make_opsetid("", 17)]
    )
    triple = helper.make_node("Triple", ["a"], ["y"], name="triple", domain="mine")
    nodes = [node("Conv", ["x", "w"], "a", pads=[1] * 4), triple]
    path = save(tmp_path / "m.onnx", nodes, {"w": W1}, functions=[function])
    found = export(path)
    assert not half_tensors(onnx.load(found.model_path).graph)
    compare(path, found)


def test_sequences_are_widened(tmp_path: Path) -> None:
    nodes = [
        node("SequenceConstruct", ["x", "x"], "both"),
        node("SequenceAt", ["both", "place"], "one"),
        node("Relu", ["one"], "y"),
    ]
    found = export(save(tmp_path / "m.onnx", nodes, {"place": np.asarray(1)}))
    onnx.checker.check_model(str(found.model_path), full_check=True)
    assert types_of(found) == [("x", "float32"), ("y", "float32")]


def test_bfloat16_is_widened_and_says_that_it_could_not_be_compared(tmp_path: Path) -> None:
    numbers = (W1.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensor = helper.make_tensor("w", BRAIN, W1.shape, numbers.tobytes(), raw=True)
    path = save(tmp_path / "m.onnx", [node("Conv", ["x", "w"], "y")], {"w": tensor}, types=(BRAIN, BRAIN), opset=22)
    found = export(path)
    assert types_of(found) == [("x", "float32"), ("y", "float32")]
    weights = numpy_helper.to_array(onnx.load(found.model_path).graph.initializer[0])
    assert np.array_equal(weights.reshape(-1).view(np.uint32) >> 16, numbers.reshape(-1))
    assert not (weights.view(np.uint32) & 0xFFFF).any(), "exactly"
    assert "computes in bfloat16" in found.warnings[0]
    assert found.warnings[1] == (
        "the conversion was not compared with the original: onnxruntime takes no bfloat16 from Python, which is input "
        "'x'"
    )


NETWORK = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(64), nn.MultiheadAttention(64, 4, batch_first=True)
        self.feed = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(approximate="tanh"), nn.Linear(128, 64))

    def forward(self, x):
        mask = torch.triu(torch.full((32, 32), float("-inf"), dtype=x.dtype), 1)
        y = self.norm(x)
        x = x + self.attend(y, y, y, attn_mask=mask, need_weights=False)[0]
        x = x + self.feed(x)
        return x * x.float().pow(2).mean(-1, keepdim=True).rsqrt().to(x.dtype)
"""


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_transformer_block_as_pytorch_exports_it_after_half(tmp_path: Path, dynamo: bool) -> None:
    """With a norm in float32 inside, as mixed code has it."""
    import torch

    names: dict[str, Any] = {}
    exec(NETWORK, names)
    torch.manual_seed(0)
    module, path = names["Net"]().eval(), tmp_path / "m.onnx"
    example, options = torch.randn(2, 32, 64), {"dynamo": dynamo, "opset_version": 18 if dynamo else 17}
    torch.onnx.export(module.half(), (example.half(),), str(path), verbose=False, **options)
    found = export(path)
    assert {kind for _, kind in types_of(found)} == {"float32"}
    assert len(found.warnings) == 1, "compared, and equal within float16"
    assert not half_tensors(onnx.load(found.model_path).graph)
    (got,) = run_model(found.model_path, [{found.inputs[0].name: example.half().float().numpy()}])
    with torch.no_grad():
        expected = module.float()(example.half().float()).numpy()
    assert difference({"y": expected}, {"y": got[found.outputs[0].name]}).error < 1e-5, "the float32 module, exactly"
    rules = {item.rule for item in make_plan(found.model_path, PlacementConfig()).decisions if item.op == "MatMul"}
    assert rules == {"matmul", "masked-attention"}


# --- left alone


def quantised(path: Path) -> Path:
    """A float16 convolution with Q/DQ, as ModelOpt writes it with its option for high precision."""
    zero, scale = np.zeros((), np.int8), np.float16(0.05)
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], "d"),
        node("Conv", ["d", "w"], "y", pads=[1] * 4),
    ]
    return save(path, nodes, {"s": np.asarray(scale), "z": zero, "w": W1}, opset=19)


def stored(path: Path) -> Path:
    """Weights in float16 to save space, computed with in float32."""
    nodes = [node("Cast", ["w"], "wide", to=FLOAT), node("Conv", ["x", "wide"], "y", pads=[1] * 4)]
    return save(path, nodes, {"w": W1}, types=(FLOAT, FLOAT))


def interface(path: Path) -> Path:
    """float16 at the inputs and outputs alone."""
    nodes = [
        node("Cast", ["x"], "wide", to=FLOAT),
        node("Conv", ["wide", "w"], "c", pads=[1] * 4),
        node("Cast", ["c"], "y", to=HALF),
    ]
    return save(path, nodes, {"w": W1.astype(np.float32)})


def double(path: Path) -> Path:
    return save(path, [node("Mul", ["x", "w"], "y")], {"w": np.ones(8)}, types=(DOUBLE, DOUBLE))


@pytest.mark.parametrize("make", [stored, interface, double])
def test_what_does_not_compute_in_float16_is_taken_byte_for_byte(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path / "m.onnx")
    found = export(path)
    assert found.model_path.read_bytes() == path.read_bytes()
    assert found.notes == found.warnings == ()


def test_a_float16_model_with_quantisers_keeps_its_types(tmp_path: Path) -> None:
    path = quantised(tmp_path / "m.onnx")
    found = run(str(path), opset=19, folder=tmp_path / "export")
    assert found.model_path.read_bytes() == path.read_bytes()
    assert types_of(found) == [("x", "float16"), ("y", "float16")]


# --- the check


def test_a_widening_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.export import widen

    right = widen._widened

    def wrong(tensor: Any) -> Any:
        import onnx_ir as ir

        return ir.tensor(right(tensor).numpy() * np.float32(1.05), name=tensor.name)

    monkeypatch.setattr(widen, "_widened", wrong)
    path = convolutions(tmp_path / "m.onnx")
    with pytest.raises(CheckFailed, match="widened from float16 to float32 computes something else: output 'y'") as got:
        export(path)
    assert got.value.figures["output"] == "y"
    assert 0.02 < got.value.figures["relative_error"] < 0.2
    assert "without .half()" in str(got.value.remedy)


def test_an_original_that_overflows_is_said(tmp_path: Path) -> None:
    large = np.full((16, 16, 3, 3), 6e4, np.float16)
    found = export(save(tmp_path / "m.onnx", [node("Conv", ["x", "w"], "y", pads=[1] * 4)], {"w": large}))
    assert found.warnings[1] == (
        "the conversion was not compared with the original: on random inputs the original's output 'y' is not finite, "
        "for float16 ends too early; that of the widened model is"
    )


def test_outputs_that_are_no_floats_do_not_decide(tmp_path: Path) -> None:
    nodes = [node("Conv", ["x", "w"], "c", pads=[1] * 4), node("ArgMax", ["c"], "y", axis=1)]
    output = helper.make_tensor_value_info("y", TensorProto.INT64, [None] * 4)
    found = export(save(tmp_path / "m.onnx", nodes, {"w": W1}, output=output))
    assert found.warnings[0].count("float32 instead of float16 at x;") == 1
    assert found.warnings[1:] == ("the conversion was not compared with the original: it has no float output",)


def test_an_original_that_onnxruntime_refuses_or_dies_on_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [helper.make_node("Odd", ["x"], ["a"], name="odd", domain="mine"), node("Mul", ["a", "w"], "y")]
    path = save(tmp_path / "m.onnx", nodes, {"w": np.ones(8, np.float16)})
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    onnx.save(model, path)
    assert "was not compared with the original: onnxruntime cannot load" in export(path).warnings[1]

    from pipeline.export import original

    ended = Ended(status=-11, timed_out=False, log="")
    monkeypatch.setattr(original, "run_child", lambda *arguments, **options: ended)
    path = convolutions(tmp_path / "crash.onnx")
    assert export(path).warnings[1].endswith("with the original: onnxruntime ended with signal SIGSEGV on it")


def test_shapes_that_the_original_does_not_take_are_passed_over(tmp_path: Path) -> None:
    """Only 7x7 fits, which no guess is."""
    nodes = [node("Reshape", ["x", "to"], "r"), node("Mul", ["r", "w"], "y")]
    output = helper.make_tensor_value_info("y", HALF, [1, 7, 7])
    weights = {"to": np.asarray([1, 7, 7]), "w": np.ones(7, np.float16)}
    path = save(tmp_path / "m.onnx", nodes, weights, output=output)
    model = onnx.load(path)
    for dim, name in zip(model.graph.input[0].type.tensor_type.shape.dim, "abcd", strict=True):
        dim.dim_param = name
    onnx.save(model, path)
    assert export(path).warnings[1].endswith("no input shape was found that the model takes")


# --- in a build


def command(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_a_build_quantises_it_and_gives_the_interface_back(tmp_path: Path) -> None:
    path = convolutions(tmp_path / "m.onnx")
    np.save(tmp_path / "data.npy", RNG.standard_normal((16, 16, 8, 8)).astype(np.float16))
    common = ["--data", str(tmp_path / "data.npy"), "--target", "onnx", "--precision", "fp16"]
    common += ["--profile", "x=1x16x8x8,2x16x8x8,4x16x8x8"]
    for options, kind in (([], FLOAT), (["--fp16-io", "both"], HALF)):
        out = tmp_path / f"built{kind}"
        printed = command("build", str(path), *common, *options, "--out", str(out))
        assert "--fp16-io both" in " ".join(printed.split())
        graph = onnx.load(out / "model.int8.onnx").graph
        kinds = [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
        assert kinds == [kind, kind]
        explained = json.loads(command("explain", str(out), "Conv", "--json"))
        assert [entry["quantized"] for entry in explained] == [True, True]


def test_explain_of_the_file_says_what_a_build_would_do(tmp_path: Path) -> None:
    explained = json.loads(command("explain", str(convolutions(tmp_path / "m.onnx")), "Conv", "--json"))
    assert [entry["quantized"] for entry in explained] == [True, True]
