"""Calibration over several ranks: the same statistics as one process, to the bit, in about 1/N of the time.

Each rank runs the float model over its own batches (:mod:`pipeline.consistency.measure`), then the statistics are
merged exactly (:mod:`pipeline.consistency.exchange`). Before that the ranks compare what they are about to calibrate,
and rank 0 writes the result only when every rank holds the same bits.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrators.statistics import BINS, PERCENTILES, TensorStatistics
from pipeline.consistency.agreement import agree, sample_difference
from pipeline.consistency.exchange import merge_ranks
from pipeline.consistency.group import PREPARING
from pipeline.consistency.measure import measure_on_cpu
from pipeline.consistency.shares import rank_batches
from pipeline.core.errors import InputError
from pipeline.core.files import sha256_json
from pipeline.core.progress import SILENT
from pipeline.data import select
from pipeline.data.source import sample_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.calibrate import CalibrationResult
    from pipeline.consistency.group import Group
    from pipeline.consistency.measure import Measure
    from pipeline.consistency.work import Work
    from pipeline.core.progress import Progress
    from pipeline.data import Batch, Sample

__all__ = ["Share", "calibrate_ranks", "calibrate_share", "check_agreement", "code_sha256", "versions"]

_PROBES = 3
"""Samples that every rank decodes before the start, to find a decoder that gives other pixels."""
_VERSIONS = ("quantize-trt", "numpy", "numba", "onnxruntime", "onnxruntime-gpu", "pillow")


def versions() -> dict[str, str]:
    """Versions of the packages that a calibration's numbers depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def code_sha256() -> str:
    """Hash of this package's own source: two checkouts of one version may differ."""
    import calibrators
    import pipeline

    digest = hashlib.sha256()
    for package in (pipeline, calibrators):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def check_agreement(group: Group, work: Work, *, model_sha256: str, extra: dict[str, str] | None = None) -> None:
    """All ranks calibrate the same model on the same data with the same programs.

    Args:
        model_sha256: of the prepared model with its external weights.
        extra: further facts to compare, such as the calibrator.

    Raises:
        RanksDiffer: they do not; what differs and in which ranks is named.
    """
    group.phase("comparing model and data with the other ranks", patience=PREPARING)
    facts = {
        "model": model_sha256,
        "list of tensors": sha256_json(list(work.tensors)),
        "selection of samples": sha256_json(list(work.samples)),
        "batch size": str(work.batch_size),
        "order of shards": work.shard,
        "treatment of NaN and infinity": work.on_nonfinite,
        "layout of the statistics": sha256_json([BINS, list(PERCENTILES)]),
        "data": work.source.sha256(),
        "decoding of the samples": sha256_json([digest for _, digest in _digests(work, _probe(work))]),
        "code of quantize": code_sha256(),
        **{f"version of {name}": text for name, text in versions().items()},
        **(extra or {}),
    }

    looked = False

    def samples() -> str | None:
        nonlocal looked
        if looked:
            return None
        looked = True
        gathered = group.gather_text("samples", json.dumps(_digests(work, work.samples)))
        if gathered is None:
            return None
        difference = sample_difference([json.loads(text) for text in gathered], work.source.names)
        return difference or "the samples to calibrate on are the same, others differ"

    agree(group, "work", facts, detail={"data": samples, "decoding of the samples": samples})


def _probe(work: Work) -> list[int]:
    """A few samples spread over the set; none of a user's callable, which would have to run for them."""
    if work.source.length is None:
        return []
    count = len(work.samples)
    chosen = {work.samples[index * (count - 1) // max(1, _PROBES - 1)] for index in range(_PROBES if count else 0)}
    return sorted(chosen)


def _digests(work: Work, numbers: Sequence[int]) -> list[tuple[int, str]]:
    return [(number, sample_digest(sample)) for number, sample in select(work.source, frozenset(numbers))]


def calibrate_ranks(
    group: Group, work: Work, *, folder: Path, measure: Measure | None = None, progress: Progress = SILENT
) -> CalibrationResult:
    """The calibrate stage over all ranks: rank 0 writes ``calibration.npz``, the very bytes that one process writes.

    Call :func:`check_agreement` first.

    Args:
        folder: for rank 0's file; the other ranks write nothing.
        measure: as for :func:`calibrate_share`.

    Raises:
        InputError, RanksDiffer, RunEnded: as :func:`calibrate_share`.
    """
    from calibrators import save_statistics
    from pipeline.artifact import CALIBRATION
    from pipeline.calibrate import NUMBERS, CalibrationResult, degenerate
    from pipeline.floatgraph import GRAPH, float_graph_sha256

    share = calibrate_share(group, work, measure=measure or measure_on_cpu, progress=progress)
    group.phase("writing the result", patience=PREPARING)
    if group.rank == 0:
        meta = {
            GRAPH: float_graph_sha256(work.model),
            "data": [work.source.key()],
            "samples": share.samples,
            NUMBERS: {work.source.key(): sorted(work.samples)},
            "batches": list(share.batches),
            "skipped": list(share.skipped),
        }
        save_statistics(folder / CALIBRATION, share.merged, meta)
    group.barrier("written")
    return CalibrationResult(
        tensors=len(work.tensors),
        samples=share.samples,
        batches=len(share.batches),
        skipped_batches=len(share.skipped),
        warnings=degenerate(share.merged),
    ).at(folder)


@dataclass(frozen=True)
class Share:
    """What a rank holds after the merge."""

    merged: dict[str, TensorStatistics]
    """Of all ranks together: the same bits in every rank."""
    own: dict[str, TensorStatistics]
    """Of this rank's batches."""
    samples: int
    """In all ranks together, without skipped batches; so are the batch indices."""
    batches: tuple[int, ...]
    skipped: tuple[int, ...]
    seconds: float
    """Wall time of this rank's own batches."""
    first_seconds: float
    """Of it, until the second batch was asked for: loading the model and running the first batch. 0 without batches."""
    cpu_seconds: float
    """Processor time of this rank's own batches, all its threads together."""
    merge_seconds: float
    """Wall time from the end of its batches to the merged statistics, waiting for other ranks included."""


def calibrate_share(
    group: Group, work: Work, *, measure: Measure = measure_on_cpu, progress: Progress = SILENT
) -> Share:
    """Calibrate this rank's batches and merge all ranks' statistics.

    Args:
        measure: takes the statistics of this rank's batches; the same in every rank.

    Raises:
        InputError: a batch does not fit the model or has a NaN or infinity in an activation; no batch is left in any
            rank.
        ToolError: onnxruntime fails.
        RunEnded: another rank has failed, died or stalled.
        RanksDiffer: a user's callable has yielded other samples in another rank.
    """
    start, cpu = time.perf_counter(), time.process_time()
    seen: list[tuple[int, str]] = []
    asked: list[float] = []
    measured = measure(work, _ticking(group, work, seen, asked), group, progress)
    finished, cpu = time.perf_counter(), time.process_time() - cpu
    group.phase("comparing what was calibrated")
    if work.source.length is None:
        _check_stream(group, seen)
    figures = _gathered(group, {"samples": measured.samples, "batches": measured.batches, "skipped": measured.skipped})
    if not figures["batches"]:
        count = len(figures["skipped"])
        raise InputError(
            f"all {count} batches of all ranks were skipped: each has a NaN or infinity in an activation"
            if count
            else "no calibration data: no rank has a single batch",
            remedy="mend the data or the model; without --on-nonfinite skip the first tensor is named",
        )
    merged = merge_ranks(group, measured.statistics, work.tensors)
    done = time.perf_counter()
    return Share(
        merged=merged,
        own=measured.statistics,
        samples=figures["samples"],
        batches=tuple(sorted(figures["batches"])),
        skipped=tuple(sorted(figures["skipped"])),
        seconds=finished - start,
        first_seconds=asked[1] - start if len(asked) > 1 else 0.0,
        cpu_seconds=cpu,
        merge_seconds=done - finished,
    )


def _gathered(group: Group, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of all ranks added up, in every rank."""
    texts = group.gather_text("figures", json.dumps(figures))
    total = None
    if texts is not None:
        each = [json.loads(text) for text in texts]
        total = json.dumps({key: sum((part[key] for part in each), type(figures[key])()) for key in figures})
    whole: dict[str, Any] = json.loads(group.announce("figures", total))
    return whole


def _ticking(group: Group, work: Work, seen: list[tuple[int, str]], asked: list[float]) -> Iterator[Batch]:
    """This rank's batches. Each is a sign of progress, and the place where the rank learns that the run has ended.

    Args:
        seen: gets the content of a user callable's samples.
        asked: gets the times when a batch was asked for, one more than there are batches.
    """
    watch = None
    if work.source.length is None:  # only what a callable yields in this rank tells whether it is the same everywhere

        def watch(number: int, sample: Sample) -> None:
            seen.append((number, sample_digest(sample)))

    group.phase("loading the model and the first batch")
    asked.append(time.perf_counter())
    for batch in rank_batches(
        work.source,
        work.samples,
        work.batch_size,
        work.inputs,
        rank=group.rank,
        size=group.size,
        shard=work.shard,
        watch=watch,
    ):
        group.phase(f"batch {batch.index}")
        yield batch
        asked.append(time.perf_counter())
    group.phase("finishing its batches")


def _check_stream(group: Group, seen: Sequence[tuple[int, str]]) -> None:
    """A user's callable has yielded the same samples in every rank."""

    def samples() -> str | None:
        gathered = group.gather_text("stream", json.dumps(list(seen)))
        return None if gathered is None else sample_difference([json.loads(text) for text in gathered], None)

    agree(group, "stream", {"data": sha256_json([digest for _, digest in seen])}, detail={"data": samples})
