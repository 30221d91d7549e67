"""The script that runs the GPU tests: how they are spread over processes, and what is reported."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import gpu_tests
from scripts.gpu_tests import Found, shards

TESTS = """
import pytest

pytestmark = pytest.mark.gpu


def test_good():
    assert True


def test_bad():
    assert False, "as it should"


@pytest.mark.alone
def test_alone():
    pytest.skip("no card")


def test_slow():
    import time
    time.sleep({seconds})
"""


def test_tests_of_a_file_stay_together_and_some_run_alone() -> None:
    found = [Found(f"a.py::t{number}", number == 1) for number in range(6)] + [Found("b.py::t", False)]
    parts, alone = shards(found, 3)
    assert parts == [["a.py::t0", "a.py::t2", "a.py::t3"], ["a.py::t4", "a.py::t5"], ["b.py::t"]]
    assert alone == ["a.py::t1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    marks = "gpu: card\n  alone: memory"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n  {marks}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.delitem(sys.modules, "test_some", raising=False)
    return tmp_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, *arguments: str) -> int:
    (folder / "test_some.py").write_text(TESTS.format(seconds=seconds))
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py", "--out", str(folder), *arguments])
    return gpu_tests.main()


def test_every_result_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, monkeypatch, 0, "test_some.py", "--", "-m", "gpu") == 1
    output = capsys.readouterr().out
    assert "2 passed, 1 skipped, 1 failed, 0 without a result, of 4 in" in output
    assert "test_some::test_bad" in output
    assert "as it should" in (folder / "gpu-tests.log").read_text()
    root = ElementTree.parse(folder / "gpu-tests.xml").getroot()
    assert len(list(root.iter("testcase"))) == 4


def test_at_the_limit_it_ends_and_says_what_has_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--limit-s", "3", "test_some.py", "--", "-k", "slow")
    assert run(folder, monkeypatch, 60, *arguments) == gpu_tests.OUT_OF_TIME
    output = capsys.readouterr().out
    assert "stopped, out of time: test_some.py::test_slow" in output
    assert "1 without a result, of 1 in" in output
