"""Return tensors of a network that are no outputs of its graph.

A plain mark is enough for most tensors. TensorRT 8.6 ends the build of an engine in which the output of a fused
DequantizeLinear is marked ("assertIsValidSubscript" in cgraph.h, seen with every Q/DQ network tried), so its values can
be returned as their double instead, which is exact in binary floating point and which no builder takes for a copy; or
as the double of what a DequantizeLinear of its own makes of the same INT8 tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.core.errors import InputError
from pipeline.engine.network import tensors_and_makers, times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.engine.compat import Api

__all__ = ["HOW", "How", "mark_outputs", "original", "returned"]

How = Literal["itself", "doubled", "dequantised again"]
HOW: tuple[How, ...] = ("doubled", "dequantised again", "itself")
"""In the order to try."""
_SUFFIX = "::doubled"
_TYPED = 10  # TensorRT's version from which on a dequantise layer is told its output type


def original(name: str) -> str:
    """The tensor that the engine's output ``name`` tells of."""
    return name.removesuffix(_SUFFIX)


def returned(outputs: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """The values of tensor ``name`` among an engine's outputs, however it was marked; None: it is not there."""
    if name in outputs:
        return outputs[name]
    doubled = outputs.get(name + _SUFFIX)
    return None if doubled is None else np.asarray(doubled * doubled.dtype.type(0.5))


def mark_outputs(
    network: Any, api: Api, names: Sequence[str], how: How, *, what: str, strictly: bool = True
) -> tuple[str, ...]:
    """Make every tensor of ``names`` an output of ``network``.

    Args:
        what: the network in words, for errors.
        strictly: False: what does not exist is left out and returned.

    Returns:
        The tensors that do not exist: a parser drops some, such as those behind an Identity.

    Raises:
        InputError: a tensor does not exist, or is to be dequantised again and comes from no DequantizeLinear.
    """
    tensors, makers = tensors_and_makers(network)
    present = {network.get_output(number).name for number in range(network.num_outputs)}
    missing = []
    for name in names:
        if name in present:
            continue
        if name not in makers and not strictly:
            missing.append(name)
            continue
        if name not in makers:
            raise InputError(f"tensor {name!r} to return does not exist in {what}")
        tensor = tensors[name]
        if how == "dequantised again":
            tensor = _again(network, api, makers[name], name)
        network.mark_output(tensor if how == "itself" else _doubled(network, api, tensor, name))
    return tuple(missing)


def _doubled(network: Any, api: Api, tensor: Any, name: str) -> Any:
    product = times(network, api, tensor, 2.0)
    product.name = name + _SUFFIX
    return product


def _again(network: Any, api: Api, layer: Any, name: str) -> Any:
    if layer.type != api.trt.LayerType.DEQUANTIZE:
        raise InputError(f"tensor {name!r} comes from no DequantizeLinear that could be repeated")
    kind = (layer.get_output(0).dtype,) if api.rtx or api.release[0] >= _TYPED else ()
    # activations have one scale, so that there is no axis to repeat
    return network.add_dequantize(layer.get_input(0), layer.get_input(1), *kind).get_output(0)
