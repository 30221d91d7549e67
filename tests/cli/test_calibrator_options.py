"""The calibrator's options, shared by the commands that calibrate with one."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from pipeline.cli.build import command as build
from pipeline.cli.calibrator_options import calibrator_options, parameters_from
from pipeline.cli.consistency import command as consistency


@click.command()
@calibrator_options("entropy")
def show(**flags: Any) -> None:
    print(parameters_from(flags), flags)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "{} {'calibrator': None}"),
        (["--calibrator", "ema", "--ema-alpha", "0.95"], "{'alpha': 0.95} {'calibrator': 'ema'}"),
        (["--ema-decay", "0.9", "--percentile", "99.9"], "{'percentile': 99.9, 'decay': 0.9} {'calibrator': None}"),
        (["--quantile", "0.99", "--cutoff", "0"], "{'quantile': 0.99, 'cutoff': 0.0} {'calibrator': None}"),
    ],
)
def test_parameters_come_under_the_calibrators_names(arguments: list[str], expected: str) -> None:
    assert CliRunner().invoke(show, arguments).stdout.strip() == expected


@pytest.mark.parametrize("command", [build, consistency])
def test_the_commands_have_them_all(command: click.Command) -> None:
    names = {option for parameter in command.params for option in parameter.opts}
    assert {"--calibrator", "--percentile", "--ema-alpha", "--ema-decay", "--quantile", "--cutoff"} <= names
