"""Figures of outputs and layers over all samples, as manifests and reports have them, and what is said beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors.doubtful import ALMOST_ZERO
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LayerFigures", "OutputFigures", "layers_remark"]


class OutputFigures(Record):
    """One graph output, FP32 against INT8, over the samples. None: not comparable, see ``note``."""

    name: str
    relative_l2_mean: float | None = None
    """Over the samples in which FP32 is not almost zero, as the next three; None where it is in all of them."""
    relative_l2_max: float | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None
    sqnr_db: float | None = None
    """10 log10(Σ‖fp32‖² / Σ‖fp32 − int8‖²) over all samples, at most 200; None: not floating point, or all zero."""
    agreement: float | None = None
    """Share of samples (of steps, for a sequence of classes) whose arg-max is the same, of class scores; of whole
    numbers the share of equal ones. None for others."""
    max_abs: float | None = None
    """Largest absolute error over all samples."""
    max_abs_sample: int | None = None
    value_range: float | None = None
    """Largest absolute FP32 value over all samples, at least 1 for a sigmoid."""
    almost_zero: int = 0
    """Samples whose FP32 values all lie within a thousandth of the range from zero."""
    far: int = 0
    """Samples that are mostly error: relative L2 above 0.5, and an error above a twentieth of the range."""
    note: str = ""

    def text(self, samples: int) -> str:
        """The figures in one line; relative ones that are missing, and why, at its end."""
        parts = []
        if self.relative_l2_mean is not None and self.cosine_mean is not None:
            parts.append(f"relative L2 {self.relative_l2_mean:.4f} (worst {self.relative_l2_max:.4f})")
            parts.append(f"cosine {self.cosine_mean:.5f}")
            if self.max_abs is not None:
                parts.append(f"largest absolute error {self.max_abs:.3g} of a range of {self.value_range:.3g}")
        if self.agreement is not None:
            parts.append(f"arg-max agreement {100 * self.agreement:.2f} %")
        return "; ".join(part for part in (", ".join(parts), self.remark(samples)) if part)

    def remark(self, samples: int) -> str:
        """Why relative figures are missing in some or all of ``samples``, and what is there instead; empty: none is."""
        if self.note or not self.almost_zero:
            return self.note
        which = "all" if self.almost_zero == samples else str(self.almost_zero)
        return (
            f"FP32 is almost zero in {which} of {samples} samples (below {ALMOST_ZERO:g} of a range of "
            f"{self.value_range:.3g}), so their relative error says nothing and is left out; the largest absolute "
            f"error is {self.max_abs:.3g} (sample {self.max_abs_sample})"
        )


class LayerFigures(Record):
    """Error of one layer over the samples. None: FP32 is almost zero in all of them."""

    layer: str
    node: str
    op: str
    relative_l2_mean: float | None
    """Over the samples in which FP32 is not almost zero."""
    relative_l2_max: float | None
    max_abs: float | None = None
    """Largest absolute error over all samples; None: an earlier version wrote this."""
    almost_zero: int = 0
    """Samples in which FP32 is almost zero."""


def layers_remark(almost_zero: Mapping[str, int], layers: int, samples: int) -> str:
    """Of which of ``layers`` relative figures are without some samples; empty: of none.

    Args:
        almost_zero: layer to the number of ``samples`` in which FP32 is almost zero there.
    """
    if not almost_zero:
        return ""
    first = max(almost_zero, key=lambda name: almost_zero[name])
    verb = "layer has" if len(almost_zero) == 1 else "layers have"
    return (
        f"{len(almost_zero)} of {layers} {verb} samples in which FP32 is almost zero (below {ALMOST_ZERO:g} of the "
        f"layer's range; {first!r} in {almost_zero[first]} of {samples}): their relative error says nothing and is "
        "left out, their absolute error counts"
    )
