"""Compile an artifact's Q/DQ graph on the machine that serves, check the engine, and add it to the artifact.

Needs numpy, pydantic, TensorRT and PyCUDA only. What the engine must reproduce is in the artifact: ``samples.npz`` has
a few inputs with the outputs that the Q/DQ graph gave in onnxruntime.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.artifact import INT8_MODEL, SAMPLES, Artifact, engine_folder
from pipeline.config import Profile
from pipeline.core.errors import CheckFailed, InputError, QuantizeError
from pipeline.core.files import explain_os_errors, fsync_dir, sha256_file, write_text
from pipeline.core.progress import SILENT
from pipeline.engine.builder import build_engine
from pipeline.engine.compat import MODULES
from pipeline.engine.profiles import covers, nearest_allowed
from pipeline.engine.records import BUILD_FILE, DEFAULT_OPTIONS, PLAN_FILE, BuildOptions, EngineRecord
from pipeline.engine.runner import Runner
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.core.progress import Progress

__all__ = ["ArtifactBuild", "EngineCheck", "build_from_artifact", "check_outputs", "fit_samples"]

_TOLERANCE = 0.1
_INPUTS, _EXPECTED = "inputs/", "int8/"


class EngineCheck(Record):
    """The engine's outputs against those recorded in the artifact."""

    relative_l2: dict[str, float]
    """Per output: ||engine - recorded|| / ||recorded|| over all samples."""
    agreement: dict[str, float]
    """Per output: share of places along all but the last axis whose arg-max is the same."""
    samples: int


class ArtifactBuild(Record):
    """What :func:`build_from_artifact` did."""

    target: str
    engine: EngineRecord
    check: EngineCheck | None
    """None: the engine cannot run here, :attr:`unchecked` says why."""
    unchecked: str = ""


def build_from_artifact(
    folder: Path,
    *,
    target: str = "tensorrt",
    options: BuildOptions = DEFAULT_OPTIONS,
    profiles: Sequence[Profile] = (),
    tolerance: float = _TOLERANCE,
    timeout_s: float | None = None,
    progress: Progress = SILENT,
) -> ArtifactBuild:
    """Build ``folder``'s Q/DQ graph for ``target``, check it, put it into ``engines/<target>`` and into the manifest.

    An earlier engine of that target is replaced, and only once the new one has passed.

    Args:
        profiles: none: those of the artifact.
        tolerance: largest relative L2 difference of an output from the recorded one. Kernels round differently, which
            moves single values by a quantisation step; a wrong scale or a lost layer gives about 1.

    Raises:
        InputError: no artifact, or as :func:`pipeline.engine.builder.build_engine`.
        CheckFailed: the graph or the samples are not what the manifest says, or the engine's outputs differ.
        ToolError: TensorRT failed.
    """
    if target not in MODULES:
        raise InputError(
            f"there is no engine to build for the target {target}: it is the Q/DQ graph, {INT8_MODEL} in the artifact",
            remedy=f"known targets with an engine: {', '.join(MODULES)}",
        )
    artifact = Artifact.open(folder)
    model, samples = _unchanged(artifact, INT8_MODEL), _unchanged(artifact, SAMPLES)
    for name in artifact.manifest.files:
        if name.startswith(f"{INT8_MODEL}."):  # weights in a file of their own
            _unchanged(artifact, name)
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
        _place(artifact, partial, final, target, record, check)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ArtifactBuild(target=target, engine=record, check=check, unchecked=reason)


def _unchanged(artifact: Artifact, name: str) -> Path:
    path = artifact.path(name)
    if sha256_file(path) != artifact.manifest.files[name].sha256:
        raise CheckFailed(
            f"{path} is not the file that the manifest lists", remedy="copy the artifact again, or build it again"
        )
    return path


def _cannot_run(record: EngineRecord) -> str:
    """Why an RTX engine cannot run on this machine; empty when it can."""
    from pipeline.engine.compat import load_api
    from pipeline.engine.device import describe_device
    from pipeline.engine.loading import check_engine

    try:
        check_engine(record, load_api("rtx"), describe_device())
    except QuantizeError as error:
        return error.message
    return ""


def _check(plan: Path, record: EngineRecord, samples: Path, tolerance: float) -> EngineCheck:
    with np.load(samples, allow_pickle=False) as stored:
        feeds = {name.removeprefix(_INPUTS): stored[name] for name in stored.files if name.startswith(_INPUTS)}
        expected = {name.removeprefix(_EXPECTED): stored[name] for name in stored.files if name.startswith(_EXPECTED)}
    with Runner(plan, target=record.target, record=record) as runner:
        fitted, kept = fit_samples(feeds, runner.profiles)
        outputs = runner(fitted)
    return check_outputs({name: values[:kept] for name, values in outputs.items()}, expected, kept, tolerance)


def fit_samples(feeds: Mapping[str, np.ndarray], profiles: Sequence[Profile]) -> tuple[dict[str, np.ndarray], int]:
    """Samples in a batch that some profile allows: repeated where that is larger, cut where it is smaller.

    Returns:
        The feeds, and how many leading samples are to be compared.

    Raises:
        CheckFailed: no profile allows the samples' own shapes at any batch.
    """
    shapes = {name: values.shape for name, values in feeds.items()}
    count = next(iter(shapes.values()))[0] if shapes else 0
    if any(covers(profile, shapes) for profile in profiles):
        return dict(feeds), count
    _, nearest = nearest_allowed(profiles, shapes)
    batch = next(iter(nearest.values()))[0]
    wanted = {name: (batch, *shape[1:]) for name, shape in shapes.items()}
    if not any(covers(profile, wanted) for profile in profiles):
        raise CheckFailed(
            f"no profile allows the recorded samples: {', '.join(f'{n} {s}' for n, s in shapes.items())}",
            remedy="build with a profile that covers the shapes of the data the artifact was verified on",
        )
    return {name: np.resize(values, wanted[name]) for name, values in feeds.items()}, min(count, batch)


def check_outputs(
    outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], samples: int, tolerance: float
) -> EngineCheck:
    """Compare floating-point outputs with the recorded ones.

    Raises:
        CheckFailed: an output is missing, has another shape, is not finite, or is further away than ``tolerance``.
    """
    distances, agreement = {}, {}
    for name, recorded in expected.items():
        wanted = recorded[:samples].astype(np.float64)
        if name not in outputs:
            raise CheckFailed(f"the engine has no output {name!r}; it has {', '.join(outputs)}")
        found = outputs[name].astype(np.float64)
        if found.shape != wanted.shape:
            raise CheckFailed(f"output {name!r} has shape {found.shape}, recorded is {wanted.shape}")
        if not np.all(np.isfinite(found)):
            raise CheckFailed(f"output {name!r} of the engine has NaN or infinity")
        norm = float(np.linalg.norm(wanted))
        distances[name] = float(np.linalg.norm(found - wanted)) / norm if norm else float(np.linalg.norm(found))
        if wanted.ndim:
            agreement[name] = float(np.mean(found.argmax(-1) == wanted.argmax(-1)))
        if distances[name] > tolerance:
            raise CheckFailed(
                f"output {name!r} of the engine differs from the recorded one by {distances[name]:.3g} (relative L2), "
                f"allowed is {tolerance:g}",
                remedy="the engine was not added; build without FP16, or look for the layer with `capture_outputs`",
            )
    return EngineCheck(relative_l2=distances, agreement=agreement, samples=samples)


def _place(
    artifact: Artifact, partial: Path, final: Path, target: str, record: EngineRecord, check: EngineCheck | None
) -> None:
    """Move the new engine in, then write the manifest: in between it lists files that do not match."""
    old = set(artifact.manifest.files)
    with explain_os_errors(final):
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        fsync_dir(final.parent)
    place = engine_folder(target)
    names = tuple(f"{place}/{path.name}" for path in sorted(final.iterdir()))
    entry = record.manifest_entry() | ({"check": check.model_dump(mode="json")} if check else {})
    gone = {name for name in old if name.startswith(f"{place}/")} - set(names)
    kept = {name: value for name, value in artifact.manifest.files.items() if name not in gone}
    current = Artifact(artifact.folder, artifact.manifest.model_copy(update={"files": kept}))
    current.updated(files=names, targets={**artifact.manifest.targets, target: entry})
