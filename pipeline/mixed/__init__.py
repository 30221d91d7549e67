"""Automatic mixed precision: repairs that cost no speed, then layers back in float until a target is met."""

from pipeline.mixed.stage import MixedResult, choose, run
from pipeline.mixed.target import Target

__all__ = ["MixedResult", "Target", "choose", "run"]
