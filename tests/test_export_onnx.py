"""Export of files that are ONNX already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline import onnxfile
from pipeline.config import InputSpec, Profile
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.files import sha256_file
from pipeline.equivalence import difference, run_model
from pipeline.export import ExportResult, run
from pipeline.onnxfile import load_model
from pipeline.onnxgraph import tensor_specs
from pipeline.records import Dependency
from pipeline.runner import StageRunner

RNG = np.random.default_rng(0)
DETECTOR = "ch_PP-OCRv4_det_infer.onnx"
RECOGNISER = "ch_PP-OCRv4_rec_infer.onnx"


def rapidocr(name: str) -> Path:
    package = pytest.importorskip("rapidocr_onnxruntime", reason="rapidocr-onnxruntime is not installed")
    return Path(package.__file__).parent / "models" / name


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    *,
    weights: dict[str, np.ndarray] | None = None,
    inputs: dict[str, list[int | str]] | None = None,
    rank: int = 4,
    opset: int = 17,
    ir_version: int = 8,
    functions: list[onnx.FunctionProto] | None = None,
    domains: dict[str, int] | None = None,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (inputs or {"x": ["N", 3, 8, 8]}).items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=functions or [])
    onnx.save(model, path)
    return path


def conv(path: Path, **options) -> Path:
    weight = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)
    return write(path, [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")], weights={"w": weight}, **options)


def same(first: Path, second: Path, feeds: dict[str, np.ndarray], tolerance: float = 1e-6) -> None:
    (expected,), (found,) = run_model(first, [feeds]), run_model(second, [feeds])
    assert difference(expected, found).error <= tolerance


def test_a_portable_model_is_taken_byte_for_byte(tmp_path) -> None:
    path = conv(tmp_path / "m.onnx")
    found = run(str(path), folder=tmp_path / "out")
    assert found.model_path.read_bytes() == path.read_bytes()
    assert (found.kind, found.spec, found.opset, found.check, found.exporter) == ("onnx", "m.onnx", 17, None, None)
    assert found.source_sha256 == sha256_file(path)
    assert [(spec.name, spec.dtype, spec.shape) for spec in found.inputs] == [("x", "float32", ("N", 3, 8, 8))]
    assert found.notes == found.warnings == ()
    found.model_path.write_bytes(b"damaged")
    assert sha256_file(path) == found.source_sha256  # the user's file is no link to the pipeline's


@pytest.mark.parametrize("opset", [13, 15, 17])
def test_opset_13_to_17_stays(tmp_path, opset: int) -> None:
    assert run(str(conv(tmp_path / "m.onnx", opset=opset)), folder=tmp_path / "out").opset == opset


def test_ir_version_is_lowered(tmp_path) -> None:
    path = conv(tmp_path / "m.onnx", ir_version=10)
    found = run(str(path), folder=tmp_path / "out")
    assert load_model(found.model_path).ir_version == 9
    assert found.notes == ("m.onnx: IR version lowered from 10 to 9",)
    same(path, found.model_path, {"x": RNG.standard_normal((2, 3, 8, 8), dtype=np.float32)})


@pytest.mark.parametrize(("opset", "ir_version"), [(9, 3), (17, 8)])
def test_weights_that_are_inputs_too_become_constants(tmp_path, opset: int, ir_version: int) -> None:
    path = conv(
        tmp_path / "m.onnx", opset=opset, ir_version=ir_version, inputs={"x": ["N", 3, 8, 8], "w": [4, 3, 3, 3]}
    )
    found = run(str(path), folder=tmp_path / "out")
    assert [spec.name for spec in found.inputs] == ["x"]
    assert found.notes[0] == "m.onnx: 1 weights are listed among the inputs as well; they are constants from here on"
    same(path, found.model_path, {"x": RNG.standard_normal((2, 3, 8, 8), dtype=np.float32)})


def test_nodes_of_one_name_are_numbered(tmp_path) -> None:
    nodes = [helper.make_node("Relu", [a], [b], name="same") for a, b in (("x", "a"), ("a", "b"), ("b", "y"))]
    found = run(str(write(tmp_path / "m.onnx", nodes)), folder=tmp_path / "out")
    assert found.notes == ("m.onnx: 2 nodes have the name of another one and are numbered",)
    assert [node.name for node in load_model(found.model_path).graph] == ["same", "same_0", "same_1"]
    run_model(found.model_path, [{"x": np.ones((1, 3, 8, 8), np.float32)}])  # onnxruntime refuses equal names


def test_external_data_is_carried_along(tmp_path, monkeypatch) -> None:
    model = onnx.load(conv(tmp_path / "plain.onnx", opset=12))
    (tmp_path / "in").mkdir()
    onnx.save(model, tmp_path / "in" / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    path = tmp_path / "in" / "m.onnx"
    feeds = {"x": RNG.standard_normal((2, 3, 8, 8), dtype=np.float32)}
    found = run(str(path), folder=tmp_path / "inside")
    assert {file.name for file in found.folder.iterdir()} == {"model.onnx"}
    same(path, found.model_path, feeds)
    monkeypatch.setattr(onnxfile, "EXTERNAL_ABOVE_BYTES", 100)
    monkeypatch.setattr(onnxfile, "_EXTERNAL_TENSOR_BYTES", 0)
    found = run(str(path), folder=tmp_path / "outside")
    assert {file.name for file in found.folder.iterdir()} == {"model.onnx", "model.onnx.data"}
    same(path, found.model_path, feeds)
    digest = found.source_sha256
    (depended,) = found.dependencies
    assert depended == Dependency(path=str(tmp_path / "in" / "w.bin"), sha256=sha256_file(tmp_path / "in" / "w.bin"))
    (tmp_path / "in" / "w.bin").write_bytes(bytes(4 * 3 * 9 * 4))
    assert run(str(path), folder=tmp_path / "again").source_sha256 != digest


def test_other_weights_beside_the_same_file_are_noticed(tmp_path) -> None:
    """The .onnx file stays as it is, and the next build takes nothing of the last one's export."""
    model = onnx.load(conv(tmp_path / "plain.onnx"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    runner = StageRunner(tmp_path / "work")

    def build() -> tuple[bool, bytes]:
        found = runner.run(
            "export", ExportResult, {"file": sha256_file(path)}, lambda folder: run(str(path), folder=folder)
        )
        return found.cached, found.result.model_path.read_bytes()

    (cached, first), (again, same_) = build(), build()
    assert (cached, again) == (False, True)
    assert first == same_
    (tmp_path / "w.bin").write_bytes(bytes(4 * 3 * 9 * 4))
    cached, other = build()
    assert not cached
    assert other != first


@pytest.mark.parametrize("link", ["soft", "hard"])
def test_external_data_behind_links(tmp_path, link: str) -> None:
    """As in the caches of download tools and package managers."""
    model = onnx.load(conv(tmp_path / "plain.onnx"))
    (tmp_path / "blobs").mkdir()
    onnx.save(model, tmp_path / "blobs" / "m", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "snapshot").mkdir()
    for name, target in (("m.onnx", "m"), ("w.bin", "w.bin")):
        here = tmp_path / "snapshot" / name
        if link == "soft":
            here.symlink_to(Path("..") / "blobs" / target)
        else:
            here.hardlink_to(tmp_path / "blobs" / target)
    found = run(str(tmp_path / "snapshot" / "m.onnx"), folder=tmp_path / "out")
    feeds = {"x": RNG.standard_normal((2, 3, 8, 8), dtype=np.float32)}
    same(tmp_path / "plain.onnx", found.model_path, feeds)
    onnx.checker.check_model(str(found.model_path))


def test_broken_external_data(tmp_path) -> None:
    model = onnx.load(conv(tmp_path / "plain.onnx"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    data = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").write_bytes(data[:-4])
    with pytest.raises(InputError, match=r"w\.bin has 428 bytes, the weights 'w' end at byte 432"):
        run(str(path), folder=tmp_path / "out")
    (tmp_path / "w.bin").unlink()
    with pytest.raises(InputError, match=r"the file 'w\.bin' with the weights 'w' is missing"):
        run(str(path), folder=tmp_path / "out")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "../w.bin"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=r"the weights 'w' lie outside its folder, in '\.\./w\.bin'"):
        run(str(path), folder=tmp_path / "out")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offset", "abc", "the offset of the weights 'w' in their file is 'abc', expected a number of bytes"),
        ("offset", "-4", "the offset of the weights 'w' in their file is '-4'"),
        ("length", "x", "the length of the weights 'w' in their file is 'x'"),
        ("length", "-432", "the length of the weights 'w' in their file is '-432'"),
        ("length", "10", r"the weights 'w' of shape \(4, 3, 3, 3\) need 432 bytes, their length in the file is 10"),
        ("offset", "1", r"w\.bin has 432 bytes, the weights 'w' end at byte 433"),
        ("length", None, r"w\.bin has 428 bytes, the weights 'w' end at byte 432"),
    ],
)
def test_places_that_external_data_cannot_have(tmp_path, field: str, value: str | None, message: str) -> None:
    path = tmp_path / "m.onnx"
    model = onnx.load(conv(tmp_path / "plain.onnx"))
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    proto = onnx.load(path, load_external_data=False)
    place = {entry.key: entry.value for entry in proto.graph.initializer[0].external_data} | {field: value}
    del proto.graph.initializer[0].external_data[:]
    for key, text in place.items():
        if text is None:
            (tmp_path / "w.bin").write_bytes((tmp_path / "w.bin").read_bytes()[:-4])
        else:
            proto.graph.initializer[0].external_data.add(key=key, value=text)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=message) as error:
        run(str(path), folder=tmp_path / "out")
    assert str(path) in error.value.message
    assert error.value.remedy


@pytest.mark.parametrize(("name", "kind"), [("nnnnnnnnn", "node"), ("ttttttttt", "tensor")])
def test_names_that_are_not_utf8(tmp_path, name: str, kind: str) -> None:
    nodes = [("x", "ttttttttt", "first"), ("ttttttttt", "y", "nnnnnnnnn")]
    path = write(tmp_path / "m.onnx", [helper.make_node("Relu", [x], [y], name=node) for x, y, node in nodes])
    path.write_bytes(path.read_bytes().replace(name.encode(), b"\xff\xfe" + b"a" * 7))
    with pytest.raises(InputError, match=rf"the name of a {kind} is not UTF-8: b'\\xff\\xfea"):
        run(str(path), folder=tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 1, 30, 200, 400])
def test_truncated_files(tmp_path, keep: int) -> None:
    path = conv(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"m\.onnx is not a (readable|valid) ONNX model"):
        run(str(path), folder=tmp_path / "out")


def test_files_that_are_no_model(tmp_path) -> None:
    with pytest.raises(InputError, match=r"model .*none\.onnx does not exist"):
        run(str(tmp_path / "none.onnx"), folder=tmp_path)
    (tmp_path / "m.onnx").write_text("this is text, not protobuf")
    with pytest.raises(InputError, match=r"m\.onnx is not a readable ONNX model"):
        run(str(tmp_path / "m.onnx"), folder=tmp_path)
    (tmp_path / "d.onnx").mkdir()
    with pytest.raises(InputError, match=r"d\.onnx is not a readable ONNX model"):
        run(str(tmp_path / "d.onnx"), folder=tmp_path)
    with pytest.raises(InputError, match=r"'nothing' is neither a \.onnx file nor file\.py:callable"):
        run("nothing", folder=tmp_path)
    with pytest.raises(InputError, match="neither") as caught:
        run("model.py", folder=tmp_path)
    assert caught.value.remedy == "name the callable in it: model.py:NAME"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="neither") as caught:
        run(str(tmp_path / "net"), folder=tmp_path)
    assert caught.value.remedy == f"of an artifact, give the float model: {tmp_path / 'net' / 'model.fp32.onnx'}"


def test_invalid_graph_names_the_checkers_words(tmp_path) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node("Relu", ["nowhere"], ["y"], name="r")])
    with pytest.raises(InputError, match=r"m\.onnx is not a valid ONNX model: .*nowhere"):
        run(str(path), folder=tmp_path / "out")


def test_input_option_is_for_pytorch_only(tmp_path) -> None:
    with pytest.raises(InputError, match=r"--input x is given with the \.onnx file"):
        run(str(conv(tmp_path / "m.onnx")), inputs=(InputSpec.model_validate("x:1x3x8x8"),), folder=tmp_path / "out")


def test_old_opset_is_converted_and_names_stay(tmp_path) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x"], ["u"], axes=[1], name="first"),
        helper.make_node("Squeeze", ["u"], ["s"], axes=[1], name="second"),
        helper.make_node("Softmax", ["s"], ["y"], axis=1, name="last"),
    ]
    path = write(tmp_path / "m.onnx", nodes, inputs={"x": ["N", 5]}, rank=2, opset=11, ir_version=7)
    found = run(str(path), folder=tmp_path / "out")
    assert (found.opset, found.notes) == (17, ("m.onnx: converted from opset 11 to 17",))
    graph = onnx.load(found.model_path).graph
    assert [node.op_type for node in graph.node] == ["Unsqueeze", "Squeeze", "Softmax"]
    assert [list(node.output) for node in graph.node] == [["u"], ["s"], ["y"]]
    same(path, found.model_path, {"x": RNG.standard_normal((4, 5), dtype=np.float32)})


def test_softmax_over_several_axes_keeps_its_meaning(tmp_path) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node("Softmax", ["x"], ["y"], axis=1)], opset=12)
    found = run(str(path), folder=tmp_path / "out")
    same(path, found.model_path, {"x": RNG.standard_normal((2, 3, 8, 8), dtype=np.float32)})


def test_large_weights_bypass_the_converter(tmp_path) -> None:
    weights = {"w": RNG.standard_normal((300, 100)).astype(np.float32), "b": np.ones(100, np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    path = write(tmp_path / "m.onnx", nodes, weights=weights, inputs={"x": ["N", 300]}, rank=2, opset=12)
    found = run(str(path), folder=tmp_path / "out")
    model = load_model(found.model_path)
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert set(model.graph.initializers) == {"w", "b"}
    same(path, found.model_path, {"x": RNG.standard_normal((2, 300), dtype=np.float32)})


def test_operator_that_cannot_be_upgraded(tmp_path) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node("Dropout", ["x"], ["y"], is_test=0)], opset=6, ir_version=3)
    message = r"m\.onnx has opset 6, INT8 .* needs 13 or more, .* Attribute is_test must not have value 0"
    with pytest.raises(InputError, match=message) as caught:
        run(str(path), folder=tmp_path / "out")
    assert caught.value.remedy == "export the model with opset 17 from its framework"


def test_new_opset_is_lowered_with_the_same_numbers(tmp_path) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["m"], keepdims=1, name="mean"),
        helper.make_node("Gelu", ["m"], ["y"], name="gelu"),
    ]
    path = write(tmp_path / "m.onnx", nodes, weights={"axes": np.array([2, 3])}, opset=20, ir_version=10)
    found = run(str(path), folder=tmp_path / "out")
    assert found.opset == 17
    assert found.notes == ("m.onnx: converted from opset 20 to 17", "m.onnx: IR version lowered from 10 to 9")
    assert found.warnings == ()
    same(path, found.model_path, {"x": RNG.standard_normal((2, 3, 8, 8), dtype=np.float32)})


def test_a_higher_opset_can_be_asked_for(tmp_path) -> None:
    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["y"])]
    path = write(tmp_path / "m.onnx", nodes, weights={"axes": np.array([2, 3])}, opset=18)
    assert run(str(path), opset=18, folder=tmp_path / "out").opset == 18


def test_what_cannot_be_lowered_is_kept_with_a_warning(tmp_path) -> None:
    nodes = [helper.make_node("Resize", ["x", "", "scales"], ["y"], antialias=1, mode="linear", name="up")]
    path = write(tmp_path / "m.onnx", nodes, weights={"scales": np.array([1, 1, 2, 2], np.float32)}, opset=18)
    found = run(str(path), folder=tmp_path / "out")
    assert found.opset == 18
    assert found.model_path.read_bytes() == path.read_bytes()
    assert found.warnings == ("m.onnx stays at opset 18, TensorRT 8.6 cannot load it: Resize 'up': antialias=1",)


def test_a_conversion_that_computes_something_else_is_refused(tmp_path, monkeypatch) -> None:
    from pipeline.export import decompose

    nodes = [helper.make_node("Gelu", ["x"], ["y"], name="gelu")]
    path = write(tmp_path / "m.onnx", nodes, opset=20)
    monkeypatch.setattr(decompose, "_gelu", lambda builder, x, approximate: builder.op("Relu", x))
    with pytest.raises(
        CheckFailed, match=r"converted from opset 20 to 17 computes something else: output 'y' differs by"
    ) as caught:
        run(str(path), folder=tmp_path / "out")
    assert caught.value.figures["relative_error"] > caught.value.figures["tolerance"]


def test_a_conversion_that_cannot_be_compared_says_so(tmp_path) -> None:
    nodes = [
        helper.make_node("Gelu", ["x"], ["g"]),
        helper.make_node("Reshape", ["g", "shape"], ["y"]),
    ]
    path = write(
        tmp_path / "m.onnx", nodes, weights={"shape": np.array([7, 11, 13])}, inputs={"x": ["N", "M"]}, opset=20
    )
    found = run(str(path), folder=tmp_path / "out")
    assert "no input shape was found that the model takes" in found.warnings[0]
    profile = Profile.parse("x=7x143,7x143,7x143")
    assert run(str(path), profiles=(profile,), folder=tmp_path / "out").warnings == ()


def test_functions_are_inlined_before_a_conversion(tmp_path) -> None:
    body = [helper.make_node("Gelu", ["a"], ["g"]), helper.make_node("Add", ["g", "g"], ["b"])]
    function = helper.make_function("mine", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 20)])
    nodes = [helper.make_node("Twice", ["x"], ["y"], domain="mine")]
    path = write(tmp_path / "m.onnx", nodes, functions=[function], domains={"mine": 1}, opset=20, ir_version=10)
    found = run(str(path), folder=tmp_path / "out")
    assert found.opset == 17
    same(path, found.model_path, {"x": RNG.standard_normal((2, 3, 8, 8), dtype=np.float32)})


@pytest.mark.parametrize(
    ("name", "output", "shape"),
    [(DETECTOR, "sigmoid_0.tmp_0", (1, 3, 64, 96)), (RECOGNISER, "softmax_11.tmp_0", (2, 3, 48, 64))],
)
def test_rapidocr(tmp_path, name: str, output: str, shape: tuple[int, ...]) -> None:
    path = rapidocr(name)
    found = run(str(path), folder=tmp_path)
    assert found.opset == 17
    assert [spec.name for spec in found.inputs] == ["x"]
    assert found.inputs[0].dynamic
    assert [spec.name for spec in found.outputs] == [output]
    before = {v for node in onnx.load(path).graph.node for v in node.output}
    after = onnx.load(found.model_path).graph
    kept = {v for node in after.node for v in node.output} | {w.name for w in after.initializer}
    assert before <= kept
    assert "Flatten" not in {node.op_type for node in after.node}
    same(path, found.model_path, {"x": RNG.uniform(0, 1, shape).astype(np.float32)}, tolerance=1e-5)


def test_metadata_of_the_model_survives_a_conversion(tmp_path) -> None:
    path = conv(tmp_path / "m.onnx", opset=12)
    model = onnx.load(path)
    helper.set_model_props(model, {"character": "abc"})
    onnx.save(model, path)
    found = run(str(path), folder=tmp_path / "out")
    assert {prop.key: prop.value for prop in onnx.load(found.model_path).metadata_props} == {"character": "abc"}


def test_equal_inputs_give_equal_bytes(tmp_path) -> None:
    path = rapidocr(DETECTOR)
    first = run(str(path), folder=tmp_path / "1").model_path.read_bytes()
    assert run(str(path), folder=tmp_path / "2").model_path.read_bytes() == first


def test_specs_of_strange_dimensions(tmp_path) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], inputs={"x": [-1, 0, "?", 4]})
    assert tensor_specs(load_model(path).graph.inputs)[0].shape == ("?", "?", "?", 4)


def test_rounding_before_a_quantiser_is_no_other_model(tmp_path) -> None:
    """Weights among the inputs (Brevitas) keep onnxruntime from fusing what it fuses in the mended file."""
    weights = {name: RNG.uniform(0.5, 1.5, 4).astype(np.float32) for name in ("scale", "variance")}
    weights |= {"w": RNG.uniform(0.5, 1.5, (4, 3, 3, 3)).astype(np.float32), "s": np.float32(0.1), "z": np.int8(0)}
    weights |= {"far": np.float32(1000), "mean": 1000 * weights["w"].sum((1, 2, 3)), "shift": np.zeros(4, np.float32)}
    nodes = [
        helper.make_node("Add", ["x", "far"], ["a"]),  # BatchNormalization takes it away, and most digits with it
        helper.make_node("Conv", ["a", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["b"]),
        helper.make_node("QuantizeLinear", ["b", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    path = write(tmp_path / "m.onnx", nodes, weights=weights, inputs={"x": [2, 3, 64, 64]}, ir_version=10)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    onnx.save(model, path)
    found = run(str(path), inputs=(), profiles=(), opset=17, folder=tmp_path / "out")
    assert any("weights are listed among the inputs" in note for note in found.notes)
