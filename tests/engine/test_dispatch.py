"""Serving two plans behind one interface (fake card): int8 doubles its inputs, float triples them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.artifact import Artifact
from pipeline.cli import bench, build, inspect
from pipeline.core.errors import CheckFailed, InputError, ToolError
from pipeline.engine import from_artifact, suite
from pipeline.engine.bench import Candidate, measure_compute
from pipeline.engine.dispatch import FastestRunner, float_engine, serve
from pipeline.engine.fastest import Fastest
from pipeline.engine.from_artifact import ArtifactBuild
from pipeline.engine.runner import Runner
from pipeline.engine.view import view_engine
from tests.engine.artifacts import add_float_plan, make_artifact
from tests.engine.conftest import CARD
from tests.engine.fakes import plan
from tests.engine.records import record
from tests.engine.test_view import OLD, with_layers

SIZES = (((1, 3),) * 3, ((2, 3), (4, 3), (8, 3)))


def rows(count: int, value: float = 1.0) -> dict[str, np.ndarray]:
    return {"x": np.full((count, 3), value, np.float32)}


def pair(float_profiles: set[int], sizes: tuple = SIZES, **options: object) -> FastestRunner:
    return FastestRunner(
        Runner(plan(profiles=SIZES), **options), Runner(plan("triple", profiles=sizes), **options), float_profiles
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_each_shape_goes_to_the_plan_that_was_chosen(card: SimpleNamespace, graphs: bool) -> None:
    with pair({0}, cuda_graphs=graphs) as runner:
        for count, value in ((1, 1), (2, 2), (8, 3), (1, 4)):
            factor = 3 if count == 1 else 2
            assert np.all(runner(rows(count, value))["y"] == factor * value)
            assert runner.plan_for({"x": (count, 3)}) == ("float" if count == 1 else "int8")
    assert (card.graphs.launches == 4) == graphs


def test_a_profile_that_the_float_plan_lacks_stays_int8(card: SimpleNamespace) -> None:
    with pair({0, 1}, sizes=SIZES[:1]) as runner:
        assert np.all(runner(rows(1))["y"] == 3)
        assert np.all(runner(rows(4))["y"] == 2)


def test_it_has_the_interface_of_a_runner(card: SimpleNamespace) -> None:
    with pair({0}, in_flight=2) as runner:
        (spec,) = runner.inputs
        assert (spec.name, spec.dtype) == ("x", "float32")
        assert runner.outputs[0].name == "y"
        assert [str(profile) for profile in runner.profiles] == ["x=1x3,1x3,1x3", "x=2x3,4x3,8x3"]
        assert runner.in_flight == 2
        assert runner.device_bytes == runner._int8.device_bytes + runner._other.device_bytes > 0
        with runner.request({"x": (1, 3)}) as request:
            request.inputs["x"][...] = 1
            request.submit()
            assert np.all(request.wait()["y"] == 3)
        found = list(runner.map(rows(1 + number % 3, number) for number in range(20)))
    for number, outputs in enumerate(found):
        factor = 3 if number % 3 == 0 else 2
        assert outputs["y"].shape == (1 + number % 3, 3)
        assert np.all(outputs["y"] == factor * number)


def test_threads_share_it(card: SimpleNamespace) -> None:
    wrong: list[int] = []
    with pair({0}, in_flight=2, cuda_graphs=True) as runner:

        def work(number: int) -> None:
            for turn in range(20):
                count = 1 + (number + turn) % 4
                if not np.all(runner(rows(count, turn))["y"] == turn * (3 if count == 1 else 2)):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_wrong_feeds_are_named_as_a_runner_names_them(card: SimpleNamespace) -> None:
    with pair({0}) as runner:
        for feeds, message in (
            ({}, "input 'x' .* is missing"),
            ({**rows(1), "z": rows(1)["x"]}, "no input 'z'"),
            ({"x": np.ones((1, 3))}, "dtype float64"),
            (rows(9), "nearest 8x3"),
        ):
            with pytest.raises(InputError, match=message):
                runner(feeds)
        for shapes, message in (({}, "'x' is missing"), ({"z": (1, 3)}, "no input 'z'"), ({"x": (3,)}, "dimensions")):
            with pytest.raises(InputError, match=message):
                runner.open_request(shapes)
        with pytest.warns(RuntimeWarning, match="not contiguous"):
            runner({"x": np.ones((3, 2), np.float32).T})
    with pytest.raises(InputError, match="closed"):
        runner(rows(1))


def test_shapes_without_a_graph_are_told_of_both_plans(card: SimpleNamespace) -> None:
    card.graphs.refuse = True
    with pair({0}, cuda_graphs=True) as runner:
        runner(rows(1))
        runner(rows(2))
        assert set(runner.uncaptured) == {"{'x': (1, 3)}", "{'x': (2, 3)}"}


def test_a_measurement_says_which_plan_ran(card: SimpleNamespace) -> None:
    with pair({0}) as both, Runner(plan(profiles=SIZES)) as single:
        candidates = [Candidate("both", both, False), Candidate("single", single, False)]
        found = [m for batch in (1, 4) for m in measure_compute(candidates, {"x": (batch, 3)}, rounds=2)]
    assert [m.plan for m in found] == ["float", None, "int8", None]


def test_plans_that_do_not_belong_together_are_refused(card: SimpleNamespace) -> None:
    with Runner(plan()) as int8, Runner(plan(dtype="float16")) as half, Runner(plan(), device_number=1) as elsewhere:
        with pytest.raises(InputError, match=r"inputs of the INT8 plan are x \(float32\), .* float plan x \(float16\)"):
            FastestRunner(int8, half, {0})
        with pytest.raises(InputError, match="two cards"):
            FastestRunner(int8, elsewhere, {0})


# From an artifact


def two_plans(folder: Path) -> Artifact:
    return add_float_plan(make_artifact(folder, engine=True))


def test_serving_uses_both_plans_and_the_runner_int8_alone(card: SimpleNamespace, tmp_path: Path) -> None:
    folder = two_plans(tmp_path / "a").folder
    with serve(folder, in_flight=2) as both, Runner.from_artifact(folder) as int8:
        assert isinstance(both, FastestRunner)
        assert both.in_flight == 2
        assert [np.unique(both(rows(count))["y"]).item() for count in (1, 4)] == [3, 2]
        assert [np.unique(int8(rows(count))["y"]).item() for count in (1, 4)] == [2, 2]
    with serve(make_artifact(tmp_path / "b", engine=True).folder) as single:
        assert isinstance(single, Runner)


@pytest.mark.parametrize("name", ["float.plan", "float.json", "fastest.json"])
def test_a_changed_file_of_the_float_plan_is_refused(card: SimpleNamespace, tmp_path: Path, name: str) -> None:
    folder = two_plans(tmp_path / "a").folder
    path = folder / "engines/tensorrt" / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CheckFailed, match=f"{name} is not the file that the manifest lists") as caught:
        serve(folder)
    assert str(caught.value.remedy).endswith("--target tensorrt --fastest")


def test_a_float_plan_without_its_table_is_refused(card: SimpleNamespace, tmp_path: Path) -> None:
    artifact = two_plans(tmp_path / "a")
    files = {name: file for name, file in artifact.manifest.files.items() if not name.endswith("fastest.json")}
    changed = Artifact(artifact.folder, artifact.manifest.model_copy(update={"files": files}))
    with pytest.raises(CheckFailed, match=r"float\.plan without engines/tensorrt/fastest\.json"):
        float_engine(changed, "tensorrt")


def test_a_float_plan_that_does_not_load_leaves_nothing_on_the_card(card: SimpleNamespace, tmp_path: Path) -> None:
    artifact = two_plans(tmp_path / "a")
    for content, error in ((b"no plan", ToolError), (plan(dtype="float16", profiles=SIZES), InputError)):
        (artifact.folder / "engines/tensorrt/float.plan").write_bytes(content)
        artifact.updated(files=("engines/tensorrt/float.plan",))
        with pytest.raises(error):
            serve(artifact.folder)
        assert card.driver.alive == {}


def test_looking_into_the_engine_looks_into_the_int8_plan(card: SimpleNamespace, tmp_path: Path) -> None:
    artifact = with_layers(two_plans(tmp_path / "a"), OLD)
    assert view_engine(artifact, "tensorrt").layers


# The commands


def test_bench_measures_what_serves(card: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "load_api", lambda target: card.api)
    monkeypatch.setattr(suite, "describe_device", lambda: CARD)
    monkeypatch.setattr("pipeline.engine.bench._ROUND_SECONDS", 0.002)
    folder = str(two_plans(tmp_path / "a").folder)
    arguments = [folder, "--batch", "1,4", "--rounds", "2"]
    result = CliRunner().invoke(bench.command, [*arguments, "--json", "-q"])
    value = json.loads(result.stdout)
    assert [(m["name"], m["batch"], m["plan"]) for m in value["warm"]] == [
        ("net fastest", 1, "float"),
        ("net fastest", 1, "float"),
        ("net fastest", 4, "int8"),
        ("net fastest", 4, "int8"),
    ]
    (engine,) = value["engines"]
    assert (engine["plan_bytes"], engine["build_seconds"]) == (10 + 7, 1.5 + 2.0)
    assert [choice["chosen"] for choice in engine["choices"]] == ["float", "int8"]
    shown = CliRunner().invoke(bench.command, arguments, env={"COLUMNS": "200"}).output
    for words in ("net fastest: which plan serves which profile", "plan", "faster", "slower", "float (its answers"):
        assert words in shown


def test_inspect_shows_what_was_measured(card: SimpleNamespace, tmp_path: Path) -> None:
    folder = str(two_plans(tmp_path / "a").folder)
    shown = CliRunner().invoke(inspect.command, [folder], env={"COLUMNS": "200"}).output
    for words in ("tensorrt: which plan serves which profile", "0.4500", "0.2500", "x=1x3,1x3,1x3", "faster", "INT8"):
        assert words in shown
    assert "which plan" not in CliRunner().invoke(inspect.command, [str(make_artifact(tmp_path / "b").folder)]).output


def test_the_option_reaches_the_build(card: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = two_plans(tmp_path / "a")
    choices = Fastest.model_validate(artifact.manifest.targets["tensorrt"]["fastest"])
    asked: list[bool] = []

    def fake(folder: Path, *, target: str, fastest: bool, **rest: object) -> ArtifactBuild:
        asked.append(fastest)
        return ArtifactBuild(target=target, engine=record(), check=None, fastest=choices if fastest else None)

    monkeypatch.setattr(from_artifact, "build_from_artifact", fake)
    monkeypatch.setattr(from_artifact, "require_fp16", lambda target: None)
    shown = CliRunner().invoke(build.command, ["--from", str(artifact.folder), "--fastest", "-q"]).output
    assert "profile x=1x3,1x3,1x3: INT8 0.4500 ms, float 0.2500 ms: float is faster; float serves it" in shown
    assert "serves" not in CliRunner().invoke(build.command, ["--from", str(artifact.folder), "-q"]).output
    assert asked == [True, False]


def test_the_option_belongs_to_the_machine_that_serves() -> None:
    result = CliRunner().invoke(build.command, ["m.onnx", "--data", "d", "--out", "o", "--fastest"])
    assert result.exit_code == 2
    assert "--fastest measures on the machine that serves" in result.output
