"""Per-layer capture on a card: the values of tensors inside an engine, from one that computes what it should.

:mod:`pipeline.engine.ways` has the ways to see them, and every result says which one was taken. Looking changes the
engine, and TensorRT 8.6.0 was seen to build one of an explicit Q/DQ graph that computes something else (where the
float outputs of INT8 convolutions are returned). So each engine's outputs are compared with what they must be before
anything of it is given away, and the next way is tried where they differ.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config import Profile, ShapeRange
from pipeline.core.errors import CheckFailed, InputError, QuantizeError, ToolError
from pipeline.engine.builder import build_engine
from pipeline.engine.compat import load_api
from pipeline.engine.debug_tensors import Watched, Watcher, dequantised_names, fused_ends, watched_names
from pipeline.engine.device import no_device_reason
from pipeline.engine.marking import original, returned
from pipeline.engine.onnx_wire import read_model
from pipeline.engine.profiles import covers, nearest_allowed
from pipeline.engine.recorded import OUTPUT_TOLERANCE, EngineCheck, Samples, check_outputs
from pipeline.engine.records import DEFAULT_OPTIONS, BuildOptions, EngineRecord
from pipeline.engine.runner import Runner
from pipeline.engine.ways import RECORDED, Recorded, Way, ways_to_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["RECORDED", "Capture", "Recorded", "build_capture"]

Arrays = dict[str, np.ndarray]
_NAMES_SHOWN = 3


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
    way: Way,
    target: str = "tensorrt",
    options: BuildOptions = DEFAULT_OPTIONS,
    timeout_s: float | None = None,
) -> EngineRecord:
    """Build an engine of ``model`` that shows ``tensors`` in one ``way``. Nobody has looked at what it computes.

    Tensors that TensorRT's network lacks are left out, with a warning in the record.

    Raises:
        InputError: a version without debug tensors, and as :func:`build_engine`.
    """
    if way.kind == "debug tensors":
        chosen = options.model_copy(update={"watch_unfused": True})
    else:
        marks = {"mark_outputs": tuple(tensors), "mark_how": way.how, "mark_strictly": False}
        chosen = options.model_copy(update={**marks, "optimization_level": way.level})
    return build_engine(
        model, target=target, profiles=profiles, plan_path=plan_path, options=chosen, timeout_s=timeout_s
    )


class Capture:
    """An engine of ``model`` and the values of ``tensors`` in it, whichever way they can be had. A context manager.

    The engine is built at the first call, for ``profiles`` or, without any, for the first feeds' shapes with any
    smaller number of samples. With marked tensors the profiles are narrowed to the first feeds' number of samples.
    Samples that no profile allows in their number are sent in one that is allowed, repeated or in pieces.

    Args:
        reference: from the first feeds: samples and the graph's outputs for them, which every engine must reproduce.
        tolerance: largest relative L2 difference of an output.
        recorded: the way asked for; None: debug tensors where the version has them and reports any of ``tensors``,
            else marked ones.
        warn: is told of each way that was refused, and why.

    Raises:
        InputError: TensorRT is not installed, or has no debug tensors and is to record those.
        ToolError: no card.
    """

    def __init__(
        self,
        model: Path,
        tensors: Sequence[str],
        *,
        reference: Callable[[Mapping[str, np.ndarray]], Samples],
        tolerance: float = OUTPUT_TOLERANCE,
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
        self.tensorrt = api.version
        graph = read_model(model).graph
        self._outputs = tuple(spec.name for spec in graph.outputs)
        self._ends = fused_ends(graph, tensors)
        wanted = [*tensors, *self._ends.values()]
        self._watched = watched_names(graph, wanted)
        self._dequantised = dequantised_names(graph, [name for name in wanted if name not in self._outputs])
        self._ways = ways_to_capture(
            recorded, debug=api.debug_tensors, int8=bool(self._dequantised), level=options.optimization_level
        )
        self._api, self._warn, self._reference, self._tolerance = api, warn, reference, tolerance
        self._model, self._tensors, self._target = model, tuple(tensors), target
        self._profiles, self._options, self._timeout_s = tuple(profiles), options, timeout_s
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._runner: Runner | None = None
        self._watcher: Watcher | None = None
        self.check: EngineCheck | None = None
        """The engine's outputs against the reference; None before the first call."""
        self._take(self._ways[0])

    def _take(self, way: Way) -> None:
        self.way = way
        self.ends: dict[str, str] = {} if way.kind == "marked outputs" else dict(self._ends)
        """By which tensor a layer is shown that was fused with its activation."""
        self.scales: dict[str, float] = {}
        """Of the last call: tensors that the engine has in INT8, and their scale. Their values are floats."""
        self.unshown: dict[str, str] = {}
        """Tensors that are not fused and could not be had, and why. Others that are not shown are fused."""
        itself = {name: Watched(name) for name in self._tensors}
        self._marks = self._dequantised if way.kind == "marked INT8 tensors" else itself

    @property
    def recorded(self) -> str:
        """The way that was taken, in words; before the first call: the one that is tried first."""
        return str(self.way)

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
        """Tensors and outputs of the graph for one batch; a tensor that the engine does not show is left out.

        Raises:
            CheckFailed: at the first call: no engine that shows tensors gives the reference's outputs.
            ToolError: at the first call: TensorRT builds no such engine.
        """
        outputs, shown = self._answer(self._runner or self._start(feeds), feeds)
        return {**outputs, **shown}

    def _answer(self, runner: Runner, feeds: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
        """The graph's outputs and the tensors looked for."""
        feeds = runner.taken(feeds)
        shapes = {name: values.shape for name, values in feeds.items()}
        known = all(spec.name in shapes and shapes[spec.name] for spec in runner.inputs)
        if not known or any(covers(profile, shapes) for profile in runner.profiles):
            return self._run(runner, feeds)
        nearest = next(iter(nearest_allowed(runner.profiles, shapes)[1].values()))
        pieces = list(self._pieces(runner, feeds, nearest[0]))
        return _joined([outputs for outputs, _ in pieces]), _joined([shown for _, shown in pieces])

    def _pieces(
        self, runner: Runner, feeds: Mapping[str, np.ndarray], batch: int
    ) -> Iterator[tuple[Arrays, Arrays]]:
        count = len(next(iter(feeds.values())))
        for start in range(0, count, batch):
            part = {name: values[start : start + batch] for name, values in feeds.items()}
            kept = min(batch, count - start)
            outputs, shown = self._run(
                runner, {name: np.resize(values, (batch, *values.shape[1:])) for name, values in part.items()}
            )
            yield self._cut(outputs, batch, kept), self._cut(shown, batch, kept)

    def _cut(self, arrays: Arrays, batch: int, kept: int) -> Arrays:
        found = {
            name: values[: len(values) // batch * kept]
            for name, values in arrays.items()
            if values.ndim and len(values) and len(values) % batch == 0
        }
        for name in arrays.keys() - found.keys():
            self.unshown[name] = f"its samples cannot be told apart: shape {arrays[name].shape} for {batch} samples"
        return found

    def _run(self, runner: Runner, feeds: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
        if self.way.kind == "debug tensors":
            watcher = self._watcher or Watcher(self._api, runner.device, self._watched)
            self._watcher = watcher
            watcher.begin()
            outputs = runner.run_watched(feeds, watcher.listener)
            values, self.scales = watcher.values()
            self.unshown |= {name: reason for name, reason in watcher.skipped.items() if name not in values}
            return outputs, values
        marked = runner(feeds)
        names = {original(name) for name in marked}
        shown = {
            watched.tensor: array
            for name, watched in self._marks.items()
            if (array := returned(marked, name)) is not None
        }
        self.scales = {w.tensor: w.scale for n, w in self._marks.items() if n in names and w.scale is not None}
        lacking = [watched.tensor for name, watched in self._marks.items() if name not in names]
        self.unshown |= dict.fromkeys(lacking, "TensorRT's network has no tensor of that name")
        return {name: marked[name] for name in self._outputs if name in marked}, shown

    def _start(self, feeds: Mapping[str, np.ndarray]) -> Runner:
        """The first engine, in the order of the ways, that gives the reference's outputs."""
        if self._scratch is None:
            raise InputError("the capture is not open", remedy="use it inside its `with` block")
        samples = self._reference(feeds)
        refused: list[tuple[Way, QuantizeError]] = []
        for way, following in zip(self._ways, (*self._ways[1:], None), strict=True):
            self._take(way)
            try:
                return self._try(Path(self._scratch.name) / "capture.plan", feeds, samples, last=following is None)
            except (CheckFailed, ToolError) as error:
                self._close()
                refused.append((way, error))
                if following is not None:
                    self._warn(f"not recorded as {way}: {_reason(error)}; next: {following}")
        if not any(isinstance(error, CheckFailed) for _, error in refused):
            raise refused[-1][1]
        raise CheckFailed(
            f"{self._api.title} builds no engine of {self._model.name} that shows its tensors and gives its outputs; "
            "nothing of these engines is reported:\n  "
            + "\n  ".join(f"{way}: {_reason(error)}" for way, error in refused),
            remedy="the engine that serves is another one: `quantize verify ARTIFACT --on-device` looks at its outputs",
            figures={"ways": [{"way": str(w), "reason": _reason(e), **e.figures} for w, e in refused]},
        )

    def _try(self, plan: Path, feeds: Mapping[str, np.ndarray], samples: Samples, *, last: bool) -> Runner:
        """Build one engine, and compare its outputs.

        Raises:
            CheckFailed: they are others.
            ToolError: TensorRT fails, or the engine shows nothing while there is another way.
        """
        profiles = self._profiles or (_up_to(feeds),)
        if self.way.kind != "debug tensors":
            profiles = tuple(_narrowed(profile, _count(feeds)) for profile in profiles)
        record = build_capture(
            self._model,
            tuple(self._marks),
            profiles,
            plan_path=plan,
            way=self.way,
            target=self._target,
            options=self._options,
            timeout_s=self._timeout_s,
        )
        runner = self._runner = Runner(plan, target=self._target, record=record)
        outputs, shown = self._answer(runner, samples.feeds)
        told = {name: v for name, v in samples.expected.items() if name in outputs or name not in self.unshown}
        if not told:
            raise CheckFailed("no output has an axis for the samples: nothing tells whether the engine is right")
        rows = max((len(values) for values in told.values() if values.ndim), default=1)  # nothing is cut off
        check = check_outputs(outputs, told, rows, self._tolerance)
        if not shown and not last and self.way.kind != "marked outputs":
            seen = sorted(self._watcher.others) if self._watcher is not None else []
            words = f"{len(seen)} tensors, such as {', '.join(seen[:_NAMES_SHOWN])}" if seen else "no tensor at all"
            raise ToolError(f"TensorRT reports none of the graph's tensors, but {words}")
        self.check = check.model_copy(update={"samples": _count(samples.feeds)})
        return runner


def _count(feeds: Mapping[str, np.ndarray]) -> int:
    return max((len(values) for values in feeds.values() if values.ndim), default=1)


def _joined(pieces: Sequence[Arrays]) -> Arrays:
    common = set(pieces[0]).intersection(*pieces[1:])
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0] if name in common}


def _reason(error: QuantizeError) -> str:
    """Of an error in one line: a check says all in its message, TensorRT's own words stand last."""
    return error.message if isinstance(error, CheckFailed) else error.message.splitlines()[-1].strip()
