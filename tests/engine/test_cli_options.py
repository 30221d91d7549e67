"""The command line's options of engine building."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from pipeline.cli.engine_options import engine_options, options_from
from pipeline.core.errors import InputError
from pipeline.engine.records import BuildOptions


def parse(*arguments: str) -> tuple[BuildOptions | None, str]:
    found: list[BuildOptions] = []

    @click.command()
    @engine_options
    def command(**flags: Any) -> None:
        found.append(options_from(flags))
        assert flags == {}

    result = CliRunner().invoke(command, arguments)
    if isinstance(result.exception, InputError):
        raise result.exception
    return (found[0] if found else None), result.output


def test_nothing_given_is_the_default() -> None:
    assert parse()[0] == BuildOptions()


def test_every_option_arrives() -> None:
    options, _ = parse(
        "--fp16", "--half-inputs", "--implicit", "c.cache", "--workspace", "512M", "--optimization-level", "2",
        "--tactic-source", "CUBLAS", "--tactic-source", "CUDNN", "--version-compatible",
        "--hardware-compatibility", "ampere_plus", "--compute-capability", "8.6", "--no-timing-cache",
        "--timing-cache-folder", "here", "--timing-iterations", "8",
    )  # fmt: skip
    assert options is not None
    assert options.model_dump(mode="json", exclude_defaults=True) == {
        "fp16": True,
        "half_inputs": True,
        "calibration_cache": "c.cache",
        "workspace_bytes": 512 << 20,
        "optimization_level": 2,
        "tactic_sources": ["CUBLAS", "CUDNN"],
        "version_compatible": True,
        "hardware_compatibility": "ampere_plus",
        "compute_capabilities": ["8.6"],
        "avg_timing_iterations": 8,
        "timing_cache": False,
        "timing_cache_folder": "here",
    }


@pytest.mark.parametrize(("text", "size"), [("4GiB", 4 << 30), ("4g", 4 << 30), ("10", 10), ("3 kB", 3072)])
def test_sizes(text: str, size: int) -> None:
    options, _ = parse("--workspace", text)
    assert options is not None
    assert options.workspace_bytes == size


def test_wrong_values_are_named() -> None:
    assert "'much' is not a size such as 512M or 4GiB" in parse("--workspace", "much")[1]
    with pytest.raises(InputError, match=r"'86' is not of the form 8\.6"):
        parse("--compute-capability", "86")
