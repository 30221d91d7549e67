"""Both dialects of the engine inspector, and what is read off the layer table."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Profile
from pipeline.core.errors import InputError
from pipeline.engine.inspect import EngineLayer, count_layers, parse_layers
from pipeline.engine.lint import lint_build, lint_layers, lint_shapes
from pipeline.engine.records import Message

INT8_32 = "Thirty-two wide channel vectorized row major Int8 format"


def old_tensor(name: str, words: str, *shape: int) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": list(shape), "Format/Datatype": words}


def new_tensor(name: str, layout: str, dtype: str, *shape: int) -> dict[str, Any]:
    return {"Name": name, "Dimensions": list(shape), "Format": layout, "Datatype": dtype}


def convolution(name: str, source: dict[str, Any], target: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "Name": name,
        "LayerType": "CaskConvolution",
        "Inputs": [source],
        "Outputs": [target],
        "ParameterType": "Convolution",
        "OutMaps": target["Dimensions"][1],
        "Groups": 1,
        "Weights": {"Type": "Int8", "Count": 864},
        "TacticName": "sm80_xmma_fprop",
        "TacticValue": "0x1",
        **fields,
    }


def text(*layers: Any, bindings: str = "Bindings") -> str:
    return json.dumps({"Layers": list(layers), bindings: []})


OLD = text(
    {
        "Name": "Reformatting CopyNode for Input Tensor 0 to conv1",
        "LayerType": "Reformat",
        "Inputs": [old_tensor("x", "Row major linear FP32", 1, 3, 8, 8)],
        "Outputs": [old_tensor("x r", "Four wide channel vectorized row major Int8 format", 1, 3, 8, 8)],
        "ParameterType": "Reformat",
        "TacticValue": "0x0",
    },
    convolution(
        "conv1 + relu1",
        old_tensor("x r", "Four wide channel vectorized row major Int8 format", 1, 3, 8, 8),
        old_tensor("a", INT8_32, 1, 64, 8, 8),
        Metadata="[ONNX Layer: conv1][ONNX Layer: relu1]",
    ),
    "a layer by its name alone",
)
NEW = text(
    convolution(
        "conv1",
        new_tensor("x", "Row major linear", "FP16", 1, 64, 8, 8),
        new_tensor("y", "Row major linear", "FP16", 1, 64, 8, 8),
        Weights={"Type": "Half", "Count": 1},
        TacticName="",
    ),
    {
        "Name": "m",
        "LayerType": "Myelin",
        "Inputs": [],
        "Outputs": [new_tensor("z", "", "BF16")],
        "TacticName": "myelin_x",
    },
    bindings="I/O Tensors",
)


def test_the_dialect_up_to_tensorrt_10() -> None:
    reformat, conv, named = parse_layers(OLD)
    assert reformat.reformat
    assert (reformat.inputs[0].dtype, reformat.outputs[0].dtype) == ("float32", "int8")
    assert conv.convolution
    assert conv.computes_int8
    assert conv.fused == ("conv1", "relu1")
    assert conv.channels == (3, 64)
    assert conv.weights_dtype == "int8"
    assert conv.tactic == "sm80_xmma_fprop"
    assert conv.outputs[0].format == INT8_32
    assert (named.name, named.kind, named.convolution) == ("a layer by its name alone", "", False)


def test_the_dialect_from_tensorrt_11_on() -> None:
    conv, myelin = parse_layers(NEW)
    assert conv.computes_float
    assert (conv.inputs[0].dtype, conv.inputs[0].format) == ("float16", "Row major linear")
    assert conv.tactic == "0x1"
    assert conv.weights_dtype == "float16"
    assert myelin.tactic == "myelin_x"
    assert myelin.outputs[0].dtype == "bfloat16"
    assert not myelin.computes_float


def test_names_say_what_was_fused_where_metadata_does_not() -> None:
    layer = EngineLayer(name="conv1 + add + relu", kind="CaskConvolution", operation="Convolution")
    assert layer.fused == ("conv1", "add", "relu")


def real(variant: str) -> str:
    """What TensorRT 8.6.0 said on an H200 of an engine of EfficientNet-Lite0 with profiles 1 and 2 to 128."""
    return gzip.decompress((Path(__file__).parent / "data" / f"layers-8.6-{variant}.json.gz").read_bytes()).decode()


@pytest.mark.parametrize(
    ("variant", "layers", "int8", "floats", "reformats", "pointwise"),
    [
        ("int8", (54, 53), (50, 50), (0, 0), (1, 1), (0, 0)),
        ("fp16", (55, 54), (0, 0), (50, 50), (2, 2), (0, 0)),
        ("implicit", (54, 53), (31, 50), (19, 0), (2, 1), (0, 0)),
        ("onnxruntime", (64, 64), (50, 50), (0, 0), (3, 3), (9, 9)),
    ],
)
def test_the_layers_of_real_engines_are_counted_by_profile(
    variant: str,
    layers: tuple[int, ...],
    int8: tuple[int, ...],
    floats: tuple[int, ...],
    reformats: tuple[int, ...],
    pointwise: tuple[int, ...],
) -> None:
    counts = count_layers(real(variant))
    parts = counts.per_profile
    assert tuple(part.layers for part in parts) == layers
    assert tuple(part.convolutions_int8 for part in parts) == int8
    assert tuple(part.convolutions_float for part in parts) == floats
    assert tuple(part.reformats for part in parts) == reformats
    assert tuple(part.pointwise for part in parts) == pointwise
    assert all(part.per_profile == () for part in parts)
    assert (counts.layers, counts.convolutions_int8, counts.reformats) == (sum(layers), sum(int8), sum(reformats))


def test_8_6_leaves_line_breaks_inside_its_strings_and_formats_unknown() -> None:
    content = real("int8")
    with pytest.raises(ValueError, match="Invalid control character"):
        json.loads(content)
    quantise, stem, *_ = parse_layers(content)
    assert quantise.reformat
    assert {tensor.dtype for tensor in quantise.inputs + quantise.outputs} == {"unknown"}
    assert quantise.computes_in == "unknown"
    assert (stem.computes_in, stem.channels, stem.groups) == ("int8", (3, 32), 1)
    assert stem.fused == ("/_conv_stem/Conv", "/_swish/Clip")


def test_a_convolution_that_takes_the_pooling_with_it_is_one() -> None:
    """As 8.6.0 told of ResNet-50's stem."""
    stem = {
        "Name": "stem.0.weight + stem.0.weight_QuantizeLinear + /stem/0/Conv + /stem/2/Relu + /pool/MaxPool",
        "LayerType": "CaskConvActPool",
        "Inputs": [old_tensor("x_q", "N/A due to dynamic shapes", 1, 3, 224, 224)],
        "Outputs": [old_tensor("p_q", "N/A due to dynamic shapes", 1, 64, 56, 56)],
        "ParameterType": "ConvActPool",
        "ConvOutMaps": 64,
        "ConvGroups": 1,
        "ConvWeights": {"Type": "Int8", "Count": 9408},
        "TacticValue": "0x7b00f0752fdcc88c",
    }
    (layer,) = parse_layers(text(stem))
    assert (layer.convolution, layer.computes_in, layer.channels) == (True, "int8", (3, 64))
    assert count_layers(text(stem)).convolutions_int8 == 1


def test_layers_that_do_nothing_are_no_reformats() -> None:
    idle = [layer for layer in parse_layers(real("int8")) if layer.no_op]
    assert any(layer.name.startswith("Reformatting CopyNode") for layer in idle)
    assert not any(layer.reformat for layer in idle)


def test_findings_of_a_real_engine() -> None:
    found = {kind for kind, _ in ((finding.kind, finding.where) for finding in lint_layers(parse_layers(real("int8"))))}
    assert found == {"channels"}
    (first, *_) = lint_layers(parse_layers(real("implicit")))
    assert (first.kind, "computes in float16" in first.message) == ("float convolution", True)


def test_the_quantisation_of_the_engines_input_is_found_as_such() -> None:
    x, q = old_tensor("x", "Row major linear FP32", 1, 64, 8, 8), old_tensor("q", INT8_32, 1, 64, 8, 8)
    quantise = {"Name": "x_QuantizeLinear", "LayerType": "Reformat", "Inputs": [x], "Outputs": [q]}
    (finding,) = lint_layers(chain(quantise, convolution("one", q, old_tensor("b", INT8_32, 1, 64, 8, 8))))
    assert "engine's input is quantised in a pass of its own (float32 to int8) at 'one'" in finding.message
    assert "--fp16-io inputs" in finding.remedy


def test_the_counts_of_a_build_record() -> None:
    counts = count_layers(OLD)
    assert (counts.layers, counts.convolutions_int8, counts.convolutions_float, counts.reformats) == (3, 1, 0, 1)
    assert count_layers(NEW).convolutions_float == 1


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "no json"])
def test_other_text_is_refused(content: str) -> None:
    with pytest.raises(InputError, match="not the engine inspector's JSON"):
        parse_layers(content)


def chain(*layers: dict[str, Any]) -> tuple[EngineLayer, ...]:
    return parse_layers(text(*layers))


def kinds(*layers: dict[str, Any], times: dict[str, float] | None = None) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in lint_layers(chain(*layers), times)]


def test_a_clean_chain_has_no_findings() -> None:
    a, b, c = (old_tensor(name, INT8_32, 1, 64, 8, 8) for name in "abc")
    assert kinds(convolution("one", a, b), convolution("two", b, c)) == []


def test_a_reformat_between_int8_layers_is_found_with_its_time() -> None:
    a, b, d = (old_tensor(name, INT8_32, 1, 64, 8, 8) for name in "abd")
    c = old_tensor("c", "Row major linear Int8 format", 1, 64, 8, 8)
    move = {"Name": "move", "LayerType": "Reformat", "Inputs": [b], "Outputs": [c]}
    layers = chain(convolution("one", a, b), move, convolution("two", c, d))
    (finding,) = lint_layers(layers, {"move": 0.02})
    assert (finding.kind, finding.where, finding.ms) == ("reformat", "move", 0.02)
    assert "'one' and 'two'" in finding.message
    assert "multiple of 32" in finding.remedy


def test_a_pass_that_only_quantises_is_found() -> None:
    a = old_tensor("a", INT8_32, 1, 64, 8, 8)
    b = old_tensor("b", "Row major linear FP16 format", 1, 64, 8, 8)
    c, d = (old_tensor(name, INT8_32, 1, 64, 8, 8) for name in "cd")
    move = {"Name": "move", "LayerType": "Reformat", "Inputs": [b], "Outputs": [c]}
    found = kinds(convolution("one", a, b), move, convolution("two", c, d))
    assert ("reformat", "move") in found
    assert ("float convolution", "one") in found


def test_a_reformat_of_float_data_far_from_convolutions_is_none_of_our_business() -> None:
    b, c = old_tensor("b", "Row major linear FP32", 1, 10), old_tensor("c", "Row major linear FP16 format", 1, 10)
    assert kinds({"Name": "move", "LayerType": "Reformat", "Inputs": [b], "Outputs": [c]}) == []


def test_a_convolution_left_in_float_is_found_only_in_a_quantised_engine() -> None:
    a, b = (old_tensor(name, INT8_32, 1, 64, 8, 8) for name in "ab")
    c, d = (old_tensor(name, "Row major linear FP16 format", 1, 64, 8, 8) for name in "cd")
    left = convolution("left", c, d)
    assert kinds(convolution("one", a, b), left) == [("float convolution", "left")]
    assert kinds(left) == []


@pytest.mark.parametrize(
    ("channels", "groups", "found"), [((48, 64), 1, False), ((24, 64), 1, True), ((24, 24), 24, False)]
)
def test_channels_that_tensor_cores_pad(channels: tuple[int, int], groups: int, found: bool) -> None:
    a, b = old_tensor("a", INT8_32, 1, channels[0], 8, 8), old_tensor("b", INT8_32, 1, channels[1], 8, 8)
    assert (kinds(convolution("one", a, b, Groups=groups)) == [("channels", "one")]) == found


def test_the_costliest_finding_comes_first() -> None:
    a, b = old_tensor("a", INT8_32, 1, 24, 8, 8), old_tensor("b", INT8_32, 1, 24, 8, 8)
    c = old_tensor("c", INT8_32, 1, 24, 8, 8)
    layers = (convolution("cheap", a, b), convolution("dear", b, c))
    assert [where for _, where in kinds(*layers, times={"cheap": 0.1, "dear": 0.5})] == ["dear", "cheap"]


def test_a_profile_tuned_for_something_else() -> None:
    profile = Profile.parse("x=1x3x8x8,64x3x8x8,128x3x8x8")
    assert lint_shapes([profile], {"x": (32, 3, 8, 8)}) == ()
    (finding,) = lint_shapes([profile], {"x": (1, 3, 8, 8)})
    assert finding.kind == "profile"
    assert "tuned for (64, 3, 8, 8)" in finding.message
    assert "1x3x8x8" in finding.remedy


def test_a_workspace_that_was_too_small() -> None:
    words = "Tactic Device request: 9MB Available: 1MB. Device memory is insufficient to use tactic."
    (finding,) = lint_build([Message(severity="warning", source="logger", text=words)])
    assert (finding.kind, finding.where) == ("workspace", "build")
    assert words in finding.message
    assert lint_build([Message(severity="info", source="logger", text="fine")]) == ()
