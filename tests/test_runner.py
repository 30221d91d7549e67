"""The stage runner: cache, damage, dependencies, kills, the lock."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.core.errors import InputError
from pipeline.core.files import sha256_file, write_text
from pipeline.records import Dependency, StageResult
from pipeline.runner import StageRunner


class Answer(StageResult):
    value: int


def stage(calls: list[Path], value: int = 42, dependencies: tuple[Dependency, ...] = ()):
    def action(folder: Path) -> Answer:
        calls.append(folder)
        write_text(folder / "answer.txt", str(value))
        return Answer(value=value, dependencies=dependencies)

    return action


def test_a_finished_stage_is_taken_from_the_cache(tmp_path: Path) -> None:
    calls: list[Path] = []
    first = StageRunner(tmp_path).run("answer", Answer, {"question": 1}, stage(calls))
    again = StageRunner(tmp_path).run("answer", Answer, {"question": 1}, stage(calls))
    assert len(calls) == 1
    assert not first.cached
    assert again.cached
    assert again.result.value == 42
    assert (again.result.folder / "answer.txt").read_text() == "42"
    assert again.files == {"answer.txt": sha256_file(again.result.folder / "answer.txt")}


def test_other_inputs_run_the_stage_again(tmp_path: Path) -> None:
    calls: list[Path] = []
    runner = StageRunner(tmp_path)
    assert (
        runner.run("answer", Answer, {"question": 1}, stage(calls)).key
        != runner.run("answer", Answer, {"question": 2}, stage(calls)).key
    )
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["change", "remove", "record"])
def test_a_damaged_result_is_made_again(tmp_path: Path, damage: str) -> None:
    calls: list[Path] = []
    done = StageRunner(tmp_path).run("answer", Answer, {}, stage(calls))
    file = done.result.folder / "answer.txt"
    if damage == "change":
        file.write_text("41")
    elif damage == "remove":
        file.unlink()
    else:
        (done.result.folder / "stage.json").write_text("{")
    again = StageRunner(tmp_path).run("answer", Answer, {}, stage(calls))
    assert not again.cached
    assert (again.result.folder / "answer.txt").read_text() == "42"


def test_a_changed_dependency_runs_the_stage_again(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text("a")
    needs = (Dependency(path=str(script), sha256=sha256_file(script)),)
    calls: list[Path] = []
    runner = StageRunner(tmp_path / "work")
    runner.run("answer", Answer, {}, stage(calls, dependencies=needs))
    assert runner.run("answer", Answer, {}, stage(calls)).cached
    script.write_text("b")
    assert not runner.run("answer", Answer, {}, stage(calls)).cached


def test_a_failed_stage_leaves_nothing_finished(tmp_path: Path) -> None:
    def fail(folder: Path) -> Answer:
        write_text(folder / "half.txt", "x")
        raise InputError("no")

    runner = StageRunner(tmp_path)
    with pytest.raises(InputError):
        runner.run("answer", Answer, {}, fail)
    calls: list[Path] = []
    done = runner.run("answer", Answer, {}, stage(calls))
    assert calls
    assert set(done.files) == {"answer.txt"}


def test_a_resuming_stage_gets_its_own_partial_files_back(tmp_path: Path) -> None:
    def fail(folder: Path) -> Answer:
        write_text(folder / "checkpoint", "3")
        raise InputError("killed")

    runner = StageRunner(tmp_path)
    with pytest.raises(InputError):
        runner.run("answer", Answer, {}, fail, resumes=True)

    def resume(folder: Path) -> Answer:
        return Answer(value=int((folder / "checkpoint").read_text()))

    assert runner.run("answer", Answer, {}, resume, resumes=True).result.value == 3


def _refuse(folder: Path) -> Answer:
    write_text(folder / "half.txt", "x")
    raise InputError("no")


def test_work_that_fails_at_once_leaves_no_folder(tmp_path: Path) -> None:
    runner = StageRunner(tmp_path / "out" / "net" / ".work")
    with pytest.raises(InputError, match="no"), runner.locked():
        runner.run("answer", Answer, {}, _refuse)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="no"), runner.locked():
        raise InputError("no")
    assert not list((tmp_path / "out").iterdir()), "what was there before stays"


def test_what_finished_before_a_failure_stays(tmp_path: Path) -> None:
    runner = StageRunner(tmp_path / "out" / ".work")
    with runner.locked():
        done = runner.run("answer", Answer, {}, stage([]))
    with pytest.raises(InputError, match="no"), runner.locked():
        runner.run("next", Answer, {}, _refuse)
    assert {path.name for path in runner.work.iterdir()} == {"lock", done.result.folder.name}


def test_a_lock_that_its_holder_removes_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, removed = fcntl.flock, []

    def removing(handle: int, how: int) -> None:
        flock(handle, how)
        if not removed:
            removed.append((tmp_path / "lock").unlink())

    monkeypatch.setattr(fcntl, "flock", removing)
    with StageRunner(tmp_path).locked():
        assert removed
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def _slow(work: Path) -> None:
    def action(folder: Path) -> Answer:
        write_text(folder / "half.txt", "x")
        (work / "started").touch()
        time.sleep(60)
        return Answer(value=1)

    runner = StageRunner(work)
    with runner.locked():
        runner.run("answer", Answer, {}, action)


def test_kill_in_the_middle_and_lock(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_slow, args=(tmp_path,))
    child.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.02)
    runner = StageRunner(tmp_path)
    with pytest.raises(InputError, match=f"another build .process {child.pid}"), runner.locked():
        pass
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    calls: list[Path] = []
    with runner.locked():
        done = runner.run("answer", Answer, {}, stage(calls))
    assert not done.cached
    assert set(done.files) == {"answer.txt"}


def test_prune_keeps_only_what_was_used(tmp_path: Path) -> None:
    StageRunner(tmp_path).run("answer", Answer, {"old": 1}, stage([]))
    runner = StageRunner(tmp_path)
    used = runner.run("answer", Answer, {"new": 1}, stage([]))
    runner.prune()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [used.result.folder.name]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where no folder can be made")
def test_a_place_without_folders_is_explained() -> None:
    lock = StageRunner(Path("/proc/nowhere")).locked()
    with pytest.raises(InputError, match="cannot make the folder /proc/nowhere"), lock:
        pass
