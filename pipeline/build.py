"""Stage 5, build: the Q/DQ graph becomes an engine, one per target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.core.files import write_text
from pipeline.core.progress import SILENT
from pipeline.engine.builder import build_engine
from pipeline.engine.records import BUILD_FILE, DEFAULT_OPTIONS, PLAN_FILE, BuildOptions, EngineRecord
from pipeline.records import StageResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config import Profile
    from pipeline.core.progress import Progress

__all__ = ["BUILD_FILE", "PLAN_FILE", "BuildResult", "run"]

_ABSENT = {"engine", "dependencies"}


class BuildResult(StageResult):
    """One target's build."""

    target: str
    engine: EngineRecord | None
    """None for target ``onnx``: the Q/DQ graph itself is the deliverable."""
    onnxruntime: str | None = None
    """Target ``onnx``: the version that loaded the graph."""

    @property
    def plan(self) -> Path | None:
        return None if self.engine is None else self.folder / PLAN_FILE


def run(
    model_int8: Path,
    *,
    target: str,
    profiles: Sequence[Profile],
    folder: Path,
    options: BuildOptions = DEFAULT_OPTIONS,
    timeout_s: float | None = None,
    progress: Progress = SILENT,
) -> BuildResult:
    """Build ``model_int8`` for ``target`` (rtx, tensorrt or onnx).

    Writes ``folder/model.plan`` and ``folder/build.json`` (target onnx: the record alone, after onnxruntime has loaded
    the graph).

    Raises:
        InputError: the target cannot take the model, the profiles or the options.
        ToolError: the tool underneath failed or crashed.
    """
    if target == "onnx":
        result = BuildResult(target=target, engine=None, onnxruntime=_check_onnx(model_int8))
    elif target in ("rtx", "tensorrt"):
        engine = build_engine(
            model_int8,
            target=target,
            profiles=profiles,
            plan_path=folder / PLAN_FILE,
            options=options,
            timeout_s=timeout_s,
            progress=progress,
        )
        for message in engine.messages:
            if message.severity == "warning":
                say = progress.warn if message.source == "check" else progress.note
                say(f"{target}: {message.text}")
        result = BuildResult(target=target, engine=engine)
    else:
        raise InputError(f"unknown target {target!r}; known: rtx, tensorrt, onnx")
    text = (
        result.engine.model_dump_json(indent=2) if result.engine else result.model_dump_json(indent=2, exclude=_ABSENT)
    )
    write_text(folder / BUILD_FILE, text + "\n")
    return result.at(folder)


def _check_onnx(model: Path) -> str:
    """Load the graph in onnxruntime; its version."""
    import onnxruntime

    from pipeline.core.ort import make_session

    make_session(model, optimise=False)
    return str(onnxruntime.__version__)
