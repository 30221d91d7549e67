"""Small contexts for the tests."""

from __future__ import annotations

from typing import Any

from pipeline.consistency.context import Evidence, QuantContext, TensorContext

AMAX = {"conv1": 1.0, "relu1": 6.0, "add": 0.01, "head": 113.25}


def context(label: str, amax: dict[str, float] | None = None, **fields: Any) -> QuantContext:
    return QuantContext.of_amax(amax or AMAX, label=label, **fields)


def seen(samples: int = 100, low: float = -1.0, high: float = 1.0) -> Evidence:
    return Evidence(samples=samples, minimum=low, maximum=high)


def weights(label: str, scales: tuple[float, ...], axis: int | None = 0) -> QuantContext:
    return QuantContext(
        label=label,
        tensors=(TensorContext(name="w", kind="weight", scales=scales, axis=axis),),
        complete=("weight",),
    )
