"""The engine inspector's JSON, in both of its dialects, as a table of layers.

Up to TensorRT 10 a tensor has one text ``Format/Datatype``; from 11 on (and RTX) ``Format`` and ``Datatype`` are apart,
and ``Bindings`` is called ``I/O Tensors``. Below profiling verbosity DETAILED a layer is its name alone.

For a dynamic engine 8.6 tells no format (``N/A due to dynamic shapes``) unless the inspector is given an execution
context with shapes; what a convolution computes in is then known from the type of its weights. Layers of several
profiles follow one another, those of profile N > 0 with `` [profile N]`` behind every name.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError
from pipeline.engine.records import LayerCounts
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

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
_CONVOLUTIONS = ("convolution", "deconvolution", "convactpool")
"""The last one: convolution, activation and pooling in one kernel, such as the stem of a ResNet."""
_FLOATS = ("float32", "float16", "bfloat16")
_PROFILE = re.compile(r" \[profile (\d+)\]$")
_UNKNOWN = "unknown"


class LayerTensor(Record):
    """An input or output of an engine layer."""

    name: str
    dtype: str
    """numpy's name; ``unknown`` where the inspector gives none (8.6, dynamic shapes, no execution context)."""
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
    def profile(self) -> int:
        """The optimisation profile that it belongs to, from its name."""
        found = _PROFILE.search(self.name)
        return int(found.group(1)) if found else 0

    @property
    def no_op(self) -> bool:
        """Kept for the books: it launches nothing."""
        return self.kind.lower() == "noop"

    @property
    def reformat(self) -> bool:
        """A pass that only changes layout or type; quantising an input is one too."""
        if self.no_op:
            return False
        return self.kind.lower() in ("reformat", "reformatter") or self.name.lower().startswith("reformatting copynode")

    @property
    def pointwise(self) -> bool:
        """Element by element, fused into no other layer: a whole pass over its tensors."""
        return self.operation.lower() == "pointwise" or self.kind.lower().startswith("pointwise")

    @property
    def computes_in(self) -> str:
        """dtype of its data input; where the inspector gives none, of its weights; else ``unknown``."""
        if self.inputs and self.inputs[0].dtype != _UNKNOWN:
            return self.inputs[0].dtype
        return self.weights_dtype or _UNKNOWN

    @property
    def computes_int8(self) -> bool:
        """Its data input is int8: with explicit Q/DQ that is what selects the integer kernel."""
        return self.computes_in == "int8"

    @property
    def fused(self) -> tuple[str, ...]:
        """The ONNX nodes in it, from TensorRT's metadata where that has them, else from its name."""
        found = _ONNX_NODE.findall(self.metadata)
        if found:
            return tuple(dict.fromkeys(found))
        return tuple(part.strip() for part in _PROFILE.sub("", self.name).split(" + ") if part.strip())

    @property
    def computes_float(self) -> bool:
        return self.computes_in in _FLOATS


def parse_layers(text: str) -> tuple[EngineLayer, ...]:
    """The layers in the order in which the engine runs them.

    Args:
        text: ``get_engine_information(JSON)`` of any version.

    Raises:
        InputError: it is not the inspector's JSON.
    """
    try:
        value = json.loads(text, strict=False)  # TensorRT 8.6 leaves line breaks inside names
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
    weights = item.get("Weights", item.get("ConvWeights"))  # the prefix: where pooling is in the same kernel
    weights_dtype = _dtype(str(weights.get("Type", ""))) if isinstance(weights, dict) else None
    inputs = tuple(_tensor(tensor) for tensor in item.get("Inputs", ()))
    channels = None
    maps = item.get("OutMaps", item.get("ConvOutMaps"))
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
        groups=int(item.get("Groups", item.get("ConvGroups", 1))),
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
    return _DTYPES[found.group(1).lower()] if found else _UNKNOWN


def count_layers(text: str) -> LayerCounts:
    """The figures for a build record: of all profiles together, and of each where there are several."""
    layers = parse_layers(text)
    numbers = sorted({layer.profile for layer in layers})
    parts = [_count([layer for layer in layers if layer.profile == number]) for number in numbers]
    return _count(layers).model_copy(update={"per_profile": tuple(parts) if len(parts) > 1 else ()})


def _count(layers: Sequence[EngineLayer]) -> LayerCounts:
    convolutions = [layer for layer in layers if layer.convolution]
    return LayerCounts(
        layers=len(layers),
        convolutions_int8=sum(layer.computes_int8 for layer in convolutions),
        convolutions_float=sum(layer.computes_float for layer in convolutions),
        reformats=sum(layer.reformat for layer in layers),
        pointwise=sum(layer.pointwise for layer in layers),
    )
