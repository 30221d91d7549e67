"""Which calibrators an experiment compares: ``all``, names, and names with parameters.

``percentile`` alone stands for its usual parameters (99.9, 99.99, 99.999), ``percentile(99.9)`` and
``percentile(percentile=99.9)`` for one, ``ema-percentile(decay=0.9, percentile=99.99)`` sets several.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pipeline.core.errors import InputError
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrators import Calibrator

__all__ = ["ALL", "Variant", "expand"]

ALL: Final = "all"

_GRID: Final[Mapping[str, tuple[Mapping[str, float], ...]]] = {
    "minmax": ({},),
    "ema": ({"alpha": 0.9}, {"alpha": 0.99}),
    "percentile": ({"percentile": 99.9}, {"percentile": 99.99}, {"percentile": 99.999}),
    "ema-percentile": ({"decay": 0.9}, {"decay": 0.95}),
    "entropy": ({},),
    "mse": ({},),
    "legacy": ({"quantile": 0.999},),
}
"""Parameters that stand for a name given without any, in the order of the reports. Others take their defaults."""

_ITEM: Final = re.compile(r"\s*(?P<name>[\w.-]+)\s*(\((?P<params>[^()]*)\))?\s*")
_OUTSIDE_PARENTHESES: Final = re.compile(r",(?![^()]*\))")


class Variant(Record):
    """A calibrator with every parameter it is run with."""

    label: str
    """What reports call it, such as ``percentile 99.9``."""
    calibrator: str
    params: dict[str, float]

    def make(self) -> Calibrator:
        import calibrators

        return calibrators.get(self.calibrator, self.params)


def expand(items: Sequence[str]) -> tuple[Variant, ...]:
    """The variants that ``items`` name, each once, in the order given.

    Raises:
        InputError: an unknown calibrator (the nearest name is offered) or parameter, a value that is no number or out
            of range, a malformed item, or none at all.
    """
    import calibrators

    wanted: list[tuple[str, Mapping[str, float]]] = []
    for item in (part for text in items for part in _OUTSIDE_PARENTHESES.split(text) if part.strip()):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise InputError(
                f"calibrator {item.strip()!r} is not NAME or NAME(parameter=value)",
                remedy="write, for example, minmax,percentile(99.9),ema(alpha=0.95)",
            )
        name, params = match["name"], match["params"]
        if name == ALL and params is None:
            known = calibrators.names()
            for each in (*(known_name for known_name in _GRID if known_name in known), *sorted({*known} - {*_GRID})):
                wanted.extend((each, grid) for grid in _GRID.get(each, ({},)))
        elif params is None:
            wanted.extend((name, grid) for grid in _GRID.get(name, ({},)))
        else:
            wanted.append((name, _parameters(name, params)))
    made: dict[tuple[str, tuple[tuple[str, float], ...]], Variant] = {}
    for name, given in wanted:
        params_in_force = {key: float(value) for key, value in calibrators.get(name, given).params.items()}
        key = (name, tuple(sorted(params_in_force.items())))
        label = _label(name, given, params_in_force)
        made.setdefault(key, Variant(label=label, calibrator=name, params=params_in_force))
    if not made:
        raise InputError("no calibrator to compare is given", remedy="give --calibrators all, or names")
    return tuple(made.values())


def _parameters(name: str, text: str) -> dict[str, float]:
    import calibrators

    params: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, separator, value = (piece.strip() for piece in part.rpartition("="))
        if not separator:
            known = list(calibrators.get(name).params)
            if not known:
                raise InputError(f"calibrator {name!r} has no parameters, got {part!r}")
            key = known[0]
        try:
            params[key] = float(value)
        except ValueError as error:
            raise InputError(f"calibrator {name!r}: {key} = {value!r} is not a number") from error
    return params


def _label(name: str, given: Mapping[str, float], params: Mapping[str, float]) -> str:
    """The name and the parameters that were chosen; a single one of a calibrator that has but one, by its value."""
    if len(params) == 1 and given:
        return f"{name} {next(iter(params.values())):.10g}"
    return " ".join([name, *(f"{key}={value:.10g}" for key, value in params.items() if key in given)])
