"""What it costs where INT8 and float meet."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from pipeline.engine.inspect import EngineLayer, LayerTensor
from pipeline.engine.view import EngineView
from pipeline.errors.graphs import Graph
from pipeline.mixed import search as searching
from pipeline.mixed.borders import Borders, Passes
from pipeline.mixed.cost import Costs
from pipeline.mixed.search import Sensitivity
from pipeline.mixed.times import pass_times

MEASURED = Path(__file__).resolve().parents[2] / "scripts" / "experiments" / "data"
QUANTIZED = ("a", "b", "pool", "c", "d", "add")


@pytest.fixture(scope="module")
def graph() -> Graph:
    """x -> a -> relu -> b -> sigmoid, mul -> pool -> c -> softmax -> d; add of b's activation and d -> y."""
    nodes = [
        helper.make_node("Conv", ["x", "wa"], ["a"], "a"),
        helper.make_node("Relu", ["a"], ["ar"], "relu"),
        helper.make_node("Conv", ["ar", "wb"], ["b"], "b"),
        helper.make_node("Sigmoid", ["b"], ["bs"], "sigmoid"),
        helper.make_node("Mul", ["b", "bs"], ["bm"], "mul"),
        helper.make_node("MaxPool", ["bm"], ["p"], "pool", kernel_shape=[2, 2]),
        helper.make_node("Conv", ["p", "wc"], ["c"], "c"),
        helper.make_node("Softmax", ["c"], ["s"], "softmax"),
        helper.make_node("Conv", ["s", "wd"], ["d"], "d"),
        helper.make_node("Add", ["d", "bm"], ["y"], "add"),
    ]
    value = helper.make_tensor_value_info
    made = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, None)], [value("y", TensorProto.FLOAT, None)])
    return Graph(helper.make_model(made))


SHAPES = dict.fromkeys(("x", "ar", "bm", "p", "c", "s", "d"), (1, 4, 10, 10))


def borders(graph: Graph, least: float = 0.0) -> Borders:
    return Borders(graph, SHAPES, QUANTIZED, Passes(1e-3, least, {"x": (8, 4, 10, 10)}))


@pytest.mark.parametrize(
    ("restored", "into_float", "into_int8"),
    [
        ((), set(), set()),
        (("a",), set(), {"ar"}),  # the input was float before
        (("b",), {"ar"}, {"bm"}),  # read by the pool and by the sum: one pass
        (("a", "b"), set(), {"bm"}),
        (("b", "pool"), {"ar"}, {"p", "bm"}),
        (("b", "pool", "c", "add"), {"ar", "d"}, set()),  # Softmax had float before
        (("c",), {"p"}, set()),
        (("d",), set(), {"d"}),
        (("add",), {"d", "bm"}, set()),
        (("gone",), set(), set()),
    ],
)
def test_where_they_meet(graph: Graph, restored: tuple[str, ...], into_float: set[str], into_int8: set[str]) -> None:
    assert borders(graph).tensors(frozenset(restored)) == (into_float, into_int8)


def test_bytes_at_the_measured_shapes(graph: Graph) -> None:
    values = 8 * 4 * 10 * 10
    assert borders(graph).ms({"b"}) == pytest.approx(1e-3 * values * (9 + 3))
    assert borders(graph, least=20.0).ms({"b"}) == pytest.approx(1e-3 * values * 9 + 20.0)
    assert borders(graph).ms(()) == 0


def test_a_layer_between_two_in_float_costs_least(graph: Graph) -> None:
    costs = Costs({}, dict.fromkeys(QUANTIZED, 0.5), "ms", borders(graph))
    values = 8 * 4 * 10 * 10
    assert costs.lost({"b"}) == pytest.approx(0.5 + 12e-3 * values)
    assert costs.added((), {"b"}) == costs.lost({"b"})
    # with `a` in float already, `b` moves the border and takes one away
    assert costs.added({"a"}, {"b"}) == pytest.approx(0.5)
    # three borders go for two: less than nothing, and so as little as the cheapest node
    assert costs.lost({"a", "c", "b", "pool"}) < costs.lost({"a", "c"})
    assert costs.added({"a", "c"}, {"b", "pool"}) == 0.5


def test_the_path_counts_the_borders_of_what_is_in_float(graph: Graph) -> None:
    """`a` goes first; then `b`, which moves its border, before `d`, which gains more and makes borders of its own."""
    from pipeline.accuracy import Figures
    from pipeline.mixed.candidate import Candidate
    from pipeline.mixed.repairs import Repairs

    gains = {"a": 0.5, "b": 0.1, "d": 0.2, "pool": 0.0001}
    costs = Costs({}, dict.fromkeys(QUANTIZED, 0.5), "ms", borders(graph))

    class Fake:
        def measure(self, candidate: Candidate) -> Figures:
            noise = 1.0 - sum(gains[name] for name in candidate.restored)
            return Figures(sqnr_db=-10 * math.log10(noise), agreement=None, samples=1)

    found = [
        Sensitivity(nodes=(name,), cost=costs.added((), (name,)), noise_before=1.0, noise_after=1.0 - gain)
        for name, gain in gains.items()
    ]
    path = searching._Path(found, Repairs(), Fake(), costs)  # type: ignore[arg-type]
    first, second = path.at(1), path.at(2)
    assert first is not None
    assert second is not None
    assert first.restored == {"a"}
    assert second.restored == {"a", "b"}


def table(path: Path, *, passes: bool, shapes: bool = True) -> Path:
    tensor = LayerTensor(name="x [profile 1]", dtype="unknown", format="", shape=(-1, 3, 4, 4))
    quantise = EngineLayer(name="x_QuantizeLinear [profile 1]", kind="Reformat", operation="Reformat", inputs=(tensor,))
    copy = EngineLayer(name="Reformatting CopyNode for y", kind="Reformat", operation="Reformat")
    conv = EngineLayer(name="c_QuantizeLinear + c", kind="CaskConvolution", operation="Convolution", inputs=(tensor,))
    layers = (quantise, copy, conv) if passes else (conv,)
    view = EngineView(
        target="tensorrt",
        tensorrt="8.6.0",
        built_on="a card",
        layers=layers,
        times_ms={layer.name: time for layer, time in zip(layers, (0.5, 0.01, 2.0), strict=False)},
        shapes={"x": (2, 3, 4, 4)} if shapes else {},
        findings=(),
    )
    path.write_text(json.dumps(view.model_dump(mode="json")))
    return path


def floats(path: Path) -> Path:
    view = json.loads(table(path, passes=False).read_text())
    view["layers"][0]["name"] = "c"
    view["times_ms"] = {"c": 3.0}
    path.write_text(json.dumps(view))
    return path


def test_the_pass_over_the_input_gives_the_rate(tmp_path: Path) -> None:
    float_ = floats(tmp_path / "float.json")
    found = pass_times(table(tmp_path / "int8.json", passes=True), float_)
    assert found == Passes(pytest.approx(0.5 / (5 * 96)), 0.01, {"x": (2, 3, 4, 4)})
    assert pass_times(table(tmp_path / "none.json", passes=False), float_) is None
    assert pass_times(table(tmp_path / "shapeless.json", passes=True, shapes=False), float_) is None


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables are not here")
def test_the_measured_mixed_engine(tmp_path: Path) -> None:
    """EfficientNet-Lite0 at batch 64 with four nodes in float: 0.050 ms by the layers alone; the engine lost 0.212."""
    paths = []
    for kind in ("int8", "fp16"):
        paths.append(tmp_path / f"{kind}.json")
        packed = MEASURED / f"layer-times-efficientnet-lite0-{kind}-64.json.xz"
        paths[-1].write_bytes(lzma.decompress(packed.read_bytes()))
    passes = pass_times(*paths)
    assert passes is not None
    wide = {"stem": 32 * 112 * 112, "block 14": 192 * 7 * 7, "mean": 1280}
    narrow = {"block 0": 16 * 112 * 112, "block 15": 1152 * 7 * 7}
    borders_ms = sum(passes.ms(9 * 64 * values) for values in wide.values())
    borders_ms += sum(passes.ms(3 * 64 * values) for values in narrow.values())
    assert 0.0499 + borders_ms == pytest.approx(0.212, rel=0.05)
