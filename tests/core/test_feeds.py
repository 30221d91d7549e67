"""Recorded inputs in the types that a graph takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from pipeline.core.errors import InputError
from pipeline.core.feeds import as_taken, session_dtypes
from pipeline.core.ort import make_session
from tests.placement.tiny import Tiny


def test_float32_becomes_float16_where_that_is_taken() -> None:
    feeds = {
        "half": np.array([1.0, -65504.0, np.inf, np.nan], np.float32),
        "full": np.ones(2, np.float32),
        "ids": np.ones(2, np.int64),
        "half already": np.ones(2, np.float16),
        "unknown": np.ones(2, np.float32),
    }
    types = {"half": "float16", "full": "float32", "ids": "float16", "half already": "float16"}
    found = as_taken(feeds, types)
    assert {name: values.dtype.name for name, values in found.items()} == {
        "half": "float16",
        "full": "float32",
        "ids": "int64",
        "half already": "float16",
        "unknown": "float32",
    }
    assert np.array_equal(found["half"], feeds["half"].astype(np.float16), equal_nan=True)
    assert all(found[name] is feeds[name] for name in ("full", "ids", "half already", "unknown"))


def test_a_value_beyond_float16_is_refused() -> None:
    with pytest.raises(InputError, match=r"input 'x' has the value -70000, .* float16, which ends at 65504") as raised:
        as_taken({"x": np.array([[1.0, -7e4, 6.6e4]], np.float32)}, {"x": "float16"})
    assert "--fp16-io" in str(raised.value.remedy)


def test_types_of_a_session(tmp_path: Path) -> None:
    net = Tiny()
    half = net.input("half", 2, dtype=TensorProto.FLOAT16)
    wide = net.op("Cast", [half], "wide", to=TensorProto.FLOAT)
    ids = net.op("Cast", [net.input("ids", 2, dtype=TensorProto.INT64)], "floats", to=TensorProto.FLOAT)
    net.op("Sum", [wide, ids, net.input("full", 2)], "y")
    assert session_dtypes(make_session(net.save(tmp_path, "y"))) == {"half": "float16", "full": "float32"}
