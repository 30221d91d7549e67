"""Which outputs hold class scores, by what computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from pipeline.errors.graphs import Graph
from pipeline.errors.outputs import OutputErrors
from pipeline.errors.scores import judged_output, score_kinds, scores_of
from tests.compare.networks import graph

N = helper.make_node
CONSTANTS = {
    "w": np.ones((8, 5), np.float32),
    "b": np.ones(5, np.float32),
    "k": np.ones((5, 3, 1, 1), np.float32),
    "two": np.float32(2),
    "flat": np.array([0, -1], np.int64),
}


def made(nodes: list[Any], shape: list[Any], inputs: list[Any], output: str = "y") -> Graph:
    used = {name for node in nodes for name in node.input}
    constants = {name: value for name, value in CONSTANTS.items() if name in used}
    return Graph(graph(nodes, {"x": inputs}, {output: shape}, constants))


ROWS = ["N", 8]
STEPS = ["N", 6, 8]
MAP = ["N", 3, 4, 4]
POOLED = N("GlobalAveragePool", ["x"], ["p"])


@pytest.mark.parametrize(
    ("nodes", "inputs", "shape", "kind"),
    [
        ([N("Gemm", ["x", "w", "b"], ["y"])], ROWS, ["N", 5], "rows"),
        ([N("MatMul", ["x", "w"], ["m"]), N("Add", ["m", "b"], ["a"]), N("Div", ["a", "two"], ["y"])],
         STEPS, ["N", 6, 5], "rows"),
        ([N("Gemm", ["x", "w"], ["m"]), N("Reshape", ["m", "flat"], ["y"])], ROWS, ["N", "C"], "row"),
        ([N("Softmax", ["x"], ["y"], axis=-1)], STEPS, STEPS, "rows"),
        ([N("LogSoftmax", ["x"], ["y"], axis=2)], STEPS, STEPS, "rows"),
        ([N("Softmax", ["x"], ["y"], axis=1)], STEPS, STEPS, "row"),
        ([N("Softmax", ["x"], ["y"], axis=-2)], STEPS, STEPS, "none"),
        ([N("Softmax", ["x"], ["s"]), N("Transpose", ["s"], ["y"], perm=[0, 2, 1])], STEPS, ["N", 8, 6], "row"),
        ([N("Conv", ["x", "k"], ["y"])], MAP, ["N", 5, 4, 4], "row"),
        ([N("Conv", ["x", "k"], ["c"]), N("Flatten", ["c"], ["y"])], MAP, ["N", 80], "none"),
        ([POOLED, N("Conv", ["p", "k"], ["c"]), N("Flatten", ["c"], ["y"])], MAP, ["N", 5], "row"),
        ([N("Conv", ["x", "k"], ["c"]), N("GlobalAveragePool", ["c"], ["y"])], MAP, ["N", 5, 1, 1], "row"),
        ([N("Conv", ["x", "k"], ["c"]), N("Relu", ["c"], ["r"]), N("GlobalAveragePool", ["r"], ["y"])],
         MAP, ["N", 5, 1, 1], "none"),
        ([N("ReduceL2", ["x"], ["n"], axes=[1]), N("Div", ["x", "n"], ["y"])], ROWS, ROWS, "none"),
        ([N("Gemm", ["x", "w"], ["m"]), N("Sigmoid", ["m"], ["y"])], ROWS, ["N", 5], "none"),
        ([N("Gemm", ["x", "w"], ["m"]), N("Tanh", ["m"], ["y"])], ROWS, ["N", 5], "none"),
        ([N("Gemm", ["x", "w"], ["a"]), N("Concat", ["a", "a"], ["y"], axis=1)], ROWS, ["N", 10], "none"),
        ([N("MatMul", ["x", "x"], ["y"])], ["N", 8, 8], ["N", 8, 8], "none"),
        ([N("Identity", ["x"], ["y"])], ROWS, ROWS, "none"),
    ],
)  # fmt: skip
def test_an_output_by_what_computes_it(nodes: list[Any], inputs: list[Any], shape: list[Any], kind: str) -> None:
    assert score_kinds(made(nodes, shape, inputs)) == {"y": kind}


@pytest.mark.parametrize("name", ["pred_boxes", "image_embeds", "last_hidden_state", "Landmarks"])
def test_an_output_whose_name_says_that_it_is_something_else(name: str) -> None:
    assert score_kinds(made([N("Gemm", ["x", "w"], [name])], ["N", 5], ROWS, name)) == {name: "none"}
    assert score_kinds(made([N("Softmax", ["x"], [name])], ROWS, ROWS, name)) == {name: "rows"}


def test_labels_say_that_there_are_classes() -> None:
    features = made([POOLED, N("Flatten", ["p"], ["y"])], ["N", 3], MAP)
    assert score_kinds(features) == {"y": "none"}
    assert score_kinds(features, labelled=True) == {"y": "row"}
    scores = made([N("Softmax", ["x"], ["y"])], STEPS, STEPS)
    assert score_kinds(scores, labelled=True) == {"y": "rows"}


def test_labels_are_about_scores_that_the_graph_knows_before_those_of_the_right_shape() -> None:
    arrays = {"embedding": np.ones((2, 8), np.float32), "logits": np.ones((2, 5), np.float32)}
    assert judged_output({"embedding": "none", "logits": "rows"}, arrays, 2) == "logits"
    assert judged_output({"embedding": "none", "logits": "none"}, arrays, 2) == "embedding"
    assert judged_output({"maps": "none"}, {"maps": np.ones((2, 8, 4, 4), np.float32)}, 2) is None


def test_one_row_is_not_several() -> None:
    steps = np.ones((2, 6, 5), np.float32)
    assert scores_of("row", steps, 2) is None
    assert scores_of("none", steps[:, 0], 2) is None
    found = scores_of("rows", steps, 2)
    assert found is not None
    assert found.shape == (2, 6, 5)


@pytest.mark.parametrize(("kind", "agreement"), [("rows", 0.5), ("none", None)])
def test_agreement_is_of_class_scores_alone(kind: Any, agreement: float | None) -> None:
    errors = OutputErrors("y", scores=kind)
    errors.add((0, 1), np.eye(2, dtype=np.float32), np.array([[1, 0], [1, 0]], np.float32))
    assert errors.figures().agreement == agreement
