"""Whole experiments on a small network: the same table everywhere, nothing measured twice, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.cli.compare import command
from pipeline.compare.config import CompareConfig
from pipeline.compare.experiment import run_experiment
from pipeline.compare.records import Outcome
from pipeline.config import validated
from pipeline.core.errors import InputError
from pipeline.core.feeds import as_taken, session_dtypes
from pipeline.core.ort import make_session
from pipeline.core.progress import SilentProgress
from tests.compare.networks import classifier, images

COUNT = 120
SAMPLES = 48


class Lines(SilentProgress):
    """Keeps what an experiment says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)

    warn = note


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model, data and labels; the labels are FP32's own answers but for a few."""
    folder = tmp_path_factory.mktemp("given")
    model = classifier(folder / "model.onnx")
    values = images(COUNT)
    np.save(folder / "data.npy", values)
    (scores,) = make_session(model).run(["scores"], {"x": values})
    labels = scores.argmax(axis=1)
    labels[::9] = (labels[::9] + 1) % 10
    lines = [f"{index},{label}" for index, label in enumerate(labels)]
    (folder / "labels.csv").write_text("\n".join(["index,class_index", *lines]) + "\n")
    return folder


def config(given: Path, out: Path, **changes: Any) -> CompareConfig:
    values = {
        "model": str(given / "model.onnx"),
        "data": str(given / "data.npy"),
        "labels": given / "labels.csv",
        "out": out,
        "samples": SAMPLES,
        "calibrators": ("minmax", "percentile(99)", "legacy(0.99)"),
        "workers": 1,
        **changes,
    }
    return CompareConfig(**values)


def tables(out: Path) -> tuple[bytes, bytes, list[dict[str, Any]]]:
    document = json.loads((out / "compare.json").read_text())
    return (out / "compare.csv").read_bytes(), (out / "compare.parquet").read_bytes(), document["rows"]


@pytest.fixture(scope="module")
def shifted(given: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path, Lines]:
    """The experiment that most tests look at: two strengths of noise and one kind of image shift, one worker."""
    out = tmp_path_factory.mktemp("shifted")
    said = Lines()
    outcome = run_experiment(
        config(given, out, shift_sigma=(0.0, 0.2, 1.0), shift_images=("brightness",)), progress=said
    )
    return outcome, out, said


def test_every_graph_is_measured_under_every_shift(shifted: tuple[Outcome, Path, Lines]) -> None:
    outcome, _, _ = shifted
    conditions = [("none", 0.0), ("activations", 0.2), ("activations", 1.0)]
    conditions += [("brightness", float(grade)) for grade in (1, 2, 3)]
    for label in ("fp32", "minmax", "percentile 99", "legacy quantile=0.99"):
        found = [(row["shift"], row["strength"]) for row in outcome.table if row["calibrator"] == label]
        assert found == conditions
    assert {row["samples"] for row in outcome.table} == {COUNT - SAMPLES}
    assert {row["draws"] for row in outcome.table if row["shift"] == "activations"} == {2}
    assert outcome.score.figure == "top1"


def test_the_figures_are_those_of_the_graphs(shifted: tuple[Outcome, Path, Lines], given: Path) -> None:
    """Against a plain evaluation of the INT8 file that the quantise stage wrote."""
    outcome, out, _ = shifted
    minmax = outcome.measured[0]
    (path,) = [
        folder / "model.int8.onnx"
        for folder in (out / ".work").glob("quantize-*")
        if minmax.graph in (folder / "stage.json").read_text()
    ]
    numbers = outcome.document["data"]["samples"]
    x = np.load(given / "data.npy")[numbers]
    labels = [int(line.split(",")[1]) for line in (given / "labels.csv").read_text().splitlines()[1:]]
    expected = np.array([labels[number] for number in numbers])
    (scores,) = make_session(path, optimise=False).run(["scores"], {"x": x})
    (float_scores,) = make_session(given / "model.onnx").run(["scores"], {"x": x})
    row = next(row for row in outcome.table if row["calibrator"] == "minmax" and row["shift"] == "none")
    assert row["top1"] == (scores.argmax(axis=1) == expected).mean()
    assert row["agreement"] == (scores.argmax(axis=1) == float_scores.argmax(axis=1)).mean()
    relative = np.linalg.norm(scores - float_scores, axis=1) / np.linalg.norm(float_scores, axis=1)
    assert row["relative_l2"] == pytest.approx(relative.mean(), rel=1e-4)
    reference = next(row for row in outcome.table if row["calibrator"] == "fp32")
    assert reference["top1"] == (float_scores.argmax(axis=1) == expected).mean()
    assert row["drop_from_clean"] == pytest.approx(reference["top1"] - row["top1"])


def test_more_noise_moves_the_outputs_further(shifted: tuple[Outcome, Path, Lines]) -> None:
    """FP32 and INT8 get the same noise, so their distance grows little, and both lose top-1."""
    outcome, _, _ = shifted
    for label in ("fp32", "minmax"):
        top1 = [row["top1"] for row in outcome.table if row["calibrator"] == label][:3]
        assert top1[0] > top1[1] > top1[2]
    minmax = [row for row in outcome.table if row["calibrator"] == "minmax"]
    assert minmax[2]["agreement"] > 0.9
    assert minmax[2]["drop_from_clean"] > minmax[2]["drop_from_shifted"] + 0.02


def test_graphs_that_are_the_same_are_measured_once(shifted: tuple[Outcome, Path, Lines]) -> None:
    outcome, _, said = shifted
    assert "legacy quantile=0.99 gives the same graph as percentile 99: evaluated once" in said.lines
    assert not any(line.startswith("legacy quantile=0.99,") for line in said.lines)
    first, second = outcome.measured[1:]
    assert first.graph == second.graph
    assert all(np.array_equal(first.clean[name], second.clean[name]) for name in first.clean)


def test_clipping_is_told_from_the_calibration_data(shifted: tuple[Outcome, Path, Lines]) -> None:
    minmax, percentile, _ = shifted[0].measured
    assert minmax.clipping_share == 0.0
    assert percentile.clipping_share == pytest.approx(0.01, rel=0.5)


def test_the_reports_are_there_and_need_no_network(shifted: tuple[Outcome, Path, Lines]) -> None:
    _, out, _ = shifted
    names = {path.name for path in out.iterdir() if path.is_file()}
    assert names == {
        "compare.csv",
        "compare.html",
        "compare.json",
        "compare.parquet",
        "layers.png",
        "scatter.png",
        "shift-activations.png",
        "shift-brightness.png",
    }
    html = (out / "compare.html").read_text()
    assert html.count("data:image/png;base64,") == 4
    assert "http://" not in html
    assert "https://" not in html
    assert any(text in html for text in ("cannot be told apart", "worse", "exactly as good", "same graph"))
    document = json.loads((out / "compare.json").read_text())
    assert document["config"]["shift_sigma"] == [0.0, 0.2, 1.0]
    assert document["seeds"] == {"experiment": 0, "shift_draws": 2}
    assert {"numpy", "onnxruntime"} <= document["tools"].keys()
    assert len(document["data"]["sha256"]) == 64
    assert document["recommendation"]["calibrator"] in {"minmax", "percentile 99", "legacy quantile=0.99"}


def test_four_workers_give_the_same_table_to_the_bit(
    shifted: tuple[Outcome, Path, Lines], given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.compare.workers._ray_installed", lambda: False)
    run_experiment(config(given, tmp_path, shift_sigma=(0.0, 0.2, 1.0), shift_images=("brightness",), workers=4))
    assert tables(tmp_path) == tables(shifted[1])


@pytest.mark.slow
def test_ray_gives_the_same_table_to_the_bit(given: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray (extra 'cluster') is not installed")
    changes = {"calibrators": ("minmax",), "shift_sigma": (0.2,), "shift_draws": 1}
    run_experiment(config(given, tmp_path / "here", **changes))
    said = Lines()
    run_experiment(config(given, tmp_path / "ray", workers=2, **changes), progress=said)
    assert "Ray: 2 evaluations at a time on 1 machine(s)" in said.lines
    assert tables(tmp_path / "ray") == tables(tmp_path / "here")


def test_one_more_calibrator_measures_only_that_one(given: Path, tmp_path: Path) -> None:
    run_experiment(config(given, tmp_path, calibrators=("minmax",), shift_sigma=(0.1,), shift_draws=1))
    said = Lines()
    outcome = run_experiment(
        config(given, tmp_path, calibrators=("minmax", "entropy"), shift_sigma=(0.1,), shift_draws=1), progress=said
    )
    assert sorted(outcome.document["runs"]["measured_seconds"]) == [
        "entropy, layers",
        "entropy, no shift",
        "entropy, noise 0.1",
    ]
    assert any(line.startswith("minmax, no shift: top-1") and line.endswith("(kept)") for line in said.lines)
    # Another shift leaves what is there valid as well.
    more = run_experiment(
        config(given, tmp_path, calibrators=("minmax",), shift_sigma=(0.1,), shift_draws=1, shift_images=("blur",))
    )
    assert set(more.document["runs"]["measured_seconds"]) == {
        f"{label}, image blur {grade}" for label in ("fp32", "minmax") for grade in (1, 2, 3)
    }
    fresh = run_experiment(config(given, tmp_path, calibrators=("minmax",)), fresh=True)
    assert "minmax, no shift" in fresh.document["runs"]["measured_seconds"]


def test_fewer_calibration_samples(given: Path, tmp_path: Path) -> None:
    outcome = run_experiment(
        config(given, tmp_path, calibrators=("minmax",), calibration_sizes=(4, 16, SAMPLES), calibration_subsets=2)
    )
    rows = [row for row in outcome.table if row["calibrator"] == "minmax"]
    assert [(row["calibration_samples"], row["calibration_subset"]) for row in rows] == [
        (SAMPLES, None),
        (4, 0),
        (4, 1),
        (16, 0),
        (16, 1),
    ]
    assert len({item.graph for item in (*outcome.measured, *outcome.subsets)}) == 5
    assert (tmp_path / "sizes.png").stat().st_size > 1000
    amax = {}
    for item in outcome.subsets:
        amax[item.calibration_samples, item.subset] = item.clipping_share
    assert set(amax) == {(4, 0), (4, 1), (16, 0), (16, 1)}


def test_a_metric_decides_and_keeps_what_is_finished_when_it_fails(given: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def metric(outputs, samples, labels):\n    return outputs['scores'][:, 0]\n")
    out = tmp_path / "out"
    good = config(given, out, calibrators=("minmax",), metric=f"{file}:metric", labels=None, verify_samples=30)
    outcome = run_experiment(good)
    assert outcome.score.figure == "metric"
    row = outcome.table[1]
    assert row["metric_low"] < row["metric"] < row["metric_high"]
    assert row["drop_from_clean"] == pytest.approx(outcome.table[0]["metric"] - row["metric"])

    # Now it fails for the INT8 graph alone: its output of sample 0 is not FP32's.
    body = (
        "def metric(outputs, samples, labels):\n"
        f"    values = outputs['scores'][:, 0]\n    if abs(values[0] - {_first_score(given, outcome)!r}) > 1e-6:\n"
        "        raise ValueError('not for INT8')\n    return values\n"
    )
    file.write_text(body)
    with pytest.raises(InputError, match=r"minmax, no shift: .*mine\.py:metric failed: ValueError: not for INT8"):
        run_experiment(good)
    file.write_text(body.replace("raise ValueError('not for INT8')", "values[0] = float('nan')"))
    with pytest.raises(InputError, match=r"minmax, no shift: the metric .*mine\.py:metric gave nan for sample"):
        run_experiment(good)
    file.write_text(body)
    said = Lines()
    with pytest.raises(InputError, match="not for INT8"):
        run_experiment(good, progress=said)
    assert any(line.startswith("fp32, no shift") and line.endswith("(kept)") for line in said.lines)


def _first_score(given: Path, outcome: Outcome) -> float:
    number = outcome.document["data"]["samples"][0]
    (scores,) = make_session(given / "model.onnx", threads=1).run(
        ["scores"], {"x": np.load(given / "data.npy")[number : number + 1]}
    )
    return float(scores[0, 0])


def test_labels_of_another_model_are_refused_before_anything_is_quantised(given: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("\n".join(["index,class_index", *(f"{i},{i % 20}" for i in range(COUNT))]) + "\n")
    with pytest.raises(
        InputError, match=r"fp32, no shift: sample \d+ has label 1\d, but output 'scores' has 10 classes"
    ):
        run_experiment(config(given, tmp_path / "out", labels=labels))
    assert not list((tmp_path / "out" / ".work").glob("quantize-*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibrators": ("entorpy",)}, "unknown calibrator 'entorpy'; did you mean 'entropy'"),
        ({"samples": 115}, "5 samples are held aside, too few to tell calibrators apart"),
        ({"samples": 120}, "all samples calibrate, none is held aside to compare on"),
        ({"calibration_sizes": (64,)}, "a calibration size of 64 is asked for, 48 samples calibrate"),
        ({"metric": "accuracy"}, "--metric 'accuracy' is not file.py:callable"),
        ({"labels": Path("nowhere.csv")}, "labels nowhere.csv do not exist"),
    ],
)
def test_what_cannot_be_measured_is_said(given: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_experiment(config(given, tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shift_sigma": (-0.1,)}, "a standard deviation must not be negative, got -0.1"),
        ({"shift_images": ("blurr",)}, "unknown image shift 'blurr'; did you mean 'blur'"),
        ({"calibration_sizes": (0,)}, "a calibration size must be at least 1, got 0"),
        ({"shift_draw": 3}, "unknown key 'shift_draw'; did you mean 'shift_draws'"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    values = {"model": "m.onnx", "data": "d.npy", "out": "o", **changes}
    with pytest.raises(InputError, match=message):
        validated(CompareConfig, values, origin="options")


def test_a_network_without_activation_layers_has_no_noise(tmp_path: Path) -> None:
    from onnx import helper, save

    from tests.compare.networks import graph

    weights = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    save(graph(nodes, {"x": ["N", 3, 16]}, {"y": ["N", 3, 64]}, {"w": weights}), tmp_path / "model.onnx")
    np.save(tmp_path / "data.npy", np.random.default_rng(1).standard_normal((60, 3, 16)).astype(np.float32))
    values = {"model": str(tmp_path / "model.onnx"), "data": str(tmp_path / "data.npy"), "out": tmp_path / "out"}
    with pytest.raises(InputError, match="the model has no activation layer"):
        run_experiment(CompareConfig(**values, samples=30, shift_sigma=(0.1,)))


def _behind_a_sigmoid(given: Path, folder: Path, shift: float) -> Path:
    """The scores less ``shift`` behind a sigmoid, whose range is known."""
    import onnx

    model = onnx.load(given / "model.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(shift), "shift"))
    model.graph.node.append(onnx.helper.make_node("Sub", ["scores", "shift"], ["lower"], "sub"))
    model.graph.node.append(onnx.helper.make_node("Sigmoid", ["lower"], ["share"], "sigmoid"))
    model.graph.output[0].name = "share"
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_samples_that_are_almost_zero_are_left_out_and_said(given: Path, tmp_path: Path) -> None:
    (scores,) = make_session(given / "model.onnx").run(["scores"], {"x": np.load(given / "data.npy")})
    largest = scores.max(axis=1)
    shift = float(np.median(largest)) + 6.9  # a sigmoid of less than -6.9 is below 0.001
    model = _behind_a_sigmoid(given, tmp_path, shift)
    said = Lines()
    changes = {"model": str(model), "labels": None, "calibrators": ("minmax", "percentile(99)")}
    outcome = run_experiment(config(given, tmp_path / "out", **changes, shift_sigma=(0.1,)), progress=said)
    held = [int(number) for number in outcome.document["data"]["samples"]]
    zero = 1 / (1 + np.exp(shift - largest[held])) < 1e-3
    assert 0 < zero.sum() < len(held)
    (reason,) = (text for text in outcome.recommendation.reasons if "almost zero" in text)
    assert reason.startswith(f"FP32's output 'share' is almost zero in {zero.sum()} of 64 samples (below 0.001 of its")
    assert reason in said.lines
    assert reason in json.loads((tmp_path / "out" / "compare.json").read_text())["recommendation"]["reasons"]
    for item in outcome.measured:
        errors = item.clean["relative_l2"]
        assert np.array_equal(np.isnan(errors), zero)
        assert np.array_equal(item.clean["left_out"] > 0, zero)
        (row,) = (row for row in outcome.table if row["calibrator"] == item.label and row["shift"] == "none")
        assert row["relative_l2"] == pytest.approx(np.nanmean(errors))
        assert row["relative_l2_low"] < row["relative_l2"] < row["relative_l2_high"]
        assert row["sqnr_db"] == pytest.approx(-10 * np.log10(np.nanmean(errors**2)))
        assert row["agreement"] is None, "an output behind a sigmoid has no class scores"
    assert f"on {len(held) - zero.sum()} samples" in outcome.recommendation.reasons[0]


def test_nothing_but_almost_zero_cannot_be_compared(given: Path, tmp_path: Path) -> None:
    model = _behind_a_sigmoid(given, tmp_path, 40.0)
    changes = {"model": str(model), "labels": None, "calibrators": ("minmax",)}
    with pytest.raises(InputError, match="or FP32 is almost zero in all samples"):
        run_experiment(config(given, tmp_path / "out", **changes))


@pytest.mark.parametrize("figure", ["top1", "agreement", "relative_l2"])
def test_the_table_fits_a_terminal_of_80_columns(
    figure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    from pipeline.cli.compare import print_outcome
    from pipeline.compare.measured import Score

    monkeypatch.setenv("COLUMNS", "80")
    names = ("ema-percentile decay=0.95", "legacy quantile=0.999")
    table = [
        {
            "shift": "none",
            "calibration_subset": None,
            "calibrator": name,
            **{figure: 1.0, f"{figure}_low": 0.999, f"{figure}_high": 1.0},
            "sqnr_db": 40.12,
            "clipping_share": 0.000123,
        }
        for name in names
    ]
    other = SimpleNamespace(calibrator=names[1], same_graph=False, told_apart=True, tied=False, difference=0.012)
    advice = SimpleNamespace(best=names[0], calibrator=names[0], reasons=("why",), comparisons=[other])
    outcome = SimpleNamespace(score=Score(figure), recommendation=advice, table=table, samples=5, folder=Path("folder"))
    print_outcome(outcome, None)
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    assert all(text in shown for text in (*names, "0.0123", "40.1", "best", "yes", "take ema-percentile decay=0.95"))


def test_the_command_line(given: Path, tmp_path: Path) -> None:
    arguments = [str(given / "model.onnx"), "--data", str(given / "data.npy"), "--out", str(tmp_path / "out")]
    arguments += ["--labels", str(given / "labels.csv"), "--samples", str(SAMPLES), "--workers", "1"]
    arguments += ["--calibrators", "minmax,percentile(99)", "--shift-sigma", "0,0.2", "--shift-draws", "1", "-q"]
    found = CliRunner().invoke(command, [*arguments, "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert [row["strength"] for row in document["rows"]] == [0.0, 0.2] * 3
    assert document["artifact"] is None
    shown = CliRunner().invoke(command, [argument for argument in arguments if argument != "-q"])
    assert shown.exit_code == 0, shown.output
    assert f"take {document['recommendation']['calibrator']}" in shown.stdout
    wrong = CliRunner().invoke(command, [*arguments, "--calibrators", "minmx"])
    assert wrong.exit_code == 2
    assert "did you mean 'minmax'?" in wrong.stderr
    numbers = CliRunner().invoke(command, [*arguments, "--shift-sigma", "little"])
    assert numbers.exit_code == 2
    assert "'--shift-sigma': 'little' is not a valid float" in numbers.stderr
    missing = CliRunner().invoke(command, ["model.onnx", "--out", str(tmp_path)])
    assert missing.exit_code == 2
    assert "--data is missing" in missing.stderr


def test_the_recommended_artifact_is_built_from_the_same_statistics(given: Path, tmp_path: Path) -> None:
    from pipeline.artifact import Artifact
    from pipeline.cli.compare import command

    arguments = [str(given / "model.onnx"), "--data", str(given / "data.npy"), "--out", str(tmp_path / "out")]
    arguments += ["--labels", str(given / "labels.csv"), "--samples", str(SAMPLES), "--calibrators", "percentile(99)"]
    (tmp_path / "c.yaml").write_text("targets: [onnx]\nprofiles: ['x=1x3x8x8,4x3x8x8,8x3x8x8']\n")
    found = CliRunner().invoke(command, [*arguments, "--build", "--json", "-q", "-c", str(tmp_path / "c.yaml")])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    artifact = Artifact.open(Path(document["artifact"]))
    assert artifact.manifest.calibration.calibrator == "percentile"
    assert artifact.manifest.calibration.params == {"percentile": 99.0}
    graphs = {row["graph"] for row in document["rows"] if row["calibrator"] == "percentile 99"}
    assert graphs == {artifact.manifest.files["model.int8.onnx"].sha256}


class _Card:
    """A stand-in for TensorRT: the engine is the graph itself, run by onnxruntime within the engine's profile."""

    def __init__(self, plan: Path, *, target: str, record: Any) -> None:
        self.session = make_session(plan, threads=1)
        self.profile = record
        self.inputs = self.session.get_inputs()
        self.outputs = self.session.get_outputs()

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, values in feeds.items():
            assert self.profile.inputs[name].contains(values.shape), (name, values.shape)
        names = [output.name for output in self.outputs]
        return dict(zip(names, self.session.run(names, feeds), strict=True))

    def taken(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return as_taken(feeds, session_dtypes(self.session))

    def close(self) -> None:
        """Nothing to free."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from types import SimpleNamespace

    from pipeline import build as stage
    from pipeline.config import Profile
    from pipeline.core.files import write_bytes, write_text

    built: list[Any] = []

    def build(model: Path, *, target: str, profiles: Any, folder: Path, options: Any, progress: Any) -> Any:
        built.append((model, profiles[0]))
        write_bytes(folder / "model.plan", model.read_bytes())
        write_text(folder / "build.json", profiles[0].model_dump_json())
        return stage.BuildResult(target=target, engine=None).at(folder)

    works = SimpleNamespace(works=True, version="test", reason="")
    monkeypatch.setattr("pipeline.engine.probe.probe", lambda target: works)
    monkeypatch.setattr("pipeline.engine.device.describe_device", lambda: "a card")
    monkeypatch.setattr("pipeline.build.run", build)
    monkeypatch.setattr("pipeline.engine.records.EngineRecord", Profile)
    monkeypatch.setattr("pipeline.engine.runner.Runner", _Card)
    return built


def test_target_tensorrt_gives_every_graph_an_engine_and_one_for_noise(
    given: Path, tmp_path: Path, card: list[Any]
) -> None:
    changes = {"calibrators": ("minmax", "percentile(99)"), "shift_sigma": (0.3,), "shift_images": ("blur",)}
    engines = run_experiment(config(given, tmp_path / "engines", target="tensorrt", **changes))
    plain = run_experiment(config(given, tmp_path / "plain", **changes))
    assert len(card) == 4
    assert {tuple(sorted(profile.inputs)) for _, profile in card} == {("x",), ("noise:r1", "noise:r2", "x")}
    assert all(str(profile.inputs["x"]).startswith("1x3x8x8,") for _, profile in card)
    assert engines.table == plain.table
    again = run_experiment(config(given, tmp_path / "engines", target="tensorrt", **changes))
    assert len(card) == 4
    assert again.table == engines.table


def test_target_tensorrt_without_a_card_is_refused(given: Path, tmp_path: Path) -> None:
    from pipeline.engine.probe import probe

    if probe("tensorrt").works:
        pytest.skip("TensorRT works here")
    with pytest.raises(InputError, match="target tensorrt does not work here"):
        run_experiment(config(given, tmp_path, target="tensorrt"))


def test_target_tensorrt_takes_no_workers() -> None:
    values = {"model": "m.onnx", "data": "d.npy", "out": "o", "target": "tensorrt", "workers": 2}
    with pytest.raises(InputError, match="target tensorrt uses the card in this machine"):
        validated(CompareConfig, values, origin="options")
