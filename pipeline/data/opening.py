"""From what the user typed as ``--data`` to a data source."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.data.arrays import NpyFile, NpzFile, array_samples
from pipeline.data.callables import CallableSource
from pipeline.data.images import IMAGE_SUFFIXES, ImageFolder
from pipeline.data.labels import Listing
from pipeline.records import TensorSpec
from pipeline.usercode import parse_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.config import Preprocess
    from pipeline.data.source import DataSource

__all__ = ["check_source", "open_source"]


def open_source(spec: str, inputs: Sequence[TensorSpec], preprocess: Preprocess | None) -> DataSource:
    """The source that ``spec`` names.

    Args:
        spec: a folder of images, an ``.npy`` or ``.npz`` file, ``file.py:callable`` or ``package.module:callable``.
        inputs: the model's inputs, batch axis included.
        preprocess: for images only.

    Raises:
        InputError: nothing is there, it is of no known kind, or it does not fit the model's inputs.
    """
    return _found(spec, preprocess)(inputs)


def check_source(spec: str, preprocess: Preprocess | None, inputs: Sequence[TensorSpec] = ()) -> Listing:
    """What is wrong with ``spec`` and ``preprocess``, before the model is there; no sample is read, no code is run.

    Args:
        inputs: the model's inputs as far as options state them: names, shapes.

    Returns:
        The samples, as far as they can be known.

    Raises:
        InputError: nothing is there, it is of no known kind, it cannot be read, preprocessing is declared for arrays,
            is missing for images or gives none that an input of ``inputs`` takes.
    """
    _found(spec, preprocess)
    path = Path(spec).expanduser()
    if path.is_dir():
        images = ImageFolder(path, [TensorSpec(name="input", dtype="float32", shape=None)], preprocess)
        if inputs:
            try:
                ImageFolder(path, inputs, preprocess)
            except InputError as error:
                raise InputError(f"{error.message} (as --input and --profile state it)", remedy=error.remedy) from error
        return Listing(images.describe(), images.length, images.names)
    if not path.exists():
        return Listing(f"samples from {spec}", None, None)
    length = array_samples(path)
    return Listing(f"{length} samples in {path}", length, None)


def _found(spec: str, preprocess: Preprocess | None) -> Callable[[Sequence[TensorSpec]], DataSource]:
    """What opens ``spec`` for a model's inputs."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return lambda inputs: ImageFolder(path, inputs, preprocess)
    code = None if path.exists() else parse_code(spec)
    if preprocess is not None and (code is not None or (path.exists() and path.suffix in (".npy", ".npz"))):
        raise InputError(
            f"preprocessing is declared, and --data {spec} gives arrays, to which none is applied",
            remedy="leave --preprocess out and give the arrays as the model takes them",
        )
    if code is not None:
        return partial(CallableSource, code)
    if not path.exists():
        raise InputError(
            f"--data {spec} does not exist", remedy="give a folder of images, an .npy or .npz file, or file.py:callable"
        )
    if path.suffix == ".npy":
        return partial(NpyFile, path)
    if path.suffix == ".npz":
        return partial(NpzFile, path)
    remedy = "give a folder of images, an .npy or .npz file, or file.py:callable"
    if path.suffix == ".py":
        remedy = f"name the callable in it: {spec}:NAME"
    elif path.suffix.lower() in IMAGE_SUFFIXES:
        remedy = f"give the folder: {path.parent}"
    raise InputError(f"--data {spec} is of no known kind", remedy=remedy)
