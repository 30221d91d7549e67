from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.core.errors import CheckFailed, InputError
from pipeline.errors.activations import BINS, SPAN, quantisation_energy, sweep_activation
from pipeline.errors.capture import Account, CallableReading, OrtReading
from pipeline.errors.graphs import Graph
from pipeline.errors.layers import layers_of_graph
from pipeline.errors.measure import measure
from pipeline.errors.metrics import pair_sums
from pipeline.errors.neighbours import neighbours
from pipeline.errors.recorded import RecordedReading
from pipeline.errors.table import COLUMNS, RELATIVE, read_table
from tests.errors.networks import almost_zero, batches, chain, fake_quantised, network

net = network({"relu": 0.9, "sum": 30.0})  # relu clips, sum does not
fp32, int8 = Graph(net.fp32), Graph(net.int8)
layers = layers_of_graph(int8)
TENSORS = [layer.tensor for layer in layers]
CANNOT = "fused: the engine cannot show it"


@pytest.fixture(scope="module")
def found():
    ranges = {"wide": dict.fromkeys(net.amax, 8.0), "close": {"relu": 3.0}}
    return measure(fp32, int8, layers, batches(), calibrated=ranges, labels=dict.fromkeys(range(10, 16), 1))


def _row(table, node):
    return next(row for row, info in enumerate(table.layers) if info.layer.node == node)


def _reading(model, names):
    feeds = {"x": np.concatenate([batch.feeds["x"] for batch in batches()])}
    return OrtReading(model, names, label="", optimise=False).run(feeds)


def test_accumulated_columns(found):
    a, b = _reading(net.fp32, TENSORS), _reading(net.int8, TENSORS)
    for row, tensor in enumerate(TENSORS):
        sums = pair_sums(a[tensor].reshape(6, -1), b[tensor].reshape(6, -1))
        for name in ("relative_l2", "sqnr_db", "cosine", "max_abs", "fp32_max_abs"):
            np.testing.assert_allclose(found.table.columns[name][row], sums.metric(name), rtol=1e-3)


def test_first_layer_has_no_inherited_error(found):
    row = _row(found.table, "stem_conv")
    np.testing.assert_allclose(
        found.table.columns["local_relative_l2"][row], found.table.columns["relative_l2"][row], rtol=1e-3
    )


def test_weights_and_activations_make_up_the_local_error(found):
    for node in ("stem_conv", "last_conv"):
        row = _row(found.table, node)
        parts = (
            found.table.mean("weights_relative_l2")[row] ** 2 + found.table.mean("activations_relative_l2")[row] ** 2
        )
        assert parts == pytest.approx(found.table.mean("local_relative_l2")[row] ** 2, rel=0.25)


def test_layers_without_weights_have_only_activation_error(found):
    row = _row(found.table, "add_node")
    assert np.isnan(found.table.columns["weights_relative_l2"][row]).all()
    np.testing.assert_array_equal(
        found.table.columns["activations_relative_l2"][row], found.table.columns["local_relative_l2"][row]
    )


def test_clipping_and_rounding(found):
    relu = _reading(net.fp32, ["relu"])["relu"].reshape(6, -1)
    quantised = fake_quantised(relu, np.float32(0.9 / 127))
    beyond = relu > np.float32(np.float32(0.9 / 127) * 127)
    error = (relu - quantised).astype(np.float64) ** 2
    row = _row(found.table, "branch_conv")
    np.testing.assert_allclose(found.table.columns["clipped_share"][row], beyond.mean(axis=1), rtol=1e-9)
    share = (error * beyond).sum(axis=1) / error.sum(axis=1)
    np.testing.assert_allclose(found.table.columns["clipping_error_share"][row], share, rtol=1e-3)
    assert share.min() > 0.9
    figures = found.table.activations["relu"]
    assert figures.values == relu.size
    assert figures.clipped == beyond.sum()
    assert figures.zeros == (relu == 0).sum()
    assert figures.largest == pytest.approx(relu.max())
    assert figures.histogram.sum() == relu.size
    assert figures.histogram[BINS // 2 :].sum() == beyond.sum()
    assert figures.relative_l2 == pytest.approx(np.sqrt(error.sum() / (relu.astype(np.float64) ** 2).sum()), rel=1e-5)
    assert found.table.columns["clipping_error_share"][_row(found.table, "last_conv")].max() < 0.5


def test_a_pair_before_a_pair_is_one_threshold():
    """Pad between two pairs of the same scale, as TensorRT wants it: the convolution has one quantised input."""
    model = onnx.ModelProto()
    model.CopyFrom(net.int8)
    conv = next(node for node in model.graph.node if node.name == "last_conv")
    scale = ["sum_scale", "zero"]
    make = onnx.helper.make_node
    at = list(model.graph.node).index(conv)
    model.graph.node.insert(at, make("DequantizeLinear", ["padded_q", *scale], ["padded_dq"], "padded_DQ"))
    model.graph.node.insert(at, make("QuantizeLinear", ["padded", *scale], ["padded_q"], "padded_Q"))
    next(node for node in model.graph.node if node.name == "last_conv").input[0] = "padded_dq"
    graph = Graph(model)
    table = measure(fp32, graph, layers_of_graph(graph), batches()).table
    row = _row(table, "last_conv")
    assert table.layers[row].inputs == ("padded",)
    plain = measure(fp32, int8, layers, batches()).table
    np.testing.assert_allclose(
        table.columns["local_relative_l2"][row], plain.columns["local_relative_l2"][_row(plain, "last_conv")], rtol=1e-5
    )


def test_calibrators_are_compared_on_the_same_samples(found):
    relu = _reading(net.fp32, ["relu"])["relu"]
    assert set(found.table.calibrators) == {"wide", "close"}
    amax, error = found.table.calibrators["close"]["relu"]
    quantised = fake_quantised(relu, np.float32(3.0 / 127))
    assert amax == 3.0
    assert error == pytest.approx(np.linalg.norm(relu - quantised) / np.linalg.norm(relu), rel=1e-4)
    assert set(found.table.calibrators["close"]) == {"relu"}


def test_outputs_and_top_one(found):
    logits = _reading(net.fp32, ["logits"])["logits"], _reading(net.int8, ["logits"])["logits"]
    assert found.top_one.reference == pytest.approx((logits[0].argmax(1) == 1).mean())
    assert found.top_one.other == pytest.approx((logits[1].argmax(1) == 1).mean())
    assert found.outputs["logits"].relative_l2_max > 0


def test_relative_figures_are_without_samples_in_which_fp32_is_almost_zero():
    """One rule with the verification: a thousandth of the layer's range. Absolute errors count all the same."""
    dim = 1
    data, small = batches(6, 6, side=16), chain(3)
    data[0].feeds["x"][dim] *= np.float32(1e-5)
    graph = Graph(small.int8)
    table = measure(Graph(small.fp32), graph, layers_of_graph(graph), data).table
    assert table.almost_zero().tolist() == [[sample == dim for sample in range(6)]] * 3
    assert table.layers_almost_zero() == {"conv0": 1, "conv1": 1, "conv2": 1}
    for name, values in table.columns.items():
        expected = name in RELATIVE
        assert (np.isnan(values[:, dim]) == expected).all(), name
        assert np.isfinite(np.delete(values, dim, axis=1)).all(), name
    np.testing.assert_allclose(
        table.mean("relative_l2"), np.delete(table.columns["relative_l2"], dim, axis=1).mean(axis=1)
    )
    peaks = np.abs(OrtReading(small.fp32, ["conv0"], label="", optimise=True)(data[0])["conv0"]).max(axis=(1, 2, 3))
    np.testing.assert_allclose(table.columns["fp32_max_abs"][0], peaks, rtol=1e-6)


def test_a_layer_that_is_almost_zero_in_all_samples_has_no_relative_figures():
    """A sigmoid's range is 1, whatever it gives."""
    found = measure(Graph(almost_zero(net.fp32)), Graph(almost_zero(net.int8)), layers, batches())
    output = found.outputs["logits"]
    assert (output.relative_l2_mean, output.cosine_mean, output.almost_zero) == (None, None, 6)
    assert 0 < output.max_abs < 1e-3
    assert output.note.startswith("FP32 is almost zero in all of 6 samples (below 0.001 of a range of 1)")


def test_neighbours():
    around = neighbours(int8, layers)
    assert around["stem"].before == ()
    assert around["stem"].after == ("branch", "sum")
    assert set(around["sum"].before) == {"branch", "stem"}
    assert around["logits"].before == ("last",)


def test_table_files(found, tmp_path):
    found.table.write(tmp_path)
    parquet, text = read_table(tmp_path / "errors.parquet"), read_table(tmp_path / "errors.csv")
    assert len(parquet) == len(layers) * 6
    assert list(parquet.columns[:5]) == ["order", "layer", "node", "op", "sample"]
    assert set(COLUMNS) - set(parquet.columns) == {name for name in COLUMNS if name.startswith("engine_")}
    for name in ("relative_l2", "local_relative_l2", "cosine", "clipped_share"):
        np.testing.assert_allclose(parquet[name], text[name], rtol=1e-6)
    first = (tmp_path / "errors.parquet").read_bytes()
    found.table.write(tmp_path)
    assert first == (tmp_path / "errors.parquet").read_bytes()


# -- engine ------------------------------------------------------------------------------------------------------------


def _engine(names):
    graph = OrtReading(net.int8, names, label="", optimise=False)
    return CallableReading(lambda feeds: {k: v + np.float32(1e-3) for k, v in graph.run(feeds).items()}, label="engine")


def test_engine_columns_and_fused_tensors():
    shown = [name for name in TENSORS if name not in ("branch", "padded")]
    table = measure(fp32, int8, layers, batches(), engine=_engine(shown)).table
    for row, info in enumerate(table.layers):
        if info.layer.tensor in shown:
            assert info.engine == "shown"
            a = _reading(net.fp32, [info.layer.tensor])[info.layer.tensor].reshape(6, -1)
            b = _reading(net.int8, [info.layer.tensor])[info.layer.tensor].reshape(6, -1)
            expected = pair_sums(a, b + np.float32(1e-3)).relative_l2
            np.testing.assert_allclose(table.columns["engine_relative_l2"][row], expected, rtol=1e-3)
            assert (table.columns["engine_int8_relative_l2"][row] < table.columns["engine_relative_l2"][row]).all()
        else:
            assert info.engine == CANNOT
            assert np.isnan(table.columns["engine_relative_l2"][row]).all()
    frame = table.frame()
    assert set(frame[frame.layer == "branch"].engine) == {CANNOT}


def test_what_an_engine_has_and_does_not_give_is_not_called_fused():
    graph = OrtReading(net.int8, ["logits"], label="", optimise=False)
    reading = CallableReading(graph.run, label="engine", account=Account(unshown={"branch": "bfloat16"}))
    table = measure(fp32, int8, layers, batches(), engine=reading).table
    states = {info.layer.tensor: info.engine for info in table.layers}
    assert states["branch"] == "not compared: bfloat16"
    assert states["stem"] == CANNOT
    assert states["logits"] == "shown"


def test_recorded_engine(tmp_path):
    data = batches()
    tensors = [OrtReading(net.int8, ["sum", "logits"], label="", optimise=False)(batch) for batch in data[:2]]
    joined = {name: np.concatenate([part[name] for part in tensors]) for name in tensors[0]}
    np.savez(tmp_path / "engine.npz", samples=[10, 11, 12, 13], **joined)
    reading = RecordedReading(tmp_path / "engine.npz")
    table = measure(fp32, int8, layers, data, engine=reading).table
    row = _row(table, "add_node")
    assert np.isfinite(table.columns["engine_relative_l2"][row]).tolist() == [True] * 4 + [False] * 2
    np.testing.assert_allclose(table.columns["engine_int8_relative_l2"][row][:4], 0, atol=1e-6)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "recorded tensors .* do not exist"),
        (b"not a zip", "is not a readable .npz file"),
        ({"sum": np.zeros(3)}, "has no array 'samples'"),
        ({"samples": [10, 11], "sum": np.zeros((3, 2))}, r"tensor 'sum' has shape \(3, 2\), expected 2 rows"),
        ({"samples": [99], "sum": np.zeros((1, 2))}, r"recorded in engine.npz\) has no tensor of any of these samples"),
    ],
)
def test_bad_recordings(tmp_path, arrays, message):
    path = tmp_path / "engine.npz"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(InputError, match=message):
        measure(fp32, int8, layers, batches(), engine=RecordedReading(path))


def test_engine_of_another_shape_is_named():
    wrong = CallableReading(lambda feeds: {"sum": np.zeros((2, 1), np.float32)}, label="the engine")
    with pytest.raises(CheckFailed, match=r"tensor 'sum' has shape \(2, 4, 8, 8\) in FP32, \(2, 1\) in the engine"):
        measure(fp32, int8, layers, batches(), engine=wrong)


def test_engine_with_nan_is_named():
    reading = CallableReading(lambda feeds: {"logits": np.full((2, 5), np.nan, np.float32)}, label="the engine")
    with pytest.raises(CheckFailed, match="tensor 'logits' holds nan in the engine for sample 10"):
        measure(fp32, int8, layers, batches(), engine=reading)


def test_no_samples():
    with pytest.raises(InputError, match="no samples to measure on"):
        measure(fp32, int8, layers, [])


# -- sums over an activation -------------------------------------------------------------------------------------------


def test_value_at_the_threshold_is_not_clipped():
    scale = np.float32(6.0 / 127)
    values = np.array([[scale * np.float32(127), -scale * np.float32(127), 0.0, 5.0]], np.float32)
    sums, histogram = sweep_activation(values, float(scale))
    assert sums[0, 0] == 0
    assert histogram[BINS // 2 :].sum() == 0
    assert sums[0, 4] == 1


def test_far_values_overflow_the_histogram():
    sums, histogram = sweep_activation(np.array([[0.5, 100.0]], np.float32), 1 / 127)
    assert histogram[BINS] == 1
    assert sums[0, 0] == 1
    assert sums[0, 1] == pytest.approx(99.0**2, rel=1e-5)
    assert sums[0, 5] == 100.0
    assert SPAN == 2.0


def test_energy_of_several_scales_agrees_with_the_sweep():
    values = np.random.default_rng(0).normal(0, 1, (3, 70_001)).astype(np.float32)
    scales = [0.5 / 127, 2.0 / 127, 5.0 / 127]
    energies = quantisation_energy(values, scales)
    for column, scale in enumerate(scales):
        sums, _ = sweep_activation(values, scale)
        np.testing.assert_allclose(energies[:, column], sums[:, 1] + sums[:, 2], rtol=1e-4)


# -- memory ------------------------------------------------------------------------------------------------------------

_MEMORY = """
import sys
from pipeline.core.memory import peak_resident_bytes
from pipeline.errors.graphs import Graph
from pipeline.errors.layers import layers_of_graph
from pipeline.errors.measure import measure
from tests.errors.networks import batches, chain
net = chain(int(sys.argv[1]), width=8, side=16)
int8 = Graph(net.int8)
table = measure(Graph(net.fp32), int8, layers_of_graph(int8), batches(int(sys.argv[2]), 16, side=16)).table
assert table.columns["relative_l2"].shape == (int(sys.argv[1]), int(sys.argv[2]))
print(peak_resident_bytes())
"""


def _peak(layers: int, samples: int) -> int:
    command = [sys.executable, "-c", _MEMORY, str(layers), str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    return int(done.stdout)


def test_300_layers_and_256_samples_stay_under_a_gigabyte():
    """The activations of these samples are 1.3 GB in each reading; kept are the figures."""
    assert _peak(300, 256) < 1 << 30
