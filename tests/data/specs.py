"""Model inputs that several tests use."""

from __future__ import annotations

from pipeline.records import TensorSpec

IMAGE = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 8, 8))
ROW = TensorSpec(name="x", dtype="float32", shape=("batch", 3))
IDS = TensorSpec(name="ids", dtype="int64", shape=("batch", "length"))
MASK = TensorSpec(name="mask", dtype="float32", shape=("batch", "length"))


def everything(number: int) -> bool:
    return True
