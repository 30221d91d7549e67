"""Several real processes over gloo: the same bits as one, and the end of every rank when one is lost or differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.consistency.graphs import convolutions

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "consistency_faults.py"
LONGEST_S = 60.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and data whose range changes from batch to batch; the last batch is ragged."""
    folder = tmp_path_factory.mktemp("ranks")
    onnx.save(convolutions(), folder / "model.onnx")
    generator = np.random.default_rng(5)
    data = generator.standard_normal((22, 32, 4, 4)).astype(np.float32)
    np.save(folder / "x.npy", data * generator.uniform(0.2, 5, (22, 1, 1, 1)).astype(np.float32))
    return folder / "model.onnx", folder / "x.npy"


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    return {**kept, "MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in names.items()}}


def run_ranks(size: int, port: int, *arguments: Any, **changes: list[Any]) -> list[subprocess.CompletedProcess[str]]:
    """Start the ranks as a launcher would; ``changes`` are further arguments for one rank (``rank1=[...]``)."""
    command = [sys.executable, "-m", "pipeline.consistency", "--backend", "gloo", "-q", *map(str, arguments)]
    processes = [
        subprocess.Popen(
            [*command, *map(str, changes.get(f"rank{rank}", []))],
            env=environment(rank, size, port),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    done = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=3 * LONGEST_S)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr))
    return done


@pytest.fixture(scope="module")
def alone(inputs: tuple[Path, Path], unused_ports: list[int]) -> dict[str, Any]:
    model, data = inputs
    (process,) = run_ranks(1, unused_ports.pop(), model, "--data", data, "--samples", 22, "--batch-size", 4, "--json")
    assert process.returncode == 0, process.stderr
    report: dict[str, Any] = json.loads(process.stdout)
    return report


@pytest.fixture(scope="module")
def unused_ports() -> list[int]:
    import socket

    opened = [socket.socket() for _ in range(8)]
    for each in opened:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in opened]
    for each in opened:
        each.close()
    return ports


@pytest.mark.parametrize(("size", "shard"), [(2, "cyclic"), (3, "blocks"), (3, "scattered")])
def test_ranks_hold_the_bits_of_one_process(
    inputs: tuple[Path, Path], unused_ports: list[int], alone: dict[str, Any], size: int, shard: str
) -> None:
    model, data = inputs
    done = run_ranks(
        size, unused_ports.pop(), model, "--data", data, "--samples", 22, "--batch-size", 4, "--shards", shard, "--json"
    )
    assert [process.returncode for process in done] == [0] * size, done
    report = json.loads(done[0].stdout)
    assert all(not process.stdout for process in done[1:])
    assert (report["statistics"], report["digest"]) == (alone["statistics"], alone["digest"])
    assert (report["batches"], report["samples"], len(report["ranks"])) == (6, 22, size)
    same, exact, each, fp16 = report["scenarios"]
    assert same["identical"]
    assert exact["identical"]
    assert exact["within"] == exact["tensors"]
    assert each["within"] < each["tensors"]
    assert fp16["within"] < fp16["tensors"]


def test_another_calibrator_in_one_rank(inputs: tuple[Path, Path], unused_ports: list[int]) -> None:
    model, data = inputs
    done = run_ranks(2, unused_ports.pop(), model, "--data", data, "--batch-size", 4, rank1=["--calibrator", "minmax"])
    assert [process.returncode for process in done] == [1, 1]
    said = [line for process in done for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done
    assert "another calibrator in rank 1 (entropy in rank 0, minmax in rank 1)" in said[0]


def test_an_error_in_one_rank_ends_all(inputs: tuple[Path, Path], unused_ports: list[int], tmp_path: Path) -> None:
    model, data = inputs
    done = run_ranks(2, unused_ports.pop(), model, "--data", data, rank1=["--data", tmp_path / "none"])
    assert [process.returncode for process in done] == [1, 2]
    said = [line for process in done for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert said == [f"error: rank 1: --data {tmp_path / 'none'} does not exist"]


def test_a_rank_that_never_comes(inputs: tuple[Path, Path], unused_ports: list[int]) -> None:
    model, data = inputs
    process = subprocess.run(
        [sys.executable, "-m", "pipeline.consistency", str(model), "--data", str(data), "--rank-timeout", "2"],
        env=environment(0, 2, unused_ports.pop()),
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert process.returncode == 1
    assert "error: rank 1 of 2 did not come within 2 s" in process.stderr


@pytest.mark.slow
def test_every_kind_of_fault(tmp_path: Path) -> None:
    """A rank killed, stopped, hanging or slow; another image or order in one: a trial of each."""
    kinds = ["kill-batch", "kill-merge", "stop-merge", "hang", "delay", "image", "order"]
    process = subprocess.run(
        [sys.executable, str(SCRIPT), "--kinds", ",".join(kinds), "--json", str(tmp_path / "faults.json")],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=420,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    trials = json.loads((tmp_path / "faults.json").read_text())
    assert [trial["kind"] for trial in trials] == kinds
    for trial in trials:
        assert trial["seconds"] < LONGEST_S, trial
