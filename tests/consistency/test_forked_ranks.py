"""Forked ranks: status, output and environment of a child are its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts import consistency_faults
from scripts.forked_ranks import fork, free_port, rank_environment
from tests.consistency import forked


def say() -> None:
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
    print("aside", file=sys.stderr)


def fail() -> None:
    raise SystemExit(3)


def crash() -> None:
    raise RuntimeError("broken")


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_one_helper_serves_tests_and_faults() -> None:
    for module in (forked, consistency_faults):
        assert (module.fork, module.free_port, module.rank_environment) == (fork, free_port, rank_environment)


def test_a_child_has_its_own_environment_and_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environment = rank_environment(1, 2, free_port())
    assert "RANK" not in os.environ
    with capfd.disabled():  # Python's own streams, on descriptors 1 and 2
        assert status(fork(say, environment, tmp_path / "out", tmp_path / "err")) == 0
        assert status(fork(say, environment, tmp_path / "both")) == 0
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("rank 1 of 2\n", "aside\n")
    assert sorted((tmp_path / "both").read_text().splitlines()) == ["aside", "rank 1 of 2"]
    assert "RANK" not in os.environ


def test_how_a_child_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        assert status(fork(fail, {}, tmp_path / "failed")) == 3
        assert status(fork(crash, {}, tmp_path / "crashed")) == 1
    assert "RuntimeError: broken" in (tmp_path / "crashed").read_text()
