"""The figures of the graph as verified, against the target and against the search's own.

A search runs onnxruntime with its optimisations on, the verification without them: float kernels round differently,
and now and then a value crosses a step of a Q/DQ pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.accuracy import Figures

if TYPE_CHECKING:
    from pipeline.accuracy import Target
    from pipeline.verify import VerifyResult

__all__ = ["missed_as_verified", "verified_figures"]

_KERNELS_DB = 0.2
"""Twice what EfficientNet-Lite0 shows: 25.05 and 24.95 dB."""


def verified_figures(result: VerifyResult) -> Figures:
    """What a search measures, of the verification: the lowest SQNR, the agreement at the first output that has one."""
    ratios = [output.sqnr_db for output in result.outputs if output.sqnr_db is not None]
    shares = [output.agreement for output in result.outputs if output.sqnr_db is not None]
    return Figures(
        sqnr_db=min(ratios, default=0.0),
        agreement=next((share for share in shares if share is not None), None),
        top1=result.top1_int8,
        top1_fp32=result.top1_fp32,
        samples=result.samples,
    )


def missed_as_verified(target: Target, verified: Figures, searched: Figures) -> str | None:
    """A sentence where the search meets ``target`` and the same graph on the same samples, as verified, does not.

    Args:
        searched: by the search's kernels, on the samples of ``verified``.
    """
    if not target.met(searched) or target.met(verified):
        return None
    limit = _KERNELS_DB if target.kind == "min_sqnr" else 1.0 / verified.samples + 1e-9
    between = target.shortfall(verified) - target.shortfall(searched)
    why = "kernels round differently" if between <= limit else "more than the rounding of other kernels usually makes"
    return (
        f"{target.describe(verified)} as verified, in onnxruntime without its optimisations, and "
        f"{target.describe(searched)} by the search, with them, on the same {verified.samples} samples: {why}; the "
        f"target is {target}, ask for a margin where it has to hold"
    )
