"""Does an array fit a model input? Shapes, dtypes, finite values; the casts that lose nothing a user would miss.

Casts: float to float of any width (noted, and refused where a finite value becomes infinite); integer to integer where
every value fits. Integers for a float input are refused: they are mostly raw pixels which nobody has normalised, and
calibrating on them gives a wrong model without any other sign. Floats for an integer input are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.records import TensorSpec

__all__ = ["InputCheck", "check_names", "numpy_dtype"]

Array = np.ndarray[Any, np.dtype[Any]]


def numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    """The numpy type of a model input.

    Raises:
        InputError: numpy has no such type (bfloat16, float8, strings): such an input cannot be fed.
    """
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiub":
        raise InputError(
            f"input {spec.name!r} has the type {spec.dtype}, for which no calibration data can be read",
            remedy="export the model with a float32, float16, integer or bool input",
        )
    return dtype


def check_names(found: Iterable[str], inputs: Sequence[TensorSpec], *, where: str) -> None:
    """Raises InputError when ``found`` are not exactly the names of the model's inputs."""
    found, expected = list(found), [spec.name for spec in inputs]
    for name in found:
        if name not in expected:
            raise InputError(
                f"{where} has data for {name!r}, which is no input of the model; {did_you_mean(name, expected)}",
                remedy="name each array after the model input it is for",
            )
    if missing := [name for name in expected if name not in found]:
        raise InputError(
            f"{where} has no data for the input {missing[0]!r}; the model has {', '.join(expected)}, "
            f"the data {', '.join(found) or 'nothing'}",
            remedy="give one array per model input, named after it",
        )


class InputCheck:
    """What one model input accepts, and the conversion to it."""

    def __init__(self, spec: TensorSpec) -> None:
        self.name = spec.name
        self.shape = None if spec.shape is None else tuple(spec.shape[1:])
        """One sample's shape: ints, names for dynamic dimensions; None when the rank is unknown."""
        self.dtype = numpy_dtype(spec)

    @property
    def rank(self) -> int | None:
        """Rank of one sample, without the batch axis."""
        return None if self.shape is None else len(self.shape)

    def expected(self) -> str:
        """``(3, 224, 224) float32``."""
        if self.shape is None:
            return f"any shape of {self.dtype}"
        return f"({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''}) {self.dtype}"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the model takes a sample of ``shape``, as far as it says."""
        return self.shape is None or (
            len(shape) == len(self.shape)
            and all(
                dim > 0 and (not isinstance(expected, int) or dim == expected)
                for dim, expected in zip(shape, self.shape, strict=True)
            )
        )

    def other_layout(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """The axes that bring a sample's channels from last to first, or the reverse, where only that fits."""
        if self.fits(shape) or len(shape) != 3:
            return None
        for axes in ((2, 0, 1), (1, 2, 0)):
            if self.fits(tuple(shape[axis] for axis in axes)):
                return axes
        return None

    def check_shape(self, shape: tuple[int, ...], *, where: str, remedy: str) -> None:
        """Raises InputError when a sample of ``shape`` does not fit."""
        if not self.fits(shape):
            raise InputError(
                f"{where}: a sample of {self.name!r} has the shape {shape}, the model expects {self.expected()}",
                remedy=remedy,
            )

    def check_dtype(self, dtype: np.dtype[Any], *, where: str) -> str | None:
        """A note when data of ``dtype`` needs a cast, None when not.

        Raises:
            InputError: data of this type must not be cast.
        """
        if dtype == self.dtype:
            return None
        if dtype.hasobject:
            raise InputError(
                f"{where}: the data for {self.name!r} are Python objects, which are never unpickled",
                remedy=f"save a plain array: np.save(..., np.stack(samples).astype({self.dtype.name!r}))",
            )
        if dtype.kind == self.dtype.kind == "f":
            return f"{where}: {dtype} data are cast to {self.dtype} for the input {self.name!r}"
        if dtype.kind in "iu" and self.dtype.kind in "iu":
            return None
        remedy = f"convert the data: array.astype({self.dtype.name!r})"
        if dtype.kind in "iu" and self.dtype.kind == "f":
            remedy = (
                "if these are raw pixels, normalise them as the model was trained; "
                f"if the model takes them as they are, array.astype({self.dtype.name!r})"
            )
        raise InputError(
            f"{where}: the data for {self.name!r} are {dtype}, the model expects {self.dtype}", remedy=remedy
        )

    def convert(self, sample: Array, *, where: str) -> Array:
        """``sample`` in the input's dtype, contiguous.

        Raises:
            InputError: NaN or infinity, or a value that the input's dtype cannot hold.
        """
        if sample.dtype.kind == "f" and not np.isfinite(sample).all():
            position = tuple(int(i) for i in np.argwhere(~np.isfinite(sample))[0])
            raise InputError(
                f"{where}: the data for {self.name!r} have {float(sample[position])} at {position} "
                f"({int((~np.isfinite(sample)).sum())} of {sample.size} values are not finite)",
                remedy="remove or repair this sample: its statistics would be meaningless",
            )
        if sample.dtype == self.dtype:
            return np.asarray(sample, order="C")  # np.ascontiguousarray makes a vector of a scalar
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = int(sample.min()), int(sample.max())
            if low < limits.min or high > limits.max:
                value = low if low < limits.min else high
                raise InputError(
                    f"{where}: the data for {self.name!r} have the value {value}, which {self.dtype} cannot hold"
                )
            return np.asarray(sample, dtype=self.dtype, order="C")
        with np.errstate(over="ignore"):
            cast = np.asarray(sample, dtype=self.dtype, order="C")
        if not np.isfinite(cast).all():
            too_large = float(sample[~np.isfinite(cast)][0])
            raise InputError(
                f"{where}: the data for {self.name!r} have the value {too_large}, which {self.dtype} cannot hold"
            )
        return cast
