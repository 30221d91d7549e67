"""`QuantContext`: every quantisation parameter of one model as an immutable value with a digest.

Scales are float32, as every consumer (ONNX, TensorRT, its calibration cache) stores them; two contexts are the same
exactly when every float32 has the same bits. The digest is taken over a canonical text of sorted tensors with scales as
the hexadecimal bits of the float32, so neither the order in which they were found nor the machine has any influence.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.core.errors import InputError
from pipeline.core.files import sha256_json
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Evidence", "QuantContext", "TensorContext", "TensorKind", "float32", "float32_hex"]

TensorKind = Literal["activation", "weight"]


def float32(value: float) -> float:
    """``value`` rounded to the nearest float32 (ties to even); infinity where it is too large."""
    try:
        return float(struct.unpack(">f", struct.pack(">f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def float32_hex(value: float) -> str:
    """The eight hexadecimal digits of a float32, big-endian, as TensorRT's calibration cache writes them."""
    return struct.pack(">f", value).hex()


class Evidence(Record):
    """What a calibration saw of one tensor. Not a quantisation parameter; it tells where a difference comes from."""

    samples: int | None = None
    minimum: float | None = None
    maximum: float | None = None


class TensorContext(Record):
    """How one tensor is quantised: q = clip(round(x / scale) + zero point)."""

    name: str
    kind: TensorKind = "activation"
    scales: tuple[float, ...]
    """float32 values: one for the tensor, or one for each slice along :attr:`axis`."""
    zero_points: tuple[int, ...] = (0,)
    """One where all slices have the same."""
    dtype: str = "int8"
    axis: int | None = None
    calibrator: str | None = None
    """What chose the range; None where the source does not say."""
    evidence: Evidence | None = None

    @field_validator("scales")
    @classmethod
    def _as_float32(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value:
            raise ValueError("a tensor needs at least one scale")
        return tuple(float32(scale) for scale in value)

    @field_validator("zero_points")
    @classmethod
    def _collapsed(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return value[:1] if len(set(value)) == 1 else value

    @model_validator(mode="after")
    def _fitting(self) -> TensorContext:
        if self.axis is None and len(self.scales) != 1:
            raise ValueError(f"tensor {self.name!r} has {len(self.scales)} scales and no axis")
        if len(self.zero_points) not in (1, len(self.scales)):
            counts = f"{len(self.scales)} scales and {len(self.zero_points)} zero points"
            raise ValueError(f"tensor {self.name!r} has {counts}")
        return self

    def canonical(self) -> list[object]:
        return [
            self.kind,
            self.name,
            self.dtype,
            self.axis,
            list(self.zero_points),
            "".join(float32_hex(scale) for scale in self.scales),
            self.calibrator,
        ]


class QuantContext(Record):
    """The quantisation of one model, as one source tells it."""

    label: str
    """Who says so, for people: a file or a rank. Not part of the digest."""
    tensors: tuple[TensorContext, ...]
    """Sorted by kind and name, each once."""
    calibrator: str | None = None
    params: tuple[tuple[str, float], ...] = ()
    """The calibrator's parameters, sorted by name."""
    complete: tuple[TensorKind, ...] = ()
    """The kinds of which the source lists every tensor: only there is an absent tensor a difference. A calibration
    cache has no weights, and an engine shows only some tensors."""
    model: str | None = None
    """SHA-256 of the model that was quantised, where known. Not part of the digest."""
    data: str | None = None
    """SHA-256 of the calibration data, where known. Not part of the digest."""
    tools: dict[str, str] = Field(default_factory=dict, repr=False)
    """Package versions, where known. Not part of the digest."""

    @field_validator("tensors")
    @classmethod
    def _sorted(cls, value: tuple[TensorContext, ...]) -> tuple[TensorContext, ...]:
        ordered = tuple(sorted(value, key=lambda tensor: (tensor.kind, tensor.name)))
        for first, second in itertools.pairwise(ordered):
            if (first.kind, first.name) == (second.kind, second.name):
                raise ValueError(f"{first.kind} {first.name!r} is listed twice")
        return ordered

    @field_validator("complete")
    @classmethod
    def _complete_sorted(cls, value: tuple[TensorKind, ...]) -> tuple[TensorKind, ...]:
        return tuple(sorted(set(value)))

    @field_validator("params")
    @classmethod
    def _params_sorted(cls, value: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
        return tuple(sorted(value))

    @classmethod
    def of_amax(
        cls,
        amax: Mapping[str, float],
        *,
        label: str,
        calibrator: str | None = None,
        params: Mapping[str, float] | None = None,
        model: str | None = None,
        data: str | None = None,
        evidence: Mapping[str, Evidence] | None = None,
    ) -> QuantContext:
        """Symmetric INT8 activations from each tensor's range: scale = amax / 127, divided in float32.

        Raises:
            InputError: a range is not a positive finite number.
        """
        from calibrators.ranges import scale_of

        for name, value in amax.items():
            if not 0.0 < value < float("inf"):
                raise InputError(f"{label}: the range of tensor {name!r} is {value}, not a positive finite number")
        return cls(
            label=label,
            tensors=tuple(
                TensorContext(
                    name=name,
                    scales=(float(scale_of(value)),),
                    calibrator=calibrator,
                    evidence=(evidence or {}).get(name),
                )
                for name, value in amax.items()
            ),
            calibrator=calibrator,
            params=tuple((params or {}).items()),
            complete=("activation",),
            model=model,
            data=data,
        )

    @property
    def digest(self) -> str:
        """SHA-256 over every tensor's parameters, the calibrator and its parameters."""
        return sha256_json(
            {
                "tensors": [tensor.canonical() for tensor in self.tensors],
                "calibrator": self.calibrator,
                "params": [[key, float(value).hex()] for key, value in self.params],
            }
        )

    @property
    def scales_digest(self) -> str:
        """:attr:`digest` without the calibrator: equal for an artifact and the Q/DQ graph made from it."""
        return sha256_json([tensor.canonical()[:-1] for tensor in self.tensors])

    def by_key(self) -> dict[tuple[TensorKind, str], TensorContext]:
        return {(tensor.kind, tensor.name): tensor for tensor in self.tensors}

    def only(self, kinds: Iterable[TensorKind]) -> QuantContext:
        """The same context with the tensors of ``kinds`` alone."""
        wanted = frozenset(kinds)
        return self.model_copy(
            update={
                "tensors": tuple(tensor for tensor in self.tensors if tensor.kind in wanted),
                "complete": tuple(kind for kind in self.complete if kind in wanted),
            }
        )
