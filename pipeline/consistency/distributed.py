"""Calibration over several ranks: the same statistics as one process, to the bit, in about 1/N of the time.

Each rank runs the float model over its own batches (:mod:`pipeline.consistency.shares`), then the statistics are merged
exactly (:mod:`pipeline.consistency.exchange`). Before that the ranks compare what they are about to calibrate, and
rank 0 writes the result only when every rank holds the same bits.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.consistency.agreement import agree, sample_difference
from pipeline.consistency.exchange import merge_ranks
from pipeline.consistency.group import PREPARING
from pipeline.consistency.shares import rank_batches, sample_digest
from pipeline.core.files import sha256_json
from pipeline.core.progress import SILENT
from pipeline.data import select

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from calibrators.statistics import TensorStatistics
    from pipeline.consistency.group import Group
    from pipeline.core.progress import Progress
    from pipeline.data import Batch, DataSource, Sample
    from pipeline.records import TensorSpec

__all__ = ["Work", "calibrate_share", "check_agreement", "code_sha256", "versions"]

_PROBES = 3
"""Samples that every rank decodes before the start, to find a decoder that gives other pixels."""
_VERSIONS = ("quantize-trt", "numpy", "numba", "onnxruntime", "onnxruntime-gpu", "pillow")


@dataclass(frozen=True)
class Work:
    """What is calibrated; the same in every rank."""

    model: Path
    """The prepared float model."""
    tensors: tuple[str, ...]
    source: DataSource
    samples: tuple[int, ...]
    """Numbers of the calibration samples."""
    inputs: tuple[TensorSpec, ...]
    batch_size: int = 8
    on_nonfinite: str = "error"
    shard: str = "cyclic"


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
        CheckFailed: they do not; what differs and in which ranks is named.
    """
    group.phase("comparing model and data with the other ranks", patience=PREPARING)
    from calibrators.statistics import BINS, PERCENTILES

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


def calibrate_share(
    group: Group, work: Work, *, progress: Progress = SILENT
) -> tuple[dict[str, TensorStatistics], dict[str, TensorStatistics], dict[str, Any]]:
    """Calibrate this rank's batches and merge all ranks' statistics.

    Returns:
        The merged statistics (the same bits in every rank), this rank's own, and the figures of the whole pass:
        batches, skipped batches, samples, warnings.

    Raises:
        InputError: as :func:`pipeline.calibrate.run` says, for this rank's batches.
        RunEnded: another rank has failed, died or stalled.
        CheckFailed: a user's callable has yielded other samples in another rank.
    """
    seen: list[tuple[int, str]] = []
    own, figures = _own_share(group, work, seen, progress)
    if work.source.length is None:
        _check_stream(group, seen)
    merged = merge_ranks(group, own, work.tensors)
    gathered = group.gather_text("figures", json.dumps(figures))
    added = None if gathered is None else json.dumps(_added([json.loads(text) for text in gathered]))
    return merged, own, json.loads(group.announce("figures", added))


def _own_share(
    group: Group, work: Work, seen: list[tuple[int, str]], progress: Progress
) -> tuple[dict[str, TensorStatistics], dict[str, Any]]:
    """This rank's statistics and figures; a rank without a batch has empty ones."""
    from calibrators.statistics import TensorStatistics, load_statistics
    from pipeline import calibrate

    batches = _ticking(group, work, seen)
    first = next(batches, None)
    if first is None:
        return {name: TensorStatistics() for name in work.tensors}, _figures()
    with tempfile.TemporaryDirectory(prefix="quantize-rank-") as folder:
        result = calibrate.run(
            work.model,
            work.tensors,
            chain([first], batches),
            folder=Path(folder),
            on_nonfinite=work.on_nonfinite,
            progress=progress,
            total=None if group.size > 1 else len(work.samples),
        )
        statistics, _ = load_statistics(result.statistics_path)
    return statistics, _figures(result.batches, result.skipped_batches, result.samples, result.warnings)


def _figures(batches: int = 0, skipped: int = 0, samples: int = 0, warnings: Sequence[str] = ()) -> dict[str, Any]:
    return {"batches": batches, "skipped_batches": skipped, "samples": samples, "warnings": list(warnings)}


def _added(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all ranks together; a warning that several give is kept once."""
    total = {key: sum(each[key] for each in figures) for key in ("batches", "skipped_batches", "samples")}
    return {**total, "warnings": list(dict.fromkeys(text for each in figures for text in each["warnings"]))}


def _ticking(group: Group, work: Work, seen: list[tuple[int, str]]) -> Iterator[Batch]:
    """This rank's batches. Each is a sign of progress, and the place where the rank learns that the run has ended."""
    watch = None
    if work.source.length is None:  # only what a callable yields in this rank tells whether it is the same everywhere

        def watch(number: int, sample: Sample) -> None:
            seen.append((number, sample_digest(sample)))

    group.phase("loading the model and the first batch")
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
    group.phase("finishing its batches")


def _check_stream(group: Group, seen: Sequence[tuple[int, str]]) -> None:
    """A user's callable has yielded the same samples in every rank."""

    def samples() -> str | None:
        gathered = group.gather_text("stream", json.dumps(list(seen)))
        return None if gathered is None else sample_difference([json.loads(text) for text in gathered], None)

    agree(group, "stream", {"data": sha256_json([digest for _, digest in seen])}, detail={"data": samples})
