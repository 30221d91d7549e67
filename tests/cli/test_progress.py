"""What the command line says while it works, and that a warning in a terminal comes once."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pipeline.cli import common
from pipeline.cli.common import LineProgress, QuietProgress, RememberingProgress

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time on."""
    now = [100.0]
    monkeypatch.setattr(common, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def said(capsys: pytest.CaptureFixture[str], clock: Callable[[float], None], total: int | None, each: float) -> str:
    with LineProgress().task("export", total=total, unit="models") as task:
        for _ in range(total or 2):
            clock(each)
            task.advance()
    return capsys.readouterr().err


def test_a_single_step_has_no_rate(capsys: pytest.CaptureFixture[str], clock: Callable[[float], None]) -> None:
    assert said(capsys, clock, 1, 16.0) == "export ...\nexport: done in 16.0 s\n"


def test_a_single_step_that_was_not_taken(capsys: pytest.CaptureFixture[str], clock: Callable[[float], None]) -> None:
    with LineProgress().task("export", total=1, unit="models"):
        clock(2.0)
    assert capsys.readouterr().err.endswith("export: not done in 2.0 s\n")


def test_steps_slower_than_one_a_second(capsys: pytest.CaptureFixture[str], clock: Callable[[float], None]) -> None:
    lines = said(capsys, clock, 3, 12.0).splitlines()
    assert lines[1:] == [
        "export: 1/3 models, 12.0 s each, 24 s left",
        "export: 2/3 models, 12.0 s each, 12 s left",
        "export: 3/3 models in 36.0 s (12.0 s each)",
    ]


def test_quick_steps(capsys: pytest.CaptureFixture[str], clock: Callable[[float], None]) -> None:
    lines = said(capsys, clock, 50, 0.25).splitlines()
    assert lines[1] == "export: 20/50 models, 4.0/s, 8 s left"
    assert lines[-1] == "export: 50/50 models in 12.5 s (4.0/s)"
    assert said(capsys, clock, None, 0.25).splitlines()[-1] == "export: 2 models in 0.5 s (4.0/s)"


def test_no_step_is_no_rate(capsys: pytest.CaptureFixture[str], clock: Callable[[float], None]) -> None:
    with LineProgress().task("export", total=3, unit="models") as task:
        clock(9.0)
        task.advance(0)
    assert capsys.readouterr().err == "export ...\nexport: 0/3 models in 9.0 s\n"


def test_warnings_are_remembered_and_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RememberingProgress(QuietProgress())
    progress.warn("far")
    progress.note("well")
    with progress.task("export", total=None, unit="models") as task:
        task.advance()
    assert progress.warned == {"far"}
    assert capsys.readouterr().err == "warning: far\n"


@pytest.mark.parametrize(("together", "expected"), [(True, "True"), (False, "False")])
def test_whether_both_streams_go_to_one_place(together: bool, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from pipeline.cli.common import same_stream; print(same_stream())"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected
