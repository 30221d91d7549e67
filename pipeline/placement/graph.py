"""A read-only view of an ONNX graph for the placement rules: producers, readers, constants, shapes, short walks.

Only the top level is looked into. A tensor that the body of an ``If``, ``Loop`` or ``Scan`` reads counts as read by a
float operator (:meth:`GraphView.read_inside`).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import onnx_ir as ir

__all__ = ["GraphView", "Use", "assign_names", "load_graph"]

Use = tuple["ir.Node", int]
"""A node that reads a tensor, and at which of its inputs."""

_DEFAULT_DOMAINS = ("", "ai.onnx")
_CONSTANT_CHAIN = 4


def load_graph(path: Path) -> ir.Model:
    """The model in ``path``, sorted topologically, every node with a unique name.

    Raises:
        InputError: the file is missing or no ONNX model, as :func:`pipeline.onnxfile.load_model` says.
    """
    from pipeline.onnxfile import load_model

    model = load_model(Path(path))
    model.graph.sort()
    assign_names(model)
    return model


def assign_names(model: ir.Model) -> None:
    """Give a name to every node that has none or shares one, from its operator and place: the same for equal graphs."""
    taken = {node.name for node in model.graph if node.name}
    seen: set[str] = set()
    for index, node in enumerate(model.graph):
        if node.name and node.name not in seen:
            seen.add(node.name)
            continue
        base = f"{node.name or node.op_type}_{index}"
        name, number = base, 1
        while name in taken or name in seen:
            name, number = f"{base}_{number}", number + 1
        node.name = name
        seen.add(name)


class GraphView:
    """The graph of a loaded model (see :func:`load_graph`). Does not change it."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.nodes: tuple[ir.Node, ...] = tuple(model.graph)
        self._place = {node: index for index, node in enumerate(self.nodes)}
        self.by_name: dict[str, ir.Node] = {node.name or "": node for node in self.nodes}

    # --- structure

    def place(self, node: ir.Node) -> int:
        """Position in the graph's topological order."""
        return self._place[node]

    @staticmethod
    def op(node: ir.Node) -> str:
        """Operator type; with its domain in front where that is not ONNX's own."""
        return node.op_type if node.domain in _DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"

    def readers(self, value: ir.Value) -> list[Use]:
        """Top-level nodes that read ``value``, in graph order."""
        uses = [(use.node, use.idx) for use in value.uses() if use.node in self._place]
        return sorted(uses, key=lambda use: (self._place[use[0]], use[1]))

    def read_inside(self, value: ir.Value) -> bool:
        """True when the body of a control-flow node reads it."""
        return bool(self.readers_inside(value))

    def readers_inside(self, value: ir.Value) -> list[Use]:
        """Nodes in the bodies of control-flow nodes that read ``value``."""
        return [(use.node, use.idx) for use in value.uses() if use.node not in self._place]

    def only_reader(self, value: ir.Value) -> ir.Node | None:
        """The one node that reads ``value``, where nothing else does and it is no graph output."""
        if value.is_graph_output() or self.read_inside(value):
            return None
        nodes = {use.node for use in value.uses()}
        return next(iter(nodes)) if len(nodes) == 1 else None

    def producer(self, value: ir.Value | None, *ops: str) -> ir.Node | None:
        """The node that computes ``value``, where there is one (of the operators ``ops``, if given)."""
        node = None if value is None else value.producer()
        return node if node is not None and (not ops or self.op(node) in ops) else None

    @cached_property
    def _depths(self) -> dict[ir.Node, int]:
        depths: dict[ir.Node, int] = {}
        for node in self.nodes:
            before = (depths.get(value.producer(), 0) for value in node.inputs if value is not None)  # type: ignore[arg-type]
            depths[node] = 1 + max(before, default=0)
        return depths

    def depth(self, value: ir.Value) -> int:
        """Longest way, in nodes, from the graph's inputs to ``value``."""
        node = value.producer()
        return 0 if node is None else self._depths.get(node, 0)

    # --- values

    @staticmethod
    def is_float(value: ir.Value) -> bool:
        """float32, the one type that QuantizeLinear takes at opset 17; an unknown type counts as it."""
        return value.dtype is None or value.dtype.name == "FLOAT"

    @staticmethod
    def shape(value: ir.Value | None) -> tuple[int | None, ...] | None:
        """None for an unknown rank; None in place of a dynamic dimension."""
        if value is None or value.shape is None:
            return None
        return tuple(dim if isinstance(dim, int) else None for dim in value.shape)

    def dim(self, value: ir.Value | None, axis: int) -> int | None:
        """One dimension, where it is known and static."""
        shape = self.shape(value)
        return shape[axis] if shape and -len(shape) <= axis < len(shape) else None

    def is_constant(self, value: ir.Value | None) -> bool:
        """Known when the graph is built: an initializer (that is no input) or a ``Constant``, directly or renamed."""
        return self.constant_root(value) is not None

    def constant_root(self, value: ir.Value | None) -> ir.Value | None:
        """The initializer or Constant output that ``value`` is, through ``Identity``; None when it is computed."""
        for _ in range(_CONSTANT_CHAIN):
            if value is None:
                return None
            if value.is_initializer():
                return None if value.is_graph_input() else value
            node = value.producer()
            if node is None:
                return None
            if self.op(node) == "Constant":
                return value
            if self.op(node) != "Identity":
                return None
            value = node.inputs[0]
        return None

    def array(self, value: ir.Value | None) -> np.ndarray[Any, Any] | None:
        """The numbers of a constant."""
        import onnx_ir as ir

        root = self.constant_root(value)
        if root is None:
            return None
        tensor = root.const_value
        if tensor is None:
            node = root.producer()
            tensor = ir.convenience.get_const_tensor(root) if node is not None else None
        return None if tensor is None else tensor.numpy()

    def scalar(self, value: ir.Value | None) -> float | None:
        """The number in a constant of one element."""
        array = self.array(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    # --- walks

    def computed_inputs(self, node: ir.Node) -> list[tuple[int, ir.Value]]:
        """Inputs that are neither absent nor constant, with their index."""
        return [
            (index, value)
            for index, value in enumerate(node.inputs)
            if value is not None and not self.is_constant(value)
        ]

    def downstream(self, value: ir.Value) -> Iterator[ir.Node]:
        """Nodes that read ``value``, each once."""
        seen: set[ir.Node] = set()
        for node, _ in self.readers(value):
            if node not in seen:
                seen.add(node)
                yield node
