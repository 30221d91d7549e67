"""Per-layer capture on a card: run an engine that returns intermediate tensors too.

A returned tensor has to be stored, so fusions across it are undone and the layers around it may run other kernels than
in the engine that serves; on explicit Q/DQ graphs the arithmetic stays the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Profile, ShapeRange
from pipeline.engine.builder import build_engine
from pipeline.engine.records import DEFAULT_OPTIONS, BuildOptions, EngineRecord
from pipeline.engine.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

__all__ = ["build_capture", "capture_outputs", "profile_for"]


_LEVEL = 0
"""Of the builder, unless told otherwise: nobody waits for the capture engine's speed, and with dozens of outputs a
search for fast kernels takes minutes."""


def profile_for(feeds: Mapping[str, np.ndarray]) -> Profile:
    """The profile that allows exactly the shapes of ``feeds``."""
    return Profile(
        inputs={name: ShapeRange(min=a.shape, opt=a.shape, max=a.shape) for name, a in feeds.items() if a.ndim}
    )


def build_capture(
    model: Path,
    tensors: Sequence[str],
    profiles: Sequence[Profile],
    *,
    plan_path: Path,
    target: str = "tensorrt",
    options: BuildOptions = DEFAULT_OPTIONS,
    timeout_s: float | None = None,
) -> EngineRecord:
    """Build an engine of ``model`` that returns ``tensors`` beside the graph's outputs.

    Raises:
        InputError: a tensor that the graph lacks, and as :func:`build_engine`.
    """
    level = options.optimization_level
    marked = options.model_copy(
        update={"mark_outputs": tuple(tensors), "optimization_level": _LEVEL if level is None else level}
    )
    return build_engine(
        model, target=target, profiles=profiles, plan_path=plan_path, options=marked, timeout_s=timeout_s
    )


def capture_outputs(
    model: Path,
    tensors: Sequence[str],
    feeds: Iterable[Mapping[str, np.ndarray]],
    *,
    profiles: Sequence[Profile] = (),
    target: str = "tensorrt",
    options: BuildOptions = DEFAULT_OPTIONS,
    timeout_s: float | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """The values of ``tensors`` and of the graph's outputs, for each of ``feeds`` in turn.

    Args:
        profiles: none: one for the shapes of the first feeds, which all others must then have.

    Raises:
        InputError: a tensor that the graph lacks; feeds of another shape, name or dtype.
        ToolError: no card, or TensorRT fails.
    """
    stream = iter(feeds)
    first = next(stream, None)
    if first is None:
        return
    with tempfile.TemporaryDirectory(prefix="quantize-capture-") as scratch:
        plan = Path(scratch) / "capture.plan"
        record = build_capture(
            model,
            tensors,
            profiles or [profile_for(first)],
            plan_path=plan,
            target=target,
            options=options,
            timeout_s=timeout_s,
        )
        with Runner(plan, target=target, record=record) as runner:
            yield runner(first)
            for values in stream:
                yield runner(values)
