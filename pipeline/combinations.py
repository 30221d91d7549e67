"""Options that do nothing together with others: one table of what each needs, asked before any work starts.

An option that was typed and has no effect is a mistake that its user cannot see, so it is refused. One that comes from
a file, which may serve several machines, is a warning (:func:`idle_options` finds it). What an option needs of a model
is known only once it is read, and is a warning too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError
from pipeline.engine.compat import MODULES, load_api
from pipeline.engine.records import DEFAULT_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pydantic import BaseModel

    from pipeline.config import BuildConfig
    from pipeline.engine.records import BuildOptions

__all__ = [
    "DEPENDENT",
    "PASS",
    "Dependent",
    "Idle",
    "Need",
    "Situation",
    "check_engine_options",
    "check_options",
    "given_options",
    "idle_among",
    "idle_for_model",
    "idle_options",
    "refuse",
]


@dataclass(frozen=True)
class Situation:
    """What a build, or an experiment, was asked for."""

    given: dict[str, Any]
    """Options by their key in ``build.yaml``, dotted; those left out, or given only as their default, are not there."""
    targets: tuple[str, ...]
    search: bool = False
    """Mixed precision, by a target or a point of an earlier search."""
    artifact: bool = True
    """One is made; False: an experiment without --build."""


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
    already: Any = None
    """A value that asks for what is the case anyway where the need is not met, so that it is never idle."""

    @property
    def name(self) -> str:
        return self.flag or self.key


@dataclass(frozen=True)
class Idle:
    """An option that does nothing in a situation."""

    option: Dependent
    targets: tuple[str, ...]

    @property
    def reason(self) -> str:
        need = self.option.need
        built = f"; this builds for {', '.join(self.targets)}" if need in (ENGINE, TENSORRT, RTX) else ""
        return f"it is for {need.words}{built}"

    def refusal(self) -> InputError:
        name = self.option.name
        return InputError(
            f"{name} has no effect here: {self.reason}", remedy=f"{self.option.need.remedy}, or leave {name} out"
        )


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
    "leave --no-timing-cache out, or set engine.timing_cache: true",
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
    Dependent("engine.half_outputs", TENSORRT, "--half-outputs"),
    Dependent("engine.calibration_cache", TENSORRT, "--implicit"),
    Dependent("engine.workspace_bytes", ENGINE, "--workspace"),
    Dependent("engine.optimization_level", ENGINE, "--optimization-level"),
    Dependent("engine.tactic_sources", ENGINE, "--tactic-source"),
    Dependent("engine.version_compatible", TENSORRT, "--version-compatible"),
    Dependent("engine.hardware_compatibility", TENSORRT, "--hardware-compatibility"),
    Dependent("engine.compute_capabilities", RTX, "--compute-capability"),
    Dependent("engine.avg_timing_iterations", TENSORRT, "--timing-iterations"),
    Dependent("engine.timing_cache", TENSORRT, "--timing-cache", already=False),
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


def check_options(
    config: BuildConfig, options: BuildOptions, targets: Sequence[str], *, typed: Collection[str] = ()
) -> None:
    """Refuse what the options of a build alone show to be wrong.

    Args:
        options: the engine options of ``config``.
        targets: what is built, whether it was asked for or is the default of this machine.
        typed: keys of options from the command line: they count with their default value too.

    Raises:
        InputError: an option has no effect; or a target cannot do what an option asks for.
    """
    refuse(options, targets, idle_options(config, options, targets, typed=typed))


def refuse(options: BuildOptions, targets: Sequence[str], idle: Sequence[Idle]) -> None:
    """Refuse what a target cannot do, then the first of ``idle``.

    Raises:
        InputError: there is one.
    """
    _refuse_for_targets(options, targets)
    for each in idle:
        raise each.refusal()


def check_engine_options(options: BuildOptions, targets: Sequence[str]) -> None:
    """As :func:`check_options`, where an engine of a finished artifact is built by options that were typed.

    Raises:
        InputError: as there.
    """
    given = {f"engine.{key}": value for key, value in _given(options)}
    refuse(options, targets, idle_among(DEPENDENT, Situation(given=given, targets=tuple(targets))))


def idle_options(
    config: BuildConfig, options: BuildOptions, targets: Sequence[str], *, typed: Collection[str] = ()
) -> tuple[Idle, ...]:
    """The options that do nothing in this build, each once, in the order of :data:`DEPENDENT`.

    Args:
        options, targets, typed: as in :func:`check_options`.
    """
    given = given_options(config, options, typed)
    return idle_among(DEPENDENT, Situation(given=given, targets=tuple(targets), search=config.mixed.wanted))


def given_options(config: BuildConfig, options: BuildOptions, typed: Collection[str]) -> dict[str, Any]:
    """:attr:`Situation.given` of a configuration and its engine options; ``typed`` as in :func:`check_options`."""
    return dict(_given(config, typed)) | {f"engine.{key}": value for key, value in _given(options, typed, "engine.")}


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


def idle_among(table: Sequence[Dependent], situation: Situation) -> tuple[Idle, ...]:
    """The options of ``table`` that do nothing in ``situation``, each once, in its order."""
    found: dict[str, Idle] = {}
    for option in table:
        if option.key not in situation.given or option.need.met(situation):
            continue
        if option.already is None or situation.given[option.key] != option.already:
            found.setdefault(option.key, Idle(option, situation.targets))
    return tuple(found.values())


def _refuse_for_targets(options: BuildOptions, targets: Sequence[str]) -> None:
    """What a version of TensorRT cannot do. Its module is loaded only where there is something to ask it."""
    if options == DEFAULT_OPTIONS:
        return
    for target in targets:
        if target in MODULES:
            load_api(target).check_options(options)


def _given(model: BaseModel, typed: Collection[str] | None = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What was set to something that can be missed, by its key below ``prefix``: what differs from the default.

    Args:
        typed: dotted keys of what was typed; None: all of it. Of these, numbers, paths and switches that are on count
            with their default value too.
    """
    for key in sorted(model.model_fields_set):
        value, default = getattr(model, key), type(model).model_fields[key].get_default(call_default_factory=True)
        if value is None or value in ((), {}):
            continue
        if key in ("placement", "mixed"):
            yield from ((f"{key}.{inner}", each) for inner, each in _given(value, typed, f"{key}."))
        elif value != default or (
            (typed is None or f"{prefix}{key}" in typed) and not (isinstance(value, str) or value is False)
        ):
            yield key, value
