"""Proof that a prepared model computes what the original does: both run in onnxruntime on random and on real inputs.

The error of an output is max|before - after| / max|before|. Where the output is a Sigmoid, Softmax or the like of a
tensor that both models have, the error of that tensor counts if it is smaller: near 0 and 1 such a function has fewer
correct digits than float32, and it is the same node in both models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import CheckFailed, InputError, QuantizeError, ToolError
from pipeline.equivalence import Difference, differences, example_shapes, random_feeds, rounding_noise, run_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.records import TensorSpec

__all__ = ["TOLERANCE", "Comparison", "compare"]

Array = np.ndarray[Any, np.dtype[Any]]
TOLERANCE = 1e-5
_NOISE_FACTOR = 4.0
"""Where rounding the inputs alone moves an output by more than the tolerance, this many times as much is allowed."""
_SATURATING = frozenset({"HardSigmoid", "LogSoftmax", "Sigmoid", "Softmax", "Tanh"})


@dataclass(frozen=True)
class Comparison:
    """See :class:`pipeline.prepare.result.PrepareResult`."""

    random_error: float | None
    data_error: float | None
    noise: float | None
    warnings: tuple[str, ...] = ()


def compare(
    original: Path, prepared: Path, inputs: Sequence[TensorSpec], sample_feeds: Sequence[Mapping[str, Array]]
) -> Comparison:
    """Compare on the samples, where there are any, and on random inputs.

    Raises:
        InputError: onnxruntime cannot load the original model, or not run it on the samples.
        CheckFailed: an output differs by more than the tolerance and by more than the model's own rounding noise.
    """
    saturated = _saturated(original, prepared)
    data_error, data_noise = None, None
    if sample_feeds:
        shapes = [{name: array.shape for name, array in sample_feeds[0].items()}]
        expected = _run_on_samples(original, sample_feeds, list(saturated.values()))
        data_error, data_noise = _judge(original, prepared, sample_feeds, expected, saturated, "the given samples")
    else:
        shapes = example_shapes(inputs)
    for shape in shapes:
        feeds = random_feeds(inputs, shape, seed=0)
        if sample_feeds:
            # Random integers are no valid ids for every model; the given ones are.
            feeds.update({name: array for name, array in sample_feeds[0].items() if array.dtype.kind != "f"})
        try:
            expected = run_model(original, [feeds], capture=list(saturated.values()))
        except Exception:  # onnxruntime refuses a guessed shape with one of several types: try the next
            continue
        error, noise = _judge(original, prepared, [feeds], expected, saturated, "random inputs")
        return Comparison(error, data_error, max((n for n in (noise, data_noise) if n is not None), default=None))
    warning = "the prepared model was not compared on random inputs: no shape was found that the model takes"
    return Comparison(None, data_error, data_noise, (warning,))


def _run_on_samples(
    model: Path, sample_feeds: Sequence[Mapping[str, Array]], capture: Sequence[str]
) -> list[dict[str, Array]]:
    try:
        return run_model(model, sample_feeds, capture=capture)
    except ToolError as error:
        raise InputError(
            error.message,
            remedy="there the model is calibrated and verified: export it with operators, attributes and types that "
            "onnxruntime has, such as float32",
        ) from error
    except QuantizeError:
        raise
    except Exception as error:  # onnxruntime refuses feeds with one of several types
        each = (f"{name} {array.shape} {array.dtype}" for feeds in sample_feeds for name, array in feeds.items())
        shapes = ", ".join(dict.fromkeys(each))
        raise InputError(
            f"the model cannot be run on the first samples ({shapes}): {error}",
            remedy="give data with shapes and values that the model takes: ids within its vocabulary, images of a size "
            "that it takes (resize and crop in --preprocess)",
        ) from error


def _saturated(original: Path, prepared: Path) -> dict[str, str]:
    """Output -> the tensor that a saturating node makes it from, where both models have the same node."""
    import onnx

    found = []
    for path in (original, prepared):
        graph = onnx.load(path, load_external_data=False).graph
        outputs = {output.name for output in graph.output}
        found.append(
            {
                node.output[0]: (node.op_type, node.input[0])
                for node in graph.node
                if node.op_type in _SATURATING and node.output[0] in outputs
            }
        )
    first, second = found
    return {output: made[1] for output, made in first.items() if second.get(output) == made}


def _judge(
    original: Path,
    prepared: Path,
    feeds: Sequence[Mapping[str, Array]],
    expected: Sequence[Mapping[str, Array]],
    saturated: Mapping[str, str],
    what: str,
) -> tuple[float, float | None]:
    """The largest error, and the model's rounding noise where it had to be measured."""
    largest, noise = 0.0, None
    found = run_model(prepared, feeds, capture=list(saturated.values()))
    for feed, before, after in zip(feeds, expected, found, strict=True):
        all_differences = differences(before, after)
        worst = max(
            (_smaller(all_differences, name, saturated) for name in before if name not in saturated.values()),
            key=lambda item: item.error,
        )
        largest = max(largest, worst.error)
        if worst.error <= TOLERANCE:
            continue
        noise = rounding_noise(original, feed, before)[worst.output]
        if worst.error <= _NOISE_FACTOR * noise:
            continue
        raise CheckFailed(
            f"{original.name} computes something else after preparing it, on {what}: {worst.describe()}, "
            f"the limit is {TOLERANCE:g}",
            remedy="this is a fault of the pipeline or of onnxruntime: please report it with the model",
        )
    return largest, noise


def _smaller(found: Mapping[str, Difference], output: str, saturated: Mapping[str, str]) -> Difference:
    """The difference of ``output``, or that of the tensor behind it where this is smaller."""
    own = found[output]
    behind = found[saturated[output]] if output in saturated else own
    return behind if behind.error < own.error else own
