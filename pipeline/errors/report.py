"""The error report of an artifact, made anew: measure, compare, write."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifact import INT8_MODEL
from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT, Progress
from pipeline.errors.capture import RecordedReading
from pipeline.errors.measure import measure
from pipeline.errors.opening import calibrated_ranges, choose_data, open_models
from pipeline.errors.qat import compare_with_qat
from pipeline.records import Record
from pipeline.reports.content import ReportContent
from pipeline.reports.tables import layer_summaries, operator_rows, worst_first
from pipeline.reports.write import write_reports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.artifact import Artifact
    from pipeline.config import Preprocess
    from pipeline.errors.capture import Reading
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
    outputs: dict[str, dict[str, Any]]
    """Graph output to its figures, as in ``VerifyResult``."""
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
    qat: Path | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> ErrorReport:
    """Measure every quantised layer of an artifact and write the reports.

    Args:
        data: as for a build; None: the samples kept in the artifact.
        engine: target whose engine is built with extra outputs and read too (needs its GPU).
        engine_tensors: ``.npz`` with an engine's tensors recorded elsewhere, in place of ``engine``.
        qat: a Q/DQ graph of the same network from quantisation-aware training, to compare with.
        out: folder for the files; None: the artifact's ``reports``, and its manifest is updated.

    Raises:
        InputError, CheckFailed, ToolError: as the parts say.
    """
    opened = open_models(folder)
    artifact = opened.artifact
    chosen = choose_data(
        artifact, data, preprocess=preprocess, samples=samples, batch_size=batch_size, labels=labels, progress=progress
    )
    with ExitStack() as stack:
        reading = _engine_reading(opened, engine, engine_tensors, stack)
        found = measure(
            opened.fp32,
            opened.int8,
            opened.layers,
            chosen.read(),
            engine=reading,
            calibrated=calibrated_ranges(artifact, opened.plan),
            labels=chosen.labels,
            progress=progress,
            total=chosen.total,
        )
        if reading is not None:
            found.table.engine_label = reading.label
    compared = None if qat is None else compare_with_qat(opened, found.table, qat, chosen, progress=progress)
    target = out if out is not None else artifact.folder / "reports"
    files = write_reports(target, found.table, _content(artifact, found, chosen.text, compared))
    if out is None:
        artifact.updated(files=tuple(f"reports/{name}" for name in files))
    return _summary(found, target, files, chosen.text, compared)


def _engine_reading(opened: Opened, engine: str | None, recorded: Path | None, stack: ExitStack) -> Reading | None:
    if engine is not None and recorded is not None:
        raise InputError("an engine is to be run and recorded tensors are given", remedy="leave one of the two out")
    if recorded is not None:
        return RecordedReading(recorded, label=f"the engine (recorded in {recorded.name})")
    if engine is None:
        return None
    from pipeline.config import Profile
    from pipeline.errors.engine import EngineReading

    profiles = tuple(Profile.parse(text) for text in opened.artifact.manifest.profiles)
    tensors = [layer.tensor for layer in opened.layers]
    model = opened.artifact.path(INT8_MODEL)
    return stack.enter_context(EngineReading(model, tensors, target=engine, profiles=profiles))


def _content(artifact: Artifact, found: Measurement, data: str, compared: QatComparison | None) -> ReportContent:
    """Title, facts, notes and further tables of the page."""
    manifest, calibration = artifact.manifest, artifact.manifest.calibration
    calibrator = str(calibration)
    notes = []
    if found.table.engine_label:
        fused = sum(info.engine != "shown" for info in found.table.layers)
        count = len(found.table.layers)
        notes.append(f"{found.table.engine_label}: {fused} of {count} layers are fused and cannot be shown.")
    if compared is not None:
        notes += compared.attribution.sentences()
    figures = {name: {"note": "", **output.figures()} for name, output in found.outputs.items()}
    keys = ("relative_l2_mean", "relative_l2_max", "cosine_mean", "agreement", "note")
    outputs = {
        "title": "Outputs of the network",
        "text": "FP32 against the whole graph in INT8.",
        "columns": ["output", "relative L2", "worst sample", "cosine", "arg-max agreement", "note"],
        "rows": [[name, *(output.get(key) for key in keys)] for name, output in figures.items()],
    }
    return ReportContent(
        title=manifest.name,
        subtitle=f"{manifest.source.spec}, calibrated with {calibrator}; measured on {data}",
        facts=_facts(found),
        notes=notes,
        sections=[outputs] if compared is None else [outputs, *compared.sections()],
    )


def _facts(found: Measurement) -> list[tuple[str, str]]:
    facts = []
    if found.top_one is not None:
        facts.append(("Top-1 FP32", f"{100 * found.top_one.reference:.2f} %"))
        facts.append(("Top-1 INT8", f"{100 * found.top_one.other:.2f} %"))
    every = [output.figures() for output in found.outputs.values()]
    first = next((figures for figures in every if not figures.get("note")), None)
    if first is not None:
        if first["agreement"] is not None:
            facts.append(("Arg-max agreement", f"{100 * first['agreement']:.2f} %"))
        facts.append(("Output relative L2", f"{first['relative_l2_mean']:.4f}"))
        facts.append(("Output cosine", f"{first['cosine_mean']:.5f}"))
    facts.append(("Quantised layers", str(len(found.table.layers))))
    facts.append(("Samples", str(len(found.table.samples))))
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
        outputs={name: _finite(output.figures()) for name, output in found.outputs.items()},
        top1_fp32=found.top_one.reference if found.top_one else None,
        top1_int8=found.top_one.other if found.top_one else None,
        operators=tuple(_finite(asdict(row)) for row in operator_rows(table)),
        worst=tuple(worst),
        comparison=() if compared is None else tuple(compared.attribution.sentences()),
    )


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """NaN and infinity, which JSON does not have, as None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
