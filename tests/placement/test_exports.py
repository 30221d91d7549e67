"""Models that come with Q/DQ, as quantisation tools really export them: taken losslessly, or refused with the reason.

The files in ``data/exports`` were written by ``scripts/experiments/qdq_exports.py --strip`` with ModelOpt 0.47.0,
Brevitas 0.13.4, onnxruntime 1.32.0, torchao 0.18.0 and torch 2.13.0, so that the tests need none of these tools. Those
named ``reproduction`` stand for pytorch-quantization, which PyPI has as a stub only: the same calls of torch's
fake_quantize functions, exported by torch. ``convnet`` has Conv-BN-ReLU, a depthwise convolution, a residual Add and a
Gemm (4 layers); ``block`` is a transformer block (6 MatMuls with weights, 2 without).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import calibrators
from pipeline import export, prepare, quantize
from pipeline.cli import main
from pipeline.config import PlacementConfig, Profile
from pipeline.core.errors import InputError
from pipeline.core.ort import make_session
from pipeline.errors.graphs import float_graph
from pipeline.placement import PlacementPlan, make_plan
from tests.placement.conftest import int8_nodes

EXPORTS = Path(__file__).parent / "data" / "exports"
SHAPES = {"convnet": (3, 16, 16), "block": (8, 16)}
WEIGHTED = ("Conv", "Gemm", "MatMul")

SKIP = "1 Adds take their skip input in float"
BETWEEN = "pairs stand between a layer and the activation or Add that TensorRT would fuse into it"
BIAS = "int32 constants behind a DequantizeLinear (biases) became float constants"
TURNED = "quantised weights behind a Transpose were stored transposed"
CLIP = "a Clip between Q and DQ became a float Clip in front of Q (the same steps)"
MERGED = "a second QuantizeLinear of the same tensor with the same scale was merged into the first"

TAKEN = {
    "convnet-modelopt-torch-qat": (4, [SKIP]),
    "convnet-modelopt-onnx-fp32": (3, ["1 layers with weights have no Q/DQ pair and run in float: /head/Gemm"]),
    "convnet-modelopt-onnx-fp16": (3, ["1 layers with weights have no Q/DQ pair and run in float: /head/Gemm"]),
    "convnet-modelopt-onnx-dq-only": (3, ["1 layers with weights have no Q/DQ pair and run in float: /head/Gemm"]),
    "convnet-reproduction-int8-qat": (4, [SKIP]),
    "convnet-brevitas-per-channel": (4, [SKIP]),
    "convnet-brevitas-per-channel-dynamo": (4, [CLIP, SKIP]),
    "convnet-brevitas-per-tensor": (4, [SKIP]),
    "convnet-brevitas-weight-q": (4, [CLIP, SKIP]),
    "convnet-brevitas-int32-bias": (4, [BIAS, SKIP]),
    "convnet-brevitas-4-bit": (4, [CLIP, SKIP]),
    "convnet-onnxruntime-qdq-int8-symmetric": (4, [BIAS, BETWEEN]),
    "convnet-onnxruntime-qdq-int8-per-tensor": (4, [BIAS, BETWEEN]),
    "convnet-onnxruntime-qdq-uint8-both-symmetric": (
        4,
        [BIAS, BETWEEN, "uint8 with zero point 128 became int8", "constants with a zero point became int8"],
    ),
    "convnet-onnxruntime-qdq-contrib": (4, [BIAS, BETWEEN, "of com.microsoft became ONNX's own"]),
    "convnet-torchao-pt2e-symmetric": (4, []),
    "block-modelopt-torch-qat": (6, [TURNED, MERGED]),
    "block-modelopt-torch-smoothquant": (6, [TURNED]),
    "block-reproduction-int8-qat": (6, [TURNED]),
    "block-brevitas-4-bit": (6, [TURNED, MERGED, CLIP]),
    "block-brevitas-weight-q": (6, [TURNED, MERGED, CLIP]),
    "block-onnxruntime-qdq-int8-symmetric": (8, [BIAS, BETWEEN, "constants of no product behind a DequantizeLinear"]),
    "block-torchao-pt2e-symmetric": (6, [TURNED]),
}
"""Export -> layers on INT8, and how each thing that the build says of it begins or what is in it."""

SYMMETRIC = "quantise it again, symmetrically to int8 with zero point 0"
REFUSED = {
    "convnet-reproduction-uint8": (
        "QuantizeLinear '/depthwise/input/QuantizeLinear' of '/relu/Relu_output_0' has uint8 zero point 0; only 128",
        "pytorch-quantization: unsigned=False",
    ),
    "convnet-brevitas-relu-uint8": ("activation_impl/Relu_output_0' has uint8 zero point 0; only 128", SYMMETRIC),
    "convnet-brevitas-shifted-uint8": ("of 'x' has uint8 zero point 121; only 128 has an int8 equal", SYMMETRIC),
    "convnet-brevitas-shifted-weights": ("do not fit int8 without their zero point (-142..145)", SYMMETRIC),
    "convnet-onnxruntime-qdq-uint8": ("QuantizeLinear 'x_QuantizeLinear' of 'x' has uint8 zero point 121", SYMMETRIC),
    "convnet-onnxruntime-qdq-int8-default": ("hold 8 things", "'x_QuantizeLinear' of 'x' has int8 zero point -7"),
    "convnet-onnxruntime-qdq-int16": ("'x_QuantizeLinear' of 'x' quantises to int16", SYMMETRIC),
    "convnet-onnxruntime-qoperator": (
        "the model is in the QOperator format, which TensorRT does not import: QLinearConv '/stem/Conv_quant'",
        "export it with QuantizeLinear and DequantizeLinear (onnxruntime: quantize_static with QuantFormat.QDQ",
    ),
    "convnet-onnxruntime-dynamic": (
        "the model is quantised dynamically: DynamicQuantizeLinear 'x_QuantizeLinear', ConvInteger '/stem/Conv_quant'",
        "quantise it statically",
    ),
    "block-onnxruntime-dynamic": ("MatMulInteger '/key/MatMul_quant'", "quantise it statically"),
    "convnet-torchao-pt2e": ("'node_quantize_per_tensor_1' of 'relu' has uint8 zero point 0", "torchao: int8"),
}
"""Export -> words of the refusal: tensor and value, and the remedy."""
UNKNOWN = {"convnet-brevitas-qonnx": "/stem/input_quant/export_handler/Quant (qonnx.custom_op.general:Quant)"}
"""Export in a format of its own -> how its operators are named by the refusal."""


def prepared(name: str, folder: Path) -> Path:
    found = export.run(str(EXPORTS / f"{name}.onnx"), inputs=(), profiles=(), opset=17, folder=folder / "export")
    return prepare.run(found.model_path, folder=folder / "prepare").model_path


def taken(name: str, folder: Path) -> tuple[Path, PlacementPlan, quantize.QuantizeResult]:
    model = prepared(name, folder)
    config = PlacementConfig()
    plan = make_plan(model, config)
    result = quantize.run(model, plan, {}, calibrators.get("minmax"), folder=folder / "quantize", config=config)
    return model, plan, result


def outputs(model: Path | onnx.ModelProto, name: str) -> np.ndarray:
    x = np.random.default_rng(11).standard_normal((4, *SHAPES[name.partition("-")[0]])).astype(np.float32)
    session = make_session(model, optimise=False)
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


def quantizers(path: Path) -> int:
    return sum(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)


def test_every_export_is_in_a_table() -> None:
    assert {path.stem for path in EXPORTS.glob("*.onnx")} == TAKEN.keys() | REFUSED.keys() | UNKNOWN.keys()


@pytest.mark.parametrize("name", TAKEN)
def test_taken_without_loss(name: str, tmp_path: Path) -> None:
    layers, words = TAKEN[name]
    _, plan, result = taken(name, tmp_path)
    assert plan.prequantized
    assert quantizers(result.model_path) <= quantizers(EXPORTS / f"{name}.onnx")
    assert np.array_equal(outputs(EXPORTS / f"{name}.onnx", name), outputs(result.model_path, name))
    assert sum(item.quantized for item in plan.decisions if item.op in WEIGHTED) == layers
    said = [text for text in result.warnings if any(word in text for word in words)]
    assert len(said) == len(words)
    assert list(result.warnings) == said, "and nothing else is said"
    assert set(plan.notes) == set(said)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_tensor_value_and_remedy(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        make_plan(prepared(name, tmp_path), PlacementConfig())
    for words in REFUSED[name]:
        assert words in str(caught.value)


@pytest.mark.parametrize("name", UNKNOWN)
def test_operators_of_another_format_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="express them with standard ONNX operators") as caught:
        prepared(name, tmp_path)
    assert UNKNOWN[name] in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "convnet-modelopt-torch-qat", "convnet-modelopt-onnx-fp16", "convnet-brevitas-4-bit",
        "convnet-brevitas-int32-bias", "convnet-onnxruntime-qdq-uint8-both-symmetric", "block-brevitas-weight-q",
        "block-onnxruntime-qdq-int8-symmetric", "block-torchao-pt2e-symmetric",
    ],
)  # fmt: skip
def test_every_layer_that_is_said_to_be_int8_is_so_in_an_engine(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    from pipeline.engine.builder import build_engine

    _, plan, result = taken(name, tmp_path)
    shape = "x".join(map(str, SHAPES[name.partition("-")[0]]))
    profile = Profile.parse(f"x=1x{shape},4x{shape},8x{shape}")
    build_engine(result.model_path, target="rtx", profiles=[profile], plan_path=tmp_path / "model.plan")
    intended = {item.node for item in plan.decisions if item.op in WEIGHTED and item.quantized}
    layers = {item.node for item in plan.decisions if item.op in WEIGHTED}
    assert intended == int8_nodes(tmp_path) & layers


@pytest.mark.parametrize("name", ["convnet-modelopt-torch-qat", "convnet-brevitas-4-bit"])
def test_verification_compares_with_the_float_network(name: str, tmp_path: Path) -> None:
    """Not with the export: nor with half of its pairs left in, where a Clip parts them."""
    graph = float_graph(prepared(name, tmp_path))
    left = [node.op_type for node in graph.nodes]
    assert not {"QuantizeLinear", "DequantizeLinear", "Clip"} & set(left)
    assert np.isfinite(outputs(graph.proto, name)).all()


def test_explain_shows_layers_and_scales() -> None:
    path = str(EXPORTS / "block-modelopt-torch-qat.onnx")
    result = CliRunner().invoke(main, ["explain", path], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "/query/MatMul  MatMul, INT8, rule existing\n    input 0 (scale 0." in result.output
    assert "/MatMul  MatMul, float, rule existing\n    no input is quantised in the model" in result.output
    assert "TensorRT has no INT8 form of LayerNormalization" in result.output
    assert "one operand only" not in result.output


@pytest.mark.parametrize("name", ["convnet-onnxruntime-qdq-uint8", "convnet-onnxruntime-qoperator"])
def test_refusal_of_the_command(name: str, tmp_path: Path) -> None:
    data = tmp_path / "x.npy"
    np.save(data, np.zeros((8, *SHAPES["convnet"]), np.float32))
    shape = "x".join(map(str, SHAPES["convnet"]))
    arguments = ["--data", str(data), "--out", str(tmp_path / "out"), "--target", "onnx"]
    profile = f"x=1x{shape},4x{shape},8x{shape}"
    path = str(EXPORTS / f"{name}.onnx")
    result = CliRunner().invoke(main, ["build", path, *arguments, "--profile", profile, "--verify-samples", "2"])
    assert result.exit_code == 2
    assert REFUSED[name][0] in result.output.replace("\n", " ")
