from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.consistency.context import QuantContext, TensorContext, float32, float32_hex
from pipeline.core.errors import InputError
from tests.consistency.contexts import AMAX, context


@given(st.floats(allow_nan=False))
def test_float32_is_numpys_rounding(value: float) -> None:
    with np.errstate(over="ignore"):
        assert float32(value) == float(np.float32(value))


def test_hex_is_that_of_a_calibration_cache() -> None:
    assert float32_hex(1.0) == "3f800000"
    assert float32_hex(6.0 / 127.0) == "3d418306"


def test_scale_is_divided_in_float32() -> None:
    value = 113.25
    (tensor,) = context("a", {"x": value}).tensors
    assert tensor.scales == (float(np.float32(value) / np.float32(127)),)


@given(st.permutations(list(AMAX)))
def test_digest_does_not_depend_on_order_label_or_provenance(order: list[str]) -> None:
    shuffled = context("other", {name: AMAX[name] for name in order}, model="b" * 64, data="c" * 64)
    assert shuffled.digest == context("a").digest
    assert [tensor.name for tensor in shuffled.tensors] == sorted(AMAX)


def test_digest_is_the_same_on_every_machine() -> None:
    """The value itself, so that a change of the canonical form is noticed."""
    expected = "6599f313d6dfe1c0389a4243ed694103e7c2acbb1f2c939c305b83e04e8adf4b"
    assert context("a", {"x": 1.0}, calibrator="minmax").digest == expected


@pytest.mark.parametrize(
    "change",
    [
        {"scales": (np.nextafter(np.float32(0.5), np.float32(1)).item(),)},
        {"zero_points": (1,)},
        {"dtype": "uint8"},
        {"axis": 0},
        {"calibrator": "ema"},
        {"name": "y"},
        {"kind": "weight"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_digest_covers_every_parameter(change: dict[str, object]) -> None:
    base = TensorContext(name="x", scales=(0.5,))
    other = TensorContext.model_validate({**base.model_dump(), **change})
    digests = {QuantContext(label="a", tensors=(tensor,)).digest for tensor in (base, other)}
    assert len(digests) == 2


def test_digest_covers_the_calibrators_parameters_and_scales_digest_does_not() -> None:
    first = context("a", calibrator="ema", params={"alpha": 0.9})
    second = context("a", calibrator="ema", params={"alpha": 0.95})
    assert first.digest != second.digest
    assert first.scales_digest == second.scales_digest


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        context("a").label = "b"


def test_equal_zero_points_collapse() -> None:
    tensor = TensorContext(name="w", kind="weight", scales=(0.5, 0.25), zero_points=(0, 0), axis=0)
    assert tensor.zero_points == (0,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scales": ()}, "at least one scale"),
        ({"scales": (1.0, 2.0)}, "2 scales and no axis"),
        ({"scales": (1.0, 2.0, 3.0), "axis": 0, "zero_points": (0, 1)}, "3 scales and 2 zero points"),
    ],
)
def test_impossible_tensors(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TensorContext.model_validate({"name": "x", **fields})


def test_a_tensor_listed_twice() -> None:
    tensor = TensorContext(name="x", scales=(1.0,))
    with pytest.raises(ValidationError, match="activation 'x' is listed twice"):
        QuantContext(label="a", tensors=(tensor, tensor))


@pytest.mark.parametrize("amax", [0.0, -1.0, float("nan"), float("inf")])
def test_a_range_that_is_none(amax: float) -> None:
    with pytest.raises(InputError, match=r"rank 3: the range of tensor .x. is .*, not a positive finite number"):
        context("rank 3", {"x": amax})


def test_only_one_kind() -> None:
    both = QuantContext(
        label="a",
        tensors=(TensorContext(name="x", scales=(1.0,)), TensorContext(name="w", kind="weight", scales=(1.0,))),
        complete=("weight", "activation"),
    )
    assert [tensor.name for tensor in both.only(["weight"]).tensors] == ["w"]
    assert both.only(["weight"]).complete == ("weight",)
