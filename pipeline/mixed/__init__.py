"""Automatic mixed precision: repairs that cost no speed, then layers back in float until a target is met."""

from pipeline.mixed.choosing import choose
from pipeline.mixed.stage import MixedResult, run

__all__ = ["MixedResult", "choose", "run"]
