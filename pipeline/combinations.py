"""Options that do nothing together with others: one table of what each needs, asked before any work starts.

An option that was given and has no effect is a mistake that its user cannot see, so it is refused. What an option needs
of the model is known only once the model is read, and is a warning then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError
from pipeline.engine.compat import MODULES, load_api
from pipeline.engine.records import DEFAULT_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pydantic import BaseModel

    from pipeline.config import BuildConfig
    from pipeline.engine.records import BuildOptions

__all__ = ["DEPENDENT", "Dependent", "Need", "check_engine_options", "check_options", "idle_for_model"]


@dataclass(frozen=True)
class Situation:
    """What a build was asked for."""

    given: dict[str, Any]
    """Options by their key in ``build.yaml``, dotted; those left out, or given only as their default, are not there."""
    targets: tuple[str, ...]
    search: bool = False
    """Mixed precision, by a target or a point of an earlier search."""


@dataclass(frozen=True)
class Need:
    """Something that an option is for."""

    words: str
    met: Callable[[Situation], bool]
    remedy: str


@dataclass(frozen=True)
class Dependent:
    """An option that does nothing unless its need is met."""

    key: str
    """In ``build.yaml``, dotted."""
    need: Need
    flag: str = ""
    """On the command line; empty: it has none."""

    @property
    def name(self) -> str:
        return self.flag or self.key


def _for_targets(*targets: str) -> Callable[[Situation], bool]:
    return lambda situation: not set(targets).isdisjoint(situation.targets)


SEARCH = Need(
    "a search for mixed precision",
    lambda situation: situation.search,
    "give --max-drop, --min-sqnr or --min-agreement as well",
)
PASS = Need(
    "the pass over the data, which --calibration takes the place of",
    lambda situation: "calibration" not in situation.given,
    "leave --calibration out to make the pass",
)
ENGINE = Need("building an engine", _for_targets("rtx", "tensorrt"), "build for --target tensorrt or rtx as well")
TENSORRT = Need("target tensorrt", _for_targets("tensorrt"), "build for --target tensorrt as well")
RTX = Need("target rtx", _for_targets("rtx"), "build for --target rtx as well")
TIMINGS = Need(
    "a timing cache, which --no-timing-cache leaves out",
    lambda situation: situation.given.get("engine.timing_cache") is not False,
    "leave --no-timing-cache out",
)
MARKED = Need(
    "tensors that the engine returns beside its outputs",
    lambda situation: "engine.mark_outputs" in situation.given,
    "name them in engine.mark_outputs",
)

DEPENDENT = (
    Dependent("mixed.samples", SEARCH, "--search-samples"),
    Dependent("mixed.layer_times", SEARCH, "--layer-times"),
    Dependent("device", PASS, "--device"),
    Dependent("on_nonfinite", PASS, "--on-nonfinite"),
    Dependent("engine.fp16", TENSORRT, "--fp16"),
    Dependent("engine.half_inputs", TENSORRT, "--half-inputs"),
    Dependent("engine.calibration_cache", TENSORRT, "--implicit"),
    Dependent("engine.workspace_bytes", ENGINE, "--workspace"),
    Dependent("engine.optimization_level", ENGINE, "--optimization-level"),
    Dependent("engine.tactic_sources", ENGINE, "--tactic-source"),
    Dependent("engine.version_compatible", TENSORRT, "--version-compatible"),
    Dependent("engine.hardware_compatibility", TENSORRT, "--hardware-compatibility"),
    Dependent("engine.compute_capabilities", RTX, "--compute-capability"),
    Dependent("engine.avg_timing_iterations", TENSORRT, "--timing-iterations"),
    Dependent("engine.timing_cache", TENSORRT, "--timing-cache"),
    Dependent("engine.timing_cache_folder", TENSORRT, "--timing-cache-folder"),
    Dependent("engine.timing_cache_folder", TIMINGS, "--timing-cache-folder"),
    Dependent("engine.max_aux_streams", ENGINE),
    Dependent("engine.mark_outputs", ENGINE),
    Dependent("engine.mark_how", MARKED),
    Dependent("engine.mark_strictly", MARKED),
    Dependent("engine.watch_unfused", ENGINE),
    Dependent("engine.verbose", ENGINE),
)
"""TensorRT-RTX measures no kernels when it builds: it has neither timing caches nor iterations."""

_FLOAT_ONLY = (
    ("calibrator", "--calibrator"),
    ("calibration", "--calibration"),
    ("on_nonfinite", "--on-nonfinite"),
    ("device", "--device"),
    ("placement.rules_off", "--rule-off"),
    ("equalise", "--equalise"),
)
"""Of no use for a model that came quantised."""


def check_options(config: BuildConfig, options: BuildOptions, targets: Sequence[str]) -> None:
    """Refuse what the options of a build alone show to be wrong.

    Args:
        options: the engine options of ``config``.
        targets: what is built, whether it was asked for or is the default of this machine.

    Raises:
        InputError: an option has no effect; or a target cannot do what an option asks for.
    """
    given = dict(_given(config)) | {f"engine.{key}": value for key, value in _given(options)}
    _refuse_for_targets(options, targets)
    _refuse(Situation(given=given, targets=tuple(targets), search=config.mixed.wanted))


def check_engine_options(options: BuildOptions, targets: Sequence[str]) -> None:
    """As :func:`check_options`, where an engine of a finished artifact is built.

    Raises:
        InputError: as there.
    """
    _refuse_for_targets(options, targets)
    _refuse(Situation(given={f"engine.{key}": value for key, value in _given(options)}, targets=tuple(targets)))


def idle_for_model(config: BuildConfig, *, prequantized: bool, equalised: bool, opset: int) -> tuple[str, ...]:
    """A warning for each given option that has no effect on this model.

    Args:
        prequantized: the model came with Q/DQ nodes.
        equalised: channels of some tensor were equalised.
        opset: of the exported model.
    """
    given = dict(_given(config))
    warnings = []
    if prequantized:
        names = [flag for key, flag in _FLOAT_ONLY if key in given]
        if names:
            warnings.append(
                f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: the model came with Q/DQ nodes, "
                "whose placement and scales are left as they are"
            )
    elif config.equalise and not equalised:
        warnings.append(
            "--equalise has no effect: no activation of this model has a spread between channels that could move into "
            "the weights behind it"
        )
    if "opset" in given and opset != config.opset:
        warnings.append(
            f"--opset {config.opset} has no effect: the model has opset {opset}, and an .onnx file is converted only "
            "where TensorRT could not read it as it is"
        )
    return tuple(warnings)


def _refuse(situation: Situation) -> None:
    for option in DEPENDENT:
        if option.key in situation.given and not option.need.met(situation):
            about_targets = option.need in (ENGINE, TENSORRT, RTX)
            built = f"; this builds for {', '.join(situation.targets)}" if about_targets else ""
            raise InputError(
                f"{option.name} has no effect here: it is for {option.need.words}{built}",
                remedy=f"{option.need.remedy}, or leave {option.name} out",
            )


def _refuse_for_targets(options: BuildOptions, targets: Sequence[str]) -> None:
    """What a version of TensorRT cannot do. Its module is loaded only where there is something to ask it."""
    if options == DEFAULT_OPTIONS:
        return
    for target in targets:
        if target in MODULES:
            load_api(target).check_options(options)


def _given(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What was set to something that can be missed: numbers and paths always, words and switches where they differ
    from the default."""
    for key in sorted(model.model_fields_set):
        value, default = getattr(model, key), type(model).model_fields[key].get_default(call_default_factory=True)
        if value is None or value in ((), {}) or (value == default and (isinstance(value, str) or value is False)):
            continue
        if key in ("placement", "mixed"):
            yield from _given(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
