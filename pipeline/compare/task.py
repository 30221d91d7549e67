"""The types of a piece of work that any process on any machine can do: which function, on which files and options.

A task holds paths, hashes and JSON values only, and its result is a mapping of arrays; so it can be sent anywhere, and
the result depends on nothing but the task: every onnxruntime session in it has one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from pipeline.compare.figures import OutputFacts
    from pipeline.compare.images import PixelCoding
    from pipeline.records import Dependency

__all__ = ["Arrays", "Done", "FileSet", "Setting", "Task"]

Arrays: TypeAlias = "dict[str, np.ndarray[Any, np.dtype[Any]]]"


@dataclass(frozen=True)
class FileSet:
    """A file and those it refers to, all in one folder."""

    folder: Path
    names: tuple[str, ...]
    """The file itself first."""
    digests: tuple[str, ...]
    """SHA-256 of each."""

    @property
    def path(self) -> Path:
        return self.folder / self.names[0]


@dataclass(frozen=True)
class Done:
    """What a task gives back."""

    arrays: Arrays
    dependencies: tuple[Dependency, ...] = ()
    """Files that the user's code read."""


@dataclass(frozen=True)
class Task:
    """``function`` is a key of :data:`pipeline.compare.perform.FUNCTIONS`; it says which files and options it takes."""

    label: str
    """For messages and progress."""
    function: str
    files: Mapping[str, FileSet]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all evaluations of an experiment have in common."""

    fp32: FileSet
    samples: FileSet
    total: int
    static_batch: bool
    labels: tuple[tuple[int, int], ...] | None
    """(sample, class) of every sample."""
    outputs: Mapping[str, OutputFacts]
    metric: str | None
    metric_sha256: str | None
    metric_file: FileSet | None
    activations: tuple[str, ...]
    """Outputs of the activation layers, for noise."""
    coding: PixelCoding | None
    absolute: bool
    seed: int
