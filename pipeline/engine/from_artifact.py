"""Compile an artifact's Q/DQ graph on the machine that serves, check the engine, and add it to the artifact.

Needs numpy, pydantic, TensorRT and PyCUDA only. What the engine must reproduce is in the artifact: ``samples.npz`` has
a few inputs with the outputs that the Q/DQ graph gave in onnxruntime.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact import FP32_MODEL, INT8_MODEL, SAMPLES, Artifact, engine_folder
from pipeline.config import Profile
from pipeline.core.errors import InputError, QuantizeError
from pipeline.core.files import explain_os_errors, fsync_dir, write_text
from pipeline.core.progress import SILENT
from pipeline.engine.builder import build_engine
from pipeline.engine.compat import MODULES
from pipeline.engine.fastest import Fastest, FloatBuild, require_fp16
from pipeline.engine.loading import check_engine, check_float_model
from pipeline.engine.recorded import OUTPUT_TOLERANCE, EngineCheck, Samples, check_engine_outputs
from pipeline.engine.records import BUILD_FILE, DEFAULT_OPTIONS, PLAN_FILE, BuildOptions, EngineRecord
from pipeline.engine.runner import Runner
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.core.progress import Progress

__all__ = ["ArtifactBuild", "build_from_artifact", "check_target"]

_COPY_AGAIN = "copy the artifact again, or build it again"


class ArtifactBuild(Record):
    """What :func:`build_from_artifact` did."""

    target: str
    engine: EngineRecord
    check: EngineCheck | None
    """None: the engine cannot run here, :attr:`unchecked` says why."""
    unchecked: str = ""
    fastest: Fastest | None = None
    """Which plan serves which profile; None where that was not asked for."""


def build_from_artifact(
    folder: Path,
    *,
    target: str = "tensorrt",
    options: BuildOptions = DEFAULT_OPTIONS,
    profiles: Sequence[Profile] = (),
    tolerance: float = OUTPUT_TOLERANCE,
    fastest: bool = False,
    rounds: int = 5,
    timeout_s: float | None = None,
    progress: Progress = SILENT,
) -> ArtifactBuild:
    """Build ``folder``'s Q/DQ graph for ``target``, check it, put it into ``engines/<target>`` and into the manifest.

    An earlier engine of that target is replaced, and only once the new one has passed.

    Args:
        profiles: none: those of the artifact.
        tolerance: largest relative L2 difference of an output from the recorded one.
        fastest: build an FP16 engine of the FP32 model too, measure both at each profile's optimum, and keep the float
            plan for the profiles where it is faster outside the noise. For their shapes the answers are FP16's
            (:func:`pipeline.engine.dispatch.serve` picks by shape).
        rounds: of that measurement; their spread is the noise.

    Raises:
        InputError: no artifact, or as :func:`pipeline.engine.builder.build_engine`; ``fastest`` where there is no
            FP16 engine to build.
        CheckFailed: the graphs or the samples are not what the manifest says, or an engine's outputs differ.
        ToolError: TensorRT failed.
    """
    check_target(target, fastest=fastest)
    artifact = Artifact.open(folder)
    if fastest:
        check_float_model(artifact, "--fastest")
    model, samples = (artifact.path(name, remedy=_COPY_AGAIN) for name in (INT8_MODEL, SAMPLES))
    float_model = artifact.path(FP32_MODEL, remedy=_COPY_AGAIN) if fastest else None
    chosen = tuple(profiles) or tuple(Profile.parse(text) for text in artifact.manifest.profiles)
    final = artifact.folder / engine_folder(target)
    partial = final.with_name(f".{target}.{os.getpid()}.partial")
    with explain_os_errors(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        record = build_engine(
            model,
            target=target,
            profiles=chosen,
            plan_path=partial / PLAN_FILE,
            options=options,
            timeout_s=timeout_s,
            progress=progress,
        )
        check, reason = None, ""
        if target == "rtx" and (reason := _cannot_run(record)):
            progress.warn(f"the engine was not checked: {reason}")
        else:
            check = _check(partial / PLAN_FILE, record, samples, tolerance)
        write_text(partial / BUILD_FILE, record.model_dump_json(indent=2) + "\n")
        choice = None
        if float_model is not None:
            choice = FloatBuild(
                float_model,
                samples,
                partial,
                record,
                half_inputs=artifact.manifest.half_inputs,
                half_outputs=artifact.manifest.half_outputs,
                rounds=rounds,
                timeout_s=timeout_s,
                progress=progress,
            ).run()
        done = ArtifactBuild(target=target, engine=record, check=check, unchecked=reason, fastest=choice)
        _place(artifact, partial, final, done)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return done


def check_target(target: str, *, fastest: bool = False) -> None:
    """Whether there is an engine to build for ``target``, and with ``fastest`` an FP16 one beside it.

    Raises:
        InputError: there is none.
    """
    if target not in MODULES:
        raise InputError(
            f"there is no engine to build for the target {target}: it is the Q/DQ graph, {INT8_MODEL} in the artifact",
            remedy=f"known targets with an engine: {', '.join(MODULES)}",
        )
    if fastest:
        require_fp16(target)


def _cannot_run(record: EngineRecord) -> str:
    """Why an RTX engine cannot run on this machine; empty when it can."""
    from pipeline.engine.compat import load_api
    from pipeline.engine.device import describe_device

    try:
        check_engine(record, load_api("rtx"), describe_device())
    except QuantizeError as error:
        return error.message
    return ""


def _check(plan: Path, record: EngineRecord, samples: Path, tolerance: float) -> EngineCheck:
    recorded = Samples.read(samples, "int8")
    with Runner(plan, target=record.target, record=record) as runner:
        return check_engine_outputs(runner, recorded, tolerance)


def _place(artifact: Artifact, partial: Path, final: Path, done: ArtifactBuild) -> None:
    """Move the new engine in, then write the manifest: in between it lists files that do not match."""
    old = set(artifact.manifest.files)
    with explain_os_errors(final):
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        fsync_dir(final.parent)
    place = engine_folder(done.target)
    names = tuple(f"{place}/{path.name}" for path in sorted(final.iterdir()))
    entry = done.engine.manifest_entry()
    entry |= {"check": done.check.model_dump(mode="json")} if done.check else {}
    entry |= {"fastest": done.fastest.model_dump(mode="json")} if done.fastest else {}
    gone = {name for name in old if name.startswith(f"{place}/")} - set(names)
    kept = {name: value for name, value in artifact.manifest.files.items() if name not in gone}
    current = Artifact(artifact.folder, artifact.manifest.model_copy(update={"files": kept}))
    current.updated(files=names, targets={**artifact.manifest.targets, done.target: entry})
