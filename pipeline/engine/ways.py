"""The ways to see the tensors inside an engine, in the order to try.

Looking can change what is computed. On an H200, TensorRT 8.6.0 built EfficientNet-Lite0's Q/DQ graph with every
convolution's float output marked, at optimisation level 0, into an engine that computes something else: right up to the
first depthwise convolution, relative L2 0.86 there and 1.1 at the output. With the float tensor returned, the ReLU6
behind it runs outside the INT8 kernel, where 8.6.0 gets it wrong (:mod:`pipeline.engine.clips` mends that since).
Marking what the next layer reads instead (the DequantizeLinear's output, doubled) leaves the kernels alone: 0.042 at
the output, as the engine that serves (``scripts/experiments/results-gpu.md``). So that comes first, and no way is taken
without a look at the outputs (:class:`pipeline.engine.capture.Capture`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pipeline.engine.marking import How

__all__ = ["RECORDED", "Kind", "Recorded", "Way", "ways_to_capture"]

Recorded = Literal["debug tensors", "marked outputs"]
RECORDED: tuple[Recorded, ...] = ("debug tensors", "marked outputs")
"""What can be asked for, in the order of preference."""
Kind = Literal["debug tensors", "marked INT8 tensors", "marked outputs"]
_QUICK = 0
"""Nobody waits for the speed of an engine with dozens of outputs, and a search for fast kernels takes minutes."""


@dataclass(frozen=True)
class Way:
    """One way: its text is what reports say was recorded.

    - *debug tensors*: what survives fusion is copied out while the engine runs.
    - *marked INT8 tensors*: what the next layer reads is returned, the output of the DequantizeLinear behind a layer.
    - *marked outputs*: the layers' own float tensors are returned, which undoes the fusions across them.
    """

    kind: Kind
    how: How = "itself"
    """Of what is marked, see :mod:`pipeline.engine.marking`."""
    level: int | None = None
    """Optimisation level; None: TensorRT's own."""

    def __str__(self) -> str:
        if self.kind == "debug tensors":
            return self.kind
        how = "" if self.how == "itself" else f", {self.how}"
        return f"{self.kind}{how}, " + ("TensorRT's own level" if self.level is None else f"level {self.level}")


def ways_to_capture(recorded: Recorded | None, *, debug: bool, int8: bool, level: int | None) -> tuple[Way, ...]:
    """What to try, in order.

    Args:
        recorded: the way asked for; None: debug tensors where there are any, then marked outputs.
        debug: the version has unfused debug tensors.
        int8: the graph has wanted tensors behind which a DequantizeLinear stands.
        level: optimisation level of all of them; None: TensorRT's own, and the quickest one first where that is marked.
    """
    quick = _QUICK if level is None else level
    ways: list[Way] = []
    if recorded == "debug tensors" or (recorded is None and debug):
        ways.append(Way("debug tensors", level=level))
    if recorded != "debug tensors":
        if int8:
            ways += [
                Way("marked INT8 tensors", "doubled", quick),
                Way("marked INT8 tensors", "doubled", level),
                Way("marked INT8 tensors", "dequantised again", level),
            ]
        else:
            ways += [Way("marked outputs", "itself", quick), Way("marked outputs", "doubled", quick)]
        # TensorRT 8.6 asserts on a marked output of a fused DequantizeLinear, such as a layer's that only moves values
        ways += [Way("marked outputs", "itself", level), Way("marked outputs", "doubled", level)]
    return tuple(dict.fromkeys(ways))
