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
import onnxruntime
import pytest

from tests.consistency.graphs import convolutions

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "consistency_faults.py"
LONGEST_S = 60.0
SAMPLES, BATCH = 22, 4
SHARDS = {"2 cyclic": (2, "cyclic"), "3 blocks": (3, "blocks"), "8 scattered": (8, "scattered")}
"""Six batches, the last one ragged; of eight ranks two have none."""


class Runs:
    """Every run of this file, made in one go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._write_inputs()
        wanted = self._wanted()
        clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            [sys.executable, "-m", "tests.consistency.forked"],
            input=json.dumps(wanted),
            cwd=ROOT,
            env=clean,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self._results: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        return self._results[name]

    def report(self, name: str) -> dict[str, Any]:
        """What rank 0 printed; the others print nothing."""
        results = self[name]
        assert [rank["status"] for rank in results] == [0] * len(results), results
        assert not any(rank["out"] for rank in results[1:])
        report: dict[str, Any] = json.loads(results[0]["out"])
        return report

    def said(self, name: str) -> list[str]:
        """The errors in all ranks' output."""
        lines = [line for rank in self[name] for line in rank["err"].splitlines()]
        assert not any("Traceback" in line for line in lines), lines
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]

    def _write_inputs(self) -> None:
        model = convolutions()
        onnx.save(model, self.folder / "model.onnx")
        weights = onnx.numpy_helper.to_array(model.graph.initializer[0]) * np.float32(1e30)
        model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "w0"))
        onnx.save(model, self.folder / "big.onnx")
        generator = np.random.default_rng(5)
        data = generator.standard_normal((SAMPLES, 32, 4, 4)).astype(np.float32)
        data *= generator.uniform(0.2, 5, (SAMPLES, 1, 1, 1)).astype(np.float32)
        np.save(self.folder / "x.npy", data)
        data[5:7] *= 1e12
        np.save(self.folder / "overflow.npy", data)
        for name, swapped in (("same", "False"), ("swapped", "os.environ['RANK'] == '1'")):
            (self.folder / f"{name}.py").write_text(
                "import os\n"
                "import numpy as np\n"
                "def samples():\n"
                f"    data = np.load({str(self.folder / 'x.npy')!r})\n"
                f"    if {swapped}:\n"
                "        data[[1, 2]] = data[[2, 1]]\n"
                "    yield from data\n"
            )

    def _wanted(self) -> dict[str, list[list[str]]]:
        def command(
            module: str, *words: Any, model: str = "model.onnx", data: str = "x.npy", **options: Any
        ) -> list[str]:
            given = {"samples": SAMPLES, "batch_size": BATCH, "backend": "gloo", **options}
            flags = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
            return [module, *words, str(self.folder / model), "--data", str(self.folder / data), *flags, "-q"]

        check = "pipeline.consistency"
        wanted = {"alone": [[*command(check), "--json"]]}
        for name, (size, shard) in SHARDS.items():
            wanted[name] = [[*command(check, shards=shard), "--json"]] * size
        wanted["calibrator"] = [command(check), command(check, calibrator="minmax")]
        wanted["no GPU"] = [command(check, device="cuda")] * 2
        wanted["missing data"] = [[*command(check, data=data), "--json"] for data in ("x.npy", "none")]
        wanted["callable"] = [[*command(check, data="same.py:samples"), "--json"]] * 2
        wanted["swapped"] = [command(check, data="swapped.py:samples")] * 2
        calibrate = ("pipeline.cli", "calibrate")
        for name, size in (("file", 1), ("file of ranks", 2)):
            wanted[name] = [command(*calibrate, out=self.folder / f"{name}.npz")] * size
        wanted["overflow"] = [
            command(*calibrate, model="big.onnx", data="overflow.npy", out=self.folder / "overflow.npz")
        ] * 2
        skipping = command(
            *calibrate, model="big.onnx", data="overflow.npy", out=self.folder / "skip.npz", on_nonfinite="skip"
        )
        wanted["skip"] = [[*skipping, "--json"]] * 2
        return wanted


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", SHARDS)
def test_ranks_hold_the_bits_of_one_process(runs: Runs, name: str) -> None:
    alone, report = runs.report("alone"), runs.report(name)
    assert (report["statistics"], report["digest"]) == (alone["statistics"], alone["digest"])
    assert (report["batches"], report["samples"], len(report["ranks"])) == (6, SAMPLES, SHARDS[name][0])
    same, exact, each, fp16 = report["scenarios"]
    assert same["identical"]
    assert exact["identical"]
    assert exact["within"] == exact["tensors"]
    assert each["within"] < each["tensors"]
    assert fp16["within"] < fp16["tensors"]


def test_a_users_callable(runs: Runs) -> None:
    assert runs.report("callable")["statistics"] == runs.report("alone")["statistics"]


def test_the_calibration_file_is_that_of_one_process(runs: Runs) -> None:
    """Byte for byte, the figures beside the statistics included."""
    assert [rank["status"] for rank in runs["file"] + runs["file of ranks"]] == [0, 0, 0], runs["file of ranks"]
    first, second = ((runs.folder / f"{name}.npz").read_bytes() for name in ("file", "file of ranks"))
    assert first == second


@pytest.mark.parametrize(
    ("name", "statuses", "expected"),
    [
        ("calibrator", [1, 1], "another calibrator in rank 1 (mse in rank 0, minmax in rank 1)"),
        ("missing data", [1, 2], "rank 1: --data "),
        ("swapped", [1, 1], "rank 1 has the same samples in another order"),
        ("overflow", [1, 2], "rank 1: tensor"),
    ],
)
def test_one_reason_ends_all_ranks(runs: Runs, name: str, statuses: list[int], expected: str) -> None:
    assert [rank["status"] for rank in runs[name]] == statuses, runs[name]
    (said,) = runs.said(name)
    assert expected in said


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="there is a GPU")
def test_the_document_of_a_failure_comes_from_one_rank(runs: Runs) -> None:
    silent, speaking = runs["missing data"]
    assert silent["out"] == ""
    document = json.loads(speaking["out"])
    assert document["error"].startswith("rank 1: --data ")
    assert document["exit_code"] == speaking["status"] == 2
    assert document["remedy"]


def test_ranks_without_a_gpu(runs: Runs) -> None:
    assert [rank["status"] for rank in runs["no GPU"]] == [2, 2], runs["no GPU"]
    (said,) = runs.said("no GPU")
    assert said.split(": ", 1)[1].startswith("calibration on a CUDA device needs onnxruntime's CUDA provider")


def test_the_batch_with_an_infinity_is_named(runs: Runs) -> None:
    (said,) = runs.said("overflow")
    assert "infinite values in batch 1 (samples 4 to 7)" in said
    assert not (runs.folder / "overflow.npz").exists()


def test_skipped_batches_are_counted(runs: Runs) -> None:
    report = runs.report("skip")
    assert (report["batches"], report["skipped_batches"], report["samples"]) == (5, 1, 18)


def test_under_torchrun(runs: Runs) -> None:
    """Once with the launcher that people use."""
    words = ["--standalone", "--nproc-per-node", "2", "-m", "pipeline.consistency", str(runs.folder / "model.onnx")]
    words += [
        "--data",
        str(runs.folder / "x.npy"),
        "--batch-size",
        str(BATCH),
        "--samples",
        str(SAMPLES),
        "--json",
        "-q",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["digest"] == runs.report("alone")["digest"]


def test_a_rank_that_never_comes(runs: Runs) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.consistency", str(runs.folder / "model.onnx"), "--data", "x.npy",
         "--rank-timeout", "2"],
        env=environment, cwd=ROOT, text=True, capture_output=True, timeout=LONGEST_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: rank 1 of 2 did not come within 2 s" in done.stderr


@pytest.mark.slow
def test_faults(tmp_path: Path) -> None:
    """A rank killed, stopped or hanging, another image in one: a trial of each. The script makes many more."""
    kinds = ["kill-merge", "stop-merge", "hang", "image"]
    words = ["--kinds", ",".join(kinds), "--limit", "10", "--json", str(tmp_path / "faults.json")]
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
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
