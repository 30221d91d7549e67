from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from PIL import Image

from pipeline import mixed, verify
from pipeline.accuracy import Target
from pipeline.config import PlacementConfig
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.ort import make_session
from pipeline.core.progress import SilentProgress
from pipeline.errors.capture import OrtReading
from pipeline.errors.graphs import Graph
from pipeline.mixed import choosing, evaluate, stage
from pipeline.mixed.candidate import Candidate, Network
from pipeline.placement import make_plan
from tests.errors.networks import CLASSES, network
from tests.mixed.setting import batches_of, save, set_up, silu_blocks
from tests.zoo.registry import build


@pytest.fixture(scope="module")
def silu(tmp_path_factory):
    """A network of SiLU blocks with random weights, and an outlier that makes minmax ranges far too wide."""
    import torch

    module = silu_blocks(4)
    folder = tmp_path_factory.mktemp("silu")
    from tests.zoo.export import export_onnx

    path = export_onnx(module, {"x": torch.zeros(2, 3, 16, 16)}, folder / "silu.onnx", dynamic_axes={"x": {0: "N"}})
    data = np.random.default_rng(0).normal(0, 1, (40, 3, 16, 16)).astype(np.float32)
    data[0, 0, 0, 0] = 60.0
    return set_up(path, data, folder / "prepared", searched=12)


def _search(setting, folder, target, **options):
    folder.mkdir(exist_ok=True)
    return mixed.run(
        *setting.arguments(),
        folder=folder,
        config=setting.config,
        target=target,
        searched=setting.searched,
        checked=setting.checked,
        **options,
    )


def _choose(result, setting, folder, **options):
    folder.mkdir()
    plan = choosing.point_plan(result, setting.model, setting.config, options.get("number"))
    done = mixed.choose(result, plan, *setting.arguments(), folder=folder, config=setting.config, **options)
    return done.at(folder), plan


def _sqnr(setting, model):
    names = [output.name for output in make_session(setting.model).get_outputs()]
    signal = noise = 0.0
    readings = [OrtReading(m, names, label="", optimise=False) for m in (setting.model, model)]
    for batch in setting.checked():
        a, b = (reading(batch)[names[0]].astype(np.float64) for reading in readings)
        signal, noise = signal + np.square(a).sum(), noise + np.square(a - b).sum()
    return 10 * np.log10(signal / noise)


def test_candidate_graph_is_what_the_quantise_stage_builds(silu, tmp_path):
    """The graphs that are measured and the graph that is shipped compute the same."""
    result = _search(silu, tmp_path / "search", Target.parse("min_sqnr", "150dB"))
    assert not result.reached
    for number in (0, len(result.points) // 2):
        done, plan = _choose(result, silu, tmp_path / f"point{number}", number=number)
        point = result.point(number)
        assert _sqnr(silu, done.model_path) == pytest.approx(point.figures.sqnr_db, abs=0.02)
        quantized = set(plan.quantized_nodes)
        assert not quantized & set(point.restored)
        onnx.checker.check_model(onnx.load(done.model_path))


def test_repairs_alone_can_meet_the_target(silu, tmp_path):
    plain = _search(silu, tmp_path / "plain", Target.parse("min_sqnr", "1dB"))
    assert plain.reached
    assert len(plain.points) == 1
    assert plain.repairs == ()
    base = plain.points[0].figures.sqnr_db
    result = _search(silu, tmp_path / "search", Target(kind="min_sqnr", value=base + 0.3))
    assert result.reached
    assert result.point().restored == ()
    assert result.point().repaired
    assert result.point().int8_share == plain.points[0].int8_share
    assert result.sensitivities == ()
    kinds = {record.kind for record in result.repairs if record.kept}
    assert "range" in kinds
    for record in result.repairs:
        assert record.kept == (record.sqnr_after_db > record.sqnr_before_db + 0.1)
    kept = sum(record.kept for record in result.repairs)
    assert f"0 nodes back in float, {kept} repair{'s' if kept > 1 else ''}, " in result.sentence()
    done, _ = _choose(result, silu, tmp_path / "chosen")
    scales = json.loads((done.folder / "scales.json").read_text())["tensors"]
    changed = {record.what for record in result.repairs if record.kind == "range" and record.kept}
    assert {entry["calibrator"] for name, entry in scales.items() if name in changed} - {"minmax"}
    assert not list(done.folder.glob("repaired*"))


def test_layers_go_back_to_float_until_the_target_is_met(silu, tmp_path):
    base = _search(silu, tmp_path / "base", Target.parse("min_sqnr", "1dB")).points[0].figures.sqnr_db
    target = Target(kind="min_sqnr", value=base + 4.5)
    result = _search(silu, tmp_path / "search", target)
    assert result.reached
    taken = result.point()
    assert taken.meets
    assert 0 < len(taken.restored) < 5
    assert 0 < taken.int8_share < 1
    # None of the faster points that were measured would have done.
    assert all(not point.meets for point in result.points if point.lost < taken.lost)
    assert len(result.sensitivities) == 5
    done, plan = _choose(result, silu, tmp_path / "chosen")
    assert _sqnr(silu, done.model_path) >= target.value - 0.02
    verified = verify.run(silu.model, done.model_path, plan, silu.checked(), folder=done.folder)
    assert verified.layers == len(plan.quantized_nodes)


def test_table_and_plot(silu, tmp_path):
    result = _search(silu, tmp_path / "search", Target.parse("min_sqnr", "150dB"))
    table = json.loads((tmp_path / "search" / stage.PARETO_JSON).read_text())
    assert len(table["points"]) == len(result.points)
    lost = [point["lost"] for point in table["points"]]
    assert lost == sorted(lost)
    assert [point["number"] for point in table["points"]] == list(range(len(lost)))
    assert sum(point["chosen"] for point in table["points"]) == 1
    front = [point for point in table["points"] if point["best"]]
    sqnr = [point["figures"]["sqnr_db"] for point in front]
    assert sqnr == sorted(sqnr)  # slower points on the front are more accurate
    assert Image.open(tmp_path / "search" / stage.PARETO_PNG).size[0] > 500


def test_a_target_that_no_mix_reaches_gives_the_nearest(silu, tmp_path):
    class Listening(SilentProgress):
        def __init__(self):
            self.warnings = []

        def warn(self, message):
            self.warnings.append(message)

    progress = Listening()
    result = _search(silu, tmp_path / "search", Target.parse("min_sqnr", "150dB"), progress=progress)
    assert not result.reached
    assert result.point().figures.sqnr_db == max(point.figures.sqnr_db for point in result.points)
    assert "is not reached by any mix; the nearest has SQNR" in progress.warnings[0]


def test_a_killed_search_goes_on_where_it_stopped(silu, tmp_path, monkeypatch):
    target = Target.parse("min_sqnr", "150dB")
    whole = _search(silu, tmp_path / "whole", target)
    measured = evaluate.Evaluator._measured
    count = 0

    def dying(self, candidate):
        nonlocal count
        count += 1
        if count > 7:
            raise KeyboardInterrupt
        return measured(self, candidate)

    monkeypatch.setattr(evaluate.Evaluator, "_measured", dying)
    for _ in range(50):
        count = 0
        try:
            resumed = _search(silu, tmp_path / "killed", target)
            break
        except KeyboardInterrupt:
            continue
    assert resumed.at(whole.folder) == whole
    for name in (stage.PARETO_JSON, stage.PARETO_PNG):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    monkeypatch.setattr(evaluate.Evaluator, "_measured", lambda self, candidate: pytest.fail("measured again"))
    assert _search(silu, tmp_path / "killed", target).at(whole.folder) == whole


def test_measured_times_steer_the_choice(silu, tmp_path):
    """With a layer whose INT8 saves nothing, restoring it is free, and it goes first."""
    nodes = [item.nodes[0] for item in _search(silu, tmp_path / "a", Target.parse("min_sqnr", "150dB")).sensitivities]
    times = dict.fromkeys(nodes, (1.0, 2.0)) | {nodes[2]: (1.0, 1.0001)}
    base = _search(silu, tmp_path / "base", Target.parse("min_sqnr", "1dB")).points[0].figures.sqnr_db
    result = _search(silu, tmp_path / "b", Target(kind="min_sqnr", value=base + 4.5), times=times)
    assert result.unit == "ms"
    assert max(result.sensitivities, key=lambda item: item.gain_per_cost).nodes == (nodes[2],)
    for point in result.points:
        assert point.lost == pytest.approx(sum(times[node][1] - times[node][0] for node in point.restored))


def test_excluded_by_the_user_stays_so(silu, tmp_path):
    first = Network(*silu.arguments()[:1], silu.config, *silu.arguments()[1:]).plan(Candidate()).quantized_nodes[0]
    config = PlacementConfig(exclude=(first,))
    (tmp_path / "search").mkdir()
    result = mixed.run(
        *silu.arguments(),
        folder=tmp_path / "search",
        config=config,
        target=Target.parse("min_sqnr", "1dB"),
        searched=silu.searched,
        checked=silu.checked,
    )
    assert result.points[0].int8_share < 1
    assert result.placement(config).exclude == (first,)


def test_tensors_that_equalisation_changes(tmp_path):
    from pipeline.mixed.equalising import changed_tensors
    from pipeline.placement import equalise
    from tests.placement.test_equalise import depthwise, images

    model = depthwise("Relu").save(tmp_path, "y")
    batches = batches_of(np.concatenate([feeds["x"] for feeds in images()]))
    done = equalise.run(model, batches, folder=tmp_path / "equal", config=PlacementConfig())
    (tensor,) = (item.tensor for item in done.tensors)
    before = make_plan(model, PlacementConfig()).tensors
    assert {"x", tensor} <= set(before)
    assert changed_tensors(model, done.model_path, before, batches[0]) == {tensor}
    assert changed_tensors(model, model, before, batches[0]) == frozenset()
    assert changed_tensors(model, done.model_path, [], batches[0]) == frozenset()


@pytest.mark.parametrize(("name", "target"), [("mobilenetv3", "33dB")])
def test_zoo(tmp_path, name, target):
    """Random weights: plain INT8 misses the target, the search meets it."""
    model = build(name, tmp_path)
    data = np.concatenate([model.feeds(8, seed)["x"] for seed in range(3)])
    setting = set_up(model.path, data, tmp_path / "prepared", calibrator="entropy", searched=8)
    result = _search(setting, tmp_path / "search", Target.parse("min_sqnr", target))
    plain = next(point for point in result.points if not point.repaired and not point.restored)
    assert not plain.meets
    assert result.reached
    done, _ = _choose(result, setting, tmp_path / "chosen")
    assert _sqnr(setting, done.model_path) >= Target.parse("min_sqnr", target).value - 0.05


# -- top-1 and agreement ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    import torch
    from torch import nn

    from tests.zoo.export import export_onnx

    torch.manual_seed(1)
    convolutions = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()]
    module = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    folder = tmp_path_factory.mktemp("small")
    axes = {"x": {0: "N"}, "logits": {0: "N"}}
    path = export_onnx(
        module, {"x": torch.zeros(2, 3, 8, 8)}, folder / "net.onnx", dynamic_axes=axes, outputs=["logits"]
    )
    data = np.random.default_rng(5).normal(0, 1, (48, 3, 8, 8)).astype(np.float32)
    return set_up(path, data, folder / "prepared")


def test_top_one_target(small, tmp_path):
    reading = OrtReading(small.model, ["logits"], label="", optimise=False)
    labels = {
        sample: int(np.argmax(row))
        for batch in small.checked()
        for sample, row in zip(batch.samples, reading(batch)["logits"], strict=True)
    }
    result = _search(small, tmp_path / "search", Target.parse("max_drop", "2%"), labels=labels)
    assert result.point().figures.top1_fp32 == 1.0
    assert result.point().figures.drop == pytest.approx(1 - result.point().figures.agreement)


def test_labels_that_do_not_fit(small, tmp_path):
    with pytest.raises(InputError, match="sample 8 has no label"):
        _search(small, tmp_path / "search", Target.parse("max_drop", "2%"), labels={0: 1})
    labels = dict.fromkeys(range(48), CLASSES)
    with pytest.raises(InputError, match=f"has label {CLASSES}, but output 'logits' has"):
        _search(small, tmp_path / "search2", Target.parse("max_drop", "2%"), labels=labels)


def test_top_one_target_without_labels(small, tmp_path):
    with pytest.raises(InputError, match="--max-drop is about top-1, which needs labels"):
        _search(small, tmp_path / "search", Target.parse("max_drop", "2%"))


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_point_that_does_not_exist(silu, tmp_path):
    result = _search(silu, tmp_path / "search", Target.parse("min_sqnr", "1dB"))
    with pytest.raises(InputError, match="--choose 5: the table has the points 0 to 0"):
        _choose(result, silu, tmp_path / "chosen", number=5)


def test_damaged_repairs(silu, tmp_path):
    result = _search(silu, tmp_path / "search", Target.parse("min_sqnr", "150dB"))
    (tmp_path / "search" / stage.REPAIRS).write_bytes(b"PK")
    with pytest.raises(InputError, match=r"repairs\.npz cannot be read"):
        _choose(result, silu, tmp_path / "chosen")


def test_no_samples(small, tmp_path):
    for empty in ("searched", "checked"):
        (tmp_path / empty).mkdir()
        options = {"searched": small.searched, "checked": small.checked, empty: list}
        with pytest.raises(InputError, match=r"no samples in the (search|check) set"):
            mixed.run(
                *small.arguments(),
                folder=tmp_path / empty,
                config=small.config,
                target=Target.parse("min_sqnr", "20dB"),
                **options,
            )


def test_model_that_came_with_qdq(small, tmp_path):
    path = save(network().int8, tmp_path / "int8.onnx")
    with pytest.raises(InputError, match="the model came with Q/DQ nodes"):
        mixed.run(
            path,
            small.statistics,
            small.calibrator,
            folder=tmp_path,
            config=small.config,
            target=Target.parse("min_sqnr", "20dB"),
            searched=small.searched,
            checked=small.checked,
        )


def test_nothing_to_quantise(small, tmp_path):
    config = PlacementConfig(exclude=("*",))
    with pytest.raises(InputError, match="nothing in this model is quantised"):
        mixed.run(
            *small.arguments(),
            folder=tmp_path,
            config=config,
            target=Target.parse("min_sqnr", "20dB"),
            searched=small.searched,
            checked=small.checked,
        )


def test_nan_is_named(small, tmp_path):
    bad = np.full((2, 3, 8, 8), np.nan, np.float32)
    with pytest.raises(CheckFailed, match="tensor 'logits' holds nan in FP32 for sample 0"):
        mixed.run(
            *small.arguments(),
            folder=tmp_path,
            config=small.config,
            target=Target.parse("min_sqnr", "20dB"),
            searched=small.searched,
            checked=lambda: batches_of(bad),
        )


def test_float_graph_is_left_as_it_is(silu, tmp_path):
    before = silu.model.read_bytes()
    result = _search(silu, tmp_path / "search", Target.parse("min_sqnr", "150dB"))
    _choose(result, silu, tmp_path / "chosen")
    assert silu.model.read_bytes() == before
    assert not Graph(silu.model).has_qdq


def test_bias_for_a_layer_that_has_none(tmp_path):
    """A corrected bias becomes a new input, in the graph that is measured and in the one that is shipped."""
    import torch
    from torch import nn

    from pipeline import quantize
    from pipeline.mixed.repairs import Repairs
    from tests.zoo.export import export_onnx

    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=False)]
    path = export_onnx(
        nn.Sequential(*convolutions), {"x": torch.zeros(2, 3, 8, 8)}, tmp_path / "n.onnx", dynamic_axes={"x": {0: "N"}}
    )
    data = np.random.default_rng(0).normal(0, 1, (16, 3, 8, 8)).astype(np.float32)
    setting = set_up(path, data, tmp_path / "prepared")
    network = Network(setting.model, setting.config, setting.statistics, setting.calibrator)
    node = next(node.name for node in reversed(network.fp32.nodes) if node.op_type == "Conv")
    shift = np.linspace(0.5, 1.0, 16, dtype=np.float32)
    candidate = Candidate(repairs=Repairs(biases={node: shift}))
    plan = network.plan(candidate)
    repaired = tmp_path / "repaired.onnx"
    assert choosing.write_repaired(network, plan, candidate.repairs, repaired)
    (tmp_path / "out").mkdir()
    done = quantize.run(
        repaired, plan, setting.statistics, setting.calibrator, folder=tmp_path / "out", config=setting.config
    )
    batch = setting.checked()[0]
    measured, shipped, plain = (
        OrtReading(model, ["output"], label="", optimise=False)(batch)["output"]
        for model in (network.graph(candidate), done.at(tmp_path / "out").model_path, network.graph(Candidate()))
    )
    np.testing.assert_allclose(measured, shipped, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(measured - plain, np.broadcast_to(shift[:, None, None], plain.shape), rtol=1e-3)
