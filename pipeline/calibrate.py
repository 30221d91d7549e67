"""Stage 3, calibrate: one pass over the data gives the statistic of every tensor, for all calibrators at once.

The pass is saved every few batches; a killed one goes on at the next batch and ends with the same bits. Passes over
different batches of the same data, in other processes or machines, are joined exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.artifact import CALIBRATION
from pipeline.core.errors import InputError
from pipeline.core.files import sha256_json
from pipeline.core.ort import read_graph
from pipeline.core.progress import SILENT, Progress
from pipeline.floatgraph import FILE, GRAPH, check_float_graph, float_graph_sha256
from pipeline.nonfinite import NonFiniteBatches
from pipeline.records import StageResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from calibrators import TensorStatistics
    from pipeline.activations import ActivationPass, BatchStatistics, NonFinite
    from pipeline.activations_cuda import CudaActivationPass
    from pipeline.data import Batch

__all__ = ["CHECKPOINT", "NUMBERS", "CalibrationResult", "merge_passes", "run", "take"]

CHECKPOINT: Final = "partial.npz"
"""The unfinished pass, gone when it is finished."""

NUMBERS: Final = "numbers"
"""In a calibration file's meta: the samples of each data source, by their numbers."""

_SHOWN: Final = 3
_OTHER_GRAPH: Final = (
    "leave --calibration out to make the pass now. Statistics fit the graph they were made of: give `quantize "
    "calibrate` and the build the same MODEL, --input, --profile, --opset and --equalise (with that the same data and "
    "placement too); those in an artifact fit a build with its options"
)


class CalibrationResult(StageResult):
    """A finished pass: ``calibration.npz`` in :attr:`folder`."""

    tensors: int
    samples: int
    """Samples in the statistics; those of skipped batches are not."""
    batches: int
    skipped_batches: int
    """Batches left out because an activation was NaN or infinite."""
    warnings: tuple[str, ...] = ()
    """One for each tensor whose values say little about its range; one where it is unknown whose they are."""
    shapes: tuple[tuple[tuple[tuple[str, tuple[int, ...]], ...], int], ...] = ()
    """Shapes of a sample's inputs, by name and without the batch axis, with the number of such samples; empty where
    statistics were taken."""
    data: tuple[str, ...] = ()
    """Keys of the data sources that the samples are of."""

    @property
    def statistics_path(self) -> Path:
        return self.folder / CALIBRATION


def run(
    model: Path,
    tensors: Sequence[str],
    batches: Iterable[Batch],
    *,
    folder: Path,
    on_nonfinite: str = "error",
    checkpoint_every: int = 32,
    progress: Progress = SILENT,
    total: int | None = None,
    threads: int | None = None,
    data_key: str = "",
    layout: str = "",
    device: str = "cpu",
) -> CalibrationResult:
    """Run the float model over ``batches`` and write the statistics of ``tensors`` into ``folder``.

    Args:
        model: ONNX file of the float model.
        tensors: activations to calibrate, in graph order; graph inputs may be among them.
        batches: each :attr:`Batch.index` once. When an unfinished pass is found in ``folder`` they are drawn from the
            start again, and those that it had are passed over.
        on_nonfinite: ``error``, or ``skip`` to leave out every batch in which an activation is NaN or infinite.
        checkpoint_every: batches between two saves of the unfinished pass.
        total: number of samples, for the progress.
        threads: cores to use; None: all that the process may use.
        data_key: changes whenever the data may have changed; an unfinished pass over other data is not resumed.
        layout: changes whenever other samples are chosen or batched in another way, where ``folder`` may hold an
            unfinished pass of such: its batches have the numbers of these, and other samples.
        device: ``cpu`` or ``cuda``. The activations of the two differ by rounding, the statistics of equal ones do not.

    Raises:
        InputError: no data at all, every batch skipped, a batch that does not fit the model, a NaN or infinity in an
            activation (``error``), or an unknown tensor.
        ToolError: onnxruntime refuses the model or fails on a batch.
    """
    proto = read_graph(model)
    graph = float_graph_sha256(model, proto)
    key = sha256_json(
        {
            "graph": graph,
            "tensors": list(tensors),
            "data": data_key,
            "layout": layout,
            "nonfinite": on_nonfinite,
            "device": device,
        }
    )
    state = _State(tensors, {GRAPH: graph, "data": [data_key]})
    checkpoint = folder / CHECKPOINT
    if (resumed := _resumed(checkpoint, key)) is not None:
        state = resumed
        progress.note(f"calibration goes on after {len(state.done)} batches of an unfinished pass")
    nonfinite = NonFiniteBatches(model, on_nonfinite, progress)
    if tensors:
        with progress.task("calibrating", total=total, unit="samples") as task:
            unseen = _passed_over(batches, frozenset(state.done), task.advance)
            if device == "cuda":
                from pipeline.activations_cuda import CudaActivationPass

                on_device = CudaActivationPass(model, tensors, skip_nonfinite=nonfinite.skips, proto=proto)
                steps = _on_cuda(state, on_device, unseen, checkpoint_every, nonfinite)
            else:
                from pipeline.activations import ActivationPass

                steps = _on_cpu(state, ActivationPass(model, tensors, threads=threads, proto=proto), unseen, nonfinite)
            del proto  # as large as the model: not to be held during the pass
            for count, batch in enumerate(steps, start=1):
                if count % checkpoint_every == 0:
                    state.save(checkpoint, key)
                task.advance(len(batch.samples))
        state.check()
    state.save(folder / CALIBRATION, None)
    checkpoint.unlink(missing_ok=True)
    return state.result(folder, progress)


def _on_cpu(
    state: _State, passes: ActivationPass, batches: Iterable[Batch], nonfinite: NonFiniteBatches
) -> Iterator[Batch]:
    """Yield each batch when it is in ``state``."""
    for found in passes(batches):
        state.add(found, nonfinite)
        yield found.batch


def _on_cuda(
    state: _State,
    on_device: CudaActivationPass,
    batches: Iterable[Batch],
    checkpoint_every: int,
    nonfinite: NonFiniteBatches,
) -> Iterator[Batch]:
    """Yield each batch when it is queued on ``on_device``, every ``checkpoint_every``-th one when all are in ``state``.

    The device is given back at the end.
    """
    from pipeline.activations import NonFinite

    before = state.statistics
    queued: dict[int, Batch] = {}

    def settle(passes: CudaActivationPass) -> None:
        bad = {index: NonFinite(name, nans, infs) for index, name, nans, infs in passes.nonfinite()}
        for index, batch in queued.items():
            state.count(batch, bad.get(index), nonfinite)
        queued.clear()
        state.statistics = {name: before[name].merge(found) for name, found in passes.collect().items()}

    with on_device as passes:
        for count, batch in enumerate(passes(batches), start=1):
            queued[batch.index] = batch
            if count % checkpoint_every == 0:
                settle(passes)
            yield batch
        settle(passes)


def take(
    source: Path, tensors: Sequence[str], *, model: Path, folder: Path, progress: Progress = SILENT
) -> CalibrationResult:
    """Take the statistics of ``tensors`` from an earlier pass instead of making one.

    Args:
        model: the float graph that is quantised, whose activations they must be of.

    Raises:
        InputError: ``source`` is no calibration file, lacks one of the tensors, or is of another float graph.
    """
    from calibrators import load_statistics

    statistics, meta = load_statistics(source)
    if missing := [name for name in tensors if name not in statistics]:
        raise InputError(
            f"{source} has no statistics of {', '.join(map(repr, missing[:_SHOWN]))} ({len(missing)} of {len(tensors)} "
            f"tensors are missing)",
            remedy="it was made for another model or placement: run `quantize calibrate` on this one",
        )
    state = _State.of_file(source, {name: statistics[name] for name in tensors}, meta)
    found = (check_float_graph(source, meta, model, remedy=_OTHER_GRAPH), state.gaps(source))
    doubts = tuple(doubt for doubt in found if doubt is not None)
    for doubt in doubts:
        progress.warn(doubt)
    state.save(folder / CALIBRATION, None)
    progress.note(f"statistics of {len(tensors)} tensors and {state.samples} samples taken from {source}")
    result = state.result(folder, progress)
    return result.model_copy(update={"warnings": (*doubts, *result.warnings)}).at(folder)


def merge_passes(sources: Sequence[Path], target: Path, *, progress: Progress = SILENT) -> CalibrationResult:
    """Join passes over different batches of the same model exactly, in any order, into the file ``target``.

    Raises:
        InputError: fewer than two files, other models, other tensors, or a batch or sample that two of them have.
    """
    from calibrators import load_statistics

    if len(sources) < 2:
        raise InputError(
            f"there is nothing to merge: {len(sources)} calibration files are given, at least 2 are needed"
        )
    first, *others = sources
    merged = _State.of_file(first, *load_statistics(first))
    for source in others:
        merged.absorb(_State.of_file(source, *load_statistics(source)), first, source)
    merged.save(target, None)
    return merged.result(target.parent, progress)


class _State:
    """Statistics and figures of a pass so far."""

    def __init__(self, tensors: Iterable[str], meta: Mapping[str, Any]) -> None:
        from calibrators import TensorStatistics

        self.statistics: dict[str, TensorStatistics] = {name: TensorStatistics() for name in tensors}
        self.graph = {key: str(meta[key]) for key in (GRAPH if GRAPH in meta else FILE,)}
        """What the statistics are of: :data:`GRAPH`, or :data:`FILE` in files of an earlier version."""
        self.data: list[str] = list(meta["data"])
        self.numbers: dict[str, set[int]] = {key: set(map(int, found)) for key, found in meta.get(NUMBERS, {}).items()}
        """Data source to the numbers of its samples, in skipped batches too; none in files of an earlier version."""
        self.samples = 0
        self.batches: list[int] = []
        self.skipped: list[int] = []
        self.done: set[int] = set()
        """Both together."""

    @classmethod
    def of_file(
        cls, path: Path, statistics: dict[str, TensorStatistics], meta: Mapping[str, Any], *, unfinished: bool = False
    ) -> _State:
        if isinstance(meta, dict) and "key" in meta and not unfinished:
            raise InputError(
                f"{path} is of an unfinished pass", remedy="run that calibration again: it goes on from there"
            )
        try:
            state = cls((), meta)
            state.statistics = statistics
            state.samples = int(meta["samples"])
            state.batches, state.skipped = [int(i) for i in meta["batches"]], [int(i) for i in meta["skipped"]]
            state.done = {*state.batches, *state.skipped}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"calibration file {path} does not say what it was made from: {error}",
                remedy="run `quantize calibrate` again",
            ) from error
        return state

    def save(self, path: Path, key: str | None) -> None:
        from calibrators import save_statistics

        meta = {
            **self.graph,
            "data": sorted(self.data),
            "samples": self.samples,
            NUMBERS: {key: sorted(found) for key, found in self.numbers.items()},
            "batches": sorted(self.batches),
            "skipped": sorted(self.skipped),
        }
        save_statistics(path, self.statistics, meta if key is None else {**meta, "key": key})

    def add(self, found: BatchStatistics, nonfinite: NonFiniteBatches) -> None:
        if self.count(found.batch, found.nonfinite, nonfinite):
            for name, statistics in found.statistics.items():
                self.statistics[name].absorb(statistics)

    def count(self, batch: Batch, bad: NonFinite | None, nonfinite: NonFiniteBatches) -> bool:
        """Enter a batch into the figures; False when it is skipped."""
        if batch.index in self.done:
            raise InputError(f"batch {batch.index} comes twice; its samples would count twice")
        self.done.add(batch.index)
        for key in self.data:  # one, in a pass
            self.numbers.setdefault(key, set()).update(batch.samples)
        if bad is None:
            self.batches.append(batch.index)
            self.samples += len(batch.samples)
            return True
        nonfinite.leave_out(bad, batch.index, batch.samples, batch)
        self.skipped.append(batch.index)
        return False

    def check(self) -> None:
        if self.batches:
            return
        if self.skipped:
            raise InputError(
                f"all {len(self.skipped)} batches were skipped: each has a NaN or infinity in an activation",
                remedy="mend the data or the model; without --on-nonfinite skip the first tensor is named",
            )
        raise InputError(
            "no calibration data: there is not a single batch",
            remedy="give data with at least one sample; random data is never used, its ranges would be wrong",
        )

    def gaps(self, path: Path) -> str | None:
        """In words, where batches between those of ``path`` are missing."""
        last = max(self.done, default=-1)
        missing = last + 1 - len(self.done)
        if not missing:
            return None
        return (
            f"{path} has {len(self.done)} of the first {last + 1} batches: part of a pass, such as --shard makes? "
            "`quantize calibrate --merge` joins the parts"
        )

    def absorb(self, other: _State, own_path: Path, other_path: Path) -> None:
        if other.graph != self.graph:
            raise InputError(
                f"{own_path} and {other_path} are passes of different models", remedy="merge passes of one"
            )
        if different := sorted(other.statistics.keys() ^ self.statistics.keys()):
            raise InputError(
                f"{own_path} and {other_path} have different tensors, such as {different[0]!r}",
                remedy="calibrate both with the same placement",
            )
        if twice := sorted(self.done & other.done):
            raise InputError(
                f"batch {twice[0]} is in {other_path} and in a file before it ({len(twice)} such batches)",
                remedy="give each process its own part of the data with --shard",
            )
        for key, found in other.numbers.items():
            if again := sorted(found & self.numbers.get(key, set())):
                raise InputError(
                    f"sample {again[0]} is in a batch of {other_path} and in another batch of a file before it "
                    f"({len(again)} such samples)",
                    remedy="give each part the same --samples and --batch-size",
                )
        for name, statistics in other.statistics.items():
            self.statistics[name].absorb(statistics)
        for key, found in other.numbers.items():
            self.numbers.setdefault(key, set()).update(found)
        self.data = sorted({*self.data, *other.data})
        self.samples += other.samples
        self.batches += other.batches
        self.skipped += other.skipped
        self.done |= other.done

    def result(self, folder: Path, progress: Progress) -> CalibrationResult:
        warnings = degenerate(self.statistics)
        for text in warnings:
            progress.warn(text)
        return CalibrationResult(
            tensors=len(self.statistics),
            samples=self.samples,
            batches=len(self.batches),
            skipped_batches=len(self.skipped),
            warnings=warnings,
            data=tuple(sorted(self.data)),
        ).at(folder)


def degenerate(statistics: Mapping[str, TensorStatistics]) -> tuple[str, ...]:
    """One line for each tensor whose statistic says little about its range, whatever the calibrator."""
    import calibrators

    minmax = calibrators.get("minmax")
    resolved = ((name, calibrators.resolve_amax(found, minmax)[1]) for name, found in statistics.items())
    return tuple(f"{name}: {warning}" for name, warning in resolved if warning is not None)


def _passed_over(batches: Iterable[Batch], done: frozenset[int], advance: Any) -> Iterator[Batch]:
    for batch in batches:
        if batch.index in done:
            advance(len(batch.samples))
        else:
            yield batch


def _resumed(checkpoint: Path, key: str) -> _State | None:
    """The unfinished pass in ``checkpoint`` if it is one of the same inputs."""
    from calibrators import load_statistics

    try:
        statistics, meta = load_statistics(checkpoint)
        return _State.of_file(checkpoint, statistics, meta, unfinished=True) if meta.get("key") == key else None
    except InputError:
        return None
