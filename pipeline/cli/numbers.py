"""Numbers on the command line, one way for every command: finite, in a range, of a length that a number may have."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["POSITIVE", "FiniteFloat", "list_of_floats", "list_of_whole", "whole_number"]

_DIGITS = re.compile(r"[0-9]{1,18}")
"""Python's ``isdigit`` takes superscripts, which ``int`` does not, and ``int`` refuses thousands of digits."""


class FiniteFloat(click.FloatRange):
    """A float option: neither NaN, which no range keeps out, nor an infinity.

    Every option that is a float has this type; a test looks at all of them.
    """

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return super().convert(number, param, ctx)

    def _describe_range(self) -> str:
        """For ``--help``, where click writes ``x<=None`` of a range without limits."""
        return "" if self.min is None and self.max is None else super()._describe_range()


POSITIVE: Final = FiniteFloat(min=0, min_open=True)


def whole_number(text: str) -> int | None:
    """The number in ``text``, of ASCII digits alone; None where it is something else or beyond any use."""
    return int(text) if _DIGITS.fullmatch(text.strip()) else None


def list_of_whole(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """A click callback: ``1,8,64`` as numbers from 1 on."""
    if value is None:
        return None
    numbers = [whole_number(part) for part in value.split(",") if part.strip()]
    found = tuple(number for number in numbers if number)
    if not found or len(found) != len(numbers):
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,8,64", context, parameter)
    return found


def list_of_floats(least: float) -> Callable[[click.Context, click.Parameter, str | None], tuple[float, ...] | None]:
    """A click callback: ``0,0.05,0.1`` as finite numbers, none of them below ``least``."""
    kind = FiniteFloat(min=least)

    def convert(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
        if value is None:
            return None
        return tuple(kind.convert(part.strip(), parameter, context) for part in value.split(",") if part.strip())

    return convert
