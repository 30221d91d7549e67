"""Tensors that vanish in a scale which they share: seen, said, and the remedy that is named works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import calibrators
from calibrators import TensorStatistics
from calibrators.accumulate import add_batch
from pipeline import calibrate, quantize, verify
from pipeline.cli.build import command
from pipeline.config import PlacementConfig
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch
from pipeline.placement import ActivationPoint, make_plan
from pipeline.shared_scales import Drowned, describe, drowned, rounding_loss
from tests.placement.tiny import Tiny

MINMAX = calibrators.get("minmax")


def concat(factor: float = 1e3) -> Tiny:
    """Branch "a", and "b" that is ``factor`` times larger, into a Concat whose reader makes up for it ("y"); and "a"
    with a small copy of "b" into a second Concat ("z")."""
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    a = net.op("Relu", [net.conv(x, "c1", 16, 32)], "a")
    net.constant("w", net.random.standard_normal((32, 16, 3, 3)) * 0.2 * factor)
    b = net.op("Relu", [net.op("Conv", [x, "w"], "c2", pads=[1] * 4)], "b")
    net.constant("w2", np.concatenate([np.ones((32, 32, 1, 1)), np.full((32, 32, 1, 1), 1 / factor)], axis=1))
    net.constant("least", 1 / factor)
    net.op("Conv", [net.op("Concat", [a, b], "ab", axis=1), "w2"], "y")
    net.conv(net.op("Concat", [a, net.op("Mul", [b, "least"], "c")], "ac", axis=1), "z", 64, 32)
    return net


def selected(op: str) -> Tiny:
    """The first half of the channels is a thousandth of the second; both are selected, by Slice or Split."""
    net = Tiny()
    weights = net.random.standard_normal((32, 16, 3, 3)) * 0.2
    weights[16:] *= 1000
    net.constant("w", weights)
    y = net.op("Relu", [net.op("Conv", [net.input("x", "n", 16, 8, 8), "w"], "conv", pads=[1] * 4)], "relu")
    if op == "Split":
        net.constant("sizes", [16, 16], np.int64)
        net.op("Split", [y, "sizes"], "low", "high", axis=1)
    else:
        for name, start in (("low", 0), ("high", 16)):
            net.constant(f"{name}.start", [start], np.int64)
            net.constant(f"{name}.end", [start + 16], np.int64)
            net.constant(f"{name}.axis", [1], np.int64)
            net.op("Slice", [y, f"{name}.start", f"{name}.end", f"{name}.axis"], name)
    net.conv("low", "y", 16, 16)
    net.conv("high", "z", 16, 16)
    return net


DATA = np.random.default_rng(0).standard_normal((8, 16, 8, 8)).astype(np.float32)


def quantised(
    net: Tiny, folder: Path, *exclude: str, calibrator: str = "minmax"
) -> tuple[quantize.QuantizeResult, verify.VerifyResult, list[float]]:
    """The quantise and the verify stage, and the relative L2 of each output."""
    folder.mkdir()
    path = net.save(folder, "y", "z")
    config = PlacementConfig(exclude=exclude)
    plan = make_plan(path, config)
    batches = [Batch(0, tuple(range(4)), {"x": DATA[:4]}), Batch(1, tuple(range(4, 8)), {"x": DATA[4:]})]
    calibrated = calibrate.run(path, plan.tensors, batches, folder=folder / "calibrate")
    statistics, _ = calibrators.load_statistics(calibrated.statistics_path)
    chosen = calibrators.get(calibrator)
    result = quantize.run(path, plan, statistics, chosen, folder=folder / "quantize", config=config)
    (folder / "verify").mkdir()
    verified = verify.run(path, result.model_path, plan, batches, folder=folder / "verify")
    wanted, found = (
        make_session(model, optimise=False).run(None, {"x": DATA}) for model in (path, result.model_path)
    )
    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in zip(wanted, found, strict=True)]
    return result, verified, errors


@pytest.mark.parametrize("calibrator", ["minmax", "mse", "entropy", "percentile"])
def test_a_small_branch_of_a_concat(tmp_path: Path, calibrator: str) -> None:
    result, verified, errors = quantised(concat(), tmp_path / "a", calibrator=calibrator)
    assert min(errors) > 0.5
    (text,) = [text for text in result.warnings if "has the scale of" in text]
    found = re.fullmatch(
        r"'a' has the scale of 'b', made for values up to (\S+): its own end at (\S+), (\S+) of the 127 steps, and "
        r"100 % of its signal is lost \((\S+) % with a scale of its own\); so it is with 'c'; --exclude 'y' parts the "
        r"scales",
        text,
    )
    assert found is not None, text
    shared, own, steps, alone = map(float, found.groups())
    assert shared > 500 * own
    assert steps == pytest.approx(127 * own / shared, rel=0.05)
    assert alone < 1
    assert verified.drowned == ()
    result, _, errors = quantised(concat(), tmp_path / "b", "y", calibrator=calibrator)
    assert max(errors) < 0.05
    assert not [text for text in result.warnings if "has the scale of" in text]


def test_branches_of_like_ranges_are_fine(tmp_path: Path) -> None:
    for number, factor in enumerate((1.0, 4.0)):
        result, verified, errors = quantised(concat(factor), tmp_path / f"{number}")
        assert max(errors) < 0.1
        assert (result.warnings, verified.drowned) == ((), ())


def test_a_concat_of_a_concat(tmp_path: Path) -> None:
    """The values of both are read behind two; the reader behind the second is the one to keep float."""
    net = Tiny()
    x = net.input("x", "n", 16, 8, 8)
    net.constant("w", net.random.standard_normal((16, 16, 3, 3)) * 200)
    small, other = net.conv(x, "small", 16, 16), net.conv(x, "other", 16, 16)
    inner = net.op("Concat", [small, other], "inner", axis=1)
    large = net.op("MaxPool", [net.op("Conv", [x, "w"], "large", pads=[1] * 4)], "pool", kernel_shape=[1, 1])
    net.conv(net.op("Concat", [inner, large], "outer", axis=1), "y", 48, 16)
    net.conv("small", "z", 16, 16)
    result, _, errors = quantised(net, tmp_path / "a")
    assert errors[1] > 0.9
    (text,) = result.warnings
    assert text.startswith("'small' has the scale of 'pool'")
    assert text.endswith("; so it is with 'other'; --exclude 'y' parts the scales")
    result, _, errors = quantised(net, tmp_path / "b", "y")
    assert max(errors) < 0.05
    assert result.warnings == ()


@pytest.mark.parametrize("op", ["Slice", "Split"])
def test_a_small_selection_is_seen_by_the_verification(tmp_path: Path, op: str) -> None:
    result, verified, errors = quantised(selected(op), tmp_path / "a")
    assert errors[0] > 0.9
    assert result.warnings == ()
    (item,) = verified.drowned
    assert (item.tensor, item.beside, item.exclude) == ("low", "relu", ("low",))
    assert item.loss > 0.99 > 0.01 > item.alone
    assert item.steps < 1
    text = next(verify.doubts(verified))
    assert text.startswith("'low' has the scale of 'relu', made for values up to ")
    assert text.endswith("; --exclude 'low' parts the scales")
    assert verify.VerifyResult.model_validate_json(verified.model_dump_json()).drowned == verified.drowned
    _, verified, errors = quantised(selected(op), tmp_path / "b", "low")
    assert max(errors) < 0.05
    assert verified.drowned == ()


def test_without_a_remedy_that_works_none_is_named(tmp_path: Path) -> None:
    """The node to exclude is asked for by --include."""
    folder = tmp_path / "a"
    folder.mkdir()
    path = concat().save(folder, "y", "z")
    config = PlacementConfig(include=("y",))
    plan = make_plan(path, config)
    batch = Batch(0, tuple(range(8)), {"x": DATA})
    calibrated = calibrate.run(path, plan.tensors, [batch], folder=folder / "calibrate")
    statistics, _ = calibrators.load_statistics(calibrated.statistics_path)
    result = quantize.run(path, plan, statistics, MINMAX, folder=folder / "quantize", config=config)
    (text,) = result.warnings
    assert text.endswith("so it is with 'c'")


def statistic(values: np.ndarray[Any, Any]) -> TensorStatistics:
    found = TensorStatistics()
    add_batch(found, values.astype(np.float32), 0)
    return found


@pytest.mark.parametrize("steps", [0.3, 2.0, 9.0, 40.0, 127.0, 400.0])
def test_rounding_loss_is_that_of_the_values(steps: float) -> None:
    values = np.random.default_rng(3).laplace(size=200_000)
    values *= steps / np.abs(values).max()
    rounded = np.clip(np.rint(values), -127, 127)
    wanted = ((values - rounded) ** 2).sum() / (values**2).sum()
    assert rounding_loss(statistic(values), 127.0) == pytest.approx(wanted, rel=0.02)


def test_rounding_loss_of_nothing_is_none() -> None:
    assert rounding_loss(TensorStatistics(), 1.0) == 0.0
    assert rounding_loss(statistic(np.zeros(10)), 1.0) == 0.0


def judged(small: np.ndarray[Any, Any], large: np.ndarray[Any, Any]) -> list[str]:
    points = [ActivationPoint(tensor=name, consumers=(), rule="r", group="g") for name in ("small", "large")]
    points.append(ActivationPoint(tensor="derived", consumers=(), rule="r", group="g", source="small"))
    statistics = {"small": statistic(small), "large": statistic(large)}
    amax = max(item.amax for item in statistics.values())
    return [item.tensor for item in drowned(points, statistics, dict.fromkeys(("small", "large"), amax), MINMAX)]


def test_the_signal_counts_and_not_the_range() -> None:
    """Heavy tails: a large maximum saves a tensor whose signal is small as little as it condemns one of zeros."""
    random = np.random.default_rng(1)
    normal = random.standard_normal(100_000)
    assert judged(normal, 1000 * normal) == ["small"]
    assert judged(normal, 8 * normal) == []
    spiked = normal.copy()
    spiked[0] = 60.0  # half of the scale's range, and yet the rest of it is lost, as it would be alone
    assert judged(spiked / 40, normal * 0.75) == []
    sparse = np.zeros(100_000)
    sparse[:10] = 40.0
    assert judged(sparse, 8 * normal) == []
    assert judged(np.zeros(1000), normal) == []


def test_sentences_are_one_for_each_cause() -> None:
    def item(name: str, loss: float, beside: str = "big", exclude: tuple[str, ...] = ("n",)) -> Drowned:
        return Drowned(tensor=name, amax=1.0, shared=254.0, loss=loss, alone=0.001, beside=beside, exclude=exclude)

    found = describe([item("a", 0.5), item("b", 0.9), *(item(f"c{k}", 0.4) for k in range(4)), item("d", 0.2, "huge")])
    assert found == [
        "'b' has the scale of 'big', made for values up to 254: its own end at 1, 0.5 of the 127 steps, and 90 % of "
        "its signal is lost (0.1 % with a scale of its own); so it is with 'a', 'c0', 'c1' and 2 more; --exclude 'n' "
        "parts the scales",
        "'d' has the scale of 'huge', made for values up to 254: its own end at 1, 0.5 of the 127 steps, and 20 % of "
        "its signal is lost (0.1 % with a scale of its own); --exclude 'n' parts the scales",
    ]
    assert describe([]) == []


def test_a_build_says_it(tmp_path: Path) -> None:
    for number, (net, words) in enumerate(((concat(), "'a' has the scale of 'b'"), (selected("Slice"), "'low' has"))):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        path = net.save(folder, "y", "z")
        np.save(folder / "data.npy", np.concatenate([DATA, DATA]))
        profile = "x=1x16x8x8,4x16x8x8,8x16x8x8"
        arguments = ["--data", str(folder / "data.npy"), "--target", "onnx", "--profile", profile]
        found = CliRunner().invoke(command, [str(path), *arguments, "--out", str(folder / "out")])
        assert found.exit_code == 0, found.output
        assert words in " ".join(found.output.split())
        assert words in (folder / "out" / "manifest.json").read_text().replace('\\"', '"')
