"""An engine's tensors read from a file that was recorded on another machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from pydantic import ValidationError

from pipeline.core.errors import InputError
from pipeline.errors.capture import Account
from pipeline.errors.engine import engine_label
from pipeline.errors.recording import META, Meta, sample_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import Arrays

__all__ = ["RecordedReading"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shape: TypeAlias = "tuple[int, ...]"
_UNKNOWN = Meta(target="", tensorrt="", recorded="", tensors=(), sizes=())
_SAMPLES = "samples"
_AGAIN = "record it again: python -m pipeline.errors.recording ARTIFACT OUT.npz"
_SHOWN = 12


class RecordedReading:
    """The tensors in an ``.npz`` that :mod:`pipeline.errors.recording` wrote, a batch at a time.

    A plain ``.npz`` will do too: ``samples`` (sample numbers, shape (n,)) and one array per tensor with n rows. Nothing
    in it says of which graph and samples it is, so ``warn`` is told; a layer that it lacks is not called fused. A batch
    of which the file has not every sample gives no tensors.

    All but the values is checked here, from the arrays' headers; the values of a part are read when a batch needs them.

    Args:
        layers: tensors to read, with what the recording shows for them; None: all.
        known: names of all tensors of the graphs; None: any name will do.
        int8: the graph that is measured (:func:`pipeline.errors.recording.int8_sha256`); None: not compared.
        warn: is told where the file cannot be checked.

    Raises:
        InputError: the file is missing or damaged, is of another graph or an earlier version, has no ``samples``, an
            unknown tensor, or one that is no array of real numbers with a row for each sample; when it is called: a
            sample with other inputs, or a part with another shape.
    """

    def __init__(
        self,
        path: Path,
        *,
        layers: Sequence[str] | None = None,
        known: Collection[str] | None = None,
        int8: str | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path = path
        try:
            self._archive = np.load(path, allow_pickle=False)
            numbers = self._archive[_SAMPLES]
            meta = Meta.model_validate_json(str(self._archive[META])) if META in self._archive.files else None
        except FileNotFoundError as error:
            raise InputError(f"recorded tensors {path} do not exist") from error
        except KeyError as error:
            raise InputError(f"{path} has no array 'samples' with the sample numbers of its rows") from error
        except ValidationError as error:
            raise InputError(f"{path}: its array {META!r} is damaged: {_first(error)}", remedy=_AGAIN) from error
        except Exception as error:
            raise InputError(f"{path} is not a readable .npz file: {error}") from error
        self._numbers = self._sample_numbers(numbers)
        self._parted = meta is not None
        self._meta = meta or _UNKNOWN
        self._sizes: Shape = self._meta.sizes if self._parted else (len(self._numbers),)
        if meta is not None:
            self._check_origin(meta, int8)
        elif int8 is not None:
            warn(f"{path} does not say of which INT8 graph and samples it is: nothing checks that it is of these")
        places = [(part, row) for part, size in enumerate(self._sizes) for row in range(size)]
        self._places = dict(zip(self._numbers, places, strict=True))
        self._keys = self._tensor_keys(layers, known)
        unshown = dict(self._meta.unshown)
        if not self._parted:
            unshown |= {name: f"it is not in {path.name}" for name in layers or () if name not in self._keys}
        self.account = Account(self._meta.recorded, self._meta.ends, self._meta.scales, unshown, self._meta.kept)
        self._absent = frozenset(self._meta.absent)
        self._check_arrays()
        self._shapes: dict[tuple[str, tuple[Any, ...]], tuple[int, Shape]] = {}
        where = f"recorded in {path.name}"
        told = engine_label(self._meta.target, self._meta.tensorrt)
        self.label = f"{told}, {where}" if self._parted else f"the engine ({where})"

    def _sample_numbers(self, array: Array) -> list[int]:
        numbers = np.atleast_1d(array)
        if numbers.ndim != 1 or not numbers.size or numbers.dtype.kind not in "iu":
            first = f", the first is {numbers.flat[0]!r}" if numbers.size else ""
            raise self._wrong(
                f"its array {_SAMPLES!r} has dtype {numbers.dtype} and shape {numbers.shape}{first}: expected whole "
                "numbers in one row"
            )
        found = [int(number) for number in numbers]
        if min(found) < 0:
            raise self._wrong(f"its array {_SAMPLES!r} holds {min(found)}, expected sample numbers from 0 on")
        number, times = Counter(found).most_common(1)[0]
        if times > 1:
            raise self._wrong(f"its array {_SAMPLES!r} holds {number} {times} times, expected each sample once")
        return found

    def _check_origin(self, meta: Meta, int8: str | None) -> None:
        """What the recording is of.

        Raises:
            InputError: another graph, an engine that nobody checked, or parts that do not fit the samples.
        """
        if not meta.outputs:
            raise InputError(
                f"{self._path}: nobody compared the outputs of the engine that these tensors come from "
                f"({meta.target} {meta.tensorrt}, {meta.recorded}) with the artifact's",
                remedy=_AGAIN,
            )
        if not meta.int8_sha256 or not meta.samples_sha256:
            raise self._wrong("it does not say of which INT8 graph and samples it is: an earlier version wrote it")
        if int8 is not None and meta.int8_sha256 != int8:
            raise self._wrong(
                f"it is of another INT8 graph ({meta.int8_sha256[:_SHOWN]}) than the artifact's ({int8[:_SHOWN]})"
            )
        for what, count in (("parts", sum(meta.sizes)), ("hashes", len(meta.samples_sha256))):
            if count != len(self._numbers):
                raise self._wrong(f"its {what} have {count} samples, 'samples' has {len(self._numbers)}")

    def _tensor_keys(self, layers: Sequence[str] | None, known: Collection[str] | None) -> dict[str, str]:
        """Name to key in the archive, of the tensors to read."""
        meta = self._meta
        if self._parted:
            keys = {name: str(number) for number, name in enumerate(meta.tensors)}
        else:
            keys = {name: name for name in self._archive.files if name != _SAMPLES}
        for name in (*keys, *meta.ends.values()):
            if known is not None and name not in known:
                raise self._wrong(f"it has a tensor {name!r}, and neither the FP32 nor the INT8 graph has one")
        if layers is None:
            return keys
        wanted = {*layers, *(meta.ends[layer] for layer in layers if layer in meta.ends)}
        return {name: key for name, key in keys.items() if name in wanted}

    def _check_arrays(self) -> None:
        """Every array that will be read, from its header."""
        if self._parted:
            every = range(len(self._meta.tensors))
            expected = {f"{part}/{number}" for part in range(len(self._sizes)) for number in every} - self._absent
            if extra := sorted({*self._archive.files} - expected - {_SAMPLES, META}):
                raise self._wrong(f"it has an array {extra[0]!r} of no part and tensor that its array {META!r} names")
        for name, key in self._keys.items():
            for part, size in enumerate(self._sizes):
                entry = self._entry(part, key)
                if entry in self._absent:
                    continue
                if entry not in self._archive.files:
                    raise self._wrong(f"part {part} of tensor {name!r} is missing")
                self._check_header(name, entry, size)

    def _check_header(self, name: str, entry: str, size: int) -> None:
        try:
            shape, dtype = _header(self._archive.zip, entry)
        except Exception as error:
            raise self._wrong(f"tensor {name!r} cannot be read: {error}") from error
        if dtype.kind not in "fiu":
            raise self._wrong(f"tensor {name!r} has dtype {dtype}, expected real numbers")
        empty = not shape or 0 in shape
        if empty or (shape[0] % size if self._parted else shape[0] != size):
            raise self._wrong(f"tensor {name!r} has shape {shape}, expected {size} rows")
        values = int(np.prod(shape, dtype=np.int64)) // size
        if self._meta.kept and values > self._meta.kept:
            raise self._wrong(
                f"tensor {name!r} has {values} values a sample, its array {META!r} says {self._meta.kept} were kept"
            )

    def _wrong(self, text: str) -> InputError:
        remedy = _AGAIN if META in self._archive.files else "write the file again"
        return InputError(f"{self._path}: {text}", remedy=remedy)

    def _entry(self, part: int, key: str) -> str:
        return f"{part}/{key}" if self._parted else key

    def __call__(self, batch: Batch) -> Arrays:
        if any(sample not in self._places for sample in batch.samples):
            return {}
        if self._parted:
            self._check_inputs(batch)
        values = {name: self._rows(name, key, batch) for name, key in self._keys.items()}
        return {name: rows for name, rows in values.items() if rows is not None}

    def _check_inputs(self, batch: Batch) -> None:
        recorded = dict(zip(self._numbers, self._meta.samples_sha256, strict=True))
        for number, digest in zip(batch.samples, sample_digests(batch.feeds, len(batch.samples)), strict=True):
            if digest != recorded[number]:
                raise InputError(
                    f"{self._path}: sample {number} was recorded with other inputs ({recorded[number][:_SHOWN]}) than "
                    f"it is measured with ({digest[:_SHOWN]})",
                    remedy="leave --data out: recorded are the samples kept in the artifact; or record it again",
                )

    def _rows(self, name: str, key: str, batch: Batch) -> Array | None:
        """The rows of a tensor, part by part; None where the engine did not show it."""
        found: list[Array] = []
        parts: dict[int, Array] = {}
        inputs = tuple(sorted((feed, array.shape[1:]) for feed, array in batch.feeds.items()))
        for part, row in (self._places[sample] for sample in batch.samples):
            entry = self._entry(part, key)
            if entry in self._absent:
                return None
            if part not in parts:
                parts = {part: self._load(entry, name)}
                self._check_shape(name, part, len(parts[part]) // self._sizes[part], parts[part].shape[1:], inputs)
            rows = len(parts[part]) // self._sizes[part]
            found.append(parts[part][row * rows : (row + 1) * rows])
        return np.concatenate(found)

    def _check_shape(self, name: str, part: int, rows: int, shape: Shape, inputs: tuple[Any, ...]) -> None:
        """Samples whose inputs have equal shapes have tensors of equal shapes."""
        before, known = self._shapes.setdefault((name, inputs), (part, (rows, *shape)))
        if known != (rows, *shape):
            raise self._wrong(
                f"tensor {name!r} has shape {(rows, *shape)} for a sample of part {part}, {known} for one of part "
                f"{before} with inputs of the same shape"
            )

    def _load(self, entry: str, name: str) -> Array:
        try:
            array: Array = self._archive[entry]
        except Exception as error:
            raise self._wrong(f"tensor {name!r} cannot be read: {error}") from error
        return array


def _header(archive: Any, entry: str) -> tuple[Shape, np.dtype[Any]]:
    """Shape and dtype of an array in an ``.npz``, without its values."""
    formats = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(f"{entry}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        if version not in formats:
            raise ValueError(f"its header is of version {version}, which arrays of numbers do not need")
        shape, _, dtype = formats[version](stream)
    return tuple(shape), dtype


def _first(error: ValidationError) -> str:
    """The first of its complaints: where, why and the value."""
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"])
    reason = detail["msg"].removeprefix("Value error, ")
    return f"{where}: {reason}, got {detail['input']!r}" if where else reason
