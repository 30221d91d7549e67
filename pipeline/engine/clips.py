"""Clip in front of a QuantizeLinear, where no INT8 kernel takes it in.

TensorRT 8.6.0 moves such a QuantizeLinear in front of the Clip and keeps the Clip's bounds, which then cut off
integers: behind Clip(0, 6) nothing above 6 is left of 0..127. Seen on an H200 behind a convolution that stays float,
behind a sum, and behind a convolution whose own output is returned (``scripts/experiments/results-gpu.md``); Relu and
LeakyRelu in the Clip's place are computed rightly. So such a QuantizeLinear is made to read something else, with the
same integers, bit for bit:

- what the Clip reads, or its Relu, where the range ends no later than the bounds: the QuantizeLinear cuts off there
  itself. Every calibrator gives such a range to the output of a Clip.
- else the half of a Clip of the double, which 8.6.0 computes rightly, with bounds twice as far.

The Clip of an INT8 convolution whose result is quantised again stays: kernels have it, and with Relu in its place
EfficientNet-Lite0 took 0.9 % longer at batch 1.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.engine.network import tensors_and_makers, times

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pipeline.engine.compat import Api
    from pipeline.engine.onnx_wire import Graph, Node, Tensor

__all__ = ["Passed", "clips_to_pass", "pass_clips"]

_LARGEST, _SMALLEST = 127, -128
_WITH_KERNELS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True)
class Passed:
    """A QuantizeLinear that is to read something else than the Clip's output."""

    clip: str
    """The Clip's label."""
    source: str
    """The tensor that the Clip reads."""
    quantised: str
    """The QuantizeLinear's output."""
    by: Literal["relu", "source", "doubled"]
    bounds: tuple[float, float]
    """Of the Clip; infinite where there is none."""


def _scalar(constants: Mapping[str, Tensor], name: str) -> float | None:
    values = constants[name].values() if name in constants else None
    return float(values[0]) if values is not None and values.size == 1 else None


def _bounds(constants: Mapping[str, Tensor], clip: Node) -> tuple[float, float] | None:
    """None: not known before the graph runs."""
    found: list[float] = []
    for place, key, without in ((1, "min", -np.inf), (2, "max", np.inf)):
        name = clip.inputs[place] if len(clip.inputs) > place else ""
        attribute = clip.attributes.get(key)  # before opset 11
        value = _scalar(constants, name) if name else without
        if attribute is not None and attribute.number is not None:
            value = attribute.number
        if value is None:
            return None
        found.append(value)
    return found[0], found[1]


def _how(bounds: tuple[float, float], scale: float) -> Literal["relu", "source", "doubled"]:
    """A value x becomes round(x / scale), ties to even, in -128..127: above 126.5 steps 127, below -127.5 -128."""
    low, high = (np.float32(bound) / np.float32(scale) for bound in bounds)
    if high > _LARGEST - 0.5 and bounds[0] == 0:
        return "relu"
    return "source" if high > _LARGEST - 0.5 and low < _SMALLEST + 0.5 else "doubled"


def clips_to_pass(graph: Graph, *, returned: Collection[str] = ()) -> list[Passed]:
    """What is to be done in ``graph``, its subgraphs left out.

    Args:
        returned: tensors that the engine returns beside the graph's outputs.
    """
    constants = graph.constants()
    producers = {name: node for node in graph.nodes for name in node.outputs}
    readers: dict[str, list[Node]] = defaultdict(list)
    for _, node in graph.walk():
        for name in node.inputs:
            readers[name].append(node)
    seen = {spec.name for spec in graph.outputs} | set(returned)

    def taken_in(clip: Node) -> bool:
        """An INT8 kernel computes the Clip, since it stores what the QuantizeLinear makes of it."""
        source, output = clip.inputs[0], clip.outputs[0]
        maker = producers.get(source)
        return (
            maker is not None
            and maker.op_type in _WITH_KERNELS
            and all(getattr(producers.get(name), "op_type", "") == "DequantizeLinear" for name in maker.inputs[:2])
            and len(readers[source]) == 1
            and all(node.op_type == "QuantizeLinear" for node in readers[output])
            and not seen & {source, output}
        )

    found = []
    for node in graph.nodes:
        clip = producers.get(node.inputs[0]) if node.op_type == "QuantizeLinear" and not node.domain else None
        if clip is None or clip.op_type != "Clip" or clip.domain or taken_in(clip):
            continue
        scale, bounds = _scalar(constants, node.inputs[1]), _bounds(constants, clip)
        if scale is not None and scale > 0 and bounds is not None and bounds[0] <= bounds[1]:
            found.append(Passed(clip.label(), clip.inputs[0], node.outputs[0], _how(bounds, scale), bounds))
    return found


def pass_clips(network: Any, api: Api, graph: Graph, *, returned: Collection[str] = ()) -> tuple[str, ...]:
    """Do it in ``network``, which was parsed from ``graph``. The Clips stay, for other readers if there are any.

    Returns:
        The labels of the Clips passed by.
    """
    wanted = clips_to_pass(graph, returned=returned)
    if not wanted:
        return ()
    trt = api.trt
    tensors, makers = tensors_and_makers(network)
    made: dict[tuple[str, str, tuple[float, float]], Any] = {}
    labels = []
    for one in wanted:
        quantise, source = makers.get(one.quantised), tensors.get(one.source)
        if quantise is None or source is None or quantise.type != trt.LayerType.QUANTIZE:
            continue  # the parser gave it another form
        key = (one.source, one.by, one.bounds)
        if key not in made:
            made[key] = _instead(network, api, source, one)
        quantise.set_input(0, made[key])
        labels.append(one.clip)
    return tuple(dict.fromkeys(labels))


def _instead(network: Any, api: Api, source: Any, one: Passed) -> Any:
    kinds = api.trt.ActivationType
    if one.by == "source":
        return source
    if one.by == "relu":
        activation = network.add_activation(source, kinds.RELU)
    else:
        activation = network.add_activation(times(network, api, source, 2.0), kinds.CLIP)
        largest = float(np.finfo(np.float32).max)
        activation.alpha, activation.beta = (float(np.clip(2 * bound, -largest, largest)) for bound in one.bounds)
    activation.name = f"{one.clip}::{one.by}"
    output = activation.get_output(0)
    return times(network, api, output, 0.5) if one.by == "doubled" else output
