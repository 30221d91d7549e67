"""The types that flow between stages."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

__all__ = ["Dependency", "Record", "StageResult", "TensorSpec"]

Self = TypeVar("Self", bound="StageResult")


class Record(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(Record):
    """A graph input or output.

    ``shape`` holds an int for a static dimension and a name for a dynamic one (``"?"`` when the model gives none);
    None when the rank is unknown. ``dtype`` is numpy's name, such as ``float32``.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None

    @property
    def dynamic(self) -> bool:
        return self.shape is None or any(not isinstance(dim, int) for dim in self.shape)


class Dependency(Record):
    """A file outside the pipeline that a stage's result was made from (a user's script, weights it opened)."""

    path: str
    sha256: str


class StageResult(Record):
    """What a stage returns: figures as fields, files by fixed names below :attr:`folder`.

    The record itself carries no absolute path, so a finished stage folder can be moved.
    """

    dependencies: tuple[Dependency, ...] = Field(default=())
    _folder: Path = PrivateAttr(default=Path())

    def at(self: Self, folder: Path) -> Self:
        """The same result, its files looked up below ``folder``."""
        copy = self.model_copy()
        copy._folder = Path(folder)
        return copy

    @property
    def folder(self) -> Path:
        return self._folder
