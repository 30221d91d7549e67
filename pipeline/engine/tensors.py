"""An engine's inputs, outputs and profiles, and the check of arrays against them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import Profile, ShapeRange
from pipeline.core.errors import InputError
from pipeline.records import TensorSpec

if TYPE_CHECKING:
    from pipeline.engine.compat import Api

__all__ = ["EngineIO", "checked", "numpy_dtype"]


class EngineIO:
    """Names, types and shapes of an engine's tensors."""

    def __init__(self, engine: Any, api: Api) -> None:
        trt = api.trt
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.on_host = frozenset(name for name in names if engine.get_tensor_location(name) == trt.TensorLocation.HOST)
        """Tensors that TensorRT wants in host memory: shapes computed or used inside the graph."""
        self.dtypes = {name: numpy_dtype(trt, engine.get_tensor_dtype(name), name) for name in names}
        specs = {name: self._spec(engine, name) for name in names}
        self.inputs = tuple(specs[name] for name in inputs)
        self.outputs = tuple(specs[name] for name in names if name not in inputs)
        self.profiles = tuple(
            Profile(inputs={name: _shape_range(engine, name, number) for name in inputs})
            for number in range(engine.num_optimization_profiles)
        )

    def _spec(self, engine: Any, name: str) -> TensorSpec:
        shape = tuple("?" if dim < 0 else int(dim) for dim in engine.get_tensor_shape(name))
        return TensorSpec(name=name, dtype=self.dtypes[name].name, shape=shape)


def _shape_range(engine: Any, name: str, number: int) -> ShapeRange:
    static = tuple(int(dim) for dim in engine.get_tensor_shape(name))
    if all(dim >= 0 for dim in static):
        return ShapeRange(min=static, opt=static, max=static)
    low, best, high = (tuple(int(dim) for dim in shape) for shape in engine.get_tensor_profile_shape(name, number))
    return ShapeRange(min=low, opt=best, max=high)


def numpy_dtype(trt: Any, dtype: Any, name: str) -> np.dtype:
    """numpy's type for a TensorRT ``DataType``.

    Raises:
        InputError: numpy has none (bfloat16, float8, int4, ...).
    """
    try:
        found: np.dtype = np.dtype(trt.nptype(dtype))
    except TypeError as error:
        raise InputError(
            f"tensor {name!r} has type {dtype}, which numpy lacks", remedy="end the graph with a Cast to float32"
        ) from error
    return found


def checked(spec: TensorSpec, values: np.ndarray) -> np.ndarray:
    """``values`` in the type of ``spec``.

    int64 becomes int32 where the values fit: TensorRT <= 9 turns ONNX's int64 inputs into int32.

    Raises:
        InputError: no numpy array, another dtype, another rank or static dimension.
    """
    if not isinstance(values, np.ndarray):
        raise InputError(f"input {spec.name!r} must be a numpy array, got {type(values).__name__}")
    if values.dtype.name != spec.dtype:
        limits = np.iinfo(np.int32)
        narrow = values.dtype == np.int64 and spec.dtype == "int32"
        if not (narrow and (not values.size or (values.min() >= limits.min and values.max() <= limits.max))):
            raise InputError(
                f"input {spec.name!r} has dtype {values.dtype.name}, the engine wants {spec.dtype}",
                remedy=f"convert it: values.astype(np.{spec.dtype})",
            )
        values = values.astype(np.int32)
    shape = spec.shape or ()
    if len(values.shape) != len(shape) or any(
        isinstance(wanted, int) and dim != wanted for wanted, dim in zip(shape, values.shape, strict=True)
    ):
        raise InputError(f"input {spec.name!r} has shape {values.shape}, the engine wants {shape} ('?' is dynamic)")
    return values
