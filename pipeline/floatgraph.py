"""Which float graph a model file holds: statistics of one graph are refused for another.

A file's own hash will not do: it leaves external weights out, and changes with documentation and names of nodes.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError
from pipeline.core.files import sha256_file, sha256_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["FILE", "GRAPH", "check_float_graph", "float_graph_sha256"]

GRAPH = "graph"
"""Key in a calibration file's meta: :func:`float_graph_sha256`."""
FILE = "model"
"""The same in files of an earlier version: the SHA-256 of the ``.onnx`` file, without external weights."""
_SHOWN = 12


def float_graph_sha256(model: Path, proto: Any | None = None) -> str:
    """SHA-256 over what decides the value of every tensor by name: operators with attributes, edges and weights.

    Not over the names of nodes and dimensions, documentation, metadata, declared shapes, the order in the file, or
    whether weights are in a file of their own.

    Args:
        proto: ``model`` as an ``onnx.ModelProto``, where it was parsed already.

    Raises:
        InputError: as :func:`pipeline.onnxfile.load_model`.
    """
    from pipeline.onnxfile import load_model, model_of

    loaded = load_model(model) if proto is None else model_of(proto, model)
    functions = sorted(
        sha256_json([str(each.identifier()), *_edges(each), sorted(_node(node) for node in each)])
        for each in loaded.functions.values()
    )
    return sha256_json([sorted(loaded.graph.opset_imports.items()), _graph(loaded.graph), functions])


def check_float_graph(source: Path, meta: Any, model: Path, *, remedy: str) -> str | None:
    """The statistics in the calibration file ``source`` are those of ``model``'s activations.

    Args:
        meta: of that file.
        remedy: for the error.

    Returns:
        A warning where the file is of an earlier version and cannot tell; else None.

    Raises:
        InputError: they are of another graph.
    """
    known: Mapping[str, Any] = meta if isinstance(meta, dict) else {}
    if (recorded := known.get(GRAPH)) is None:
        if known.get(FILE) == sha256_file(model) and not _external(model):
            return None
        return (
            f"{source} does not say which float graph its statistics are of (an earlier version wrote it): those of "
            f"another one than {model.name} would give wrong scales; `quantize calibrate` writes one that says it"
        )
    if recorded == (own := float_graph_sha256(model)):
        return None
    raise InputError(
        f"{source} has statistics of another float graph ({str(recorded)[:_SHOWN]}) than {model} ({own[:_SHOWN]}): its "
        "ranges do not fit, even where tensors have the same names",
        remedy=remedy,
    )


def _external(model: Path) -> bool:
    from pipeline.onnxfile import external_files

    return bool(external_files(model))


def _graph(graph: Any) -> list[Any]:
    """Lists and texts; order only where it says something."""
    weights = sorted([_name(value), _tensor(value.const_value)] for value in graph.initializers.values())
    inputs = [[_name(value), str(value.dtype)] for value in graph.inputs]
    return [inputs, [_name(value) for value in graph.outputs], weights, sorted(_node(node) for node in graph)]


def _node(node: Any) -> str:
    attributes = sorted([name, attribute.type.name, _value(attribute)] for name, attribute in node.attributes.items())
    return sha256_json([node.domain, node.op_type, node.overload, *_edges(node), attributes])


def _edges(part: Any) -> list[list[str]]:
    return [[_name(value) for value in values] for values in (part.inputs, part.outputs)]


def _name(value: Any) -> str:
    return "" if value is None else str(value.name)


def _value(attribute: Any) -> Any:
    if attribute.is_ref():
        return ["of the function", attribute.ref_attr_name]
    kind, value = attribute.type.name, attribute.value
    if kind == "GRAPH":
        return _graph(value)
    if kind == "GRAPHS":
        return [_graph(each) for each in value]
    if kind == "TENSOR":
        return _tensor(value)
    if kind == "TENSORS":
        return [_tensor(each) for each in value]
    if isinstance(value, (list, tuple)):
        return [repr(each) for each in value]
    return repr(value)


def _tensor(tensor: Any) -> list[Any]:
    """Its type, its shape and the SHA-256 of its values; None: an initializer without values."""
    if tensor is None:
        return []
    name = tensor.dtype.name
    shape = [int(dim) for dim in tensor.shape.numpy()]
    if name == "STRING":
        return [name, shape, sha256_json([repr(text) for text in tensor.numpy().reshape(-1).tolist()])]
    return [name, shape, hashlib.sha256(tensor.tobytes()).hexdigest()]
