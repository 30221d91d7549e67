"""Record an engine's layers on the machine with the GPU, for a report made elsewhere.

``python -m pipeline.errors.recording ARTIFACT OUT.npz`` runs the artifact's INT8 graph as an engine on the samples kept
in the artifact, and writes the quantised layers' tensors, one sample at a time: memory does not grow with their number.
``quantize errors ARTIFACT --engine-tensors OUT.npz`` reads the file. Needs numpy, pydantic, TensorRT and PyCUDA.

The file is an ``.npz``: ``PART/TENSOR`` with the numbers of a part (a few samples) and of a tensor, ``samples`` with
the sample numbers of all parts in order, and ``meta``, JSON: see :class:`Meta`.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from pipeline.artifact import INT8_MODEL, PLACEMENT, SAMPLES, Artifact
from pipeline.config import Profile
from pipeline.core.errors import InputError, QuantizeError
from pipeline.core.files import atomic_file, sha256_json
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import IO

    from pipeline.engine.capture import Capture, Recorded

__all__ = ["META", "Meta", "int8_sha256", "main", "positions", "record_engine", "sample_digests", "write_recording"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Scale: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Distance: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
META = "meta"
_GOLDEN = 2654435769  # 2**32 divided by the golden ratio


class Meta(Record):
    """What stands beside the numbers of a recording."""

    target: str
    tensorrt: str
    recorded: str
    """In which way, see :class:`pipeline.engine.ways.Way`."""
    tensors: tuple[str, ...]
    """Names by number; an engine that never shows one has no array for it."""
    sizes: tuple[PositiveInt, ...]
    """Samples in each part."""
    int8_sha256: str = ""
    """Which graph the engine is of, see :func:`int8_sha256`; empty: an earlier version wrote the file."""
    samples_sha256: tuple[str, ...] = ()
    """Of each sample's inputs, see :func:`sample_digests`."""
    absent: tuple[str, ...] = ()
    """``PART/TENSOR`` of tensors that the engine shows in other parts and not in this one."""
    kept: NonNegativeInt = 0
    """Values of a tensor and sample in the file, see :func:`positions`; 0: all."""
    ends: dict[str, str] = Field(default_factory=dict)
    """Layer's tensor to what may be shown for it, see :class:`pipeline.errors.capture.Account`."""
    scales: dict[str, Scale] = Field(default_factory=dict)
    """Of the tensors that the engine has as INT8."""
    outputs: dict[str, Distance] = Field(default_factory=dict)
    """Relative L2 of each output of the engine to the one recorded in the artifact, over the samples kept there."""
    unshown: dict[str, str] = Field(default_factory=dict)
    """Tensors that the engine has and did not give, and why; others that are not there were fused."""

    @field_validator("tensors")
    @classmethod
    def _once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"the tensor {twice!r} is there twice")
        return names


def int8_sha256(artifact: Artifact) -> str:
    """Which INT8 graph an artifact has: the SHA-256 of its file; where weights are in another one, over both.

    Raises:
        InputError, CheckFailed: a file is gone, or not what the manifest lists.
    """
    artifact.path(INT8_MODEL)
    files = artifact.manifest.files
    digests = [files[name].sha256 for name in sorted(files) if name.startswith(INT8_MODEL)]
    return digests[0] if len(digests) == 1 else sha256_json(digests)


def sample_digests(feeds: Mapping[str, Array], count: int) -> tuple[str, ...]:
    """SHA-256 of the inputs of each of the ``count`` rows of a batch."""
    from pipeline.data.source import sample_digest

    return tuple(sample_digest({name: array[row] for name, array in feeds.items()}) for row in range(count))


def positions(size: int, kept: int) -> Array:
    """Which ``kept`` of ``size`` values are recorded, in rising order, the same in every sample and on every machine.

    They are spread evenly, and not at equal distances, which would see the same columns of every image only: multiples
    of the golden ratio, in whole numbers (a value may come twice where nearly all are kept).
    """
    places = np.arange(kept, dtype=np.uint64) * np.uint64(_GOLDEN) % np.uint64(1 << 32)
    chosen: Array = np.sort((places * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    return chosen


def record_engine(
    folder: Path,
    path: Path,
    *,
    target: str = "tensorrt",
    samples: int | None = None,
    recorded: Recorded | None = None,
    values: int | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Meta:
    """Write what an engine of ``folder``'s INT8 graph shows of its quantised layers into ``path``.

    Args:
        samples: how many of the artifact's samples; None: all of them.
        recorded: the way; None: see :class:`pipeline.engine.capture.Capture`.
        values: keep so many values of each tensor and sample (:func:`positions`) where it has more: errors are
            estimated from them, roughly where a few clipped values carry most of it, and the file stays small. None:
            all.
        warn: is told of each way that was refused, and why.

    Raises:
        InputError: no artifact, no samples in it, nothing quantised, or a TensorRT without that way.
        CheckFailed: no engine that shows its tensors gives the outputs recorded in the artifact; or a file of that is
            not what the manifest lists.
        ToolError: no GPU, or TensorRT fails.
    """
    from pipeline.engine.capture import Capture
    from pipeline.engine.recorded import Samples

    artifact = Artifact.open(folder)
    try:
        decisions = json.loads(artifact.path(PLACEMENT).read_text())["decisions"]
        tensors = [decision["outputs"][0] for decision in decisions if decision["quantized"]]
        with np.load(artifact.path(SAMPLES), allow_pickle=False) as kept:
            numbers = kept["samples"][:samples]
            prefix = "inputs/"
            feeds = {n.removeprefix(prefix): kept[n][: len(numbers)] for n in kept.files if n.startswith(prefix)}
        every = Samples.read(artifact.path(SAMPLES), "int8")
    except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{folder}: {PLACEMENT} or {SAMPLES} cannot be read: {error}",
            remedy="the file is as the manifest lists it: build the artifact again",
        ) from error
    if not tensors:
        raise InputError(f"{folder} has no quantised layer")
    profiles = [Profile.parse(text) for text in artifact.manifest.profiles]
    with Capture(
        artifact.path(INT8_MODEL),
        tensors,
        reference=lambda _: every,
        target=target,
        profiles=profiles,
        recorded=recorded,
        warn=warn,
    ) as capture:
        one_by_one = ({name: array[i : i + 1] for name, array in feeds.items()} for i in range(len(numbers)))
        with atomic_file(path) as stream:
            return write_recording(
                stream, capture, one_by_one, numbers, target=target, int8=int8_sha256(artifact), kept=values or 0
            )


def write_recording(
    stream: IO[bytes],
    capture: Capture,
    batches: Iterable[Mapping[str, Array]],
    numbers: Array,
    *,
    target: str,
    int8: str,
    kept: int = 0,
) -> Meta:
    """Run ``batches`` and write each one's tensors at once.

    Args:
        numbers: the sample numbers of all batches in order.
        int8: see :func:`int8_sha256`.
    """
    names: dict[str, int] = {}
    sizes: list[int] = []
    digests: list[str] = []
    written: set[str] = set()
    scales: dict[str, float] = {}
    with zipfile.ZipFile(stream, "w") as archive:
        for part, feeds in enumerate(batches):
            count = len(next(iter(feeds.values())))
            sizes.append(count)
            digests += sample_digests(feeds, count)
            for name, array in capture(feeds).items():
                entry = f"{part}/{names.setdefault(name, len(names))}"
                _write_array(archive, entry, _thinned(np.atleast_1d(array), count, kept))
                written.add(entry)
            scales.update(capture.scales)
        meta = Meta(
            target=target,
            tensorrt=capture.tensorrt,
            recorded=capture.recorded,
            tensors=tuple(names),
            sizes=tuple(sizes),
            int8_sha256=int8,
            samples_sha256=tuple(digests),
            absent=tuple(
                entry
                for part in range(len(sizes))
                for number in range(len(names))
                if (entry := f"{part}/{number}") not in written
            ),
            kept=kept,
            ends=capture.ends,
            scales=scales,
            outputs=capture.check.relative_l2 if capture.check is not None else {},
            unshown=capture.unshown,
        )
        _write_array(archive, "samples", np.asarray(numbers))
        _write_array(archive, META, np.array(meta.model_dump_json()))
    return meta


def _thinned(array: Array, count: int, kept: int) -> Array:
    if not kept or array.shape[0] % count or array.size // count <= kept:
        return array
    rows = array.reshape(count, -1)
    thinned: Array = rows[:, positions(rows.shape[1], kept)]
    return thinned


def _write_array(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Record an engine's layers for `quantize errors --engine-tensors`.")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("out", type=Path, help="an .npz file")
    parser.add_argument("--target", default="tensorrt", choices=("tensorrt", "rtx"))
    parser.add_argument("--samples", type=int, help="so many of the artifact's samples [all]")
    parser.add_argument(
        "--engine-capture",
        choices=("debug-tensors", "marked-outputs"),
        help="unfused debug tensors (TensorRT 10.12 and newer) or marked tensors, those in INT8 first "
        "[debug tensors where there are any]",
    )
    parser.add_argument("--values", type=int, help="so many values of each tensor and sample, evenly spread [all]")
    options = parser.parse_args(arguments)
    chosen: Any = options.engine_capture.replace("-", " ") if options.engine_capture else None
    try:
        for name in ("samples", "values"):
            if (number := getattr(options, name)) is not None and number < 1:
                raise InputError(f"--{name} must be at least 1, got {number}")
        meta = record_engine(
            options.artifact,
            options.out,
            target=options.target,
            samples=options.samples,
            recorded=chosen,
            values=options.values,
            warn=lambda text: print(f"warning: {text}", file=sys.stderr),
        )
    except QuantizeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    size = options.out.stat().st_size / 1e6
    count = len(meta.tensors)
    sys.stdout.write(
        f"{count} tensors of {sum(meta.sizes)} samples ({meta.recorded}) in {options.out}, {size:.1f} MB\n"
    )
    for name, distance in meta.outputs.items():
        sys.stdout.write(f"output {name}: relative L2 {distance:.4f} to the recorded one\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
