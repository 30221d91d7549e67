"""Recording on the GPU machine, with onnxruntime in TensorRT's place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.artifact import SAMPLES
from pipeline.engine import capture
from pipeline.errors.capture import OrtReading
from pipeline.errors.recording import main
from pipeline.errors.report import report_artifact
from tests.errors.artifacts import make_artifact
from tests.errors.networks import network

net = network()


@pytest.fixture
def artifact(tmp_path):
    return make_artifact(tmp_path / "net", net).folder


@pytest.fixture
def engine(monkeypatch):
    def outputs(model, tensors, feeds, *, target):
        reading = OrtReading(model, [*tensors, "logits"], label="", optimise=False)
        return (reading.run(values) for values in feeds)

    monkeypatch.setattr(capture, "capture_outputs", outputs)


def test_recording_feeds_the_report(artifact, engine, tmp_path, capsys):
    assert main([str(artifact), str(tmp_path / "engine.npz")]) == 0
    assert "6 layers recorded" in capsys.readouterr().out
    report = report_artifact(artifact, engine_tensors=tmp_path / "engine.npz", out=tmp_path / "out")
    assert "0 of 6 layers are fused" in (tmp_path / "out" / "report.html").read_text()
    assert report.engine


def test_fewer_samples(artifact, engine, tmp_path):
    assert main([str(artifact), str(tmp_path / "engine.npz"), "--samples", "1"]) == 0
    with np.load(tmp_path / "engine.npz") as found:
        assert found["samples"].tolist() == [10]
        assert found["stem"].shape[0] == 1


def test_damaged_artifact(artifact, engine, tmp_path, capsys):
    (artifact / SAMPLES).write_bytes(b"PK")
    assert main([str(artifact), str(tmp_path / "engine.npz")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "engine.npz").exists()


def test_a_serving_machine_has_all_it_imports():
    code = (
        "import sys, pipeline.errors.recording\n"
        "heavy = {'onnx', 'onnxruntime', 'torch', 'numba', 'pandas', 'matplotlib', 'rich', 'click'}\n"
        "found = heavy & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
