"""Options of engine building, for every command that builds one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.cli.numbers import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.engine.records import BuildOptions

__all__ = ["engine_options", "options_from"]

F = TypeVar("F", bound="Callable[..., Any]")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 2**63 - 1
"""TensorRT takes sizes of 64 bits."""
_NAMES = (
    "fp16",
    "half_inputs",
    "half_outputs",
    "calibration_cache",
    "workspace_bytes",
    "optimization_level",
    "tactic_sources",
    "version_compatible",
    "hardware_compatibility",
    "compute_capabilities",
    "avg_timing_iterations",
    "timing_cache",
    "timing_cache_folder",
)


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+)\s*([KMG]?)(i?B)?\s*", value, re.IGNORECASE)
    count = whole_number(match[1]) if match else None
    if match is None or count is None or count * _UNITS[match[2].upper()] > _LARGEST:
        raise click.BadParameter(f"{value!r} is not a size such as 512M or 4GiB")
    return count * _UNITS[match[2].upper()]


def engine_options(function: F) -> F:
    """Adds the options; the command gets them under the names of :class:`BuildOptions`, None where not given."""
    for option in reversed(
        (
            click.option("--fp16", is_flag=True, default=None, help="TensorRT <= 10: FP16 kernels for the rest."),
            click.option("--half-inputs", is_flag=True, default=None, help="TensorRT <= 10: take float16 inputs."),
            click.option("--half-outputs", is_flag=True, default=None, help="TensorRT <= 10: give float16 outputs."),
            click.option(
                "--implicit",
                "calibration_cache",
                type=click.Path(path_type=Path),
                help="TensorRT <= 10: implicit INT8 of an FP32 model from this calibration.cache.",
            ),
            click.option(
                "--workspace", "workspace_bytes", callback=_size, help="Memory limit of kernels, such as 4GiB."
            ),
            click.option("--optimization-level", type=click.IntRange(0, 5), help="Builder effort, 0 to 5."),
            click.option("--tactic-source", "tactic_sources", multiple=True, help="Only these (repeatable)."),
            click.option("--version-compatible", is_flag=True, default=None, help="Runs on newer TensorRT too."),
            click.option(
                "--hardware-compatibility",
                type=click.Choice(["none", "ampere_plus", "same_compute_capability"]),
                help="TensorRT: which other cards it runs on [none].",
            ),
            click.option(
                "--compute-capability",
                "compute_capabilities",
                multiple=True,
                help="RTX: build for these cards, such as 8.6 (repeatable).",
            ),
            click.option(
                "--timing-iterations",
                "avg_timing_iterations",
                type=click.IntRange(1),
                help="Pick kernels by the mean of so many runs [1]: steadier choice, longer first build.",
            ),
            click.option("--timing-cache/--no-timing-cache", default=None, help="Keep what the builder measures."),
            click.option("--timing-cache-folder", type=click.Path(path_type=Path), help="Where it is kept."),
        )
    ):
        function = option(function)
    return function


def options_from(flags: dict[str, Any]) -> BuildOptions:
    """Take the options of :func:`engine_options` out of ``flags``.

    Raises:
        InputError: a value that :class:`BuildOptions` refuses.
    """
    from pipeline.config import validated
    from pipeline.engine.records import BuildOptions

    given = {name: flags.pop(name) for name in _NAMES if name in flags}
    options: BuildOptions = validated(
        BuildOptions, {name: value for name, value in given.items() if value not in (None, ())}, origin="options"
    )
    return options
