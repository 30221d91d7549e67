"""The error report of an artifact, made anew: measure, compare, write."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifact import INT8_MODEL, OTHER_SAMPLES, REPORTS, SAMPLES, STAGED, WORK, Artifact
from pipeline.core.errors import InputError
from pipeline.core.files import check_can_make, explain_os_errors, fsync_dir
from pipeline.core.progress import SILENT, Progress
from pipeline.errors.engine_errors import FUSED, INT8_MARKED, SHOWN
from pipeline.errors.figures import OutputFigures, layers_remark
from pipeline.errors.measure import measure
from pipeline.errors.opening import calibrated_ranges, choose_data, open_models
from pipeline.errors.qat import compare_with_qat
from pipeline.errors.recorded import RecordedReading
from pipeline.errors.recording import int8_sha256
from pipeline.records import Record
from pipeline.reports.content import ReportContent
from pipeline.reports.tables import layer_summaries, operator_rows, worst_first
from pipeline.reports.write import write_reports
from pipeline.runner import StageRunner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.config import Preprocess
    from pipeline.engine.capture import Recorded
    from pipeline.errors.capture import EngineSource
    from pipeline.errors.measure import Measurement
    from pipeline.errors.opening import Opened
    from pipeline.errors.qat import QatComparison

__all__ = ["ErrorReport", "report_artifact"]

_WORST = 10


class ErrorReport(Record):
    """What :func:`report_artifact` found and wrote."""

    folder: Path
    files: tuple[str, ...]
    data: str
    samples: int
    layers: int
    engine: str
    """Which engine was read; empty without one."""
    recorded: str
    """In which way, such as ``marked INT8 tensors, doubled, level 0``, see :class:`pipeline.engine.ways.Way`; empty
    without an engine, or where a file does not say."""
    engine_layers: dict[str, int]
    """How many layers it shows in which way: ``shown``, ``shown in INT8``, ``fused`` ..."""
    engine_hidden: dict[str, int]
    """Why the others are not shown, and how many layers each reason holds for."""
    outputs: dict[str, OutputFigures]
    """Graph output to its figures, as in ``VerifyResult``."""
    almost_zero: dict[str, int]
    """Layer (its tensor) to the number of samples in which FP32 is almost zero there, where there are any: the relative
    figures are without them."""
    top1_fp32: float | None
    top1_int8: float | None
    operators: tuple[dict[str, Any], ...]
    worst: tuple[dict[str, Any], ...]
    comparison: tuple[str, ...] = ()
    """QAT against PTQ, one sentence per figure."""


def report_artifact(
    folder: Path,
    *,
    data: str | None = None,
    preprocess: Preprocess | None = None,
    samples: int | None = None,
    batch_size: int = 8,
    labels: Path | None = None,
    engine: str | None = None,
    engine_tensors: Path | None = None,
    engine_capture: Recorded | None = None,
    qat: Path | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> ErrorReport:
    """Measure every quantised layer of an artifact and write the reports.

    Args:
        data: as for a build; None: the samples that the build verified on, where its files are still as they were, and
            otherwise, or with an engine, those kept in the artifact.
        engine: target whose engine is built and read too (needs its GPU).
        engine_tensors: ``.npz`` with an engine's tensors recorded elsewhere, in place of ``engine``.
        engine_capture: with ``engine``: read debug tensors or marked ones; None: debug tensors where there are any.
        qat: a Q/DQ graph of the same network from quantisation-aware training, to compare with.
        out: folder for the files; None: in the artifact, whose manifest is updated: ``reports`` where the samples are
            those that the build verified on, so that its figures and its summary are of the same, or else
            ``reports/other-samples``.

    Raises:
        InputError, CheckFailed, ToolError: as the parts say.
    """
    opened = open_models(folder)
    artifact = opened.artifact
    if out is None:
        for place in (WORK, REPORTS):
            check_can_make(artifact.folder / place)  # before the work
    chosen = choose_data(
        artifact,
        data,
        preprocess=preprocess,
        samples=samples,
        batch_size=batch_size,
        labels=labels,
        recorded=engine is not None or engine_tensors is not None,
        progress=progress,
    )
    with ExitStack() as stack:
        samples_kept = artifact.path(SAMPLES) if data is None else None
        reading = _engine_reading(opened, engine, engine_tensors, engine_capture, samples_kept, stack, progress)
        found = measure(
            opened.fp32,
            opened.int8,
            opened.layers,
            chosen.read(),
            engine=reading,
            calibrated=calibrated_ranges(artifact, opened.plan, progress=progress),
            labels=chosen.labels,
            progress=progress,
            total=chosen.total,
        )
    compared = None if qat is None else compare_with_qat(opened, found.table, qat, chosen, progress=progress)
    inside = REPORTS if chosen.verified else OTHER_SAMPLES
    target = out if out is not None else artifact.folder / inside
    content = _content(artifact, found, chosen.text, compared)
    if out is not None:
        files = write_reports(target, found.table, content)
    else:
        files = _renew(artifact.folder, inside, found, content)
        if not chosen.verified:
            count = artifact.manifest.data.verification_samples
            progress.note(f"the report on the {count} samples that the build verified on stays in {REPORTS}")
    return _summary(found, target, files, chosen.text, compared)


def _renew(folder: Path, inside: str, found: Measurement, content: ReportContent) -> tuple[str, ...]:
    """Write the reports beside the artifact, list them in its manifest, and only then put them into it.

    One that is cut off leaves the old report, or the new one of which some files are to be moved; the next one does it.

    Raises:
        InputError: a build or another report is at work in it, or there is no room.
    """
    with StageRunner(folder / WORK).locked():
        _place(Artifact.open(folder))
        files = write_reports(folder / STAGED / inside, found.table, content)
        # Read anew: an engine may have been added during this measurement.
        _place(_listed(Artifact.open(folder), inside, files, found))
    return files


def _place(artifact: Artifact) -> None:
    """Move what is staged and listed into the artifact, and forget what else a report that was cut off has left."""
    staging = artifact.folder / STAGED
    for name in filter(artifact.staged, artifact.manifest.files):
        target = artifact.folder / name
        with explain_os_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(target)
        fsync_dir(target.parent)
    shutil.rmtree(staging, ignore_errors=True)


def _listed(artifact: Artifact, folder: str, files: Sequence[str], found: Measurement) -> Artifact:
    """The manifest: the files' hashes, and what the engine of the last report in ``folder`` was."""
    figures = dict(artifact.manifest.verification)
    if figures.get("engine", {}).get("report", REPORTS) == folder:
        figures.pop("engine", None)
    if found.table.engine_label:
        figures["engine"] = {
            "engine": found.table.engine_label,
            "recorded": found.table.engine_recorded,
            "layers": _engine_layers(found),
            "report": folder,
        }
    return artifact.updated(files=tuple(f"{folder}/{name}" for name in files), staged=True, verification=figures)


def _engine_layers(found: Measurement) -> dict[str, int]:
    if not found.table.engine_label:
        return {}
    kinds = [_kind(info.engine) for info in found.table.layers]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _hidden(found: Measurement) -> dict[str, int]:
    """Reasons for layers that are not shown and how many have them, the most frequent first."""
    states = [info.engine for info in found.table.layers if info.engine and not info.engine.startswith(SHOWN)]
    reasons = Counter(state.partition(": ")[2] for state in states)
    return dict(reasons.most_common())


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _kind(state: str) -> str:
    """A layer's state without the names and numbers in it."""
    if not state.startswith(SHOWN):
        return state.partition(":")[0]
    activation = " by the activation behind" if state.startswith(f"{SHOWN} as ") else ""
    return SHOWN + activation + (" in INT8" if ", in INT8" in state else "")


def _engine_reading(
    opened: Opened,
    engine: str | None,
    file: Path | None,
    recorded: Recorded | None,
    samples: Path | None,
    stack: ExitStack,
    progress: Progress,
) -> EngineSource | None:
    if engine is not None and file is not None:
        raise InputError("an engine is to be run and recorded tensors are given", remedy="leave one of the two out")
    if recorded is not None and engine is None:
        raise InputError("a way to capture an engine's tensors is named, and no engine", remedy="add --engine")
    if file is not None:
        return RecordedReading(
            file,
            layers=[layer.tensor for layer in opened.layers],
            known={*opened.fp32.tensors, *opened.int8.tensors},
            int8=int8_sha256(opened.artifact),
            warn=progress.warn,
        )
    if engine is None:
        return None
    from pipeline.config import Profile
    from pipeline.errors.engine import EngineReading

    profiles = tuple(Profile.parse(text) for text in opened.artifact.manifest.profiles)
    tensors = [layer.tensor for layer in opened.layers]
    model = opened.artifact.path(INT8_MODEL)
    reading = EngineReading(
        model, tensors, target=engine, samples=samples, profiles=profiles, recorded=recorded, progress=progress
    )
    return stack.enter_context(reading)


def _content(artifact: Artifact, found: Measurement, data: str, compared: QatComparison | None) -> ReportContent:
    """Title, facts, notes and further tables of the page."""
    manifest, calibration = artifact.manifest, artifact.manifest.calibration
    calibrator = str(calibration)
    samples = len(found.table.samples)
    notes = []
    if found.table.engine_label:
        notes += _engine_notes(found)
    if zeros := layers_remark(found.table.layers_almost_zero(), len(found.table.layers), samples):
        notes.append(zeros)
    if compared is not None:
        notes += compared.attribution.sentences()
    keys = ("relative_l2_mean", "relative_l2_max", "max_abs", "value_range", "cosine_mean", "agreement")
    outputs = {
        "title": "Outputs of the network",
        "text": "FP32 against the whole graph in INT8.",
        "columns": [
            "output",
            "relative L2",
            "worst sample",
            "largest absolute error",
            "range",
            "cosine",
            "arg-max agreement",
            "note",
        ],
        "rows": [
            [name, *(getattr(output, key) for key in keys), output.remark(samples)]
            for name, output in found.outputs.items()
        ],
    }
    return ReportContent(
        title=manifest.name,
        subtitle=f"{manifest.source.spec}, calibrated with {calibrator}; measured on {data}",
        facts=_facts(found),
        notes=notes,
        sections=[outputs] if compared is None else [outputs, *compared.sections()],
    )


def _engine_notes(found: Measurement) -> list[str]:
    table, count = found.table, len(found.table.layers)
    fused = sum(info.engine.startswith(FUSED) for info in table.layers)
    notes = [f"{table.engine_label}: {fused} of {count} layers are fused and cannot be shown."]
    if table.engine_recorded:
        notes[0] += f" Recorded: {table.engine_recorded}."
    if table.engine_recorded.startswith(INT8_MARKED):
        notes.append(
            "Marked INT8 tensors are what the next layers read: a layer, its activation and its quantiser stay one "
            "kernel, not always the one in the engine that serves. A layer whose result, or what the activation makes "
            "of it, is not quantised by itself has no such tensor, and a float one in its place would undo the fusion."
        )
        notes += [f"Not shown: {_layers(number)}, {reason}." for reason, number in _hidden(found).items()]
    if table.engine_recorded.startswith("marked outputs"):
        notes.append("Marked outputs undo fusions: the engine that serves may run other kernels around them.")
    if any(", in INT8" in info.engine for info in table.layers):
        notes.append(
            "Tensors that the engine has in INT8 are compared with FP32 as they are (their own rounding counts) and "
            "with the Q/DQ graph after the same quantisation."
        )
    if different := sum(info.engine.startswith("not compared") for info in table.layers):
        notes.append(f"{different} of {count} layers could not be compared, though they are not fused: see the layer.")
    return notes


def _facts(found: Measurement) -> list[tuple[str, str]]:
    facts = []
    if found.top_one is not None:
        facts.append(("Top-1 FP32", f"{100 * found.top_one.reference:.2f} %"))
        facts.append(("Top-1 INT8", f"{100 * found.top_one.other:.2f} %"))
    first = next((output for output in found.outputs.values() if output.max_abs is not None), None)
    if first is not None:
        if first.agreement is not None:
            facts.append(("Arg-max agreement", f"{100 * first.agreement:.2f} %"))
        if first.relative_l2_mean is not None and first.cosine_mean is not None:
            facts.append(("Output relative L2", f"{first.relative_l2_mean:.4f}"))
            facts.append(("Output cosine", f"{first.cosine_mean:.5f}"))
        facts.append(("Output largest absolute error", f"{first.max_abs:.4g} of {first.value_range:.4g}"))
    facts.append(("Quantised layers", str(len(found.table.layers))))
    facts.append(("Samples", str(len(found.table.samples))))
    if found.table.engine_recorded:
        facts.append(("Engine: recorded", found.table.engine_recorded))
    return facts


def _summary(
    found: Measurement, folder: Path, files: Sequence[str], data: str, compared: QatComparison | None
) -> ErrorReport:
    table = found.table
    worst = []
    for item in worst_first(layer_summaries(table), _WORST):
        layer = table.layers[item.order].layer
        worst.append({"layer": layer.tensor, "node": layer.node, "op": layer.op, **_finite(asdict(item))})
    return ErrorReport(
        folder=folder,
        files=tuple(files),
        data=data,
        samples=len(table.samples),
        layers=len(table.layers),
        engine=table.engine_label,
        recorded=table.engine_recorded,
        engine_layers=_engine_layers(found),
        engine_hidden=_hidden(found),
        outputs=found.outputs,
        almost_zero=table.layers_almost_zero(),
        top1_fp32=found.top_one.reference if found.top_one else None,
        top1_int8=found.top_one.other if found.top_one else None,
        operators=tuple(_finite(asdict(row)) for row in operator_rows(table)),
        worst=tuple(worst),
        comparison=() if compared is None else tuple(compared.attribution.sentences()),
    )


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """NaN and infinity, which JSON does not have, as None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
