"""Class labels of the samples, from ``.csv`` or ``.npy``."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.data.source import DataSource
    from pipeline.records import TensorSpec

__all__ = ["Listing", "check_class_scores", "load_labels"]

_COLUMN = "class_index"


@dataclass(frozen=True)
class Listing:
    """Which samples there are, without the samples."""

    text: str
    """In words."""
    length: int | None
    """None: only a pass can tell."""
    names: list[str] | None
    """As of a :class:`DataSource`."""

    def describe(self) -> str:
        return self.text


def check_class_scores(outputs: Sequence[TensorSpec]) -> None:
    """Refuse labels for a model whose output shapes say that none holds one row of class scores per sample.

    Scores are floating point of shape (batch, classes), (batch, 1, classes) or (batch, classes, 1, 1), with at least
    two classes; a dimension or rank that is not known may turn out to be so.

    Raises:
        InputError: no output can hold class scores.
    """
    if any(_may_be_scores(spec) for spec in outputs):
        return
    shapes = ", ".join(f"{spec.name!r} ({', '.join(map(str, spec.shape or ()))}) {spec.dtype}" for spec in outputs)
    raise InputError(
        f"labels are given, but no output has one row of class scores per sample: {shapes}",
        remedy="leave --labels out for this model",
    )


def _may_be_scores(spec: TensorSpec) -> bool:
    if spec.shape is None:
        return True
    if not spec.dtype.startswith(("float", "bfloat")) or len(spec.shape) < 2:
        return False
    _, *dims = spec.shape
    if len(dims) == 2 and not _is_one(dims[0]):
        return False
    if len(dims) > 2 and not all(map(_is_one, dims[1:])):
        return False
    classes = dims[1] if len(dims) == 2 else dims[0]
    return not isinstance(classes, int) or classes > 1


def _is_one(dim: int | str) -> bool:
    return not isinstance(dim, int) or dim == 1


def load_labels(path: Path, source: DataSource | Listing) -> dict[int, int]:
    """Class index of every sample of ``source``, by sample number.

    Formats: for images a ``.csv`` with the columns ``file,class_index`` (more are ignored; ``file`` is the path below
    the data folder, or just the file's name where that is unique); for arrays ``index,class_index``, one column
    ``class_index``, or a one-dimensional integer ``.npy``, in the order of the samples.

    Raises:
        InputError: unreadable, a column missing, a label that is no class index, a sample without or with two labels, a
            label without sample; named one by one.
    """
    path = Path(path)
    if path.suffix == ".npy":
        return _by_order(path, _npy_labels(path), source)
    rows = _rows(path)
    columns = list(rows[0]) if rows else []
    if _COLUMN not in columns:
        raise InputError(
            f"{path} has no column {_COLUMN!r}; it has {', '.join(map(str, columns)) or 'none'}",
            remedy=f"the first line must be file,{_COLUMN} (images) or index,{_COLUMN} (arrays)",
        )
    classes = [_class_index(row[_COLUMN], f"{path} line {line}") for line, row in enumerate(rows, 2)]
    if "file" in columns:
        return _by_file(path, [str(row["file"]) for row in rows], classes, source)
    if "index" in columns:
        keys = [_class_index(row["index"], f"{path} line {line}, index") for line, row in enumerate(rows, 2)]
        return _by_key(path, keys, classes, source)
    return _by_order(path, classes, source)


def _rows(path: Path) -> list[dict[str, str | None]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            return [dict(row) for row in csv.DictReader(stream, skipinitialspace=True)]
    except FileNotFoundError as error:
        raise InputError(f"labels {path} do not exist") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"labels {path} cannot be read: {error}") from error


def _npy_labels(path: Path) -> list[int]:
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise InputError(f"labels {path} do not exist") from error
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"labels {path} cannot be read: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"labels {path} must be a one-dimensional integer array, got {array.dtype} of shape {array.shape}"
        )
    return [_class_index(str(value), f"{path} position {position}") for position, value in enumerate(array)]


def _class_index(text: str | None, where: str) -> int:
    try:
        value = int(text or "")
    except ValueError as error:
        raise InputError(f"{where}: {text!r} is not a whole number") from error
    if value < 0:
        raise InputError(f"{where}: {value} is negative")
    return value


def _by_file(path: Path, files: list[str], classes: list[int], source: DataSource | Listing) -> dict[int, int]:
    names = source.names
    if names is None:
        raise InputError(
            f"{path} labels files, and the data ({source.describe()}) have no file names",
            remedy=f"give the columns index,{_COLUMN}, or one column {_COLUMN} in the order of the samples",
        )
    numbers = {name: number for number, name in enumerate(names)}
    by_base: dict[str, list[int]] = {}
    for name, number in numbers.items():
        by_base.setdefault(name.rpartition("/")[2], []).append(number)
    keys = []
    for file in files:
        candidates = [numbers[file]] if file in numbers else by_base.get(file, [])
        if len(candidates) > 1:
            raise InputError(
                f"{path} labels {file!r}, and {len(candidates)} files have that name, "
                f"such as {names[candidates[0]]!r} and {names[candidates[1]]!r}",
                remedy="write the path below the data folder",
            )
        if not candidates:
            missing = sum(f not in numbers and f not in by_base for f in files)
            raise InputError(
                f"{path} labels {file!r}, which is not in the data ({missing} such labels)",
                remedy="take these lines out, or give the right --data folder",
            )
        keys.append(candidates[0])
    return _by_key(path, keys, classes, source)


def _by_order(path: Path, classes: list[int], source: DataSource | Listing) -> dict[int, int]:
    if source.length is not None and len(classes) != source.length:
        raise InputError(f"{path} has {len(classes)} labels, the data have {source.length} samples")
    return dict(enumerate(classes))


def _by_key(path: Path, keys: list[int], classes: list[int], source: DataSource | Listing) -> dict[int, int]:
    names = source.names

    def called(number: int) -> str:
        return repr(names[number]) if names is not None else f"sample {number}"

    if repeated := sorted(number for number, count in Counter(keys).items() if count > 1):
        raise InputError(f"{path} labels {called(repeated[0])} more than once ({len(repeated)} such samples)")
    length = source.length
    if length is not None:
        if beyond := sorted(key for key in keys if key >= length):
            raise InputError(f"{path} labels sample {beyond[0]}, and the data have {length} samples, numbered from 0")
        if missing := sorted(set(range(length)) - set(keys)):
            raise InputError(
                f"{path} has no label for {called(missing[0])} ({len(missing)} of {length} samples have none)",
                remedy="label every sample, or leave the unlabelled ones out of --data",
            )
    return dict(sorted(zip(keys, classes, strict=True)))
