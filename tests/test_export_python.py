"""Export of PyTorch modules. Each run of an exporter takes seconds, so one result serves several tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from pipeline.config import InputSpec, Profile
from pipeline.core.errors import CheckFailed, InputError, ToolError
from pipeline.core.files import sha256_file
from pipeline.equivalence import run_model
from pipeline.export import ExportResult, run
from pipeline.export.names import strip_prefix
from pipeline.onnxfile import load_model

MODELS = '''
import os, sys
import torch
from torch import nn
import parts


class Net(nn.Module):
    """Two inputs, a dict out, every kind of name."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
        self.head = nn.Linear(8, parts.CLASSES)
        self.drop = nn.Dropout(0.5)

    def forward(self, image, weight):
        features = self.stem(image)
        pooled = self.drop((features * weight[:, None, None, None]).mean((2, 3)))
        return {"logits": self.head(pooled), "features": features, "unused": None}


def net():
    torch.manual_seed(0)
    module = Net()
    module.load_state_dict(torch.load(os.path.join(os.path.dirname(__file__), "weights.pth")))
    return module, {"image": torch.rand(2, 3, 12, 12), "weight": torch.rand(2)}


class Flow(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 1e9 else x * 3


class Baked(nn.Module):
    def forward(self, x):
        return x + torch.zeros(x.numpy().shape[0], 4)


class Singular(nn.Module):
    def forward(self, x):
        return torch.linalg.svd(x)[1]


class Positions(nn.Module):
    """The exporter compares the sizes of both inputs outside every module, beside constants of the outermost one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(16, 4), nn.Embedding(8, 4)

    def forward(self, ids, mask):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))[None]
        return (x @ x.transpose(1, 2) - (1 - mask[:, None].float()) * 1e4).softmax(-1) @ x


class Broken(nn.Module):
    def forward(self, x):
        print("in forward")
        return self.inner(x)

    def inner(self, x):
        raise RuntimeError("does not work")


def no_module():
    return "text"


def half():
    return nn.Linear(4, 4).half()
'''
ROW = (Profile.parse("x=1x4,2x4,8x4"),)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> str:
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("user")
    (folder / "models.py").write_text(MODELS)
    (folder / "parts.py").write_text("CLASSES = 5\n")
    torch.manual_seed(0)
    stem = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8))
    head = torch.nn.Linear(8, 5)
    state = {f"stem.{name}": value for name, value in stem.state_dict().items()}
    torch.save(state | {f"head.{name}": value for name, value in head.state_dict().items()}, folder / "weights.pth")
    return f"{folder}/models.py"


@pytest.fixture(scope="module")
def net(models: str, tmp_path_factory) -> ExportResult:
    profile = Profile.parse("image=1x3x8x12,2x3x12x12,8x3x16x12;weight=1,2,8")
    return run(f"{models}:net", profiles=(profile,), folder=tmp_path_factory.mktemp("net"))


def test_form_of_the_exported_model(net: ExportResult) -> None:
    model = load_model(net.model_path)
    assert (net.kind, net.spec, net.exporter, net.opset, model.ir_version) == (
        "python",
        "models.py:net",
        "dynamo",
        17,
        9,
    )
    assert [(spec.name, spec.shape) for spec in net.inputs] == [
        ("image", ("batch", 3, "image_dim2", 12)),
        ("weight", ("batch",)),
    ]
    assert [(spec.name, spec.shape) for spec in net.outputs] == [
        ("logits", ("batch", 5)),
        ("features", ("batch", 8, "image_dim2", 12)),
    ]
    assert {file.name for file in net.folder.iterdir()} == {"model.onnx"}
    assert net.warnings == net.notes == ()


def test_nodes_and_weights_are_named_after_modules(net: ExportResult) -> None:
    graph = onnx.load(net.model_path).graph
    names = [node.name for node in graph.node]
    assert {"/stem/0/Conv", "/stem/1/BatchNormalization", "/head/Gemm"} <= set(names)
    assert len(set(names)) == len(names)
    assert {"stem.0.weight", "stem.1.running_mean", "head.bias"} <= {weight.name for weight in graph.initializer}
    conv = next(node for node in graph.node if node.op_type == "Conv")
    assert list(conv.output) == ["/stem/0/Conv_output_0"]


def test_a_node_outside_every_module_shares_no_name_with_one_inside(models: str, tmp_path) -> None:
    result = run(
        f"{models}:Positions",
        inputs=tuple(InputSpec(name=name, shape=(1, 4), dtype="int64") for name in ("ids", "mask")),
        profiles=(Profile.parse("ids=1x2,2x4,4x8;mask=1x2,2x4,4x8"),),
        folder=tmp_path,
    )
    graph = onnx.load(result.model_path).graph
    names = [node.name for node in graph.node]
    tensors = [name for node in graph.node for name in node.output] + [value.name for value in graph.initializer]
    assert result.exporter == "dynamo"
    assert len(set(names)) == len(names)
    assert len(set(tensors)) == len(tensors)
    assert "words.weight" in tensors


def test_a_stripped_name_that_is_taken_is_numbered() -> None:
    def node(name: str) -> ir.Node:
        made = ir.node("Relu", [x], name=name)
        made.outputs[0].name = f"{name}_output_0"
        return made

    x = ir.Value(name="x", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT))
    inside, outside, second = node("/module/Relu"), node("/Relu"), node("/module/a/Relu")
    weight = ir.Value(name="module.w", const_value=ir.tensor([1.0], name="module.w"))
    taken = ir.Value(name="w", const_value=ir.tensor([2.0], name="w"))
    graph = ir.Graph(
        [x], [], nodes=[inside, outside, second], initializers=[weight, taken], opset_imports={"": 17}, name="g"
    )
    strip_prefix(ir.Model(graph, ir_version=9), "module")
    assert [made.name for made in graph] == ["/Relu_1", "/Relu", "/a/Relu"]
    assert [made.outputs[0].name for made in graph] == ["/Relu_1_output_0", "/Relu_output_0", "/a/Relu_output_0"]
    assert sorted(graph.initializers) == ["w", "w_1"]


def test_module_is_in_eval_mode_and_agrees_with_torch(net: ExportResult) -> None:
    assert "Dropout" not in {node.op_type for node in onnx.load(net.model_path).graph.node}
    assert net.check is not None
    assert net.check.batch_sizes == (1, 3)
    assert net.check.shapes[0] == {"image": (1, 3, 12, 12), "weight": (1,)}
    assert net.check.shapes[1] == {"image": (3, 3, 8, 12), "weight": (3,)}
    assert 0 <= net.check.max_relative_error < 1e-5
    feeds = {"image": np.ones((5, 3, 9, 12), np.float32), "weight": np.ones(5, np.float32)}
    assert run_model(net.model_path, [feeds])[0]["features"].shape == (5, 8, 9, 12)


def test_dependencies_are_the_users_sources_and_weights(net: ExportResult, models: str) -> None:
    folder = Path(models).parent
    assert {item.path: item.sha256 for item in net.dependencies} == {
        str(folder / name): sha256_file(folder / name) for name in ("models.py", "parts.py", "weights.pth")
    }


def test_equal_bytes_and_nothing_of_this_machine(net: ExportResult, models: str, tmp_path) -> None:
    profile = Profile.parse("image=1x3x8x12,2x3x12x12,8x3x16x12;weight=1,2,8")
    again = run(f"{models}:net", profiles=(profile,), folder=tmp_path)
    data = again.model_path.read_bytes()
    assert data == net.model_path.read_bytes()
    assert again.source_sha256 == net.source_sha256
    for trace in (str(Path(models).parent), "site-packages", "models.py", "pkg.torch"):
        assert trace.encode() not in data


class _Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def task(self, description: str, *, total: int | None, unit: str):
        from pipeline.core.progress import SILENT

        return SILENT.task(description, total=total, unit=unit)


def test_control_flow_falls_back_to_tracing_and_says_so(models: str, tmp_path) -> None:
    progress = _Notes()
    profiles = (Profile.parse("row=1x4,2x4,8x4"),)
    found = run(f"{models}:Flow", profiles=profiles, folder=tmp_path, progress=progress)
    assert [spec.name for spec in found.inputs] == ["row"]
    assert (found.exporter, found.opset) == ("torchscript", 17)
    assert "dynamo exporter cannot export" in found.notes[0]
    assert "data-dependent" in found.notes[0]
    assert len(found.warnings) == 2
    assert "by its position this input is forward's 'x', and the exported model calls it 'row'" in found.warnings[1]
    line = 1 + MODELS[: MODELS.index("x.sum()")].count("\n")
    assert f"tracing took a value for a constant: models.py:{line}" in found.warnings[0]
    assert progress.warnings == list(found.warnings)
    assert "exported with torchscript, opset 17; largest relative error against PyTorch" in progress.notes[-1]
    assert "(batch sizes 1, 3)" in progress.notes[-1]


def test_size_taken_for_a_constant_fails_the_check(models: str, tmp_path) -> None:
    with pytest.raises(
        CheckFailed, match=r"on inputs of x 1x4: output 'output' has the shape \(2, 4\) instead of \(1, 4\)"
    ) as caught:
        run(f"{models}:Baked", profiles=ROW, opset=13, folder=tmp_path)
    assert "a size was probably taken for a constant" in str(caught.value.remedy)


def test_other_numbers_than_torch_fail_the_check(models: str, tmp_path, monkeypatch) -> None:
    from pipeline.export import from_python

    monkeypatch.setattr(from_python, "TOLERANCE", -1.0)
    with pytest.raises(
        CheckFailed, match=r"something else than PyTorch on inputs of x 1x4: output 'output' differs by"
    ):
        run(f"{models}:Flow", profiles=ROW, opset=13, folder=tmp_path)


def test_model_that_no_exporter_can_export(models: str, tmp_path) -> None:
    with pytest.raises(ToolError) as caught:
        run(f"{models}:Singular", profiles=ROW, opset=13, folder=tmp_path)
    assert "PyTorch's torchscript exporter cannot export" in str(caught.value)
    assert caught.value.remedy == "export the model yourself and give the .onnx file"
    assert list(tmp_path.iterdir()) == []


def test_faults_of_the_users_code(models: str, tmp_path) -> None:
    with pytest.raises(InputError) as caught:
        run(f"{models}:Broken", profiles=ROW, folder=tmp_path)
    message = str(caught.value)
    assert "models.py:Broken failed: RuntimeError: does not work" in message
    assert "in inner" in message
    assert "site-packages" not in message
    assert "last output:\n  in forward" in message
    assert "its inputs were taken to be float32" in str(caught.value.remedy)
    with pytest.raises(InputError, match=r"must return an nn\.Module, or .*, it returned str"):
        run(f"{models}:no_module", profiles=ROW, folder=tmp_path)
    with pytest.raises(InputError, match="the module's 'weight' is float16; calibration needs float32"):
        run(f"{models}:half", profiles=ROW, folder=tmp_path)
    with pytest.raises(InputError, match="nothing says what the model's inputs are") as caught:
        run(f"{models}:Flow", folder=tmp_path)
    assert "--input x:1x3x224x224:float32" in str(caught.value.remedy)


def test_large_weights_go_to_their_own_file(models: str, tmp_path, monkeypatch) -> None:
    from pipeline import onnxfile

    monkeypatch.setattr(onnxfile, "EXTERNAL_ABOVE_BYTES", 100)
    monkeypatch.setattr(onnxfile, "_EXTERNAL_TENSOR_BYTES", 100)
    inputs = tuple(map(InputSpec.model_validate, ("image:Nx3x12x12", "weight:N:float32")))
    found = run(f"{models}:net", inputs=inputs, folder=tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert found.inputs[0].shape == ("N", 3, 12, 12)
    assert found.check is not None
    assert found.check.max_relative_error < 1e-5


def test_time_limit(models: str, tmp_path) -> None:
    with pytest.raises(ToolError, match=r"did not finish within 0\.01 s"):
        run(f"{models}:Flow", profiles=ROW, folder=tmp_path, timeout_s=0.01)
