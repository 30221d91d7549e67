"""The calibrator and its parameters, for every command that calibrates with one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from pipeline.cli.numbers import FiniteFloat

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

__all__ = ["calibrator_options", "parameters_from"]

F = TypeVar("F", bound="Callable[..., Any]")

_PARAMETERS: Final = {
    "percentile": "percentile",
    "ema_alpha": "alpha",
    "ema_decay": "decay",
    "quantile": "quantile",
    "cutoff": "cutoff",
}
"""Name of the option to the calibrators' own name of the parameter."""


def calibrator_options(default: str) -> Callable[[F], F]:
    """Adds the options; the command gets ``calibrator`` and what :func:`parameters_from` takes, None where not given.

    Args:
        default: what is taken without ``--calibrator``, for the help.
    """
    options = (
        click.option(
            "--calibrator", help=f"minmax, ema, percentile, ema-percentile, entropy, mse, legacy [{default}]."
        ),
        click.option("--percentile", type=FiniteFloat(), help="For the percentile calibrators, such as 99.9."),
        click.option("--ema-alpha", type=FiniteFloat(), help="For ema: weight of the past [0.9]."),
        click.option("--ema-decay", type=FiniteFloat(), help="For ema-percentile: weight of the past [0.95]."),
        click.option("--quantile", type=FiniteFloat(), help="For legacy."),
        click.option("--cutoff", type=FiniteFloat(), help="For legacy: regression cut-off."),
    )

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def parameters_from(flags: MutableMapping[str, Any]) -> dict[str, float]:
    """Take the parameters that were given out of ``flags``, under the calibrators' names."""
    values = {name: flags.pop(option, None) for option, name in _PARAMETERS.items()}
    return {name: value for name, value in values.items() if value is not None}
