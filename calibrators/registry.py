"""Calibrators by name: our own, and those that other distributions add through entry points.

A third-party distribution adds one in its ``pyproject.toml``::

    [project.entry-points."quantize.calibrators"]
    mine = "my_package.module:MyCalibrator"

The object is called with the parameters as keywords and returns a :class:`~calibrators.protocol.Calibrator`.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

from calibrators.protocol import Calibrator
from pipeline.core.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["BUILT_IN", "GROUP", "get", "names"]

GROUP: Final = "quantize.calibrators"

BUILT_IN: Final[Mapping[str, str]] = {
    "minmax": "calibrators.minmax:MinMax",
    "ema": "calibrators.ema:Ema",
    "percentile": "calibrators.percentile:Percentile",
    "ema-percentile": "calibrators.ema_percentile:EmaPercentile",
    "entropy": "calibrators.entropy:Entropy",
    "mse": "calibrators.mse:Mse",
    "legacy": "calibrators.legacy:Legacy",
}
"""Ours, also without an installation (the same lines stand in ``pyproject.toml``)."""


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Entry points of all distributions: reading them takes tens of milliseconds."""
    return tuple(entry_points(group=GROUP))


def names() -> tuple[str, ...]:
    """Every known name, sorted."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in _installed())}))


def get(name: str, params: Mapping[str, float] | None = None) -> Calibrator:
    """The calibrator ``name`` with ``params``; parameters left out take their defaults.

    Raises:
        InputError: unknown name or parameter, a value out of range, a name that two distributions claim, or a
            third-party calibrator that cannot be loaded.
    """
    factory = _factory(name)
    wanted = dict(params or {})
    known = list(inspect.signature(factory).parameters)
    if unknown := [key for key in wanted if key not in known]:
        raise InputError(f"calibrator {name!r} has no parameter {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    calibrator = factory(**wanted)
    if not isinstance(calibrator, Calibrator):
        raise InputError(f"calibrator {name!r} gives a {type(calibrator).__name__} without name, params and amax()")
    return calibrator


def _factory(name: str) -> Callable[..., object]:
    targets = {point.value: point for point in _installed() if point.name == name}
    if name in BUILT_IN:
        targets[BUILT_IN[name]] = EntryPoint(name, BUILT_IN[name], GROUP)
    if not targets:
        raise InputError(f"unknown calibrator {name!r}; {did_you_mean(name, names())}")
    if len(targets) > 1:
        raise InputError(
            f"the calibrator name {name!r} is claimed by {' and '.join(sorted(targets))}",
            remedy="uninstall one of these distributions or rename its entry point",
        )
    ((value, _),) = targets.items()
    module, _, attribute = value.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"calibrator {name!r} ({value}) cannot be loaded: {error}") from error
    if not callable(factory):
        raise InputError(f"calibrator {name!r} ({value}) is a {type(factory).__name__}, not a class or function")
    return factory  # type: ignore[no-any-return]
