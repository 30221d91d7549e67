"""Small changes to a network that a parser made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pipeline.engine.compat import Api

__all__ = ["tensors_and_makers", "times"]

# a network only points at its weights
_FACTORS = {
    (factor, half): np.full(1, factor, np.float16 if half else np.float32)
    for factor in (2.0, 0.5)
    for half in (False, True)
}


def tensors_and_makers(network: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of ``network`` by name, its inputs too, and the layer that makes each of the others."""
    tensors = {tensor.name: tensor for tensor in map(network.get_input, range(network.num_inputs))}
    makers: dict[str, Any] = {}
    for layer in map(network.get_layer, range(network.num_layers)):
        for tensor in map(layer.get_output, range(layer.num_outputs)):
            tensors[tensor.name], makers[tensor.name] = tensor, layer
    return tensors, makers


def times(network: Any, api: Api, tensor: Any, factor: float) -> Any:
    """``tensor`` times ``factor``, 2 or 0.5: exact in binary floating point."""
    trt = api.trt
    values = _FACTORS[factor, tensor.dtype == trt.DataType.HALF]
    constant = network.add_constant((1,) * len(tensor.shape), trt.Weights(values)).get_output(0)
    return network.add_elementwise(tensor, constant, trt.ElementWiseOperation.PROD).get_output(0)
