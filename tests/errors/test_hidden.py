"""Why layers of a Q/DQ graph have no INT8 tensor of their own."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.core.operators import ACTIVATIONS
from pipeline.errors.graphs import Graph
from pipeline.errors.hidden import why_hidden


def _graph(*nodes):
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4, 8, 8]) for name in ("x", "other", "y")]
    constants = [numpy_helper.from_array(np.float32(2), "two"), numpy_helper.from_array(np.float32(6), "six")]
    made = [helper.make_node(op, inputs, outputs, f"n{i}") for i, (op, inputs, outputs) in enumerate(nodes)]
    return Graph(helper.make_model(helper.make_graph(made, "g", info[:2], info[2:], constants)))


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([("Add", ["x", "other"], ["y"])], "Add joins it with another tensor before anything is quantised"),
        ([("Relu", ["x"], ["r"]), ("MaxPool", ["r"], ["y"])], "MaxPool reads it before anything is quantised"),
        ([("Clip", ["x", "two", "six"], ["c"]), ("Mul", ["c", "other"], ["y"])], "Mul joins it with another tensor"),
        (
            [("GlobalAveragePool", ["x"], ["p"]), ("Mul", ["p", "x"], ["y"])],
            "GlobalAveragePool and Mul read it in float",
        ),
        (
            [("GlobalAveragePool", ["x"], ["p"]), ("Mul", ["p", "x"], ["m"]), ("Add", ["m", "x"], ["y"])],
            "Add, GlobalAveragePool and Mul read it in float",
        ),
        ([("MaxPool", ["x"], ["p"]), ("MaxPool", ["x"], ["y"])], "several MaxPool read it in float"),
        ([("Mul", ["x", "two"], ["y"])], "Mul reads it before anything is quantised"),
        ([("Relu", ["other"], ["y"])], "nothing reads it"),
    ],
)
def test_reasons(nodes, reason):
    assert why_hidden(_graph(*nodes), "x").startswith(reason)


@pytest.mark.parametrize("operator", sorted({*ACTIVATIONS, "Cast"}))
def test_the_reason_is_what_reads_the_activation(operator):
    slopes = ["two"] if operator == "PRelu" else []
    nodes = [(operator, ["x", *slopes], ["a"]), ("MaxPool", ["a"], ["y"])]
    assert why_hidden(_graph(*nodes), "x") == "MaxPool reads it before anything is quantised"
