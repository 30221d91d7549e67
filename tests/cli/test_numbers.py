"""Every number on the command line is finite and in its range."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pipeline.cli import COMMANDS, main
from pipeline.cli.numbers import FiniteFloat, list_of_floats, whole_number
from pipeline.config import CalibratorConfig, validated
from pipeline.core.errors import InputError


def options() -> list[tuple[str, click.Option]]:
    found = []
    for name, (module, _) in COMMANDS.items():
        command = importlib.import_module(module).command
        found += [(name, item) for item in command.params if isinstance(item, click.Option)]
    return found


FLOATS = [(name, item) for name, item in options() if isinstance(item.type, click.types.FloatParamType)]
NEEDED = {"drift": ["a", "--data", "d"], "calibrate": ["m", "--data", "d"], "consistency": ["a", "b"], "build": ["m"]}


def test_every_float_option_has_the_one_type() -> None:
    assert {item.opts[-1] for _, item in FLOATS} >= {"--limit", "--atol", "--rtol", "--rank-timeout", "--percentile"}
    wrong = [(name, item.opts) for name, item in FLOATS if not isinstance(item.type, FiniteFloat)]
    assert wrong == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_no_range_that_has_no_limit(name: str) -> None:
    text = CliRunner().invoke(main, [name, "--help"]).stdout
    assert "Usage: " in text
    assert "None]" not in text


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(("name", "option"), FLOATS, ids=lambda item: getattr(item, "name", item))
def test_no_float_option_takes_a_number_that_is_not_finite(name: str, option: click.Option, text: str) -> None:
    found = CliRunner().invoke(main, [name, *NEEDED[name], f"{option.opts[-1]}={text}"])
    assert found.exit_code == 2
    assert f"Invalid value for '{option.opts[-1]}': {text} is not a finite number" in " ".join(found.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("drift", "a", "--data", "d", "--limit", "0"), "is not in the range x>0"),
        (("consistency", "a", "--atol", "-1"), "is not in the range x>=0"),
        (("consistency", "a", "--rtol", "-1"), "is not in the range x>=0"),
        (("calibrate", "m", "--rank-timeout", "0"), "is not in the range x>0"),
        (("compare", "m", "--shift-sigma", "0,nan"), "nan is not a finite number"),
        (("compare", "m", "--shift-sigma", "0,-1"), "is not in the range x>=0"),
        (("compare", "m", "--shift-sigma", "0,much"), "'much' is not a valid"),
        (("compare", "m", "--calibration-size", "8,²"), "'8,²' is not a list of numbers such as 1,8,64"),
        (("compare", "m", "--calibration-size", "8,0"), "'8,0' is not a list of numbers"),
        (("build", "m", "--workspace", "9000000000G"), "is not a size such as 512M or 4GiB"),
        (("calibrate", "m", "--data", "d", "--shard", "²/3"), "--shard '²/3' is not I/N with I below N"),
        (("calibrate", "m", "--data", "d", "--shard", f"1/{'9' * 5000}"), "is not I/N with I below N"),
    ],
)
def test_ranges_and_lists(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    more = ("-o", str(tmp_path / "c.npz")) if "--shard" in arguments else ()
    found = CliRunner().invoke(main, [*arguments, *more])
    assert found.exit_code == 2, found.exception
    assert said in " ".join(found.stderr.split())


def test_numbers_that_are_taken() -> None:
    convert: Any = list_of_floats(0)
    context = click.Context(click.Command("c"))
    assert convert(context, click.Option(["--x"]), "0, 0.05,") == (0.0, 0.05)
    assert [whole_number(text) for text in (" 12 ", "0", "-1", "1.0", "٣", "9" * 19)] == [12, 0, None, None, None, None]


def test_a_calibrators_parameter_in_a_file_is_finite() -> None:
    with pytest.raises(InputError, match=r"build.yaml: params.percentile: Input should be a finite number"):
        validated(CalibratorConfig, {"params": {"percentile": float("nan")}}, origin="build.yaml")
