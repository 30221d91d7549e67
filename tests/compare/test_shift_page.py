"""The page of `scripts/experiments/shift_noise.py`: a new run keeps what was written by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "experiments"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("shift_noise", FOLDER / "shift_noise.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "shift_noise", module)
    spec.loader.exec_module(module)
    return module


def test_what_is_written_by_hand_stays(script: ModuleType) -> None:
    first = script.page_text("# measured 1\n", "")
    assert first == f"# measured 1\n\n{script.BY_HAND}\n"
    edited = first + "\n## By hand\n\nWords.\n"
    second = script.page_text("# measured 2\n", edited)
    assert second == edited.replace("# measured 1", "# measured 2")


def test_the_page_in_the_repository_has_the_mark(script: ModuleType) -> None:
    assert (FOLDER / "results-shift.md").read_text().count(script.BY_HAND) == 1


def test_another_page_is_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Something else\n")
    found = CliRunner().invoke(script.main, ["--data", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert found.exit_code == 1
    assert "is no page of this script" in found.output
    assert (tmp_path / "page.md").read_text() == "# Something else\n"
