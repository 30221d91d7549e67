"""Does the engine, on the card it serves on, use the scales of its artifact and give the recorded outputs?

Needs numpy, pydantic and TensorRT/PyCUDA alone. An engine keeps its INT8 tensors to itself, and its inspector does not
tell their scales; what can be seen are its outputs. So the scales are measured on a *probe*: an engine built on the
same card from the same Q/DQ graph that returns the output of every DequantizeLinear (see
:mod:`pipeline.engine.marking`). Their values are multiples of the scale that TensorRT took from the graph. The probe is
built once and kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.artifact import INT8_MODEL, SAMPLES, Artifact
from pipeline.consistency.context import QuantContext, TensorContext
from pipeline.consistency.graph import visible_tensors
from pipeline.consistency.levels import measure_scale
from pipeline.consistency.loading import context_of_artifact
from pipeline.core.errors import InputError, ToolError
from pipeline.core.files import sha256_file, write_text
from pipeline.core.progress import SILENT
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.core.progress import Progress

__all__ = [
    "DEFAULT_RTOL",
    "DeviceCheck",
    "OutputCheck",
    "ScaleCheck",
    "build_probe",
    "check_on_device",
    "check_outputs",
    "check_probe",
    "check_scales",
    "device_text",
]

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]

DEFAULT_RTOL = 1e-5
"""Largest relative distance of a measured scale from the artifact's."""
_OUTPUT_FLOOR = 0.02
"""An output may always differ by this relative L2 error from the recorded INT8 one. TensorRT rounds the same values in
another order than onnxruntime, which moves some of them to the neighbouring INT8 level."""


class ScaleCheck(Record):
    """One quantised tensor on the device."""

    tensor: str
    expected: float
    measured: float | None
    relative: float | None
    """|measured - expected| / expected."""
    residual: float
    """Largest distance of a value from a multiple of the measured scale, in scales."""
    levels: int
    """Distinct magnitudes seen."""
    verdict: str
    """ok; other scale; not quantised (its values are on no grid); undetermined (too few levels in these samples)."""


class OutputCheck(Record):
    """One output of the engine against the recorded outputs of the Q/DQ graph and of the float model."""

    output: str
    relative_l2: float
    """|engine - recorded INT8| / |recorded INT8|; infinity where the shapes differ or a value is not finite."""
    allowed: float
    passed: bool


class DeviceCheck(Record):
    """What the device shows."""

    target: str
    device: str
    samples: int
    rtol: float
    outputs: tuple[OutputCheck, ...]
    scales: tuple[ScaleCheck, ...] = ()
    """Empty without a probe."""
    hidden: tuple[str, ...] = ()
    """Quantised tensors that the engine does not show."""

    @property
    def wrong(self) -> tuple[ScaleCheck, ...]:
        return tuple(check for check in self.scales if check.verdict in ("other scale", "not quantised"))

    @property
    def determined(self) -> tuple[ScaleCheck, ...]:
        return tuple(check for check in self.scales if check.verdict != "undetermined")

    @property
    def passed(self) -> bool:
        return not self.wrong and all(output.passed for output in self.outputs)

    @property
    def context(self) -> QuantContext:
        """The measured scales, for comparison with other devices."""
        return QuantContext(
            label=f"{self.target} on {self.device}",
            tensors=tuple(
                TensorContext(name=check.tensor, scales=(check.measured,))
                for check in self.determined
                if check.measured is not None
            ),
        )


def check_scales(
    shown: Mapping[str, np.ndarray], expected: QuantContext, *, rtol: float = DEFAULT_RTOL
) -> tuple[ScaleCheck, ...]:
    """Measure each tensor in ``shown`` (name of the quantised tensor to its dequantised values) and compare.

    Raises:
        InputError: a tensor of ``shown`` is not quantised per tensor in ``expected``.
    """
    known = {tensor.name: tensor for tensor in expected.tensors if tensor.kind == "activation"}
    checks = []
    for name, values in shown.items():
        if name not in known or len(known[name].scales) != 1:
            raise InputError(f"{expected.label} has no per-tensor scale of {name!r}, which the engine shows")
        scale = known[name].scales[0]
        found = measure_scale(values)
        relative = None if found.scale is None else abs(found.scale - scale) / scale
        if found.scale is None:
            verdict = "not quantised" if found.residual else "undetermined"
        elif relative is not None and relative <= rtol:
            verdict = "ok"
        elif not found.determined and _is_multiple(found.scale, scale, rtol):
            verdict = "undetermined"
        else:
            verdict = "other scale"
        checks.append(
            ScaleCheck(
                tensor=name,
                expected=scale,
                measured=found.scale,
                relative=relative,
                residual=found.residual,
                levels=found.levels,
                verdict=verdict,
            )
        )
    return tuple(checks)


def _is_multiple(measured: float, scale: float, rtol: float) -> bool:
    steps = round(measured / scale)
    return steps >= 1 and abs(measured - steps * scale) <= rtol * measured


def check_outputs(outputs: Mapping[str, np.ndarray], recorded: Mapping[str, np.ndarray]) -> tuple[OutputCheck, ...]:
    """Compare an engine's outputs with the recorded ones of an artifact (``int8/NAME`` and ``fp32/NAME``).

    An output may differ from the recorded INT8 one as much as that differs from FP32, and always by 2 %.

    Raises:
        InputError: an output is not recorded.
    """
    checks = []
    for name, values in outputs.items():
        if f"int8/{name}" not in recorded:
            raise InputError(f"the artifact has no recorded output {name!r}", remedy="build the artifact again")
        int8, fp32 = recorded[f"int8/{name}"], recorded[f"fp32/{name}"]
        distance = _relative_l2(values, int8)
        allowed = max(_OUTPUT_FLOOR, _relative_l2(int8, fp32))
        checks.append(OutputCheck(output=name, relative_l2=distance, allowed=allowed, passed=distance <= allowed))
    return tuple(checks)


def _relative_l2(values: np.ndarray, reference: np.ndarray) -> float:
    if values.shape != reference.shape:
        return float("inf")
    a, b = values.astype(np.float64), reference.astype(np.float64)
    norm = float(np.linalg.norm(b))
    distance = float(np.linalg.norm(a - b))
    if not np.isfinite(distance):
        return float("inf")
    return distance / norm if norm else distance


def build_probe(artifact: Artifact, *, target: str, plan: Path, progress: Progress = SILENT) -> None:
    """Build the probe of ``artifact`` at ``plan``.

    Raises:
        ToolError: TensorRT builds none, in whichever way the tensors are returned; its words about the last one.
    """
    from pipeline.config import Profile
    from pipeline.engine.builder import build_engine
    from pipeline.engine.marking import HOW
    from pipeline.engine.records import BuildOptions

    model = artifact.path(INT8_MODEL)
    shown = {output.name for output in artifact.manifest.outputs}
    for how in HOW:
        options = BuildOptions(
            mark_outputs=tuple(name for name in visible_tensors(model).values() if name not in shown),
            mark_how=how,
            optimization_level=0,  # scales do not depend on the choice of kernels
        )
        try:
            record = build_engine(
                model,
                target=target,
                profiles=[Profile.parse(text) for text in artifact.manifest.profiles],
                plan_path=plan,
                options=options,
                progress=progress,
            )
        except ToolError as error:
            if how == HOW[-1]:
                raise
            progress.warn(f"no probe with tensors {how}: {error.message.splitlines()[-1].strip()}")
        else:
            write_text(_record_path(plan), record.model_dump_json(indent=2) + "\n")
            return


def _record_path(plan: Path) -> Path:
    return plan.with_suffix(".json")


def check_on_device(
    folder: Path,
    *,
    target: str = "tensorrt",
    probe: Path | None = None,
    rtol: float = DEFAULT_RTOL,
    progress: Progress = SILENT,
) -> DeviceCheck:
    """Run the engine of the artifact in ``folder`` on its sample inputs, and its probe if one is named.

    Args:
        probe: plan of the probe; built there when it does not exist or was made from another graph. None: the outputs
            alone are checked.
        rtol: for the scales.

    Raises:
        InputError: no artifact, no engine for ``target``, or one that cannot run here.
        ToolError: TensorRT fails.
    """
    from pipeline.engine.runner import Runner

    artifact = Artifact.open(folder)
    recorded = _samples(artifact)
    with Runner.from_artifact(folder, target=target) as engine:
        outputs = check_outputs(engine(engine.taken(_feeds(recorded))), recorded)
    scales: tuple[ScaleCheck, ...] = ()
    if probe is not None:
        scales = check_probe(folder, target=target, probe=probe, rtol=rtol, progress=progress).scales
    return _check(artifact, target, recorded, rtol, outputs, scales)


def check_probe(
    folder: Path, *, target: str = "tensorrt", probe: Path, rtol: float = DEFAULT_RTOL, progress: Progress = SILENT
) -> DeviceCheck:
    """:func:`check_on_device` with the probe alone, for an artifact that has no engine for ``target`` yet."""
    from pipeline.engine.marking import returned
    from pipeline.engine.records import EngineRecord
    from pipeline.engine.runner import Runner

    artifact = Artifact.open(folder)
    recorded = _samples(artifact)
    if not _usable(probe, artifact):
        with progress.task("building the probe engine", total=None, unit="steps"):
            build_probe(artifact, target=target, plan=probe, progress=progress)
        _source_path(probe).write_text(sha256_file(artifact.path(INT8_MODEL)))
    record = EngineRecord.model_validate_json(_record_path(probe).read_bytes())
    with Runner(probe, target=target, record=record) as engine:
        results = engine(engine.taken(_feeds(recorded)))
    names = visible_tensors(artifact.path(INT8_MODEL))
    found = {tensor: returned(results, name) for tensor, name in names.items()}
    shown = {tensor: values for tensor, values in found.items() if values is not None}
    own = {output.name: results[output.name] for output in artifact.manifest.outputs if output.name in results}
    scales = check_scales(shown, context_of_artifact(folder), rtol=rtol)
    return _check(artifact, target, recorded, rtol, check_outputs(own, recorded), scales)


def _check(
    artifact: Artifact,
    target: str,
    recorded: Arrays,
    rtol: float,
    outputs: tuple[OutputCheck, ...],
    scales: tuple[ScaleCheck, ...],
) -> DeviceCheck:
    from pipeline.engine.device import describe_device

    measured = {check.tensor for check in scales}
    device = describe_device()
    return DeviceCheck(
        target=target,
        device=device.name if device is not None else "no card",
        samples=len(recorded["samples"]),
        rtol=rtol,
        outputs=outputs,
        scales=scales,
        hidden=tuple(name for name in visible_tensors(artifact.path(INT8_MODEL)) if name not in measured),
    )


def _feeds(recorded: Arrays) -> Arrays:
    return {name.removeprefix("inputs/"): values for name, values in recorded.items() if name.startswith("inputs/")}


def _source_path(probe: Path) -> Path:
    return probe.with_suffix(".source")


def _usable(probe: Path, artifact: Artifact) -> bool:
    """Whether the probe at hand was made from this artifact's graph."""
    source = _source_path(probe)
    made_from = source.read_text().strip() if source.is_file() else ""
    return probe.is_file() and _record_path(probe).is_file() and made_from == sha256_file(artifact.path(INT8_MODEL))


def _samples(artifact: Artifact) -> Arrays:
    path = artifact.path(SAMPLES)
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}", remedy="restore it, or build the artifact again") from error


def device_text(check: DeviceCheck, *, most: int = 20) -> str:
    """The check in lines for a terminal."""
    lines = [f"{check.target} on {check.device}, {check.samples} samples"]
    for output in check.outputs:
        verdict = "ok" if output.passed else "WRONG"
        lines.append(
            f"output {output.output}: relative L2 {output.relative_l2:.4g} to the recorded INT8 output "
            f"(allowed {output.allowed:.4g}): {verdict}"
        )
    if check.scales:
        told = check.determined
        right = [scale for scale in told if scale.verdict == "ok"]
        worst = max((scale.relative for scale in right if scale.relative is not None), default=0.0)
        lines.append(
            f"scales: {len(right)} of {len(told)} visible tensors within {check.rtol:g} of the artifact, "
            f"largest difference {worst:.2g}"
            + (
                f"; {len(check.scales) - len(told)} have too few levels to tell"
                if len(told) < len(check.scales)
                else ""
            )
        )
        for scale in check.wrong[:most]:
            found = "values on no grid" if scale.measured is None else f"measured {scale.measured:.9g}"
            lines.append(f"  {scale.tensor}: {scale.verdict}: {found}, the artifact has {scale.expected:.9g}")
        if len(check.wrong) > most:
            lines.append(f"  and {len(check.wrong) - most} more")
    if check.hidden:
        remedy = "" if check.scales else "; --probe PLAN builds an engine that shows them"
        lines.append(f"{len(check.hidden)} quantised tensors are not visible in this engine{remedy}")
    return "\n".join(lines) + "\n"
