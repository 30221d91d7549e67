"""The built-in rules, one family per module, in the order in which they run within a stage."""

from pipeline.placement.rules import explain, joins, keep, layout, pooling, ranges, residual, weighted

__all__ = ["BUILT_IN"]

BUILT_IN = (
    *keep.RULES,
    *weighted.RULES,
    *residual.RULES,
    *joins.RULES,
    *pooling.RULES,
    *layout.RULES,
    *ranges.RULES,
    *explain.RULES,
)
