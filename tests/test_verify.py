from __future__ import annotations

import csv

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from pipeline import verify
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch
from pipeline.errors.capture import OrtReading
from pipeline.placement.plan import NodeDecision, PlacementPlan
from pipeline.reports.heatmap import error_heatmap
from tests.errors.networks import CLASSES, batches, chain, network

net = network()


@pytest.fixture
def models(tmp_path):
    onnx.save(net.fp32, tmp_path / "fp32.onnx")
    onnx.save(net.int8, tmp_path / "int8.onnx")
    return tmp_path / "fp32.onnx", tmp_path / "int8.onnx"


def _run(models, tmp_path, data=None, **options):
    folder = tmp_path / options.pop("into", "out")
    folder.mkdir()
    return verify.run(
        *models, options.pop("plan", net.plan), data if data is not None else batches(), folder=folder, **options
    )


def _rows(folder):
    with (folder / "errors.csv").open() as stream:
        return list(csv.DictReader(stream))


def _tensor(model, name, feeds):
    session = make_session(model, capture=[name], optimise=False)
    names = [output.name for output in session.get_outputs()]
    return session.run(None, feeds)[names.index(name)]


def test_errors_csv_holds_every_layer_and_sample_in_network_order(models, tmp_path):
    result = _run(models, tmp_path)
    rows = _rows(result.folder)
    order = ["stem", "branch", "sum", "padded", "last", "logits"]
    assert [row["layer"] for row in rows] == [name for name in order for _ in range(6)]
    assert [int(row["sample"]) for row in rows[:6]] == list(range(10, 16))
    assert rows[0]["node"] == "stem_conv"
    assert rows[0]["op"] == "Conv"
    feeds = {"x": np.concatenate([batch.feeds["x"] for batch in batches()])}
    for number, name in enumerate(order):
        a, b = (_tensor(model, name, feeds).reshape(6, -1).astype(np.float64) for model in models)
        expected = np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)
        found = [float(row["relative_l2"]) for row in rows[6 * number : 6 * number + 6]]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_figures(models, tmp_path):
    labels = dict.fromkeys(range(10, 16), 0)
    result = _run(models, tmp_path, labels=labels, held_aside=False, total=6)
    assert (result.samples, result.layers, result.held_aside) == (6, 6, False)
    feeds = {"x": np.concatenate([batch.feeds["x"] for batch in batches()])}
    a, b = (_tensor(model, "logits", feeds) for model in models)
    (output,) = result.outputs
    assert output.name == "logits"
    assert output.agreement == pytest.approx((a.argmax(1) == b.argmax(1)).mean())
    assert output.cosine_min == pytest.approx(
        ((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min()
    )
    assert result.top1_fp32 == pytest.approx((a.argmax(1) == 0).mean())
    assert result.top1_int8 == pytest.approx((b.argmax(1) == 0).mean())
    assert result.top1_drop == pytest.approx(result.top1_fp32 - result.top1_int8)
    means = [layer.relative_l2_mean for layer in result.worst]
    assert means == sorted(means, reverse=True)
    assert result == verify.VerifyResult.model_validate_json(result.model_dump_json()).at(result.folder)


def test_batching_changes_nothing_but_rounding(models, tmp_path, monkeypatch):
    whole = _run(models, tmp_path, into="whole", data=batches(6, 6))
    monkeypatch.setattr(OrtReading, "samples_within", lambda self, limit, batch: 1)
    ragged = _run(models, tmp_path, into="ragged", data=batches(6, 4))
    for one, other in zip(_rows(whole.folder), _rows(ragged.folder), strict=True):
        assert one["sample"] == other["sample"]
        assert float(one["relative_l2"]) == pytest.approx(float(other["relative_l2"]), rel=1e-3)


def test_two_runs_write_the_same_bytes(models, tmp_path):
    first, second = _run(models, tmp_path, into="a"), _run(models, tmp_path, into="b")
    for name in (verify.ERRORS_CSV, verify.ERRORS_PNG, verify.SAMPLES_NPZ):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()
    assert first == second.at(first.folder)


def test_sample_record_can_be_checked_elsewhere(models, tmp_path):
    result = _run(models, tmp_path, data=batches(6, 5))
    with np.load(result.folder / verify.SAMPLES_NPZ) as record:
        assert record["samples"].tolist() == [10, 11, 12, 13]
        feeds = {"x": record["inputs/x"]}
        for kind, model in zip(("fp32", "int8"), models, strict=True):
            np.testing.assert_allclose(record[f"{kind}/logits"], _tensor(model, "logits", feeds), rtol=1e-4, atol=1e-6)


def test_static_batch_is_kept_whole(models, tmp_path):
    for path in models:
        model = onnx.load(path)
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
        onnx.save(model, path)
    result = _run(models, tmp_path, data=batches(6, 3))
    assert result.samples == 6
    with np.load(result.folder / verify.SAMPLES_NPZ) as record:
        assert record["inputs/x"].shape[0] == 3


def test_graph_that_came_with_qdq_is_compared_with_its_float_form(models, tmp_path):
    result = _run((models[1], models[1]), tmp_path)
    assert result.outputs[0].relative_l2_max > 1e-4


def test_nothing_quantised(models, tmp_path):
    result = _run((models[0], models[0]), tmp_path, plan=PlacementPlan())
    assert result.layers == 0
    assert result.outputs[0].relative_l2_max < 1e-5
    assert _rows(result.folder) == []
    assert Image.open(result.folder / verify.ERRORS_PNG).size[0] > 100


def test_graph_without_a_node(tmp_path):
    spec = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    model = helper.make_model(helper.make_graph([], "g", [spec], [spec]), opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "m.onnx")
    data = [Batch(0, (0, 1), {"x": np.ones((2, 3, 8, 8), np.float32)})]
    result = _run((tmp_path / "m.onnx", tmp_path / "m.onnx"), tmp_path, data=data, plan=PlacementPlan())
    assert result.outputs[0].relative_l2_max == 0


@pytest.mark.filterwarnings("error::UserWarning")
def test_heatmap_of_names_that_the_font_lacks(tmp_path):
    error_heatmap(tmp_path / "errors.png", np.ones((2, 1)), ["像", "a\tb $x^{"], [0])
    assert Image.open(tmp_path / "errors.png").size[0] > 100


@pytest.mark.parametrize(("layers", "samples"), [(20, 16), (300, 64)])
def test_heatmap_has_room_for_every_layer(tmp_path, layers, samples):
    big = chain(layers, side=4)
    paths = tmp_path / "fp32.onnx", tmp_path / "int8.onnx"
    onnx.save(big.fp32, paths[0])
    onnx.save(big.int8, paths[1])
    result = _run(paths, tmp_path, data=batches(samples, 16, side=4), plan=big.plan)
    assert result.layers == layers
    width, height = Image.open(result.folder / verify.ERRORS_PNG).size
    assert height > 12 * layers  # a line of six-point type is 9 pixels high
    assert width < 2200
    assert height < 5000


# -- outputs that are far from FP32, or almost zero --------------------------------------------------------------------


def _one_output(tmp_path, operators, fp32_bias, int8_bias):
    """Two graphs x + bias, then ``operators``; a bias per graph stands for what quantisation does."""
    spec = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    paths = []
    for name, bias in (("fp32", fp32_bias), ("int8", int8_bias)):
        names = [*(f"t{i}" for i in range(len(operators))), "y"]
        nodes = [helper.make_node("Add", ["x", "bias"], [names[0]], "add")]
        nodes += [
            helper.make_node(op, [names[i]], [names[i + 1]], f"n{i}", **({"perm": [0, 1]} if op == "Transpose" else {}))
            for i, op in enumerate(operators)
        ]
        out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])
        bias = numpy_helper.from_array(np.float32(bias), "bias")
        model = helper.make_model(
            helper.make_graph(nodes, "g", [spec], [out], [bias]), opset_imports=[helper.make_opsetid("", 17)]
        )
        model.ir_version = 8
        onnx.save(model, tmp_path / f"{name}.onnx")
        paths.append(tmp_path / f"{name}.onnx")
    return paths


def _rows_of(*values):
    x = np.repeat(np.float32(values)[:, None], 4, axis=1)
    return [Batch(0, tuple(range(20, 20 + len(values))), {"x": x})]


def test_relative_error_of_a_sigmoid_near_zero_is_left_out(tmp_path):
    paths = _one_output(tmp_path, ["Sigmoid", "Transpose"], 0.0, 8.0)
    result = _run(paths, tmp_path, data=_rows_of(-16.0, -14.0, -10.0), plan=PlacementPlan())
    (output,) = result.outputs
    assert output.relative_l2_mean is None
    assert output.relative_l2_max is None
    assert (output.almost_zero, output.value_range, output.max_abs_sample, output.far) == (3, 1.0, 22, 1)
    assert output.max_abs == pytest.approx(1 / (1 + np.exp(2.0)) - 1 / (1 + np.exp(10.0)), rel=1e-4)
    assert output.note.startswith("FP32 is almost zero in all of 3 samples (below 0.001 of a range of 1)")
    almost, far = verify.doubts(result)
    assert almost == f"output 'y': {output.note}"
    assert far.startswith(
        "output 'y' is far from FP32: 1 of 3 samples are mostly error; largest error 0.119 (sample 22) of a range of 1."
    )
    for remedy in ("--calibrator", "--min-sqnr", "quantize errors"):
        assert remedy in far
    assert result == verify.VerifyResult.model_validate_json(result.model_dump_json()).at(result.folder)


def test_samples_near_zero_do_not_spoil_the_mean_of_the_others(tmp_path):
    paths = _one_output(tmp_path, ["Identity"], 0.0, 0.001)
    result = _run(paths, tmp_path, data=_rows_of(1e-9, 2.0, -4.0), plan=PlacementPlan())
    (output,) = result.outputs
    assert (output.almost_zero, output.value_range, output.far, output.note) == (1, 4.0, 0, "")
    assert output.relative_l2_mean == pytest.approx((0.001 / 2 + 0.001 / 4) / 2, rel=1e-3)
    assert output.relative_l2_max == pytest.approx(0.001 / 2, rel=1e-3)
    assert output.max_abs == pytest.approx(0.001, rel=1e-3)
    assert [text.partition(" (")[0] for text in verify.doubts(result)] == [
        "output 'y': FP32 is almost zero in 1 of 3 samples"
    ]


def test_layers_that_are_almost_zero_have_no_relative_error(tmp_path):
    big = chain(2, side=8)
    paths = tmp_path / "fp32.onnx", tmp_path / "int8.onnx"
    onnx.save(big.fp32, paths[0])
    onnx.save(big.int8, paths[1])
    data = batches(3, 3)
    data[0].feeds["x"][1] *= np.float32(1e-5)
    result = _run(paths, tmp_path, data=data, plan=big.plan)
    assert result.almost_zero_layers == {"conv0": 1, "conv1": 1}
    rows = {(row["layer"], row["sample"]): row for row in _rows(result.folder)}
    for layer in result.worst:
        kept = [float(rows[layer.layer, sample]["relative_l2"]) for sample in ("10", "12")]
        assert rows[layer.layer, "11"]["relative_l2"] == ""
        assert (layer.relative_l2_mean, layer.relative_l2_max) == pytest.approx((np.mean(kept), max(kept)))
        assert layer.max_abs == pytest.approx(max(float(rows[layer.layer, s]["max_abs"]) for s in ("10", "11", "12")))


def test_a_layer_that_is_almost_zero_in_all_samples_comes_last(tmp_path):
    paths = _one_output(tmp_path, ["Sigmoid"], 0.0, 8.0)
    plan = PlacementPlan(
        decisions=tuple(
            NodeDecision(node=node, op=op, outputs=(tensor,), quantized=True, rule="test", reason="")
            for node, op, tensor in (("n0", "Sigmoid", "y"), ("add", "Add", "t0"))
        )
    )
    result = _run(paths, tmp_path, data=_rows_of(-16.0, -14.0), plan=plan)
    first, last = result.worst
    assert (first.layer, last.layer) == ("t0", "y")
    assert (last.relative_l2_mean, last.relative_l2_max, last.almost_zero) == (None, None, 2)
    assert last.max_abs > 0


def test_an_output_far_from_fp32_is_said_with_what_may_help(tmp_path):
    paths = _one_output(tmp_path, ["Identity"], 0.0, 3.0)
    result = _run(paths, tmp_path, data=_rows_of(1.0, 2.0), plan=PlacementPlan())
    (text,) = verify.doubts(result)
    assert text.startswith(
        "output 'y' is far from FP32: relative L2 2.25 in the mean, where 1 is as far as an output of zeros; "
        "2 of 2 samples are mostly error; largest error 3 (sample 20) of a range of 2."
    )


def test_an_output_near_fp32_and_one_of_zeros_are_no_doubt(models, tmp_path):
    assert list(verify.doubts(_run(models, tmp_path, into="near"))) == []
    paths = _one_output(tmp_path, ["Relu"], 0.0, -1.0)
    result = _run(paths, tmp_path, data=_rows_of(-1.0, -2.0), plan=PlacementPlan(), into="zeros")
    assert (result.outputs[0].value_range, result.outputs[0].almost_zero, result.outputs[0].max_abs) == (0.0, 0, 0.0)
    assert list(verify.doubts(result)) == []


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_no_samples(models, tmp_path):
    with pytest.raises(InputError, match="no samples to verify on"):
        _run(models, tmp_path, data=[])


def test_tensor_that_a_graph_lacks(models, tmp_path):
    model = onnx.load(models[1])
    for node in model.graph.node:
        node.input[:] = ["renamed" if name == "last" else name for name in node.input]
        node.output[:] = ["renamed" if name == "last" else name for name in node.output]
    onnx.save(model, models[1])
    with pytest.raises(InputError, match="the INT8 graph: tensor 'last' to capture does not exist"):
        _run(models, tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_name_tensor_sample_and_graph(models, tmp_path, value):
    data = batches()
    data[1].feeds["x"][1] = value
    with pytest.raises(
        CheckFailed,
        match=r"tensor 'stem' holds nan in FP32 for sample 13|tensor 'stem' holds -?inf in FP32 for sample 13",
    ):
        _run(models, tmp_path, data=data)


def test_non_finite_values_in_int8_alone(models, tmp_path):
    model = onnx.load(models[1])
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == "w_last_scale")
    scale.CopyFrom(numpy_helper.from_array(np.full(6, np.inf, np.float32), scale.name))
    onnx.save(model, models[1])
    with pytest.raises(CheckFailed, match=r"tensor 'last' holds \S+ in INT8 for sample 10"):
        _run(models, tmp_path)


def test_missing_input(models, tmp_path):
    with pytest.raises(InputError, match="the data has no input 'x'; it has \\['image'\\]"):
        _run(models, tmp_path, data=[Batch(0, (0,), {"image": batches()[0].feeds["x"][:1]})])


def test_sample_without_label(models, tmp_path):
    with pytest.raises(InputError, match="sample 12 has no label"):
        _run(models, tmp_path, labels={10: 1, 11: 2})


def test_label_outside_the_classes(models, tmp_path):
    labels = {sample: CLASSES if sample == 11 else 0 for sample in range(10, 16)}
    with pytest.raises(InputError, match=f"sample 11 has label {CLASSES}, but output 'logits' has {CLASSES} classes"):
        _run(models, tmp_path, labels=labels)


def test_labels_for_a_model_without_classes(tmp_path):
    big = chain(2)
    paths = tmp_path / "fp32.onnx", tmp_path / "int8.onnx"
    onnx.save(big.fp32, paths[0])
    onnx.save(big.int8, paths[1])
    with pytest.raises(InputError, match="no output has one row of class scores per sample: 'relu1'"):
        _run(paths, tmp_path, data=batches(2, 2, side=16), plan=big.plan, labels={10: 0, 11: 0})


def test_layer_whose_shape_depends_on_the_data(models, tmp_path):
    """A layer behind NonZero: as many rows as there are positive values, which quantisation changes."""
    for path in models:
        model = onnx.load(path)
        zero = numpy_helper.from_array(np.float32(0.02 if path == models[0] else -50.0), "limit")
        model.graph.initializer.append(zero)
        model.graph.node.append(helper.make_node("Greater", ["logits", "limit"], ["mask"], "greater"))
        model.graph.node.append(helper.make_node("NonZero", ["mask"], ["found"], "found_node"))
        model.graph.output.append(helper.make_tensor_value_info("found", TensorProto.INT64, [2, "n"]))
        onnx.save(model, path)
    result = _run(models, tmp_path)
    note = result.outputs[1]
    assert note.relative_l2_mean is None
    assert "not compared: sample 10 has shape" in note.note
    extra = net.plan.decisions[0].model_copy(update={"node": "found_node", "outputs": ("found",)})
    plan = net.plan.model_copy(update={"decisions": (*net.plan.decisions, extra)})
    with pytest.raises(
        CheckFailed, match=r"tensor 'found' has shape \(2, \d+\) in FP32, \(2, \d+\) in INT8, samples \[10, 11\]"
    ):
        _run(models, tmp_path, into="again", plan=plan)
