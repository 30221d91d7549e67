"""What the scripts around ``gpu_bench.py`` share: the packed folder, how images are normalised, whose turn it is."""

from __future__ import annotations

import fcntl
import io
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pipeline.config import Profile
from pipeline.engine.onnx_wire import read_model

__all__ = ["PACK", "RIVALS", "batch_profiles", "card", "differing", "model_images", "normalised", "unpack"]

PACK = "pack.tar"
RIVALS = ("modelopt", "onnxruntime", "alternative")
"""Q/DQ graphs of other tools, and of other placement rules, given with --rival."""


def normalised(images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """float32, same shape."""
    values = images.astype(np.float32) - mean.reshape(1, -1, 1, 1)
    return np.asarray(values / std.reshape(1, -1, 1, 1), np.float32)


def model_images(images: np.ndarray, numbers: Mapping[str, Sequence[float]]) -> np.ndarray:
    """``images`` as a model of ``spec.json`` takes them: float32, same shape."""
    mean, std = (np.array(numbers[key], np.float32) for key in ("mean", "std"))
    return normalised(images, mean, std)


def batch_profiles(model: Path, batches: Sequence[str]) -> list[Profile]:
    """A profile of the first input of ``model`` for each MIN:OPT:MAX of ``batches``."""
    spec = read_model(model).inputs[0]
    rest = "x".join(str(dim) for dim in (spec.shape or ())[1:])
    texts = [[f"{batch}x{rest}" for batch in part.split(":")] for part in batches]
    return [Profile.parse(f"{spec.name}={','.join(shapes)}") for shapes in texts]


def differing(one: np.ndarray, other: np.ndarray) -> dict[int, list[int]]:
    """Number of each image with two predictions, and what they are; both (images,) of class numbers."""
    return {int(number): [int(one[number]), int(other[number])] for number in np.flatnonzero(one != other)}


def unpack(folder: Path) -> None:
    parts = sorted(folder.glob(f"{PACK}.*"))
    if not parts:
        return
    data = b"".join(part.read_bytes() for part in parts)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder)
    for part in parts:
        part.unlink()


@contextmanager
def card(*, alone: bool) -> Iterator[None]:
    """Share the card with other runs of this script, or have it alone. Who waits to be alone is overtaken by nobody."""
    folder = Path(tempfile.gettempdir())
    turn, use = (folder / f"quantize-gpu-bench.{name}.lock" for name in ("turn", "use"))
    with turn.open("w") as first, use.open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(first, fcntl.LOCK_UN)
        yield
