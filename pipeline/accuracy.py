"""What the INT8 network has to reach, and how a measured network stands against it."""

from __future__ import annotations

import re
from typing import Literal

from pipeline.core.errors import InputError
from pipeline.records import Record

__all__ = ["Figures", "Target"]

Kind = Literal["max_drop", "min_sqnr", "min_agreement"]

_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(%|db)?\s*", re.IGNORECASE)
_OPTIONS: dict[Kind, str] = {"max_drop": "--max-drop", "min_sqnr": "--min-sqnr", "min_agreement": "--min-agreement"}
_LARGEST_SQNR_DB = 200.0


class Figures(Record):
    """One network against FP32, over a set of samples."""

    sqnr_db: float
    """10 log10(Σ‖fp32‖² / Σ‖fp32 − int8‖²) over all samples, the lowest of the graph's outputs; at most 200."""
    agreement: float | None
    """Share of samples with the same arg-max at the first output with class scores; None without such an output."""
    top1: float | None = None
    """Share of samples whose arg-max is their label; None without labels."""
    top1_fp32: float | None = None
    samples: int

    @property
    def drop(self) -> float | None:
        """Top-1 lost against FP32, as a share."""
        return None if self.top1 is None or self.top1_fp32 is None else self.top1_fp32 - self.top1


class Target(Record):
    """One condition on :class:`Figures`. ``value`` is a share for drop and agreement, dB for SQNR."""

    kind: Kind
    value: float

    @classmethod
    def parse(cls, kind: Kind, text: str) -> Target:
        """``0.5%`` (points of top-1), ``20dB`` or ``99%``; a bare number is taken in the same unit.

        Raises:
            InputError: not a number, another unit, or out of range.
        """
        option = _OPTIONS[kind]
        unit = "db" if kind == "min_sqnr" else "%"
        example = {"max_drop": "0.5%", "min_sqnr": "20dB", "min_agreement": "99%"}[kind]
        match = _TEXT.fullmatch(text)
        if match is None or (match[2] and match[2].lower() != unit):
            raise InputError(f"{option} {text!r} is not a number such as {example}")
        value = float(match[1])
        if kind == "min_agreement" and value == 0:
            raise InputError(f"{option} {text!r} is met by every network; {example} is a usual value")
        if kind == "min_agreement" and value <= 1 and not match[2]:
            raise InputError(
                f"{option} {text!r} would be {value:g} per cent",
                remedy=f"write {100 * value:g}%, or {value:g}% if that is meant",
            )
        if (unit == "%" and value > 100) or (kind == "min_sqnr" and value > _LARGEST_SQNR_DB):
            raise InputError(f"{option} {text!r} is out of range; {example} is a usual value")
        return cls(kind=kind, value=value if unit == "db" else value / 100.0)

    def met(self, figures: Figures) -> bool:
        return self.shortfall(figures) <= 0

    def shortfall(self, figures: Figures) -> float:
        """How far the figures are from the target, in its unit; zero or less when it is met.

        Raises:
            InputError: the network or the data has no such figure.
        """
        if self.kind == "min_sqnr":
            return self.value - figures.sqnr_db
        if self.kind == "max_drop":
            if figures.drop is None:
                raise InputError(
                    "--max-drop is about top-1, which needs labels", remedy="add --labels, or use --min-sqnr"
                )
            # A share of a few hundred samples: allow for the rounding of the division, not for a sample.
            return figures.drop - self.value - 1e-9
        if figures.agreement is None:
            raise InputError(
                "--min-agreement compares the arg-max, and no output of this network has class scores",
                remedy="use --min-sqnr",
            )
        return self.value - figures.agreement - 1e-9

    def describe(self, figures: Figures) -> str:
        """The figure that the target is about, in words."""
        if self.kind == "min_sqnr":
            return f"SQNR {figures.sqnr_db:.2f} dB"
        if self.kind == "max_drop":
            return f"top-1 drop {100 * (figures.drop or 0.0):+.2f} points"
        return f"agreement {100 * (figures.agreement or 0.0):.2f} %"

    def __str__(self) -> str:
        if self.kind == "min_sqnr":
            return f"SQNR of at least {self.value:g} dB"
        if self.kind == "max_drop":
            return f"top-1 drop of at most {100 * self.value:g} points"
        return f"agreement of at least {100 * self.value:g} %"
