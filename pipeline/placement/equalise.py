"""Equalisation: the spread of an activation's channels moves into the weights behind it. The float graph stays the
same.

One INT8 scale serves a whole activation, so that a channel a hundred times wider than the others leaves them a few
steps each. Weights have a scale per output channel and more room. For y = W x and any positive s, y = (W s) (x / s):
here s is chosen per channel of x, which is what SmoothQuant (Xiao et al., ICML 2023) does for transformers and
cross-layer equalisation (Nagel et al., ICCV 2019) for convolutions.

Every s is a power of two. All products and quotients are then exact, and the float graph computes the very same bits as
before (short of overflow), which tests assert.

- Matrix products: x / s is folded into the LayerNormalization in front where nothing else reads it, and is a Mul on the
  INT8 path otherwise, which TensorRT fuses with what writes x.
- Depthwise convolutions behind a convolution with ReLU or no activation: 1 / s goes into the first one's weights and
bias.
  Both have a scale per channel there, so that nothing is paid for it. (ReLU6 is no candidate: its bound would move.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from pipeline.core.progress import SILENT, Progress
from pipeline.placement.graph import GraphView, load_graph
from pipeline.records import Record, StageResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import onnx_ir as ir
    from numpy.typing import NDArray

    from pipeline.config import PlacementConfig
    from pipeline.data import Batch
    from pipeline.placement.plan import PlacementPlan

__all__ = ["Candidate", "EqualiseResult", "EqualisedTensor", "apply", "candidates", "channel_maxima", "factors", "run"]

STRENGTH: Final = 0.8
"""How much of the spread moves: 0 leaves it in the activation, 1 puts all of it into the weights."""
_WIDEST: Final = 2.0**8
"""Largest ratio of two factors of one tensor: a channel that was silent in calibration may speak later."""


@dataclass(frozen=True)
class Candidate:
    """A tensor whose channels can be scaled exactly."""

    tensor: str
    axis: int
    """Its channel axis."""
    readers: tuple[str, ...]
    """Nodes that read it as INT8: their weights take the factors."""
    way: Literal["normalisation", "convolution", "multiply"]
    """What takes 1 / factor: the LayerNormalization or the convolution in front, or a new Mul."""


class EqualisedTensor(Record):
    """What was done to one tensor."""

    tensor: str
    way: str
    readers: tuple[str, ...]
    spread_before: float
    """Greatest over median channel maximum."""
    spread_after: float


class EqualiseResult(StageResult):
    """The equalised model, ``model.onnx`` in :attr:`folder`."""

    tensors: tuple[EqualisedTensor, ...]

    @property
    def model_path(self) -> Path:
        return self.folder / "model.onnx"


def run(
    model: Path,
    batches: Iterable[Batch],
    *,
    folder: Path,
    config: PlacementConfig,
    strength: float = STRENGTH,
    progress: Progress = SILENT,
) -> EqualiseResult:
    """Equalise the prepared ``model`` on calibration data and write it into ``folder``.

    Args:
        batches: calibration data; the greatest magnitude of every channel is all that is kept of them.
        config: the placement that the model will be quantised with; only tensors that become INT8 are equalised.
    """
    from pipeline.onnxfile import save_model
    from pipeline.placement.plan import make_plan

    plan = make_plan(model, config)
    loaded = load_graph(model)
    graph = GraphView(loaded)
    found = candidates(graph, plan)
    maxima = channel_maxima(model, found, batches)
    done = []
    for candidate in found:
        amax = maxima.get(candidate.tensor)
        if amax is None:
            continue
        chosen = factors(amax, reader_amax(graph, candidate), 1.0 if candidate.way == "convolution" else strength)
        if (chosen == chosen[0]).all():
            continue
        apply(graph, candidate, chosen)
        done.append(
            EqualisedTensor(
                tensor=candidate.tensor,
                way=candidate.way,
                readers=candidate.readers,
                spread_before=_spread(amax),
                spread_after=_spread(amax / chosen),
            )
        )
    save_model(loaded, folder)
    progress.note(f"{len(done)} of {len(found)} tensors that can be equalised were")
    return EqualiseResult(tensors=tuple(done)).at(folder)


def _spread(amax: NDArray[np.float32]) -> float:
    median = float(np.median(amax))
    return float(amax.max()) / median if median > 0.0 else 0.0


def candidates(graph: GraphView, plan: PlacementPlan) -> list[Candidate]:
    """Tensors of ``plan`` whose channels can be scaled without changing what the float graph computes."""
    weighted = {(point.node, 0) for point in plan.weights if point.axis is not None}
    found = []
    for point in plan.activations:
        if point.group is not None or not point.consumers or not set(point.consumers) <= weighted:
            continue
        nodes = [graph.by_name[name] for name, _ in point.consumers]
        value = nodes[0].inputs[0]
        if value is None:
            continue
        readers = tuple(name for name, _ in point.consumers)
        if all(graph.op(node) in ("MatMul", "Gemm") for node in nodes):
            alone = _read_by(graph, value, set(nodes))
            norm = graph.producer(value, "LayerNormalization")
            folds = alone and norm is not None and all(graph.is_constant(item) for item in norm.inputs[1:])
            way: Literal["normalisation", "multiply"] = "normalisation" if folds else "multiply"
            found.append(Candidate(point.tensor, -1, readers, way))
        elif len(nodes) == 1 and _is_depthwise(graph, nodes[0]) and _convolution_before(graph, value) is not None:
            found.append(Candidate(point.tensor, 1, readers, "convolution"))
    return found


def channel_maxima(
    model: Path, chosen: Sequence[Candidate], batches: Iterable[Batch]
) -> dict[str, NDArray[np.float32]]:
    """Greatest magnitude of every channel of every candidate's tensor, over all batches."""
    from pipeline.core.ort import make_session

    if not chosen:
        return {}
    names = [candidate.tensor for candidate in chosen]
    session = make_session(model, capture=names)
    maxima: dict[str, NDArray[np.float32]] = {}
    for batch in batches:
        for candidate, value in zip(chosen, session.run(names, batch.feeds), strict=True):
            axis = candidate.axis % value.ndim
            amax = np.abs(value).max(axis=tuple(i for i in range(value.ndim) if i != axis))
            maxima[candidate.tensor] = np.maximum(maxima.get(candidate.tensor, amax), amax)
    return maxima


def factors(activation: NDArray[Any], weights: NDArray[Any], strength: float) -> NDArray[np.float32]:
    """s per channel: activation^strength / weights^(1 - strength), as powers of two with geometric mean near 1.

    A channel without values, or whose weights are all zero, takes 1; the ratio of two factors is at most 2**8.
    """
    usable = (activation > 0.0) & (weights > 0.0) & np.isfinite(activation)
    if not usable.any():
        return np.ones(activation.shape, np.float32)
    logs = np.zeros(activation.shape)
    logs[usable] = strength * np.log2(activation[usable].astype(np.float64))
    logs[usable] -= (1.0 - strength) * np.log2(weights[usable].astype(np.float64))
    logs[usable] -= logs[usable].mean()
    half = np.log2(_WIDEST) / 2.0
    return np.exp2(np.rint(np.clip(logs, -half, half))).astype(np.float32)


def reader_amax(graph: GraphView, candidate: Candidate) -> NDArray[np.float32]:
    """Greatest magnitude of the readers' weights for each input channel."""
    rows = []
    for name in candidate.readers:
        node = graph.by_name[name]
        array = graph.array(node.inputs[1])
        if array is None:
            raise ValueError(f"the weights of {name} are no constant")
        axis = _input_axis(graph, node)
        rows.append(np.abs(array).max(axis=tuple(i for i in range(array.ndim) if i != axis)))
    return np.asarray(np.maximum.reduce(rows), np.float32)


def apply(graph: GraphView, candidate: Candidate, chosen: NDArray[np.float32]) -> None:
    """Scale the weights of the readers by ``chosen`` and the tensor by its inverse."""
    nodes = [graph.by_name[name] for name in candidate.readers]
    value = nodes[0].inputs[0]
    if value is None:
        raise ValueError(f"{candidate.tensor} is not read by {candidate.readers[0]}")
    for node in nodes:
        _scale(graph, node, 1, chosen, _input_axis(graph, node))
    if candidate.way == "normalisation":
        norm = graph.producer(value)
        if norm is not None:
            for index in range(1, len(norm.inputs)):
                _scale(graph, norm, index, 1.0 / chosen, -1)
    elif candidate.way == "convolution":
        conv = _convolution_before(graph, value)
        if conv is not None:
            for index in range(1, len(conv.inputs)):
                _scale(graph, conv, index, 1.0 / chosen, 0)
    else:
        _multiply(graph, value, nodes, 1.0 / chosen)


def _input_axis(graph: GraphView, node: ir.Node) -> int:
    """Axis of a reader's weights along the channels of what it reads; for a depthwise convolution, its filters."""
    if graph.op(node) == "Conv":
        return 0
    flip = node.attributes.get("transB")
    return 1 if flip is not None and flip.as_int() else 0


def _scale(graph: GraphView, node: ir.Node, index: int, by: NDArray[np.float32], axis: int) -> None:
    """Multiply a constant input; a constant that others read as well is copied first."""
    import onnx_ir as ir

    value = node.inputs[index]
    array = graph.array(value)
    if value is None or array is None:
        return
    shape = [1] * array.ndim
    shape[axis] = by.size
    scaled = (array * by.reshape(shape).astype(array.dtype)).astype(array.dtype)
    if value.is_initializer() and len(value.uses()) == 1:
        value.const_value = ir.tensor(scaled, name=value.name)
        return
    node.replace_input_with(index, _constant(graph, f"{value.name}_equalised", scaled))


def _multiply(graph: GraphView, value: ir.Value, nodes: Sequence[ir.Node], by: NDArray[np.float32]) -> None:
    import onnx_ir as ir

    factor = _constant(graph, f"{value.name}_equalising", by)
    result = ir.Value(name=f"{value.name}_equalised", shape=value.shape, type=value.type)
    mul = ir.Node("", "Mul", [value, factor], outputs=[result], name=f"{value.name}_equalise")
    producer = value.producer()
    if producer is not None:
        graph.model.graph.insert_after(producer, [mul])
    else:
        graph.model.graph.insert_before(graph.nodes[0], [mul])
    for node in nodes:
        node.replace_input_with(0, result)


def _constant(graph: GraphView, name: str, array: NDArray[Any]) -> ir.Value:
    import onnx_ir as ir

    taken: Mapping[str, Any] = graph.model.graph.initializers
    fresh, number = name, 1
    while fresh in taken:
        fresh, number = f"{name}_{number}", number + 1
    tensor = ir.tensor(array, name=fresh)
    value = ir.Value(name=fresh, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.model.graph.register_initializer(value)
    return value


def _read_by(graph: GraphView, value: ir.Value, nodes: set[ir.Node]) -> bool:
    """True when nothing but ``nodes`` reads ``value``."""
    outside = value.is_graph_output() or graph.read_inside(value)
    return not outside and all(node in nodes for node, _ in graph.readers(value))


def _is_depthwise(graph: GraphView, node: ir.Node) -> bool:
    group, shape = node.attributes.get("group"), graph.shape(node.inputs[1])
    return graph.op(node) == "Conv" and group is not None and shape is not None and group.as_int() == shape[0] != 1


def _convolution_before(graph: GraphView, value: ir.Value) -> ir.Node | None:
    """The Conv with constant weights whose output, perhaps through ReLU, is ``value``, read by nothing else."""
    if graph.only_reader(value) is None:
        return None
    relu = graph.producer(value, "Relu", "LeakyRelu")
    inner = relu.inputs[0] if relu is not None else value
    if inner is None or (relu is not None and graph.only_reader(inner) is not relu):
        return None
    conv = graph.producer(inner, "Conv")
    return (
        conv
        if conv is not None and all(graph.is_constant(item) for item in conv.inputs[1:] if item is not None)
        else None
    )
