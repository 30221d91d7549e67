"""The same scales on every batch, process, device and machine, asserted.

Light to import: numpy and pydantic. Under torchrun, ``python -m pipeline.consistency`` is `quantize consistency`.
"""

from pipeline.consistency.compare import assert_consistent, compare
from pipeline.consistency.comparison import Comparison, Tolerance
from pipeline.consistency.context import QuantContext, TensorContext
from pipeline.consistency.loading import load_context, save_context

__all__ = [
    "Comparison",
    "QuantContext",
    "TensorContext",
    "Tolerance",
    "assert_consistent",
    "compare",
    "load_context",
    "save_context",
]
