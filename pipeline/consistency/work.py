"""What the ranks calibrate together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.data import DataSource
    from pipeline.records import TensorSpec

__all__ = ["Work"]


@dataclass(frozen=True)
class Work:
    """What is calibrated; the same in every rank."""

    model: Path
    """The prepared float model."""
    tensors: tuple[str, ...]
    source: DataSource
    samples: tuple[int, ...]
    """Numbers of the calibration samples."""
    inputs: tuple[TensorSpec, ...]
    batch_size: int = 8
    on_nonfinite: str = "error"
    shard: str = "cyclic"
