"""Stage 2, prepare: an equal model that is easier to quantise."""

from pipeline.prepare.result import Change, PrepareResult
from pipeline.prepare.stage import rewrite, run

__all__ = ["Change", "PrepareResult", "rewrite", "run"]
