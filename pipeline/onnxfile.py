"""ONNX files: reading with errors that users understand, atomic and deterministic writing."""

from __future__ import annotations

import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.files import explain_os_errors, fsync_dir, write_bytes
from pipeline.onnxgraph import all_graphs, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import onnx_ir as ir

__all__ = [
    "DATA",
    "EXTERNAL_ABOVE_BYTES",
    "MODEL",
    "check_file",
    "external_files",
    "load_model",
    "model_of",
    "save_model",
]

MODEL = "model.onnx"
DATA = "model.onnx.data"
EXTERNAL_ABOVE_BYTES = 1_900_000_000
"""Weights beyond this go to :data:`DATA`: a protobuf file ends at 2 GiB, and the graph itself needs room too."""
_EXTERNAL_TENSOR_BYTES = 1024
_COUNT = re.compile(r"[0-9]{1,18}")


def load_model(path: Path) -> ir.Model:
    """Parse ``path``; external weights stay on the disk, memory-mapped.

    Raises:
        InputError: missing, unreadable, truncated, no ONNX model, or external weights missing or too short.
    """
    import onnx
    from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        proto = onnx.load(path, load_external_data=False)
    except FileNotFoundError as error:
        raise InputError(f"model {path} does not exist") from error
    except (DecodeError, json_format.ParseError, text_format.ParseError, OSError, ValueError) as error:  # by the suffix
        raise _unreadable(path, error) from error
    return model_of(proto, path)


def model_of(proto: Any, path: Path) -> ir.Model:
    """What :func:`load_model` gives, of a file that was parsed already into the ``onnx.ModelProto`` ``proto``.

    Raises:
        InputError: as there.
    """
    import onnx_ir as ir

    if not proto.graph.node and not proto.graph.output:
        raise InputError(f"{path} is not a readable ONNX model: it has no graph", remedy="it may be empty or truncated")
    places = _external(proto, path)
    _check_names(proto.graph, path)
    try:
        model: ir.Model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir wraps whatever it meets in its own private types
        raise _unreadable(path, error) from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    _map_external(model, places)
    if "" not in model.graph.opset_imports:
        raise InputError(f"{path} names no version of the ONNX operators (opset import of the default domain)")
    return model


def _check_names(graph: Any, path: Path) -> None:
    """Protobuf gives text that is not UTF-8 as bytes, in which nothing behind it looks for a name.

    Raises:
        InputError: a node or a tensor has such a name.
    """
    nodes = (name for node in graph.node for name in (node.name, node.op_type, node.domain))
    edges = (name for node in graph.node for name in (*node.input, *node.output))
    values = (value.name for value in (*graph.input, *graph.output, *graph.initializer))
    for kind, names in (("node", nodes), ("tensor", edges), ("tensor", values)):
        if (wrong := next((name for name in names if isinstance(name, bytes)), None)) is not None:
            raise InputError(
                f"{path}: the name of a {kind} is not UTF-8: {wrong!r}", remedy="export the model with other names"
            )
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                _check_names(inner, path)


def _unreadable(path: Path, error: BaseException) -> InputError:
    while error.__cause__ is not None:  # onnx_ir wraps the error that says what is wrong
        error = error.__cause__
    return InputError(
        f"{path} is not a readable ONNX model: {error}",
        remedy="it may be truncated or of another format: export it again",
    )


def _tensors(graph: Any) -> Iterator[Any]:
    """Every ``TensorProto`` of a ``GraphProto`` that may lie in an external file."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)
            for inner in attribute.graphs:
                yield from _tensors(inner)


@dataclass(frozen=True)
class _External:
    """Where a tensor's bytes lie. ``length`` 0: not known."""

    tensor: str
    file: Path
    offset: int
    length: int


def _external(proto: Any, path: Path) -> list[_External]:
    """Every tensor of ``proto`` outside the file, checked.

    Raises:
        InputError: the place is outside the model's folder, missing, or too short, or no place at all.
    """
    import onnx

    found = []
    for tensor in _tensors(proto.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        fields = {entry.key: entry.value for entry in tensor.external_data}
        location = Path(fields.get("location", ""))
        file = path.parent / location
        # By its name, not by what links lead to: download caches consist of links.
        if location.is_absolute() or ".." in location.parts or location == Path():
            raise InputError(f"{path}: the weights {tensor.name!r} lie outside its folder, in {str(location)!r}")
        if not file.is_file():
            raise InputError(
                f"{path}: the file {str(location)!r} with the weights {tensor.name!r} is missing",
                remedy="keep the external data file beside the model",
            )
        item = _External(tensor.name, file, _count(fields, "offset", tensor.name, path), _length(fields, tensor, path))
        if file.stat().st_size < item.offset + item.length:
            raise InputError(
                f"{path}: {file.name} has {file.stat().st_size} bytes, "
                f"the weights {tensor.name!r} end at byte {item.offset + item.length}",
                remedy="the file is truncated: copy it again",
            )
        found.append(item)
    return found


def _count(fields: Mapping[str, str], key: str, name: str, path: Path) -> int:
    text = fields.get(key, "0")
    if not _COUNT.fullmatch(text):
        raise InputError(
            f"{path}: the {key} of the weights {name!r} in their file is {text!r}, expected a number of bytes",
            remedy="export the model again",
        )
    return int(text)


def _length(fields: Mapping[str, str], tensor: Any, path: Path) -> int:
    """Bytes of ``tensor`` in its file; 0 where neither the file says it nor its type and shape do."""
    import onnx_ir as ir

    said = _count(fields, "length", tensor.name, path)
    try:
        needed: int = -(-ir.DataType(tensor.data_type).bitwidth * math.prod(tensor.dims) // 8)
    except (TypeError, ValueError):  # no type of fixed size: the checker says so
        return said
    if said and said != needed:
        raise InputError(
            f"{path}: the weights {tensor.name!r} of shape {tuple(tensor.dims)} need {needed} bytes, their length in "
            f"the file is {said}",
            remedy="export the model again",
        )
    return max(needed, 0)


def external_files(path: Path) -> list[Path]:
    """The files beside ``path`` that hold its weights, sorted."""
    import onnx

    return sorted({item.file for item in _external(onnx.load(path, load_external_data=False), path)})


def _map_external(model: ir.Model, places: Sequence[_External]) -> None:
    """Map external weights from their files; onnx_ir itself refuses files that are links."""
    import onnx_ir as ir

    by_name = {item.tensor: item for item in places}
    for graph in all_graphs(model):
        for value in graph.initializers.values():
            tensor, place = value.const_value, by_name.get(str(value.name))
            if not isinstance(tensor, ir.ExternalTensor) or place is None:
                continue
            dtype, shape = tensor.dtype.numpy(), tuple(tensor.shape.numpy())
            if dtype.itemsize * math.prod(shape) != tensor.nbytes or not tensor.nbytes:
                continue  # packed types smaller than a byte, and empty tensors
            array = np.memmap(place.file, dtype=dtype, mode="r", offset=place.offset, shape=shape)
            value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=value.name)


def check_file(path: Path) -> None:
    """``onnx.checker`` on the file; raises :class:`InputError` with its words."""
    import onnx

    try:
        proto = onnx.load(path, load_external_data=False)
        places = _external(proto, path)
        if not places:
            onnx.checker.check_model(str(path))
            return
        # The checker refuses files that are links, but reads nothing of the weights: empty files of that size do.
        with tempfile.TemporaryDirectory() as folder:
            for file in {item.file for item in places}:
                stand_in = Path(folder) / file.relative_to(path.parent)
                stand_in.parent.mkdir(parents=True, exist_ok=True)
                stand_in.touch()
                os.truncate(stand_in, file.stat().st_size)
            (Path(folder) / MODEL).write_bytes(proto.SerializeToString())
            onnx.checker.check_model(str(Path(folder) / MODEL))
    except InputError:
        raise
    except Exception as error:  # the checker raises several unrelated types
        text = str(error).split("\n\n==> Context")[0]
        raise InputError(f"{path} is not a valid ONNX model: {text}", remedy="export it again") from error


def save_model(model: ir.Model, folder: Path) -> Path:
    """Write ``model.onnx`` into ``folder``, with ``model.onnx.data`` beside it where the weights exceed
    :data:`EXTERNAL_ABOVE_BYTES`.

    Equal models give equal bytes. ``model`` may be left with its weights mapped from the new file.
    """
    import onnx_ir as ir

    path = folder / MODEL
    with explain_os_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        if weight_bytes(model) > EXTERNAL_ABOVE_BYTES:
            ir.external_data.unload_from_model(model, folder, DATA, size_threshold_bytes=_EXTERNAL_TENSOR_BYTES)
            with (folder / DATA).open("rb") as stream:
                os.fsync(stream.fileno())
            fsync_dir(folder)
        else:
            ir.external_data.load_to_model(model)
    write_bytes(path, ir.to_proto(model).SerializeToString(deterministic=True))
    return path
