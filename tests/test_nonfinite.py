"""A NaN in an activation is said in the same words, with its origin, wherever a pass meets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from pipeline import calibrate
from pipeline.activations import NonFinite
from pipeline.consistency.measure import measure_on_cpu
from pipeline.consistency.work import Work
from pipeline.core.errors import InputError
from pipeline.core.progress import SILENT
from pipeline.nonfinite import NonFiniteBatches
from tests.test_calibrate import TENSORS, Recorded, batches, data, network, poisoned


class Rank:
    def check(self) -> None:
        """Nothing has ended."""


def said_by_one_process(model: Path, x: np.ndarray[Any, Any], folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        calibrate.run(model, TENSORS, batches(x), folder=folder)
    return caught.value.message


def said_by_a_rank(model: Path, x: np.ndarray[Any, Any]) -> str:
    work = Work(model, TENSORS, cast(Any, None), tuple(range(len(x))), ())
    with pytest.raises(InputError) as caught:
        measure_on_cpu(work, iter(batches(x)), cast(Any, Rank()), SILENT)
    return caught.value.message


def broken(model: Path) -> Path:
    """The network with a NaN in its first weight."""
    proto = onnx.load(model)
    weight = proto.graph.initializer[0]
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] = np.nan
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(proto, model.with_name("broken.onnx"))
    return model.with_name("broken.onnx")


def test_a_rank_says_where_it_came_from_as_one_process_does(tmp_path: Path) -> None:
    model = network(tmp_path)
    cases = ((model, poisoned(np.nan, 9), "; the data of the model input 'x' already holds one"),
             (broken(model), data(), " holds 1 NaN"))  # fmt: skip
    for number, (path, x, origin) in enumerate(cases):
        alone = said_by_one_process(path, x, tmp_path / str(number))
        assert alone == said_by_a_rank(path, x)
        assert alone.endswith(origin)


def test_a_batch_whose_data_is_gone_is_not_said_to_be_finite(tmp_path: Path) -> None:
    model, bad, progress = network(tmp_path), NonFinite("x", 1, 0), Recorded()
    judge = NonFiniteBatches(model, "skip", cast(Any, progress))
    judge.leave_out(bad, 2, (8, 9, 11), None)
    assert progress.warnings == [
        "tensor 'x' has 1 NaN and 0 infinite values in batch 2 (samples 8 to 11); no weight of the model holds one; "
        "the batch is skipped"
    ]
