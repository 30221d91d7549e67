"""Measured times of nodes, from the layer times of two engines of one network: everything in INT8, and in float.

A layer of an engine is a fusion of nodes. Its time is shared in equal parts among those of them that can be given back
to float and that both engines have: a fused activation goes with its convolution, and what a node alone would take
cannot be measured.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError
from pipeline.engine.inspect import EngineLayer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

__all__ = ["layer_times", "node_times", "shared"]

_REMEDY = "`quantize inspect ARTIFACT --engine tensorrt --batch N --json` prints it, on a machine with the card"


def node_times(int8: Path, float_: Path, nodes: Collection[str] | None = None) -> dict[str, tuple[float, float]]:
    """Node to its time in INT8 and in float, in ms.

    Args:
        nodes: those that can be given back to float; None: all.

    Raises:
        InputError: a file is missing, is no such table, or has no times; the two have no node in common.
    """
    if all(path.is_file() for path in (int8, float_)) and int8.read_bytes() == float_.read_bytes():
        raise InputError(
            f"the layer times {int8} and {float_} are the same table",
            remedy="give those of an engine in INT8 and of one in float",
        )
    tables = [layer_times(path) for path in (int8, float_)]
    common = {node for nodes, _ in tables[0] for node in nodes} & {node for nodes, _ in tables[1] for node in nodes}
    common = common if nodes is None else common & set(nodes)
    if not common:
        raise InputError(
            f"the layer times {int8} and {float_} have no node in common", remedy="measure two builds of one network"
        )
    first, second = (shared(table, common) for table in tables)
    return {node: (first[node], second[node]) for node in sorted(common)}


def layer_times(path: Path) -> list[tuple[tuple[str, ...], float]]:
    """The nodes in each layer of a measured engine, and the layer's time in ms.

    Raises:
        InputError: the file is missing, no such table, or has no times.
    """
    try:
        view: Any = json.loads(path.read_text())
        times: Mapping[str, float] = view["times_ms"]
        layers = [EngineLayer.model_validate_json(json.dumps(layer)) for layer in view["layers"]]
        found = [(layer.fused, float(times[layer.name])) for layer in layers if layer.name in times]
    except FileNotFoundError as error:
        raise InputError(f"layer times {path} do not exist", remedy=_REMEDY) from error
    except KeyError as error:
        raise InputError(f"{path} is no table of layer times: it has no {error}", remedy=_REMEDY) from error
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is no table of layer times: {error}", remedy=_REMEDY) from error
    if not found:
        raise InputError(f"{path} has layers but no times", remedy=_REMEDY)
    for members, time_ms in found:
        if not (math.isfinite(time_ms) and time_ms >= 0.0):
            raise InputError(f"{path}: layer {' + '.join(members)} has the time {time_ms:g} ms", remedy=_REMEDY)
    return found


def shared(table: Collection[tuple[tuple[str, ...], float]], nodes: Collection[str]) -> dict[str, float]:
    """Each layer's time in equal parts among those of its nodes that are in ``nodes``, summed by node."""
    known = set(nodes)
    found: dict[str, float] = {}
    for members, time_ms in table:
        own = [node for node in members if node in known]
        for node in own:
            found[node] = found.get(node, 0.0) + time_ms / len(own)
    return found
