"""The scripts for GPU machines: how they judge what they have run. What they run is tested where it belongs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.artifact import INT8_MODEL, SAMPLES, Artifact
from pipeline.core.errors import InputError
from scripts import gpu_nccl, gpu_on_device
from tests.consistency.graphs import Y_SCALE, write_artifact
from tests.consistency.test_device import FakeEngine, artifact, on_grid  # noqa: F401

DIED = "error: rank 1 (process 7 on vm) died; its last word was: batch 1\n  no partial result was written\n"


def ended(folder: Path, kind: str, *, status: int, log: str = "", result: str | None = None, seconds: float = 9) -> Any:
    (folder / f"{kind}.log").write_text(log)
    (folder / f"{kind}.end").write_text(f"{status} 100.0 {100 + seconds}")
    if result is not None:
        (folder / f"{kind}.result").write_text(result)
    return gpu_nccl.judge_fault(kind, folder)


@pytest.mark.parametrize(
    ("kind", "given", "passed"),
    [
        ("kill-batch", {"status": 1, "log": DIED}, True),
        ("kill-batch", {"status": 1, "log": DIED, "seconds": 61}, False),
        ("kill-batch", {"status": 0, "log": DIED}, False),
        ("kill-batch", {"status": 1, "log": DIED, "result": "d"}, False),
        ("kill-batch", {"status": 1, "log": DIED + DIED}, False),
        ("kill-batch", {"status": 1, "log": DIED.replace("rank 1", "rank 0")}, False),
        ("hang", {"status": 1, "log": DIED}, False),
        ("delay", {"status": 0, "result": "d"}, True),
        ("delay", {"status": 0, "result": "other"}, False),
        ("delay", {"status": 0, "result": "d", "log": DIED}, False),
        ("delay", {"status": 1}, False),
    ],
)
def test_a_fault_is_judged(tmp_path: Path, kind: str, given: dict[str, Any], passed: bool) -> None:
    (tmp_path / "none.result").write_text("d")
    assert ended(tmp_path, kind, **given)["passed"] is passed


def test_time_after_the_fault(tmp_path: Path) -> None:
    (tmp_path / "kill-batch.moment").write_text("107.5")
    found = ended(tmp_path, "kill-batch", status=1, log=DIED)
    assert (found["seconds"], found["seconds_after_fault"]) == (9.0, 1.5)
    assert ended(tmp_path, "kill-batch", status=1, log=DIED, seconds=67)["passed"], "59.5 s after the fault"
    assert not ended(tmp_path, "kill-batch", status=1, log=DIED, seconds=68)["passed"]
    assert ended(tmp_path, "none", status=0, result="d", seconds=100)["passed"]


def test_rate_leaves_the_first_batch_out() -> None:
    run = {"seconds": [3.0, 4.0], "first_seconds": [2.0, 2.0], "batches": 10, "samples": 320}
    assert gpu_nccl.rate(run) == pytest.approx(2 * 4 * 32 / 2.0)
    assert gpu_nccl.rate({**run, "batches": 2, "samples": 64}) is None


def test_a_report_of_nothing_fails_and_says_what_was_not_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(gpu_nccl.main, ["report", "--at", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    found = json.loads((tmp_path / "out" / "nccl.json").read_text())
    assert found["wrong"] == []
    assert {"resnet50 on 2", "efficientnet-lite0: comparison with cpu", "fault hang"} <= set(found["missing"])


@pytest.mark.parametrize(("digest", "wrong"), [("s", []), ("t", ["resnet50 on 2: statistics as on one"])])
def test_a_difference_between_one_and_two_gpus_is_wrong(tmp_path: Path, digest: str, wrong: list[str]) -> None:
    run = {
        "seconds": [3.0], "first_seconds": [2.0], "batches": 10, "samples": 320, "merge_seconds": 0.1,
        "backend": "nccl", "passed": True, "statistics": "s", "digest": "d",
    }  # fmt: skip
    (tmp_path / "resnet50-1.json").write_text(json.dumps(run))
    two = {**run, "seconds": [2.0, 2.0], "first_seconds": [1.0, 1.0], "statistics": digest}
    (tmp_path / "resnet50-2.json").write_text(json.dumps(two))
    result = CliRunner().invoke(gpu_nccl.main, ["report", "--at", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1  # most of it was not run
    assert json.loads((tmp_path / "out" / "nccl.json").read_text())["wrong"] == wrong


def test_a_mismatch_is_in_the_output_of_a_command() -> None:
    @click.command()
    def command() -> None:
        click.echo("shown")
        raise SystemExit(1)

    text, seconds = gpu_nccl.quantize(command, [])
    assert text == "shown\n"
    assert seconds >= 0


def packed(source: Path, folder: Path) -> Path:
    gpu_on_device.pack([f"net={source}"], folder)
    return folder


def on_device(pack: Path, out: Path, *benches: Path) -> tuple[int, dict[str, Any]]:
    given = SimpleNamespace(pack=pack, out=out, bench=list(benches), target="tensorrt", work=out)
    code = gpu_on_device.run(given)  # type: ignore[arg-type]
    (found,) = json.loads((out / "on_device.json").read_text())
    return code, found


def test_on_device_reports_every_quantised_tensor(
    artifact: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*_: Any, plan: Path, **__: Any) -> None:
        plan.write_bytes(b"probe")
        (plan.with_suffix(".json")).write_text("{}")

    with np.load(artifact / SAMPLES) as archive:
        recorded = {name: archive[name] for name in archive.files}
    z = recorded["int8/z"] = on_grid(float(Y_SCALE), recorded["int8/z"].size).reshape(recorded["int8/z"].shape)
    np.savez(artifact / SAMPLES, **recorded)
    Artifact.open(artifact).updated(files=(SAMPLES,))

    def run(engine: FakeEngine, _: Any) -> dict[str, Any]:
        return {"z": z, "x_dq": on_grid(engine.x_scale)}

    monkeypatch.setattr(FakeEngine, "__call__", run)
    monkeypatch.setattr("pipeline.consistency.device.build_probe", build)
    monkeypatch.setattr("pipeline.engine.records.EngineRecord.model_validate_json", lambda _: None)
    code, found = on_device(packed(artifact, tmp_path / "pack"), tmp_path / "out")
    assert code == 0
    assert [scale["verdict"] for scale in found["scales"]] == ["ok"] * len(found["scales"])
    shown = {scale["tensor"] for scale in found["scales"]}
    assert found["quantised"] == len(shown) + len(found["hidden"])
    assert found["engine"] == "probe"
    assert "| net | " in (tmp_path / "out" / "on_device.md").read_text()
    monkeypatch.setattr(FakeEngine, "x_scale", 0.05)
    code, found = on_device(tmp_path / "pack", tmp_path / "out")
    assert code == 1
    assert not found["passed"]


def test_on_device_without_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_on_device, "SMALL", 0)
    pack = packed(write_artifact(tmp_path / "art"), tmp_path / "pack")
    code, found = on_device(pack, tmp_path / "out")
    assert code == 1
    assert found["error"].startswith(f"{pack / 'net'} has no {INT8_MODEL}")
    with pytest.raises(InputError, match=r"give gpu_bench\.py's folder with --bench"):
        gpu_on_device.assembled(pack / "net", [tmp_path], "tensorrt", tmp_path / "work")


def test_graph_and_engine_of_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_artifact(tmp_path / "art")
    monkeypatch.setattr(gpu_on_device, "SMALL", 0)
    pack, bench = packed(source, tmp_path / "pack"), tmp_path / "bench"
    for name, content in (("net/int8.onnx", (source / INT8_MODEL).read_bytes()), ("net/weights.bin", b"w"),
                          ("engines/net/int8/model.plan", b"p"), ("engines/net/int8/build.json", b"{}")):  # fmt: skip
        (bench / name).parent.mkdir(parents=True, exist_ok=True)
        (bench / name).write_bytes(content)
    folder = gpu_on_device.assembled(pack / "net", [tmp_path, bench], "tensorrt", tmp_path / "work")
    files = Artifact.open(folder).manifest.files
    assert (folder / INT8_MODEL).read_bytes() == (source / INT8_MODEL).read_bytes()
    assert (folder / "weights.bin").exists()
    assert {"engines/tensorrt/model.plan", "engines/tensorrt/build.json"} <= set(files)
    assert gpu_on_device.assembled(pack / "net", [tmp_path, bench], "tensorrt", tmp_path / "work") == folder, "twice"
