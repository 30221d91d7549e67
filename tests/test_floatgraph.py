"""Statistics fit the float graph they were made of, and are refused for every other one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from calibrators import load_statistics, save_statistics
from pipeline.artifact import CALIBRATION, INT8_MODEL, SCALES, Artifact
from pipeline.cli.build import command as build_command
from pipeline.cli.calibrate import command as calibrate_command
from pipeline.compare.drift import measure_drift
from pipeline.core.errors import InputError
from pipeline.floatgraph import check_float_graph, float_graph_sha256
from pipeline.reports.error_report import report_artifact
from tests.compare.networks import transformer

Model = onnx.ModelProto
OTHER = "has statistics of another float graph"


# --- which graph it is


def documented(model: Model) -> None:
    model.producer_name, model.doc_string, model.graph.name = "another program", "text", "other"
    entry = model.metadata_props.add()
    entry.key, entry.value = "folder", "somewhere"
    for number, node in enumerate(model.graph.node):
        node.name, node.doc_string = f"node{number}", "text"


def another_batch_name(model: Model) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"


def weights_reordered(model: Model) -> None:
    reordered = list(model.graph.initializer)[::-1]
    del model.graph.initializer[:]
    model.graph.initializer.extend(reordered)


def weights_in_other_fields(model: Model) -> None:
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor).reshape(-1).tolist()
        tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.FLOAT, list(tensor.dims), values))


@pytest.mark.parametrize("change", [documented, another_batch_name, weights_reordered, weights_in_other_fields])
def test_the_same_graph(change: Callable[[Model], None], tmp_path: Path) -> None:
    model = onnx.load(transformer(tmp_path / "a.onnx"))
    change(model)
    onnx.save(model, tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() != (tmp_path / "b.onnx").read_bytes()
    assert float_graph_sha256(tmp_path / "a.onnx") == float_graph_sha256(tmp_path / "b.onnx")


def test_external_weights_are_weights(tmp_path: Path) -> None:
    inside = transformer(tmp_path / "a.onnx")
    for name, seed in (("same", 0), ("other", 1)):
        model = onnx.load(transformer(tmp_path / "made.onnx", seed=seed))
        (tmp_path / name).mkdir()
        options = {"save_as_external_data": True, "location": "weights", "size_threshold": 64}
        onnx.save(model, tmp_path / name / "m.onnx", **options)
    assert (tmp_path / "same" / "m.onnx").read_bytes() == (tmp_path / "other" / "m.onnx").read_bytes()
    assert float_graph_sha256(tmp_path / "same" / "m.onnx") == float_graph_sha256(inside)
    assert float_graph_sha256(tmp_path / "other" / "m.onnx") != float_graph_sha256(inside)


def one_weight(model: Model) -> None:
    tensor = model.graph.initializer[0]
    values = numpy_helper.to_array(tensor).copy()
    values.flat[0] = np.nextafter(values.flat[0], np.float32(np.inf))
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def one_attribute(model: Model) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("epsilon", 1e-3))


def one_operator(model: Model) -> None:
    model.graph.node.insert(1, helper.make_node("Relu", ["n"], ["r"], name="relu"))
    model.graph.node[2].input[0] = "r"


def edges_swapped(model: Model) -> None:
    model.graph.node[0].input[1], model.graph.node[0].input[2] = "bias", "scale"


def a_tensor_renamed(model: Model) -> None:
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "norm_out"


def another_opset(model: Model) -> None:
    model.opset_import[0].version = 18


@pytest.mark.parametrize(
    "change", [one_weight, one_attribute, one_operator, edges_swapped, a_tensor_renamed, another_opset]
)
def test_another_graph(change: Callable[[Model], None], tmp_path: Path) -> None:
    model = onnx.load(transformer(tmp_path / "a.onnx"))
    change(model)
    onnx.save(model, tmp_path / "b.onnx")
    assert float_graph_sha256(tmp_path / "a.onnx") != float_graph_sha256(tmp_path / "b.onnx")


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_graphs_inside_nodes_count(value: float, tmp_path: Path) -> None:
    """Also attributes of every kind: tensors, texts and lists."""

    def branching(path: Path, constant: float) -> Path:
        def branch(name: str, number: float) -> onnx.GraphProto:
            tensor = numpy_helper.from_array(np.array([number], np.float32))
            node = helper.make_node("Constant", [], [name], name=name, value=tensor)
            return helper.make_graph(
                [node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])]
            )

        nodes = [
            helper.make_node("If", ["c"], ["y"], "if", then_branch=branch("t", constant), else_branch=branch("e", 0.0)),
            helper.make_node("Constant", [], ["words"], "words", value_strings=["a", "b"]),
            helper.make_node("Constant", [], ["word"], "word", value=helper.make_tensor("w", 8, [1], [b"text"])),
        ]
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
        graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("c", TensorProto.BOOL, [])], outputs)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        return path

    known = float_graph_sha256(branching(tmp_path / "a.onnx", 1.0))
    assert (float_graph_sha256(branching(tmp_path / "b.onnx", value)) == known) == (value == 1.0)


def test_exporting_twice_gives_the_same_graph(tmp_path: Path) -> None:
    """Of a Python model, from different folders and batch sizes of the preparation's samples."""
    from pipeline import export, prepare
    from pipeline.config import Profile

    found = set()
    for number, rows in enumerate((1, 4)):
        (tmp_path / f"{number}").mkdir()
        source = tmp_path / f"{number}" / "net.py"
        source.write_text(
            "import torch\n\n\ndef net():\n    torch.manual_seed(0)\n    return torch.nn.Sequential("
            "torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))\n"
        )
        exported = export.run(
            f"{source}:net",
            profiles=(Profile.parse("x=1x3x8x8,4x3x8x8,8x3x8x8"),),
            folder=tmp_path / f"{number}" / "export",
        )
        feeds = [{exported.inputs[0].name: np.zeros((rows, 3, 8, 8), np.float32)}]
        made = prepare.run(exported.model_path, folder=tmp_path / f"{number}" / "prepare", sample_feeds=feeds)
        found.add(float_graph_sha256(made.model_path))
    assert len(found) == 1


# --- what is taken and what is refused


class Made:
    """Artifacts and statistics of one network, its data, and those of another with equal names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.other = transformer(folder / "m.onnx"), transformer(folder / "o.onnx", seed=1, widest=5.0)
        self.data = folder / "tokens.npy"
        np.save(self.data, np.random.default_rng(0).standard_normal((24, 16, 32)).astype(np.float32))
        self.statistics = {name: self.calibrated(folder / f"{name}.npz", source) for name, source in self.models()}
        for name, options in (("plain", ()), ("equalised", ("--equalise",))):
            assert self.built(self.model, folder / name, *options).exit_code == 0
            self.statistics[f"{name} artifact"] = folder / name / CALIBRATION
        self.statistics["from the equalised artifact"] = self.calibrated(folder / "e.npz", folder / "equalised")

    def models(self) -> tuple[tuple[str, Path], ...]:
        return ("model", self.model), ("other", self.other)

    def calibrated(self, out: Path, model: Path) -> Path:
        arguments = [str(model), "--data", str(self.data), "-o", str(out), "--samples", "16", "-q"]
        result = CliRunner().invoke(calibrate_command, arguments)
        assert result.exit_code == 0, result.output
        return out

    def built(self, model: Path, out: Path, *more: str) -> Any:
        options = ["--target", "onnx", "--samples", "16", "--profile", "x=1x16x32,4x16x32,8x16x32"]
        arguments = [str(model), "--data", str(self.data), "--out", str(out), *options]
        return CliRunner().invoke(build_command, [*arguments, *more])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("float-graphs"))


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("statistics", "options"),
    [
        ("model", ()),
        ("plain artifact", ()),
        ("equalised artifact", ("--equalise",)),
        ("from the equalised artifact", ("--equalise",)),
    ],
)
def test_own_statistics_are_taken(made: Made, tmp_path: Path, statistics: str, options: tuple[str, ...]) -> None:
    source = str(made.statistics[statistics])
    result = made.built(made.model, tmp_path / "out", "--calibration", source, *options)
    assert result.exit_code == 0, result.output
    assert "which float graph" not in result.output
    plain = made.folder / ("equalised" if options else "plain")
    assert (tmp_path / "out" / INT8_MODEL).read_bytes() == (plain / INT8_MODEL).read_bytes()
    other = made.built(made.model, tmp_path / "minmax", "--calibration", source, "--calibrator", "minmax", *options)
    assert other.exit_code == 0, other.output
    assert Artifact.open(tmp_path / "minmax").manifest.calibration.calibrator == "minmax"


@pytest.mark.parametrize(
    ("statistics", "options"),
    [
        ("model", ("--equalise",)),
        ("plain artifact", ("--equalise",)),
        ("equalised artifact", ()),
        ("from the equalised artifact", ()),
        ("other", ()),
        ("other", ("--equalise",)),
    ],
)
def test_statistics_of_another_graph_are_refused(
    made: Made, tmp_path: Path, statistics: str, options: tuple[str, ...]
) -> None:
    source = made.statistics[statistics]
    result = made.built(made.model, tmp_path / "out", "--calibration", str(source), *options)
    assert result.exit_code == 2, result.output
    said = words(result.stderr)
    assert f"{source.name} {OTHER} ({load_statistics(source)[1]['graph'][:12]}) than" in said
    assert "leave --calibration out to make the pass now" in said
    assert not (tmp_path / "out" / SCALES).exists()


def test_the_build_that_took_them_is_not_taken_from_the_cache(made: Made, tmp_path: Path) -> None:
    source = ("--calibration", str(made.statistics["model"]))
    assert made.built(made.model, tmp_path / "out", *source).exit_code == 0
    again = made.built(made.model, tmp_path / "out", *source, "--equalise")
    assert again.exit_code == 2
    assert OTHER in words(again.stderr)


@pytest.mark.parametrize(
    ("meta", "told"),
    [({"model": "f" * 64}, True), ({"model": None}, True), ({}, True), ([], True), ("file", False)],
    ids=["another file", "no hash", "nothing", "no names", "this very file"],
)
def test_files_of_an_earlier_version(made: Made, tmp_path: Path, meta: Any, told: bool) -> None:
    from pipeline.core.files import sha256_file

    meta = {"model": sha256_file(made.model)} if meta == "file" else meta
    doubt = check_float_graph(tmp_path / "c.npz", meta, made.model, remedy="")
    assert (doubt is not None) == told
    assert doubt is None or "c.npz does not say which float graph its statistics are of" in doubt


def test_a_build_from_an_earlier_version_warns(made: Made, tmp_path: Path) -> None:
    statistics, meta = load_statistics(made.statistics["model"])
    del meta["graph"]
    save_statistics(tmp_path / "old.npz", statistics, {**meta, "model": "e" * 64})
    result = made.built(made.model, tmp_path / "out", "--calibration", str(tmp_path / "old.npz"))
    assert result.exit_code == 0, result.output
    assert "old.npz does not say which float graph its statistics are of" in words(result.stderr)
    kept = [text for text in Artifact.open(tmp_path / "out").manifest.warnings if "which float graph" in text]
    assert len(kept) == 1
    assert load_statistics(tmp_path / "out" / CALIBRATION)[1]["model"] == "e" * 64, "taking does not vouch for them"


def test_merging_needs_one_graph(made: Made, tmp_path: Path) -> None:
    files = [str(made.statistics[name]) for name in ("model", "from the equalised artifact")]
    result = CliRunner().invoke(calibrate_command, ["--merge", *files, "-o", str(tmp_path / "m.npz")])
    assert result.exit_code == 2
    assert "are passes of different models" in words(result.stderr)


@pytest.mark.parametrize("reader", ["drift", "errors"])
@pytest.mark.parametrize("kind", ["other", "old"])
def test_an_artifact_with_foreign_statistics(made: Made, tmp_path: Path, reader: str, kind: str) -> None:
    from tests.test_calibrate import Recorded

    folder = tmp_path / "artifact"
    shutil.copytree(made.folder / "plain", folder, ignore=shutil.ignore_patterns(".work"))
    statistics, meta = load_statistics(made.statistics["other" if kind == "other" else "plain artifact"])
    save_statistics(folder / CALIBRATION, statistics, meta if kind == "other" else {})
    Artifact.open(folder).updated(files=(CALIBRATION,))  # they were there when the artifact was written
    progress = Recorded()

    def read() -> None:
        if reader == "drift":
            measure_drift(folder, str(made.data), progress=progress)
        else:
            report_artifact(folder, out=tmp_path / "out", progress=progress)

    if kind == "old":
        read()
        assert sum("which float graph" in text for text in progress.warnings) == 1
        return
    with pytest.raises(InputError, match=OTHER) as error:
        read()
    assert error.value.remedy == "the artifact was put together of two builds: build it again"


def test_an_artifact_s_statistics_name_its_own_float_graph(made: Made) -> None:
    """What is written is what is compared: the artifact's own float model."""
    for name in ("plain", "equalised"):
        _, meta = load_statistics(made.folder / name / CALIBRATION)
        assert meta["graph"] == float_graph_sha256(made.folder / name / "model.fp32.onnx")
