"""The built-in rules, one family per module, in the order in which they run within a stage."""

from pipeline.placement.rules import (
    attention,
    compounds,
    explain,
    joins,
    keep,
    layout,
    pooling,
    ranges,
    residual,
    unquantised,
    weighted,
)

__all__ = ["BUILT_IN"]

BUILT_IN = (
    *keep.RULES,
    *attention.RULES,
    *weighted.RULES,
    *residual.RULES,
    *joins.RULES,
    *pooling.RULES,
    *layout.RULES,
    *ranges.RULES,
    *unquantised.RULES,
    *compounds.RULES,
    *explain.RULES,
)
