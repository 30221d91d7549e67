"""Equalisation: the spread of an activation's channels moves into the weights behind it. The float graph stays the
same.

One INT8 scale serves a whole activation, so that a channel a hundred times wider than the others leaves them a few
steps each. Weights have a scale per output channel and more room. For y = W x and any positive s, y = (W s) (x / s):
here s is chosen per channel of x, which is what SmoothQuant (Xiao et al., ICML 2023) does for transformers and
cross-layer equalisation (Nagel et al., ICCV 2019) for convolutions.

Every s is a power of two. All products and quotients are then exact, and the float graph computes the very same bits as
before (short of overflow), which tests assert.

1 / s goes into the constants in front of x, where nothing else reads x: those of a LayerNormalization, of a Mul or of a
layer with weights, also through ReLU and through an Add of a constant. That costs nothing at run time. In front of
matrix products a Mul on the INT8 path does it otherwise where the spread is great; TensorRT fuses it with what writes
x. The weights of a
depthwise convolution have a scale for every channel and take all of the spread for nothing; those of other layers take
a part of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline.core.progress import SILENT, Progress
from pipeline.placement.graph import GraphView, load_graph
from pipeline.placement.scaling import apply, candidates, reader_amax
from pipeline.records import Record, StageResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from pipeline.config import PlacementConfig
    from pipeline.data import Batch
    from pipeline.placement.plan import PlacementPlan
    from pipeline.placement.scaling import Candidate

__all__ = ["EqualiseResult", "EqualisedTensor", "channel_maxima", "factors", "products_to_equalise", "run"]

STRENGTH: Final = 0.8
"""How much of the spread moves in front of matrix products: 0 leaves it in the activation, 1 puts all of it into the
weights. For MiniLM 0.7 to 0.8 are best."""
CONVOLUTION_STRENGTH: Final = 0.65
"""The same in front of convolutions; best of 0.5, 0.65 and 0.8 for the text detector of rapidocr."""
_WORTH: Final = 3.0
"""Greatest over median channel from which on a new Mul pays. In MiniLM what the attention gives to its output layer has
2: quantised alone it costs 0.0001 of the embedding's cosine; what the LayerNormalizations give has 4 to 17 and costs
0.007."""
_WIDEST: Final = 2.0**8
"""Largest ratio of two factors of one tensor: a channel that was silent in calibration may speak later."""


def products_to_equalise(model: Path, plan: PlacementPlan) -> int:
    """How many INT8 tensors in front of matrix products :func:`run` may change; whether they need it, data says."""
    return sum(each.axis == -1 for each in candidates(GraphView(load_graph(model)), plan))


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
    strength: float | None = None,
    progress: Progress = SILENT,
) -> EqualiseResult:
    """Equalise the prepared ``model`` on calibration data and write it into ``folder``.

    Args:
        batches: calibration data; the greatest magnitude of every channel is all that is kept of them.
        config: the placement that the model will be quantised with; only tensors that become INT8 are equalised.
        strength: in place of :data:`STRENGTH` and :data:`CONVOLUTION_STRENGTH`.
    """
    from pipeline.onnxfile import save_model
    from pipeline.onnxgraph import drop_unused_initializers
    from pipeline.placement.planner import make_plan

    plan = make_plan(model, config)
    loaded = load_graph(model)
    graph = GraphView(loaded)
    found = candidates(graph, plan)
    maxima = channel_maxima(model, found, batches)
    done = []
    for candidate in found:
        amax = maxima.get(candidate.tensor)
        if amax is None or (candidate.way == "multiply" and _spread(amax) < _WORTH):
            continue
        usual = STRENGTH if candidate.axis == -1 else CONVOLUTION_STRENGTH
        wanted = usual if strength is None else strength
        chosen = factors(amax, reader_amax(graph, candidate), 1.0 if candidate.free else wanted)
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
    drop_unused_initializers(loaded)  # the weights before they took the factors
    save_model(loaded, folder)
    progress.note(f"{len(done)} of {len(found)} tensors that can be equalised were")
    return EqualiseResult(tensors=tuple(done)).at(folder)


def _spread(amax: NDArray[np.float32]) -> float:
    median = float(np.median(amax))
    return float(amax.max()) / median if median > 0.0 else 0.0


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
