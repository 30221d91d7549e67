"""What the placement benchmark sends to a GPU machine arrives there unchanged."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

from tests.placement.tiny import Tiny

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[ModuleType, ModuleType]:
    """bench_placement_prepare and bench_placement, the latter working in ``tmp_path / "work"``."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("bench_placement_prepare", "bench_placement"):
        sys.modules.pop(name, None)
    here, there = importlib.import_module("bench_placement_prepare"), importlib.import_module("bench_placement")
    monkeypatch.setattr(there, "WORK", tmp_path / "work")
    return here, there


def test_slices_come_together(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = scripts
    monkeypatch.setattr(here, "SLICE_BYTES", 1_500_000)
    random = np.random.default_rng(0)
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for file, size in zip(files, (1_400_000, 2_000_000), strict=True):
        file.write_bytes(random.bytes(size))
    here.slice_into(files, tmp_path / "out", "models")
    folders = sorted((tmp_path / "out").iterdir())
    assert len(folders) == 3
    assert all(sum(file.stat().st_size for file in folder.iterdir()) <= 1_500_000 for folder in folders)
    for folder in (folders[2], folders[0]):
        there.unpack([folder])
        assert not (tmp_path / "work" / "b.onnx").exists()
    there.unpack(folders[1:2])
    for file in files:
        assert (tmp_path / "work" / file.name).read_bytes() == file.read_bytes()


def test_images_arrive_as_the_network_takes_them(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    here, there = scripts
    pixels = np.random.default_rng(1).integers(0, 256, (3, 20, 30, 3)).astype(np.uint8)
    (tmp_path / "work").mkdir()
    np.save(tmp_path / "work" / "images.npy", here.filtered(pixels))
    np.save(tmp_path / "work" / "labels.npy", np.arange(3))
    data, labels = there.images()
    assert np.array_equal(data, here.normalised(pixels))
    assert labels.tolist() == [0, 1, 2]


def test_a_graph_without_its_weights_gets_others(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    here, there = scripts
    net = Tiny()
    net.conv(net.input("x", "n", 16, 8, 8), "y", 16, 32)
    source = net.save(tmp_path, "y")
    target = tmp_path / "net.ours.onnx"
    made = here.strip_weights(source, target)
    assert [entry["count"] for entry in made] == [32 * 16 * 9]
    assert target.stat().st_size < source.stat().st_size / 10
    there.make_weights(target, made)
    model = onnx.load(target)
    (weights,) = [item for item in model.graph.initializer if item.name == "y.weight"]
    values = onnx.numpy_helper.to_array(weights)
    assert values.shape == (32, 16, 3, 3)
    assert values.std() == pytest.approx(made[0]["std"], rel=0.05)
    onnx.checker.check_model(str(target))


def test_summary_of_layers(scripts: tuple[ModuleType, ModuleType]) -> None:
    _, there = scripts

    def layer(name: str, kind: str, inputs: str, outputs: str) -> dict[str, object]:
        tensors = {"Inputs": [{"Format/Datatype": inputs}], "Outputs": [{"Format/Datatype": outputs}]}
        return {"Name": name, "LayerType": kind, **tensors}

    found = there.summarise(
        [
            layer("a", "CaskConvolution", "Four wide channel vectorized row major Int8 format", "Int8"),
            layer("b", "CaskConvolution", "Row major linear FP16 format", "Row major Int8 format"),
            layer("c", "CaskConvolution", "Int8", "Row major linear FP16 format"),
            layer("Reformatting CopyNode", "Reformat", "FP32", "Int8"),
            layer("x_QuantizeLinear", "Scale", "FP16", "Int8"),
        ]
    )
    assert found["layers"] == 5
    assert found["float_convolutions"] == ["b"]
    assert found["int8_convolutions_with_float_output"] == ["c"]
    assert len(found["reformats"]) == 1
    assert found["scale_layers"] == ["x_QuantizeLinear"]
