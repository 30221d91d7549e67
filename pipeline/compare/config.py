"""Configuration of an experiment: a build's, and what to compare and how."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.compare.images import IMAGE_SHIFTS
from pipeline.config import BuildConfig
from pipeline.core.errors import did_you_mean

__all__ = ["MIN_SAMPLES", "CompareConfig"]

MIN_SAMPLES: Final = 10
"""Held-aside samples below which an experiment is refused: no difference that matters could be told."""


class CompareConfig(BuildConfig):
    """Everything `quantize compare` needs. ``calibrator`` and ``targets`` of a build are for ``--build``."""

    calibrators: tuple[str, ...] = ("all",)
    """As :func:`pipeline.compare.variants.expand` takes them."""
    target: Literal["onnx", "tensorrt"] = "onnx"
    """What computes the INT8 graphs: onnxruntime, or TensorRT on the card in this machine."""
    metric: str | None = None
    """``file.py:callable``: called with (outputs, samples, labels), gives one number per sample, higher is better."""
    shift_sigma: tuple[float, ...] = ()
    """Standard deviations of noise on activation outputs, in units of each tensor's own; 0 is the clean case."""
    shift_absolute: bool = False
    """Strengths in ``shift_sigma`` are in the tensors' own units."""
    shift_draws: int = Field(default=2, ge=1)
    """Drawings of the noise for each strength."""
    shift_images: tuple[str, ...] = ()
    calibration_sizes: tuple[int, ...] = ()
    """Also calibrate on so many of the calibration samples."""
    calibration_subsets: int = Field(default=5, ge=1)
    """Different choices of samples for each size."""
    seed: int = Field(default=0, ge=0)
    workers: int | None = Field(default=None, ge=1)
    """Evaluations at a time; None: one per core, in this process."""
    address: str | None = None
    """A running Ray cluster, such as ``auto`` or ``ray://host:10001``."""

    @model_validator(mode="after")
    def _one_card(self) -> CompareConfig:
        if self.target == "tensorrt" and (self.address is not None or (self.workers or 1) > 1):
            raise ValueError("target tensorrt uses the card in this machine: leave workers and address out")
        return self

    @field_validator("calibrators", "shift_sigma", "shift_images", "calibration_sizes", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """One value stands for a list of one; a text of numbers or names is split at commas, except for calibrators."""
        if isinstance(value, str):
            return (value,)
        return (value,) if isinstance(value, (int, float)) else value

    @field_validator("shift_sigma")
    @classmethod
    def _not_negative(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if wrong := [sigma for sigma in value if not 0 <= sigma < float("inf")]:
            raise ValueError(f"a standard deviation must not be negative, got {wrong[0]:g}")
        return value

    @field_validator("shift_images")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in value if name not in IMAGE_SHIFTS]:
            raise ValueError(f"unknown image shift {unknown[0]!r}; {did_you_mean(unknown[0], IMAGE_SHIFTS)}")
        return value

    @field_validator("calibration_sizes")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if wrong := [size for size in value if size < 1]:
            raise ValueError(f"a calibration size must be at least 1, got {wrong[0]}")
        return tuple(sorted(set(value)))
