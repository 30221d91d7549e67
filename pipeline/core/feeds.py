"""Recorded inputs for a graph or an engine that takes them in FP16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["as_taken", "session_dtypes"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def as_taken(feeds: Mapping[str, Array], dtypes: Mapping[str, str]) -> dict[str, Array]:
    """``feeds`` with float32 rounded to float16 where ``dtypes`` (numpy's name by input) says so.

    Any other difference of types is left to whoever takes the feeds, to complain about.

    Raises:
        InputError: a finite value is beyond FP16's 65504.
    """
    found = dict(feeds)
    for name, values in feeds.items():
        if dtypes.get(name) != "float16" or values.dtype != np.float32:
            continue
        with np.errstate(over="ignore"):
            found[name] = values.astype(np.float16)
        if np.any(np.isinf(found[name]) & np.isfinite(values)):
            raise InputError(
                f"input {name!r} has the value {values.flat[np.argmax(np.abs(values))]:.6g}, and the model takes it "
                "as float16, which ends at 65504",
                remedy="scale the input down, or keep it float32: leave --fp16-io inputs (both) out",
            )
    return found


def session_dtypes(session: Any) -> dict[str, str]:
    """numpy's name of the floating-point type of each input of an ``onnxruntime.InferenceSession``; others left out."""
    names = {"tensor(float16)": "float16", "tensor(float)": "float32", "tensor(double)": "float64"}
    return {spec.name: names[spec.type] for spec in session.get_inputs() if spec.type in names}
