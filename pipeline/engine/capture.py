"""Per-layer capture on a card: the values of tensors inside an engine.

Two ways, and every result says which one was taken:

- **debug tensors** (TensorRT 10.12 and newer, RTX): the engine is fused as the one that serves, and what survives
  fusion is copied out while it runs. The rest was fused away and is not there. See
  :mod:`pipeline.engine.debug_tensors`.
- **marked outputs** (all versions): every tensor is returned. A returned tensor has to be stored, so fusions across it
  are undone and the layers around it may run other kernels than in the engine that serves; on explicit Q/DQ graphs the
  arithmetic stays the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.config import Profile, ShapeRange
from pipeline.core.errors import InputError, ToolError
from pipeline.engine.builder import build_engine
from pipeline.engine.compat import load_api
from pipeline.engine.debug_tensors import Watcher, fused_ends, watched_names
from pipeline.engine.device import no_device_reason
from pipeline.engine.marking import original, returned
from pipeline.engine.onnx_wire import read_model
from pipeline.engine.profiles import covers, nearest_allowed
from pipeline.engine.records import DEFAULT_OPTIONS, BuildOptions, EngineRecord
from pipeline.engine.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pipeline.engine.marking import How

__all__ = ["RECORDED", "Capture", "Recorded", "build_capture", "capture_outputs", "profile_for"]

Recorded = Literal["debug tensors", "marked outputs"]
RECORDED: tuple[Recorded, ...] = ("debug tensors", "marked outputs")
"""In the order of preference."""
Arrays = dict[str, np.ndarray]

_LEVEL = 0
"""Of a builder with marked outputs, unless told otherwise: nobody waits for that engine's speed, and with dozens of
outputs a search for fast kernels takes minutes. With debug tensors the engine is to be the one that serves: TensorRT's
own level."""
_HOW: tuple[How, ...] = ("itself", "doubled")
"""Ways to mark an output, in the order to try: TensorRT 8.6 asserts on the output of a fused DequantizeLinear, and the
output of a layer that only moves values (MaxPool) becomes one."""
_NAMES_SHOWN = 3


def profile_for(feeds: Mapping[str, np.ndarray]) -> Profile:
    """The profile that allows exactly the shapes of ``feeds``."""
    return Profile(
        inputs={name: ShapeRange(min=a.shape, opt=a.shape, max=a.shape) for name, a in feeds.items() if a.ndim}
    )


def _up_to(feeds: Mapping[str, np.ndarray]) -> Profile:
    """From one sample to as many as ``feeds`` has, the other dimensions as they are."""
    return Profile(
        inputs={
            name: ShapeRange(min=(1, *a.shape[1:]), opt=a.shape, max=a.shape) for name, a in feeds.items() if a.ndim
        }
    )


def _narrowed(profile: Profile, samples: int) -> Profile:
    """``profile`` for at most ``samples`` samples where it allows so few: less to build and to hold."""

    def cut(shape: tuple[int, ...], least: int) -> tuple[int, ...]:
        return (max(least, min(shape[0], samples)), *shape[1:]) if shape else shape

    return Profile(
        inputs={
            name: ShapeRange(
                min=allowed.min,
                opt=cut(allowed.opt, allowed.min[0] if allowed.min else 0),
                max=cut(allowed.max, allowed.min[0] if allowed.min else 0),
            )
            for name, allowed in profile.inputs.items()
        }
    )


def build_capture(
    model: Path,
    tensors: Sequence[str],
    profiles: Sequence[Profile],
    *,
    plan_path: Path,
    target: str = "tensorrt",
    recorded: Recorded = "marked outputs",
    how: How = "itself",
    strictly: bool = True,
    options: BuildOptions = DEFAULT_OPTIONS,
    timeout_s: float | None = None,
) -> EngineRecord:
    """Build an engine of ``model`` that shows ``tensors``.

    Args:
        how: marked outputs: see :mod:`pipeline.engine.marking`.
        strictly: marked outputs: False leaves out tensors that TensorRT's network lacks, with a warning in the record.

    Raises:
        InputError: a tensor that the graph lacks, a version without debug tensors, and as :func:`build_engine`.
    """
    if recorded == "debug tensors":
        changes: dict[str, Any] = {"watch_unfused": True}
    else:
        level = _LEVEL if options.optimization_level is None else options.optimization_level
        changes = {
            "mark_outputs": tuple(tensors),
            "mark_how": how,
            "mark_strictly": strictly,
            "optimization_level": level,
        }
    chosen = options.model_copy(update=changes)
    return build_engine(
        model, target=target, profiles=profiles, plan_path=plan_path, options=chosen, timeout_s=timeout_s
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
    """The values of ``tensors`` as marked outputs, and of the graph's outputs, for each of ``feeds`` in turn.

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


class Capture:
    """An engine of ``model`` and the values of ``tensors`` in it, whichever way they can be had. A context manager.

    The engine is built at the first call, for ``profiles`` or, without any, for the first feeds' shapes with any
    smaller number of samples. With marked outputs the profiles are narrowed to the first feeds' number of samples.
    Samples that no profile allows in their number are sent in one that is allowed, repeated or in pieces.

    Args:
        recorded: the way; None: debug tensors where the version has them and reports any of ``tensors``, else marked
            outputs.
        warn: is told why the preferred way was not taken.

    Raises:
        InputError: TensorRT is not installed, or has no debug tensors and is to record those.
        ToolError: no card.
    """

    def __init__(
        self,
        model: Path,
        tensors: Sequence[str],
        *,
        target: str = "tensorrt",
        profiles: Sequence[Profile] = (),
        recorded: Recorded | None = None,
        options: BuildOptions = DEFAULT_OPTIONS,
        timeout_s: float | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        api = load_api(target)
        if recorded == "debug tensors":
            api.require_debug_tensors()
        if reason := no_device_reason():
            raise ToolError(
                f"no engine can run here: {reason}",
                remedy="record the tensors where the card is (python -m pipeline.errors.recording) and give the file "
                "to --engine-tensors",
            )
        self.recorded: Recorded = recorded or ("debug tensors" if api.debug_tensors else "marked outputs")
        self.tensorrt = api.version
        graph = read_model(model).graph
        self.ends: dict[str, str] = fused_ends(graph, tensors) if self.recorded == "debug tensors" else {}
        """Debug tensors: by which tensor a layer that was fused with its activation is shown."""
        self.scales: dict[str, float] = {}
        """Of the last call: tensors that came as INT8, and the scale they were turned back with."""
        self.unshown: dict[str, str] = {}
        """Tensors that are not fused and could not be had, and why. Others that are not shown are fused."""
        self._wanted = watched_names(graph, [*tensors, *self.ends.values()])
        self._forced, self._api, self._warn = recorded is not None, api, warn
        self._model, self._tensors, self._target = model, tuple(tensors), target
        self._profiles, self._options, self._timeout_s = tuple(profiles), options, timeout_s
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._runner: Runner | None = None
        self._watcher: Watcher | None = None

    def __enter__(self) -> Capture:
        self._scratch = tempfile.TemporaryDirectory(prefix="quantize-capture-")
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = self._watcher = None

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Tensors and outputs of the graph for one batch; a tensor that the engine does not show is left out."""
        runner = self._runner or self._start(feeds)
        shapes = {name: values.shape for name, values in feeds.items()}
        known = all(spec.name in shapes and shapes[spec.name] for spec in runner.inputs)
        if not known or any(covers(profile, shapes) for profile in runner.profiles):
            return self._run(feeds)
        nearest = next(iter(nearest_allowed(runner.profiles, shapes)[1].values()))
        return self._in_pieces(feeds, nearest[0])

    def _in_pieces(self, feeds: Mapping[str, np.ndarray], batch: int) -> Arrays:
        count = len(next(iter(feeds.values())))
        pieces: list[Arrays] = []
        for start in range(0, count, batch):
            part = {name: values[start : start + batch] for name, values in feeds.items()}
            kept = min(batch, count - start)
            fitted = {name: np.resize(values, (batch, *values.shape[1:])) for name, values in part.items()}
            found = self._run(fitted)
            pieces.append(
                {
                    name: values[: len(values) // batch * kept]
                    for name, values in found.items()
                    if values.ndim and len(values) and len(values) % batch == 0
                }
            )
            for name in found.keys() - pieces[-1].keys():
                self.unshown[name] = f"its samples cannot be told apart: shape {found[name].shape} for {batch} samples"
        common = set(pieces[0]).intersection(*pieces[1:])
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0] if name in common}

    def _run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        runner = self._runner
        if runner is None:
            raise InputError("the capture is closed", remedy="use it inside its `with` block")
        if self.recorded == "marked outputs":
            marked = runner(feeds)
            names = [original(name) for name in marked]
            lacking = [name for name in self._tensors if name not in names]
            self.unshown |= dict.fromkeys(lacking, "TensorRT's network has no tensor of that name")
            return {name: array for name in names if (array := returned(marked, name)) is not None}
        watcher = self._watcher or Watcher(self._api, runner.device, self._wanted)
        self._watcher = watcher
        watcher.begin()
        outputs = runner.run_watched(feeds, watcher.listener)
        values, self.scales = watcher.values()
        self.unshown |= {name: reason for name, reason in watcher.skipped.items() if name not in values}
        if not values and not self._forced:
            seen = sorted(watcher.others)
            words = f"{len(seen)} tensors, such as {', '.join(seen[:_NAMES_SHOWN])}" if seen else "no tensor at all"
            self._fall_back(f"TensorRT reports none of the graph's tensors, but {words}")
            self._start(feeds)
            return self._run(feeds)
        return {**outputs, **values}

    def _fall_back(self, reason: str) -> None:
        self._warn(f"no debug tensors: {reason}; marked outputs are recorded, which undo fusions")
        self._close()
        self.recorded, self.ends, self.scales, self.unshown = "marked outputs", {}, {}, {}

    def _start(self, feeds: Mapping[str, np.ndarray]) -> Runner:
        if self._scratch is None:
            raise InputError("the capture is not open", remedy="use it inside its `with` block")
        profiles = self._profiles or (_up_to(feeds),)
        samples = max((len(values) for values in feeds.values() if values.ndim), default=1)
        plan = Path(self._scratch.name) / "capture.plan"
        record = self._build(plan, profiles, samples)
        self._runner = Runner(plan, target=self._target, record=record)
        return self._runner

    def _build(self, plan: Path, profiles: Sequence[Profile], samples: int) -> EngineRecord:
        if self.recorded == "debug tensors":
            try:
                return self._build_one(plan, profiles)
            except ToolError as error:
                if self._forced:
                    raise
                self._fall_back(error.message)
        profiles = tuple(_narrowed(profile, samples) for profile in profiles)
        for how in _HOW[:-1]:
            try:
                return self._build_one(plan, profiles, how)
            except ToolError as error:
                last = error.message.splitlines()[-1].strip()
                self._warn(f"no engine with tensors returned as {how}: {last}; they are returned as {_HOW[-1]}")
        return self._build_one(plan, profiles, _HOW[-1])

    def _build_one(self, plan: Path, profiles: Sequence[Profile], how: How = "itself") -> EngineRecord:
        return build_capture(
            self._model,
            self._tensors,
            profiles,
            plan_path=plan,
            target=self._target,
            recorded=self.recorded,
            how=how,
            strictly=False,
            options=self._options,
            timeout_s=self._timeout_s,
        )
