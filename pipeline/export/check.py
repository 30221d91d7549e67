"""A converted ONNX model against the file that it was made from, in onnxruntime on random inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import CheckFailed
from pipeline.equivalence import difference, differences, example_shapes, random_feeds, run_model, run_on_random
from pipeline.export.opset import PORTABLE
from pipeline.export.original import run_original

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config import Profile
    from pipeline.equivalence import Difference
    from pipeline.records import TensorSpec

__all__ = ["check_converted", "check_widened"]

_TOLERANCE = 1e-4
_HALF_TOLERANCE = {"float16": 0.02, "bfloat16": 0.1}
"""Of the largest value of an output. Ten networks in float16, from ResNet-18 to MiniLM and the PP-OCRv4 recogniser,
lie within 0.0011 of their widened form; bfloat16 has three bits less."""
_NOT_COMPARED = "the conversion was not compared with the original"


def check_converted(
    original: Path,
    converted: Path,
    inputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
    *,
    opsets: tuple[int, int],
) -> list[str]:
    """Compare two files that should compute the same up to float32 rounding.

    Returns:
        Warnings: why they could not be compared.

    Raises:
        CheckFailed: they differ.
    """
    shapes = example_shapes(inputs, profiles)
    ran = run_on_random(original, inputs, shapes)
    if isinstance(ran, str):
        return [f"{_NOT_COMPARED}: {ran}"]
    number, expected = ran
    worst = difference(expected, run_model(converted, [random_feeds(inputs, shapes[number], seed=number)])[0])
    if worst.error > _TOLERANCE:
        raise CheckFailed(
            f"{original} converted from opset {opsets[0]} to {opsets[1]} computes something else: "
            f"{worst.describe()}, the limit is {_TOLERANCE:g}",
            remedy=f"export the model with opset {PORTABLE} from its framework",
            figures=_figures(worst, _TOLERANCE),
        )
    return []


def check_widened(
    original: Path,
    widened: Path,
    inputs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    profiles: Sequence[Profile],
    *,
    dtype: str,
) -> list[str]:
    """Compare a model in 16 bits with its float32 form, whose inputs are ``inputs[1]`` instead of ``inputs[0]``.

    Only float outputs decide: an arg-max may jump where two scores are equal within 16 bits.

    Returns:
        Warnings: why they could not be compared.

    Raises:
        CheckFailed: a float output differs by more than rounding to ``dtype`` explains.
    """
    if brain := [spec.name for spec in inputs[0] if spec.dtype == "bfloat16"]:
        return [f"{_NOT_COMPARED}: onnxruntime takes no bfloat16 from Python, which is input {brain[0]!r}"]
    shapes = example_shapes(inputs[0], profiles)
    ran = run_original(original, inputs[0], shapes)
    if isinstance(ran, str):
        return [f"{_NOT_COMPARED}: {ran}"]
    number, expected = ran
    types = {spec.name: spec.dtype for spec in inputs[1]}
    feeds = random_feeds(inputs[0], shapes[number], seed=number)
    found = run_model(widened, [{name: array.astype(types[name]) for name, array in feeds.items()}])[0]
    if endless := [name for name in expected if not _finite(expected[name]) and _finite(found[name])]:
        return [
            f"{_NOT_COMPARED}: on random inputs the original's output {endless[0]!r} is not finite, for {dtype} ends "
            "too early; that of the widened model is"
        ]
    deciding = [each for name, each in differences(expected, found).items() if expected[name].dtype.kind == "f"]
    worst = max(deciding, key=lambda each: each.error, default=None)
    limit = _HALF_TOLERANCE[dtype]
    if worst is not None and worst.error > limit:
        raise CheckFailed(
            f"{original} widened from {dtype} to float32 computes something else: {worst.describe()}, the limit is "
            f"{limit:g}",
            remedy="export the model in float32 from its framework (without .half())",
            figures=_figures(worst, limit),
        )
    return [] if worst is not None else [f"{_NOT_COMPARED}: it has no float output"]


def _finite(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _figures(worst: Difference, tolerance: float) -> dict[str, Any]:
    return {"output": worst.output, "relative_error": worst.figure, "tolerance": tolerance}
