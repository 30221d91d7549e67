"""Unfused debug tensors: what TensorRT hands out while an engine runs that is fused as it would be without looking.

From TensorRT 10.12 on (and in RTX) ``mark_unfused_tensors_as_debug_tensors`` makes a debug tensor of whatever survives
fusion. A listener gets each one's address, which is valid during the call only. What follows from that:

- A tensor that was fused away is never reported, and nobody says which those are.
- The names are those of the engine inspector. In Q/DQ graphs most tensors between layers are INT8, under the name of
  the QuantizeLinear's output; kernels that Myelin made have names of its own, which no tensor of the graph has.
  Going by the names that 8.6's inspector has for EfficientNet-Lite0's INT8 engine, 50 of 60 layers would be seen: 17
  by their own tensor, 33 by that of the activation behind; 9 are fused with an Add, one with what follows it.
- Nothing is said of the memory layout. NVIDIA's own writer (trtexec) takes the values as row-major, and so does this;
  who compares them has to notice when they are not (:mod:`pipeline.errors.engine_errors`).

Not yet run on a card: no TensorRT from 10.12 on was at hand with a GPU it runs on. The tests hold the calls against
the class lists of 10.16, 11.4 and RTX, run them on a fake card, and call the listener through the virtual table of
RTX's own class.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import QuantizeError, ToolError
from pipeline.core.operators import ACTIVATIONS
from pipeline.engine.tensors import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.engine.compat import Api
    from pipeline.engine.cuda import Device
    from pipeline.engine.onnx_wire import Graph, Node, Tensor

__all__ = ["Watched", "Watcher", "dequantised_names", "fused_ends", "watched_names"]

_PROFILE = re.compile(r" \[profile \d+\]$")
_ELEMENTWISE = ACTIVATIONS | {"Abs", "Add", "Div", "Erf", "Exp", "Max", "Min", "Mul", "Neg", "Pow", "Sqrt", "Sub"}
"""What an activation may be written with, where it is no single node: HardSwish as Add, Clip, Mul and Div."""


@dataclass(frozen=True)
class Watched:
    """What a name that TensorRT may report stands for."""

    tensor: str
    """A float tensor of the graph."""
    scale: float | None = None
    """The name is that of the tensor's INT8 form: values are codes times this. None: of the tensor itself."""


def fused_ends(graph: Graph, tensors: Sequence[str]) -> dict[str, str]:
    """Tensor to what it becomes after the activation that alone reads it; tensors without one are left out.

    A kernel that fuses a layer with its activation shows the latter only. An activation is one node; or, up to the
    tensor that is quantised, element-wise nodes that read nothing but the layer, each other and constants: the text
    detector of PaddleOCR has HardSwish as four nodes, with a scale and a shift behind it as two more.
    """
    consumers, constants = _consumers(graph), graph.constants()
    outputs = {spec.name for spec in graph.outputs}
    order = {id(node): number for number, node in enumerate(graph.nodes)}  # topological, as ONNX has them
    quantised = {name for name, _, _ in _quantised(graph, list(consumers))}

    def quantised_end(tensor: str) -> str | None:
        """The first quantised tensor through which all goes that is made of ``tensor``, element by element."""
        before, inside, passed = [tensor], {tensor}, set[int]()
        pending = [order[id(node)] for node in consumers.get(tensor, ())]
        heapify(pending)
        while pending:
            node = graph.nodes[heappop(pending)]
            others = {name for name in node.inputs if name} - constants.keys() - inside
            if others or node.op_type not in _ELEMENTWISE:
                return None
            if id(node) in passed:
                continue
            passed.add(id(node))
            end = node.outputs[0]
            whole = all(id(reader) in passed for name in before for reader in consumers.get(name, ()))
            if whole and outputs.isdisjoint(before) and end in quantised:
                return end
            before.append(end)
            inside.add(end)
            for reader in consumers.get(end, ()):
                heappush(pending, order[id(reader)])
        return None

    found = {}
    for name in tensors:
        readers = consumers.get(name, [])
        if name in outputs or name in quantised:
            continue
        if (end := quantised_end(name)) is not None:
            found[name] = end
        elif len(readers) == 1 and readers[0].op_type in ACTIVATIONS:
            found[name] = readers[0].outputs[0]
    return found


def watched_names(graph: Graph, tensors: Sequence[str]) -> dict[str, Watched]:
    """Every name under which an engine may report ``tensors``: their own, and those of their INT8 forms.

    An INT8 form counts where it can be turned back: one constant scale above 0, zero point 0.
    """
    names = {name: Watched(name) for name in tensors}
    for name, quantiser, scale in _quantised(graph, tensors):
        names.setdefault(quantiser.outputs[0], Watched(name, scale))
    return names


def dequantised_names(graph: Graph, tensors: Sequence[str]) -> dict[str, Watched]:
    """The outputs of DequantizeLinear nodes that hold ``tensors`` as the layers behind read them, one for each tensor.

    Tensors that are not quantised, or not in the form of :func:`watched_names`, have none.
    """
    consumers, constants = _consumers(graph), graph.constants()
    names: dict[str, Watched] = {}
    found: set[str] = set()
    for name, quantiser, scale in _quantised(graph, tensors):
        for node in consumers.get(quantiser.outputs[0], []):
            if name not in found and node.op_type == "DequantizeLinear" and _scale(node, constants) == scale:
                names[node.outputs[0]] = Watched(name, scale)
                found.add(name)
    return names


def _quantised(graph: Graph, tensors: Sequence[str]) -> Iterator[tuple[str, Node, float]]:
    """Each of ``tensors`` that is quantised with one constant scale and no zero point, its QuantizeLinear and scale.

    Where the float part of the graph is FP16, a Cast stands between them.
    """
    consumers, constants = _consumers(graph), graph.constants()
    for name in tensors:
        readers = consumers.get(name, [])
        casts = [cast.outputs[0] for cast in readers if cast.op_type == "Cast"]
        for node in [*readers, *(node for cast in casts for node in consumers.get(cast, []))]:
            if node.op_type == "QuantizeLinear" and (scale := _scale(node, constants)) is not None:
                yield name, node, scale


def _scale(node: Node, constants: Mapping[str, Tensor]) -> float | None:
    """The one scale of a Q or DQ node without zero point; None: it has several, or they are not known."""

    def constant(position: int) -> np.ndarray | None:
        tensor = constants.get(node.inputs[position]) if len(node.inputs) > position else None
        return None if tensor is None else tensor.values()

    scale, zero = constant(1), constant(2)
    usable = scale is not None and scale.size == 1 and scale[0] > 0 and (zero is None or not zero.any())
    return float(scale[0]) if scale is not None and usable else None


def _consumers(graph: Graph) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            found.setdefault(name, []).append(node)
    return found


class Watcher:
    """Copies the wanted ones of the tensors that TensorRT reports, one run at a time.

    Args:
        wanted: reported name to what it stands for, see :func:`watched_names`.
    """

    def __init__(self, api: Api, device: Device, wanted: Mapping[str, Watched]) -> None:
        self._api, self._device, self._wanted = api, device, dict(wanted)
        self._seen: dict[str, np.ndarray] = {}
        self._error: Exception | None = None
        self.others: set[str] = set()
        """Reported names that stand for nothing wanted, over all runs."""
        self.skipped: dict[str, str] = {}
        """Tensors of the graph that were reported and could not be copied, and why."""
        self.listener = self._make_listener()

    def begin(self) -> None:
        """Forget the run before: memory holds the tensors of one run only."""
        self._seen, self._error = {}, None

    def values(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Tensor to float values of the run, and the scales of those that came as INT8.

        A tensor that was reported both ways counts as itself.

        Raises:
            ToolError: copying failed during the run.
        """
        if self._error is not None:
            raise ToolError(f"a debug tensor could not be copied: {self._error}") from self._error
        values: dict[str, np.ndarray] = {}
        scales: dict[str, float] = {}
        for name, array in self._seen.items():
            watched = self._wanted[name]
            if watched.scale is None:
                values[watched.tensor] = array
                scales.pop(watched.tensor, None)
            elif watched.tensor not in values:
                values[watched.tensor] = array.astype(np.float32) * np.float32(watched.scale)
                scales[watched.tensor] = watched.scale
        return values, scales

    def receive(self, address: Any, location: Any, dtype: Any, shape: Any, name: str, stream: int) -> None:
        """Take in one tensor while its memory is valid."""
        name = _PROFILE.sub("", name)
        watched = self._wanted.get(name)
        if watched is None:
            self.others.add(name)
            return
        try:
            kind = numpy_dtype(self._api.trt, dtype, name)
        except QuantizeError as error:
            self.skipped[watched.tensor] = error.message
            return
        if (kind == np.int8) != (watched.scale is not None):
            self.skipped[watched.tensor] = (
                f"{name!r} is reported as {kind}, expected {'int8' if watched.scale else 'floating point'}"
            )
            return
        target = np.empty(tuple(int(dim) for dim in shape), kind)
        if location == self._api.trt.TensorLocation.HOST:
            ctypes.memmove(target.ctypes.data, _address(address), target.nbytes)
        else:
            with self._device.active():
                self._device.read(target, _address(address), stream)
        self._seen[name] = target

    def _make_listener(self) -> Any:
        watcher, base = self, self._api.trt.IDebugListener

        class Listener(base):  # type: ignore[valid-type,misc]
            def __init__(self) -> None:
                base.__init__(self)

            def process_debug_tensor(
                self, addr: Any, location: Any, type: Any, shape: Any, name: str, stream: int
            ) -> bool:
                try:
                    watcher.receive(addr, location, type, shape, name, stream)
                except Exception as error:  # TensorRT prints it and goes on: it is raised after the run
                    watcher._error = watcher._error or error
                    return False
                return True

        return Listener()


def _address(value: Any) -> int:
    """A pointer as a number. The bindings hand over a number, though their signature says capsule."""
    if isinstance(value, int):
        return value
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(get(value, None) or 0)
