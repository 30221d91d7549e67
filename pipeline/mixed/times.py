"""Measured times of nodes, from the layer times of two engines of one network: everything in INT8, and in float.

A layer of an engine is a fusion of nodes. Its time is shared in equal parts among those of them that can be given back
to float and that both engines have: a fused activation goes with its convolution, and what a node alone would take
cannot be measured.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.config import LARGEST_DIMENSION
from pipeline.core.errors import InputError
from pipeline.engine.inspect import EngineLayer
from pipeline.mixed.borders import Passes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

__all__ = ["doubts", "layer_times", "node_times", "pass_times", "shared"]

Dimension: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST_DIMENSION)]

_REMEDY = "`quantize inspect ARTIFACT --engine tensorrt --batch N --json` prints it, on a machine with the card"
_ORDER = "give the table of the engine with everything in INT8 first, then that of the engine in float"
_INT8_LAYER = "QuantizeLinear"
"""In a layer's name where the graph had Q/DQ nodes."""
_QUANTISED_BYTES = 4 + 1
"""Read and written for each value of a float32 tensor that is quantised."""
_INT8_KERNEL = re.compile(r"i8i8|int8", re.IGNORECASE)
"""In a kernel's name, such as ``sm80_xmma_fprop_implicit_gemm_i8i8_i8i32_f32_...``."""
_LONGEST_MS = 3.6e6
"""An hour: no layer takes that long, and sums of such times stay finite."""
_SHOWN = 60
"""Characters of a wrong value in a message."""
_SAME = {"target": "targets", "tensorrt": "versions of TensorRT", "built_on": "cards"}
"""What two tables should have in common, in words."""


class _View(BaseModel):
    """What is read of a table: of the fields of :class:`pipeline.engine.view.EngineView`, as JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    layers: tuple[EngineLayer, ...]
    times_ms: dict[str, float]
    shapes: dict[str, tuple[Dimension, ...]] | None = None
    """Of the inputs, in the measurement; None or empty where the table does not tell."""
    target: str = ""
    tensorrt: str = ""
    built_on: str = ""


class _Table:
    """A file of layer times.

    Raises:
        InputError: the file is missing, no such table, or has no times.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.view = _read(path)
        times = self.view.times_ms
        self.layers = [(layer, times[layer.name]) for layer in self.view.layers if layer.name in times]
        if not self.layers:
            raise InputError(f"{path} has layers but no times", remedy=_REMEDY)
        for layer, time_ms in self.layers:
            if not 0.0 <= time_ms <= _LONGEST_MS:
                name = " + ".join(layer.fused)
                raise InputError(
                    f"{path}: layer {name} has the time {time_ms:g} ms, expected 0 to {_LONGEST_MS:g}", remedy=_REMEDY
                )

    @property
    def quantised(self) -> bool | None:
        """Whether something in the engine runs in INT8; None: the table does not tell."""
        layers = [layer for layer, _ in self.layers]
        dtypes = {dtype for layer in layers for dtype in _dtypes(layer)}
        if "int8" in dtypes or any(_INT8_LAYER in layer.name or _INT8_KERNEL.search(layer.tactic) for layer in layers):
            return True
        return False if any(layer.convolution and layer.computes_float for layer in layers) else None

    @property
    def members(self) -> list[tuple[tuple[str, ...], float]]:
        """The nodes in each layer, and the layer's time in ms."""
        return [(layer.fused, time_ms) for layer, time_ms in self.layers]

    @property
    def nodes(self) -> set[str]:
        return {node for layer, _ in self.layers for node in layer.fused}


def _read(path: Path) -> _View:
    try:
        return _View.model_validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError as error:
        raise InputError(f"layer times {path} do not exist", remedy=_REMEDY) from error
    except OSError as error:
        raise InputError(f"layer times {path} cannot be read: {error.strerror or error}", remedy=_REMEDY) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        found = repr(first["input"])
        shown = found if len(found) <= _SHOWN else f"{found[:_SHOWN]}..."
        raise InputError(
            f"{path} is no table of layer times: {f'{where}: ' if where else ''}{first['msg']}, got {shown}",
            remedy=_REMEDY,
        ) from error


def _dtypes(layer: EngineLayer) -> Iterator[str]:
    yield from (tensor.dtype for tensor in (*layer.inputs, *layer.outputs))
    if layer.weights_dtype is not None:
        yield layer.weights_dtype


def node_times(int8: Path, float_: Path, nodes: Collection[str] | None = None) -> dict[str, tuple[float, float]]:
    """Node to its time in INT8 and in float, in ms.

    Args:
        nodes: those that can be given back to float; None: all.

    Raises:
        InputError: a file is missing, is no such table, or has no times; the two have no node in common, were measured
            at different shapes, or are not of an engine in INT8 and of one in float, in this order.
    """
    return _paired(*_tables(int8, float_), nodes)


def pass_times(int8: Path, float_: Path) -> Passes | None:
    """What a pass over a tensor takes: from the one that quantises an input (float32 to INT8) in the INT8 engine.

    Returns:
        None where the tables have no such pass or do not tell the inputs' shapes.

    Raises:
        InputError: as :func:`node_times`.
    """
    tables = _tables(int8, float_)
    shapes = tables[0].view.shapes or {}
    passes = [(layer, time_ms) for table in tables for layer, time_ms in table.layers if layer.reformat and time_ms > 0]
    bytes_, spent = 0.0, 0.0
    for layer, time_ms in tables[0].layers:
        read = layer.inputs[0].name.partition(" [profile")[0] if layer.inputs else ""
        if layer.reformat and read in shapes and _INT8_LAYER in layer.name:
            bytes_ += _QUANTISED_BYTES * math.prod(shapes[read])
            spent += time_ms
    if not bytes_ or not spent:
        return None
    return Passes(spent / bytes_, min(time_ms for _, time_ms in passes), shapes)


def _tables(int8: Path, float_: Path) -> tuple[_Table, _Table]:
    """Both, found to be of one kind of measurement and in this order."""
    if all(path.is_file() for path in (int8, float_)) and int8.read_bytes() == float_.read_bytes():
        raise InputError(
            f"the layer times {int8} and {float_} are the same table",
            remedy="give those of an engine in INT8 and of one in float",
        )
    tables = _Table(int8), _Table(float_)
    _check_order(*tables)
    shapes = [table.view.shapes for table in tables]
    if all(shapes) and shapes[0] != shapes[1]:
        raise InputError(
            f"the layer times {int8} and {float_} were measured at different shapes, {shapes[0]} and {shapes[1]}",
            remedy="measure both with the same --batch",
        )
    return tables


def _paired(int8: _Table, float_: _Table, nodes: Collection[str] | None = None) -> dict[str, tuple[float, float]]:
    common = int8.nodes & float_.nodes
    common = common if nodes is None else common & set(nodes)
    if not common:
        raise InputError(
            f"the layer times {int8.path} and {float_.path} have no node in common",
            remedy="measure two builds of one network",
        )
    first, second = (shared(table.members, common) for table in (int8, float_))
    return {node: (first[node], second[node]) for node in sorted(common)}


def _check_order(int8: _Table, float_: _Table) -> None:
    if int8.quantised is False and float_.quantised:
        raise InputError(
            f"the layer times are in the wrong order: {float_.path} has layers in INT8, and {int8.path} has none",
            remedy=_ORDER,
        )
    if int8.quantised is False:
        raise InputError(f"{int8.path} is given as the layer times in INT8, and no layer in it is", remedy=_ORDER)
    if float_.quantised:
        raise InputError(
            f"{float_.path} is given as the layer times in float, and layers in it are in INT8", remedy=_ORDER
        )


def doubts(int8: Path, float_: Path) -> tuple[str, ...]:
    """Warnings about two tables that :func:`node_times` takes: of different machines; or perhaps in the wrong order,
    where they do not say in which types the layers compute.

    Raises:
        InputError: as :func:`node_times`.
    """
    tables = _tables(int8, float_)
    times = _paired(*tables)
    found = []
    for key, words in _SAME.items():
        first, second = (getattr(table.view, key) for table in tables)
        if first != second:
            found.append(f"the layer times {int8} and {float_} are of different {words}: {first} and {second}")
    slow, fast = (sum(pair[position] for pair in times.values()) for position in (0, 1))
    if slow > fast and None in (tables[0].quantised, tables[1].quantised):
        found.append(
            f"INT8 is slower than float in the layer times, {slow:.4g} against {fast:.4g} ms in all; the tables do not "
            f"say in which types their layers compute: is {int8} really that of the INT8 engine?"
        )
    return tuple(found)


def layer_times(path: Path) -> list[tuple[tuple[str, ...], float]]:
    """The nodes in each layer of a measured engine, and the layer's time in ms.

    Raises:
        InputError: the file is missing, no such table, or has no times.
    """
    return _Table(path).members


def shared(table: Collection[tuple[tuple[str, ...], float]], nodes: Collection[str]) -> dict[str, float]:
    """Each layer's time in equal parts among those of its nodes that are in ``nodes``, summed by node."""
    known = set(nodes)
    found: dict[str, float] = {}
    for members, time_ms in table:
        own = [node for node in members if node in known]
        for node in own:
            found[node] = found.get(node, 0.0) + time_ms / len(own)
    return found
