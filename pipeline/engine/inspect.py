"""The engine inspector's JSON, in both of its dialects, as a table of layers.

Up to TensorRT 10 a tensor has one text ``Format/Datatype``; from 11 on (and RTX) ``Format`` and ``Datatype`` are apart,
and ``Bindings`` is called ``I/O Tensors``. Below profiling verbosity DETAILED a layer is its name alone.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pipeline.core.errors import InputError
from pipeline.engine.records import LayerCounts
from pipeline.records import Record

__all__ = ["EngineLayer", "LayerTensor", "count_layers", "parse_layers"]

_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "bool": "bool",
    "fp8": "float8",
    "int4": "int4",
    "fp4": "float4",
    "e8m0": "e8m0",
}
_DTYPE_WORD = re.compile(r"\b(" + "|".join(sorted(_DTYPES, key=len, reverse=True)) + r")\b", re.IGNORECASE)
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_CONVOLUTIONS = ("convolution", "deconvolution")
_FLOATS = ("float32", "float16", "bfloat16")


class LayerTensor(Record):
    """An input or output of an engine layer."""

    name: str
    dtype: str
    """numpy's name; ``unknown`` where the inspector gives none."""
    format: str
    """TensorRT's words for the memory layout."""
    shape: tuple[int, ...]
    """-1 for a dynamic dimension."""


class EngineLayer(Record):
    """One kernel, or group of kernels, of the engine."""

    name: str
    kind: str
    """TensorRT's layer type, such as ``CaskConvolution``; empty below verbosity DETAILED."""
    operation: str
    """What it computes, such as ``Convolution``; empty where TensorRT does not say."""
    inputs: tuple[LayerTensor, ...] = ()
    outputs: tuple[LayerTensor, ...] = ()
    weights_dtype: str | None = None
    channels: tuple[int, int] | None = None
    """Input and output channels of a convolution."""
    groups: int = 1
    tactic: str = ""
    metadata: str = ""
    """ONNX nodes that it came from, where TensorRT says so."""

    @property
    def convolution(self) -> bool:
        return self.operation.lower() in _CONVOLUTIONS or self.kind.lower().endswith(_CONVOLUTIONS)

    @property
    def reformat(self) -> bool:
        return self.kind.lower() in ("reformat", "reformatter") or self.name.lower().startswith("reformatting copynode")

    @property
    def computes_int8(self) -> bool:
        """Its data input is int8: with explicit Q/DQ that is what selects the integer kernel."""
        return bool(self.inputs) and self.inputs[0].dtype == "int8"

    @property
    def fused(self) -> tuple[str, ...]:
        """The ONNX nodes in it, from TensorRT's metadata where that has them, else from its name."""
        found = _ONNX_NODE.findall(self.metadata)
        if found:
            return tuple(dict.fromkeys(found))
        return tuple(part.strip() for part in self.name.split(" + ") if part.strip())

    @property
    def computes_float(self) -> bool:
        return bool(self.inputs) and self.inputs[0].dtype in _FLOATS


def parse_layers(text: str) -> tuple[EngineLayer, ...]:
    """The layers in the order in which the engine runs them.

    Args:
        text: ``get_engine_information(JSON)`` of any version.

    Raises:
        InputError: it is not the inspector's JSON.
    """
    try:
        value = json.loads(text)
        layers = value["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"not the engine inspector's JSON: {error}",
            remedy="save get_engine_information(LayerInformationFormat.JSON)",
        ) from error
    return tuple(_layer(item) for item in layers)


def _layer(item: Any) -> EngineLayer:
    if isinstance(item, str):
        return EngineLayer(name=item, kind="", operation="")
    weights = item.get("Weights")
    weights_dtype = _dtype(str(weights.get("Type", ""))) if isinstance(weights, dict) else None
    inputs = tuple(_tensor(tensor) for tensor in item.get("Inputs", ()))
    channels = None
    maps = item.get("OutMaps")
    if isinstance(maps, int) and inputs and len(inputs[0].shape) >= 3:
        channels = (inputs[0].shape[1], maps)
    return EngineLayer(
        name=str(item.get("Name", "")),
        kind=str(item.get("LayerType", "")),
        operation=str(item.get("ParameterType", "")),
        inputs=inputs,
        outputs=tuple(_tensor(tensor) for tensor in item.get("Outputs", ())),
        weights_dtype=weights_dtype,
        channels=channels,
        groups=int(item.get("Groups", 1)),
        tactic=str(item.get("TacticName") or item.get("TacticValue") or ""),
        metadata=str(item.get("Metadata", "")),
    )


def _tensor(item: Any) -> LayerTensor:
    if "Format/Datatype" in item:
        format_text = dtype_text = str(item["Format/Datatype"])
    else:
        format_text, dtype_text = str(item.get("Format", "")), str(item.get("Datatype", item.get("DataType", "")))
    return LayerTensor(
        name=str(item.get("Name", "")),
        dtype=_dtype(dtype_text),
        format=format_text,
        shape=tuple(int(dim) for dim in item.get("Dimensions", ())),
    )


def _dtype(text: str) -> str:
    found = _DTYPE_WORD.search(text)
    return _DTYPES[found.group(1).lower()] if found else "unknown"


def count_layers(text: str) -> LayerCounts:
    """The figures for a build record."""
    layers = parse_layers(text)
    convolutions = [layer for layer in layers if layer.convolution]
    return LayerCounts(
        layers=len(layers),
        convolutions_int8=sum(layer.computes_int8 for layer in convolutions),
        convolutions_float=sum(layer.computes_float for layer in convolutions),
        reformats=sum(layer.reformat for layer in layers),
    )
