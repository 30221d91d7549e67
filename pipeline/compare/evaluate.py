"""Running a graph over the held-aside samples, under a shift: the tasks ``outputs`` and ``layers``.

Q and DQ nodes are computed as they stand, between float kernels: no integer fusion, which would be another computation.
(onnxruntime's optimised float kernels take half the time of its plain ones, and differ from them in the rounding of
float32 sums, which now and then moves a value across a step of a Q/DQ pair.) One thread and a fixed number of samples
at a time make the figures independent of where they are computed; several evaluations run beside each other instead.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.compare.activations import NOISE_PREFIX, add_noise_inputs
from pipeline.compare.archive import read_arrays, read_batches
from pipeline.compare.engines import EngineSession
from pipeline.compare.figures import OutputFacts, SampleFigures
from pipeline.compare.images import PixelCoding, shifted
from pipeline.compare.metric import metric_process
from pipeline.compare.noise import fill_noise, noise_key
from pipeline.compare.shifts import ACTIVATIONS, NONE, Shift
from pipeline.compare.task import Done
from pipeline.core.errors import CheckFailed, QuantizeError, ToolError
from pipeline.core.feeds import as_taken, session_dtypes
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch
from pipeline.errors.capture import check_finite
from pipeline.errors.doubtful import almost_zero, known_range
from pipeline.errors.graphs import Graph
from pipeline.errors.metrics import PEAK
from pipeline.errors.streaming import LayerErrors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.compare.task import Arrays, FileSet

__all__ = ["layer_errors", "outputs"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class _ActivationNoise:
    """Noise for every activation layer of one evaluation, batch by batch.

    Args:
        fp32: the float model; one run per shape of the inputs tells the shapes of the activations.
        scales: tensor name to standard deviation of its noise.
    """

    def __init__(self, fp32: Path, scales: Mapping[str, float], seed: int, draw: int) -> None:
        self._scales = dict(scales)
        self._seed, self._draw = seed, draw
        self._session = make_session(fp32, capture=list(scales), threads=1)
        self._inputs = [spec.name for spec in self._session.get_inputs()]
        self._buffers: dict[tuple[tuple[str, tuple[int, ...]], ...], Arrays] = {}

    def feeds(self, batch: Batch) -> Arrays:
        """Graph input to noise. The arrays are used again for the next batch of the same shapes."""
        buffers = self._prepared(batch)
        for tensor, scale in self._scales.items():
            noise = buffers[NOISE_PREFIX + tensor]
            count = len(batch.samples)
            # A tensor without an axis for the samples gets the noise of the first sample of its batch.
            rows = noise.reshape(count, -1) if noise.ndim and noise.shape[0] % count == 0 else noise.reshape(1, -1)
            for row, sample in zip(rows, batch.samples, strict=False):
                fill_noise(row, noise_key("activations", self._seed, self._draw, tensor, sample), scale)
        return buffers

    def _prepared(self, batch: Batch) -> Arrays:
        signature = tuple((name, batch.feeds[name].shape) for name in self._inputs)
        if signature not in self._buffers:
            tensors = list(self._scales)
            values = self._session.run(tensors, {name: batch.feeds[name] for name in self._inputs})
            self._buffers[signature] = {
                NOISE_PREFIX + name: np.empty(array.shape, np.float32)
                for name, array in zip(tensors, values, strict=True)
            }
        return self._buffers[signature]


def _with_image_shift(batch: Batch, coding: PixelCoding, shift: Shift, seed: int) -> Batch:
    images = batch.feeds[coding.input]
    changed = np.stack(
        [
            shifted(image, coding, shift.kind, int(shift.strength), seed=seed, sample=sample)
            for image, sample in zip(images, batch.samples, strict=True)
        ]
    )
    return Batch(batch.index, batch.samples, {**batch.feeds, coding.input: changed})


class _OrtSession:
    """A graph in onnxruntime, with one thread; with inputs for noise on the tensors ``noisy``."""

    def __init__(self, path: Path, *, noisy: Sequence[str]) -> None:
        model: Any = path
        if noisy:
            import onnx_ir as ir

            from pipeline.onnxfile import load_model

            loaded = load_model(path)
            add_noise_inputs(loaded, noisy)
            model = ir.to_proto(loaded)
        self._session = make_session(model, threads=1, external_data_dir=path.parent if noisy else None)
        self.inputs = tuple(spec.name for spec in self._session.get_inputs())
        self._dtypes = session_dtypes(self._session)
        self.outputs = tuple(output.name for output in self._session.get_outputs())

    def run(self, names: Sequence[str], feeds: Mapping[str, Array]) -> list[Any]:
        values: list[Any] = self._session.run(list(names), as_taken(feeds, self._dtypes))
        return values

    def close(self) -> None:
        """Nothing is held beyond the object's life."""


def _session(files: Mapping[str, FileSet], options: Mapping[str, Any], *, noisy: bool) -> _OrtSession | EngineSession:
    if "engine" in files:
        return EngineSession(files["engine"])
    tensors = options["activations"] if noisy else ()
    return _OrtSession(files["model"].path, noisy=tensors)


def outputs(files: Mapping[str, FileSet], options: Mapping[str, Any]) -> Done:
    """One graph over all samples under one shift.

    Files: ``model``, ``samples``; ``engine`` where that computes the model; ``fp32`` and ``moments`` for noise on
    activations; ``reference`` (FP32's outputs under the same shift) to compare with; ``metric`` where it is a file.
    Options: ``quantized``, ``shift``, ``seed``, ``absolute``, ``activations``, ``coding``, ``labels`` (pairs or None),
    ``outputs`` (name to the fields of ``OutputFacts``), ``metric`` (text or None), ``keep`` (give the outputs too).

    Returns:
        float64 (samples,) by figure (:mod:`pipeline.compare.figures`), ``samples``; with ``keep`` also
        ``INDEX/samples`` and ``INDEX/tensors/NAME`` for each batch.

    Raises:
        CheckFailed: a NaN or infinity in an output.
        InputError: labels that do not fit, or a metric that fails.
    """
    shift = Shift.model_validate(options["shift"])
    noise = _noise(files, options, shift)
    labels = None if options["labels"] is None else {int(sample): int(label) for sample, label in options["labels"]}
    label = "the INT8 graph" if options["quantized"] else "the FP32 graph"
    reference = read_batches(files["reference"].path) if "reference" in files else None
    coding = None if options["coding"] is None else PixelCoding.model_validate(options["coding"])
    figures = SampleFigures(labels, {name: OutputFacts(**facts) for name, facts in options["outputs"].items()})
    kept: Arrays = {}
    with ExitStack() as stack:
        session = stack.enter_context(closing(_session(files, options, noisy=noise is not None)))
        names = session.outputs
        inputs = [name for name in session.inputs if not name.startswith(NOISE_PREFIX)]
        metric = None
        if options["metric"] is not None:
            file = files["metric"].path if "metric" in files else None
            metric = stack.enter_context(metric_process(options["metric"], file))
        for index, batch in enumerate(read_batches(files["samples"].path)):
            if coding is not None and shift.kind not in (NONE, ACTIVATIONS):
                batch = _with_image_shift(batch, coding, shift, options["seed"])
            feeds = {name: batch.feeds[name] for name in inputs}
            if noise is not None:
                feeds.update(noise.feeds(batch))
            found = _run(session, names, feeds, batch, label)
            expected = _reference_of(reference, batch)
            chosen = None if labels is None else [labels.get(sample, -1) for sample in batch.samples]
            figures.add(
                batch.samples,
                found,
                expected,
                None if metric is None else metric(found, batch.samples, chosen),
            )
            if options["keep"]:
                kept[f"{index:06d}/samples"] = np.asarray(batch.samples, np.int64)
                kept.update({f"{index:06d}/tensors/{name}": values for name, values in found.items()})
        dependencies = () if metric is None else metric.dependencies()
    return Done({**figures.arrays(), **kept}, dependencies)


def _noise(files: Mapping[str, FileSet], options: Mapping[str, Any], shift: Shift) -> _ActivationNoise | None:
    if shift.kind != ACTIVATIONS or not options["activations"]:
        return None
    tensors: list[str] = options["activations"]
    stds = np.ones(len(tensors)) if options["absolute"] else read_arrays(files["moments"].path)["std"]
    scales = {name: shift.strength * float(std) for name, std in zip(tensors, stds, strict=True)}
    return _ActivationNoise(files["fp32"].path, scales, options["seed"], shift.draw)


def _run(
    session: _OrtSession | EngineSession, names: Sequence[str], feeds: Mapping[str, Array], batch: Batch, label: str
) -> Arrays:
    try:
        values = session.run(names, feeds)
    except QuantizeError:
        raise
    except Exception as error:
        raise ToolError(f"onnxruntime failed on {label}, samples {list(batch.samples)}: {error}") from error
    found = dict(zip(names, values, strict=True))
    for name, array in found.items():
        check_finite(name, array, batch.samples, label=label)
    return found


def _reference_of(reference: Iterator[Batch] | None, batch: Batch) -> Mapping[str, Array] | None:
    if reference is None:
        return None
    expected = next(reference, None)
    if expected is None or expected.samples != batch.samples:
        raise CheckFailed(
            f"the FP32 outputs kept are of other samples than {list(batch.samples)}",
            remedy="run the experiment again with --fresh",
        )
    return expected.feeds


def layer_errors(files: Mapping[str, FileSet], options: Mapping[str, Any]) -> Done:
    """Relative L2 error of each layer's output, accumulated from the input on.

    Files ``fp32``, ``int8``, ``samples``; options ``tensors``, ``limit`` (samples looked at, evenly spaced) and
    ``static_batch``. Returns ``relative_l2`` float64 (tensors, samples), NaN where FP32 is almost zero.
    """
    tensors: list[str] = list(options["tensors"])
    sessions = [
        make_session(files[role].path, capture=tensors, threads=1) for role in ("fp32", "int8")
    ]
    dtypes = [session_dtypes(session) for session in sessions]
    inputs = [spec.name for spec in sessions[0].get_inputs()]
    errors = LayerErrors(tensors)
    for part in _chosen(files["samples"].path, options):
        feeds = {name: part.feeds[name] for name in inputs}
        reference, other = (
            dict(zip(tensors, session.run(tensors, as_taken(feeds, types)), strict=True))
            for session, types in zip(sessions, dtypes, strict=True)
        )
        errors.add(part.samples, reference, other)
    graph = Graph(files["fp32"].path)
    zero = almost_zero(errors.metric(PEAK), np.array([known_range(graph, name) for name in tensors]))
    return Done({"relative_l2": np.where(zero, np.nan, errors.metric("relative_l2"))})


def _chosen(path: Path, options: Mapping[str, Any]) -> Iterator[Batch]:
    """``options["limit"]`` of the samples, evenly spaced; whole batches where the model's batch is static."""
    total = int(options["total"])
    step = max(1, -(-total // int(options["limit"])))
    seen = 0
    for batch in read_batches(path):
        rows = [row for row in range(len(batch.samples)) if (seen + row) % step == 0]
        seen += len(batch.samples)
        if options["static_batch"]:
            if rows:
                yield batch
            continue
        if rows:
            yield Batch(
                batch.index,
                tuple(batch.samples[row] for row in rows),
                {name: values[rows] for name, values in batch.feeds.items()},
            )
