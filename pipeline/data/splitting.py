"""Which samples calibrate and which are held aside to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.data.batching import static_batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.data.source import DataSource, Sample
    from pipeline.records import TensorSpec

__all__ = ["DEFAULT_CALIBRATION", "DEFAULT_VERIFICATION", "Split", "select", "split", "split_source"]

DEFAULT_CALIBRATION = 128
DEFAULT_VERIFICATION = 64


@dataclass(frozen=True)
class Split:
    """Sample numbers of the two parts; disjoint when :attr:`held_aside`."""

    calibration: frozenset[int]
    verification: frozenset[int]
    held_aside: bool
    """False: nothing was left over, so verification looks at samples that calibration has seen."""
    notes: tuple[str, ...]


def _spread(candidates: Sequence[int], count: int) -> list[int]:
    """``count`` of the candidates, evenly spaced: candidate ``i * len // count`` for i = 0..count-1."""
    return [candidates[i * len(candidates) // count] for i in range(count)]


def split(length: int | None, samples: int | None, verify: int | None, labelled: bool, *, multiple: int = 1) -> Split:
    """Choose calibration and verification samples.

    Of a known ``length``, both parts are evenly spaced over the set (a folder sorted by class gives every class). Of an
    unknown length, calibration takes the first samples and verification those that follow.

    Args:
        samples: how many calibrate; None: 128, or three quarters of the set where it has fewer than 171.
        verify: how many verify; None: 64, or all that are left when ``labelled`` and the length is known.
        multiple: the model's static batch; both parts are multiples of it.

    Raises:
        InputError: there is no sample, fewer than one static batch, or an explicit number is no multiple of the
            static batch.
    """
    notes: list[str] = []
    for value, option in ((samples, "samples"), (verify, "verify_samples")):
        if value is not None and value % multiple:
            raise InputError(
                f"{option} is {value}, and the model has a static batch of {multiple}",
                remedy=f"give a multiple of {multiple}, such as {max(1, value // multiple) * multiple}",
            )
    if length is None:
        first = samples or _rounded(DEFAULT_CALIBRATION, multiple)
        second = verify or _rounded(DEFAULT_VERIFICATION, multiple)
        return Split(frozenset(range(first)), frozenset(range(first, first + second)), True, ())
    if length == 0:
        raise InputError("the data has no samples")
    if length < multiple:
        raise InputError(
            f"the data has {length} samples, and the model has a static batch of {multiple}",
            remedy=f"give at least {multiple} samples, or export the model with a dynamic batch",
        )

    if samples is None:
        wish = min(DEFAULT_CALIBRATION, max(1, length * 3 // 4))
        count = min(_rounded(wish, multiple), length // multiple * multiple)
    else:
        count = min(samples, length // multiple * multiple)
        if count < samples:
            notes.append(f"{samples} samples to calibrate on were asked for, the data has {length}: {count} are used")
    calibration = _spread(range(length), count)
    chosen = frozenset(calibration)
    left = [number for number in range(length) if number not in chosen]

    wish = verify or (len(left) if labelled else _rounded(DEFAULT_VERIFICATION, multiple))
    most = len(left) // multiple * multiple
    if most:
        found = min(wish, most) // multiple * multiple
        if verify is not None and found < verify:
            notes.append(
                f"{verify} samples to verify on were asked for, {len(left)} are left after calibration: "
                f"{found} are used"
            )
        elif labelled and verify is None and found < len(left):
            notes.append(f"{len(left) - found} samples are left out: the model's static batch is {multiple}")
        return Split(chosen, frozenset(_spread(left, found)), True, tuple(notes))
    found = min(verify or _rounded(DEFAULT_VERIFICATION, multiple), count)
    notes.append(
        f"no sample is left to hold aside (the data has {length}, {count} calibrate): verification looks at {found} "
        "of the calibration samples and cannot show overfitting to them"
    )
    return Split(chosen, frozenset(_spread(calibration, found)), False, tuple(notes))


def _rounded(count: int, multiple: int) -> int:
    return max(1, count // multiple) * multiple


def split_source(
    source: DataSource, inputs: Sequence[TensorSpec], *, samples: int | None, verify: int | None, labelled: bool
) -> Split:
    """:func:`split` of ``source``, for the model's static batch.

    A source of unknown length is first counted, at most as far as the two parts reach (to its end when ``labelled``);
    nothing is decoded or kept for that, but a user's callable runs once more.
    """
    multiple = static_batch(inputs) or 1
    if source.length is not None:
        return split(source.length, samples, verify, labelled, multiple=multiple)
    wish = split(None, samples, verify, labelled, multiple=multiple)
    reach = None if labelled and verify is None else len(wish.calibration) + len(wish.verification)
    counted = source.count(reach)
    if reach is not None and counted >= reach:
        return wish
    return split(counted, samples, verify, labelled, multiple=multiple)


def select(source: DataSource, numbers: frozenset[int]) -> Iterator[tuple[int, Sample]]:
    """The samples with these numbers, in order; stops reading after the last (a user's generator may be endless).

    Raises:
        InputError: the source ended before the last number, or a sample cannot be used.
    """
    if not numbers:
        return
    last, seen = max(numbers), -1
    for seen, sample in source.read(numbers.__contains__):
        yield seen, sample
        if seen == last:
            return
    raise InputError(
        f"{source.describe()}: the data ended after sample {seen}, and sample {last} is needed",
        remedy="every pass must give the same data: give fewer --samples, or let the callable yield the same again",
    )
