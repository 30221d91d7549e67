"""An engine's tensors read from a file that was recorded on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from pydantic import ValidationError

from pipeline.core.errors import InputError
from pipeline.errors.engine import engine_label
from pipeline.errors.recording import META, Meta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.data.batching import Batch
    from pipeline.errors.capture import Arrays

__all__ = ["RecordedReading"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_UNKNOWN = Meta(target="", tensorrt="", recorded="", tensors=(), sizes=())


class RecordedReading:
    """The tensors in an ``.npz`` that :mod:`pipeline.errors.recording` wrote, a batch at a time.

    A plain ``.npz`` will do too: ``samples`` (sample numbers, shape (n,)) and one array per tensor with n rows. A batch
    of which the file has not every sample gives no tensors.

    Raises:
        InputError: the file is missing or damaged, has no ``samples``, or a tensor with another number of rows; or it
            was recorded by a version that did not look at the engine's outputs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = np.load(path, allow_pickle=False)
            numbers = np.atleast_1d(self._archive["samples"])
            meta = Meta.model_validate_json(str(self._archive[META])) if META in self._archive.files else None
        except FileNotFoundError as error:
            raise InputError(f"recorded tensors {path} do not exist") from error
        except KeyError as error:
            raise InputError(f"{path} has no array 'samples' with the sample numbers of its rows") from error
        except ValidationError as error:
            raise InputError(f"{path}: its array {META!r} is damaged: {error}", remedy="record it again") from error
        except Exception as error:
            raise InputError(f"{path} is not a readable .npz file: {error}") from error
        if meta is not None and not meta.outputs:
            raise InputError(
                f"{path}: nobody compared the outputs of the engine that these tensors come from "
                f"({meta.target} {meta.tensorrt}, {meta.recorded}) with the artifact's",
                remedy="record it again: python -m pipeline.errors.recording ARTIFACT OUT.npz",
            )
        self._parted = meta is not None
        self._meta = meta or _UNKNOWN
        sizes = self._meta.sizes if self._parted else (len(numbers),)
        if sum(sizes) != len(numbers):
            raise InputError(f"{path}: its parts have {sum(sizes)} samples, 'samples' has {len(numbers)}")
        places = [(part, row) for part, size in enumerate(sizes) for row in range(size)]
        self._sizes = sizes
        self._places = {int(number): place for number, place in zip(numbers, places, strict=True)}
        where = f"recorded in {path.name}"
        told = engine_label(self._meta.target, self._meta.tensorrt)
        self.label = f"{told}, {where}" if self._parted else f"the engine ({where})"

    @property
    def recorded(self) -> str:
        return self._meta.recorded

    @property
    def ends(self) -> Mapping[str, str]:
        return self._meta.ends

    @property
    def scales(self) -> Mapping[str, float]:
        return self._meta.scales

    @property
    def unshown(self) -> Mapping[str, str]:
        return self._meta.unshown

    @property
    def kept(self) -> int:
        return self._meta.kept

    def __call__(self, batch: Batch) -> Arrays:
        if any(sample not in self._places for sample in batch.samples):
            return {}
        places = [self._places[sample] for sample in batch.samples]
        if self._parted:
            names = {name: str(number) for number, name in enumerate(self._meta.tensors)}
        else:
            names = {name: name for name in self._archive.files if name != "samples"}
        values = {name: self._rows(name, key, places) for name, key in names.items()}
        return {name: rows for name, rows in values.items() if rows is not None}

    def _rows(self, name: str, key: str, places: Sequence[tuple[int, int]]) -> Array | None:
        """The rows of a tensor, part by part; None where the engine did not show it."""
        found: list[Array] = []
        parts: dict[int, Array] = {}
        for part, row in places:
            if part not in parts:
                entry = f"{part}/{key}" if self._parted else key
                if entry not in self._archive.files:
                    return None
                parts = {part: self._load(entry, name, self._sizes[part])}
            rows = len(parts[part]) // self._sizes[part]
            found.append(parts[part][row * rows : (row + 1) * rows])
        return np.concatenate(found)

    def _load(self, entry: str, name: str, size: int) -> Array:
        try:
            array: Array = self._archive[entry]
        except Exception as error:
            raise InputError(
                f"{self._path}: tensor {name!r} cannot be read: {error}", remedy="record it again"
            ) from error
        wrong = not array.size or array.shape[0] % size if self._parted else array.shape[:1] != (size,)
        if wrong:
            raise InputError(f"{self._path}: tensor {name!r} has shape {array.shape}, expected {size} rows")
        return array
