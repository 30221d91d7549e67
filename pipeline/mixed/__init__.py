"""Automatic mixed precision: repairs that cost no speed, then layers back in float until a target is met."""

from pipeline.mixed.choosing import choose
from pipeline.mixed.stage import MixedResult, run
from pipeline.mixed.target import Target

__all__ = ["MixedResult", "Target", "choose", "run"]
