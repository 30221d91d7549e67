"""A Ray cluster that was started by itself, with a token: connecting, being refused, and a worker that is killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pipeline.compare.cluster import _on_this_machine, _rays_words
from tests.compare.networks import classifier, images

METRIC = """
import time
import numpy as np

def metric(outputs, samples, labels):
    time.sleep(0.7)  # long enough to be killed in
    return outputs["scores"].max(axis=1).astype(np.float64)
"""


@dataclass(frozen=True)
class Cluster:
    address: str
    environment: dict[str, str]
    """For processes of the account that started it."""
    group: int


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two cores, in a process group and with a home of its own."""
    pytest.importorskip("ray", reason="Ray (extra 'cluster') is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not below pytest's folder: the path of a Unix socket has 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="qray"))
    (folder / "home" / ".ray").mkdir(parents=True)
    (folder / "home" / ".ray" / "auth_token").write_text("5" * 64)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment.update(HOME=str(folder / "home"), RAY_USAGE_STATS_ENABLED="0")
    start = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    # No Ray Client server: without the extra 'client' there is none.
    process = subprocess.Popen(
        [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *start, f"--temp-dir={folder}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "--block" in line:
                break
        else:
            pytest.fail("Ray does not start:\n" + "".join(said))
        yield Cluster(f"127.0.0.1:{port}", environment, process.pid)
    finally:
        workers = workers_of(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        for worker in workers:
            kill(worker)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def kill(worker: int) -> bool:
    """False: it has ended since it was listed, as all do once the raylet is gone, which ends with any of its agents."""
    try:
        os.kill(worker, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def workers_of(group: int) -> dict[int, str]:
    """Processes that the cluster's raylet started, its agents among them, and what they do."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition(" (")[2].rpartition(") ")
            title = (stat.parent / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
            parent = int(rest.split()[1])
            if title.startswith("ray::") and os.getpgid(parent) == group:
                found[int(stat.parent.name)] = title.removeprefix("ray::") or name
        except OSError:
            continue
    return found


def compare(folder: Path, out: str, *more: str) -> list[str]:
    arguments = [str(folder / "model.onnx"), "--data", str(folder / "data.npy"), "--out", str(folder / out)]
    arguments += ["--samples", "32", "--verify-samples", "24", "--calibrators", "minmax,percentile(99)"]
    arguments += ["--metric", f"{folder / 'metric.py'}:metric"]
    return [sys.executable, "-m", "pipeline.cli", "compare", *arguments, *more]


@pytest.mark.slow
def test_a_cluster_that_wants_a_token_and_a_killed_worker(cluster: Cluster, tmp_path: Path) -> None:
    classifier(tmp_path / "model.onnx")
    np.save(tmp_path / "data.npy", images(64))
    (tmp_path / "metric.py").write_text(METRIC)
    here = subprocess.Popen(compare(tmp_path, "here", "--workers", "1"), stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(
        compare(tmp_path, "there", "--address", cluster.address),
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killed = None
    deadline = time.monotonic() + 60
    while killed is None and process.poll() is None and time.monotonic() < deadline:
        busy = {pid: title for pid, title in workers_of(cluster.group).items() if "no shift" in title}
        if busy and kill(min(busy)):
            killed = min(busy)
        time.sleep(0.05)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert killed is not None, "no evaluation was seen on the cluster"
    assert "Ray: 2 evaluations at a time on 1 machine(s)" in errors
    assert here.communicate(timeout=60)[1] is not None
    assert here.returncode == 0
    assert (tmp_path / "there" / "compare.csv").read_bytes() == (tmp_path / "here" / "compare.csv").read_bytes()


@pytest.mark.slow
def test_a_cluster_that_refuses_is_quoted(cluster: Cluster, tmp_path: Path) -> None:
    environment = {**cluster.environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
    command = ["--address", cluster.address]
    classifier(tmp_path / "model.onnx")
    np.save(tmp_path / "data.npy", images(64))
    (tmp_path / "metric.py").write_text(METRIC)
    done = subprocess.run(
        compare(tmp_path, "out", *command), env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "no connection to a Ray cluster" in done.stderr
    assert "InvalidAuthToken: Authentication token is missing or incorrect" in done.stderr
    assert "the cluster wants its token: set RAY_AUTH_MODE=token" in done.stderr


@pytest.mark.parametrize(("host", "here"), [("127.0.0.1", True), ("localhost", True), ("203.0.113.77", False)])
def test_which_addresses_are_this_machines(host: str, here: bool) -> None:
    assert _on_this_machine(host) == here


def test_the_first_cause_is_told() -> None:
    refused = RuntimeError("Failed to connect. Last connection error: Traceback ...\n  File x\nBadToken: it is wrong\n")
    outer = ConnectionError("Failed to connect to Ray cluster")
    outer.__cause__ = refused
    assert _rays_words(outer) == "BadToken: it is wrong"
    assert _rays_words(ValueError()) == "ValueError"
