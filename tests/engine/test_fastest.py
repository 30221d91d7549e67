"""Building with a float plan: what is chosen, what is kept, and what is refused (fake card, given measurements)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.artifact import Artifact
from pipeline.config import Profile
from pipeline.core.errors import CheckFailed, InputError
from pipeline.engine import fastest, from_artifact
from pipeline.engine.bench import Measurement
from pipeline.engine.compat import Api
from pipeline.engine.fastest import Fastest, decide, float_options, measured_profiles
from pipeline.engine.from_artifact import build_from_artifact
from pipeline.engine.recorded import Samples, check_engine_outputs
from pipeline.engine.records import BuildOptions, EngineRecord
from pipeline.engine.runner import Runner
from tests.engine.artifacts import FakeBuilder, make_artifact
from tests.engine.fakes import plan
from tests.engine.records import measurement
from tests.engine.test_from_artifact import tree

ONE, MANY = Profile.parse("x=1x3,1x3,1x3"), Profile.parse("x=2x3,4x3,8x3")
OLD = Api(trt=SimpleNamespace(BuilderFlag=SimpleNamespace(FP16=1)), rtx=False, version="8.6.0")
PLACE = "engines/tensorrt"


# The decision


def test_float_serves_only_where_it_was_faster_outside_the_noise() -> None:
    int8 = measurement("int8", 1.0, 1.1)
    pairs = {
        0: (int8, measurement("float", 0.8, 0.95, 0.9)),
        1: (int8, measurement("float", 0.9, 1.0)),
        2: (int8, measurement("float", 1.2, 1.3)),
    }
    found = decide([ONE, MANY, MANY, ONE], pairs)
    assert [(c.verdict, c.chosen) for c in found] == [
        ("faster", "float"),
        ("within noise", "int8"),
        ("slower", "int8"),
        ("not measured", "int8"),
    ]
    assert (found[0].int8_ms, found[0].float_ms, found[0].shapes) == (1.05, 0.9, {"x": (1, 3)})
    assert found[0].float_rounds_ms == (0.8, 0.95, 0.9)
    assert found[3].int8_ms is None
    assert Fastest(choices=found).float_profiles == {0}
    assert str(found[0]).endswith("INT8 1.0500 ms, float 0.9000 ms: float is faster; float serves it")
    assert str(found[1]).endswith("float is within noise; INT8 serves it")
    assert str(found[3]).endswith("not measured, it stays INT8")


def test_of_profiles_with_one_optimum_the_one_that_serves_it_is_measured() -> None:
    wide = Profile.parse("x=1x3,4x3,64x3")
    assert measured_profiles([ONE, wide, MANY]) == (0, 2)
    assert measured_profiles([ONE, MANY]) == (0, 1)


def test_the_float_plan_takes_the_same_inputs() -> None:
    options = BuildOptions(half_inputs=True, workspace_bytes=5)
    assert float_options(options) == BuildOptions(half_inputs=True, workspace_bytes=5, fp16=True)
    of_the_graph = float_options(BuildOptions(), half_inputs=True, half_outputs=True)
    assert of_the_graph == BuildOptions(half_inputs=True, half_outputs=True, fp16=True)


# A build


class Scale:
    """Stands in for ``measure_compute``: the float plan's milliseconds by batch and turn; INT8's are always 1."""

    def __init__(self, floats: dict[int, Sequence[float]]) -> None:
        self.floats, self.turns = {batch: list(values) for batch, values in floats.items()}, []

    def __call__(self, candidates, shapes, *, rounds: int, places: int, samples) -> list[Measurement]:
        assert all(c.cuda_graph and c.runner.in_flight >= places > 1 for c in candidates)
        assert set(samples) == {"x"}
        batch = shapes["x"][0]
        self.turns.append((batch, len(candidates[1].runner.profiles)))
        value = self.floats[batch].pop(0)
        return [measurement("int8", 1.0, batch=batch), measurement("float", value, batch=batch)]


class Workshop:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch, self.builder = folder, monkeypatch, FakeBuilder()
        for module in (fastest, from_artifact):
            monkeypatch.setattr(module, "build_engine", self.builder)
        monkeypatch.setattr(fastest, "load_api", lambda target: OLD)

    def build(self, floats: dict[int, Sequence[float]], *, profiles: Sequence[Profile] = (ONE, MANY)):
        scale = Scale(floats)
        self.monkeypatch.setattr(fastest, "measure_compute", scale)
        return build_from_artifact(self.folder, profiles=profiles, fastest=True), scale

    @property
    def files(self) -> set[str]:
        artifact = Artifact.open(self.folder)
        assert artifact.differences() == []
        return {name.removeprefix(f"{PLACE}/") for name in artifact.manifest.files if name.startswith(PLACE)}


@pytest.fixture
def workshop(card: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(make_artifact(tmp_path / "a").folder, monkeypatch)


def test_the_float_plan_is_kept_for_the_profiles_it_won(workshop: Workshop) -> None:
    done, scale = workshop.build({1: [0.5, 0.6], 4: [2.0]})
    calls = [(model.name, profiles, options.fp16) for model, _, profiles, options in workshop.builder.calls]
    assert calls == [
        ("model.int8.onnx", (ONE, MANY), False),
        ("model.fp32.onnx", (ONE, MANY), True),
        ("model.fp32.onnx", (ONE,), True),
    ]
    assert scale.turns == [(1, 2), (4, 2), (1, 1)]
    assert workshop.files == {"model.plan", "build.json", "float.plan", "float.json", "fastest.json"}
    assert done.fastest is not None
    assert done.fastest.float_profiles == {0}
    assert [choice.float_ms for choice in done.fastest.choices] == [0.6, 2.0]  # of the plan that is kept
    assert done.fastest.check is not None
    assert done.fastest.check.relative_l2 == {"y": 0.0}
    assert done.fastest.check.samples == 1
    folder = workshop.folder / PLACE
    assert Fastest.model_validate_json((folder / "fastest.json").read_bytes()) == done.fastest
    assert EngineRecord.model_validate_json((folder / "float.json").read_bytes()).profiles == (ONE,)
    assert json.loads((folder / "float.plan").read_bytes())["profiles"] == [[[1, 3]] * 3]
    entry = Artifact.open(workshop.folder).manifest.targets["tensorrt"]
    assert Fastest.model_validate(entry["fastest"]) == done.fastest


def test_where_int8_wins_everywhere_the_table_alone_is_kept(workshop: Workshop) -> None:
    done, _ = workshop.build({1: [1.0], 4: [1.5]})
    assert len(workshop.builder.calls) == 2
    assert workshop.files == {"model.plan", "build.json", "fastest.json"}
    assert done.fastest is not None
    assert [choice.verdict for choice in done.fastest.choices] == ["within noise", "slower"]
    assert done.fastest.check is None


def test_a_plan_that_won_every_profile_is_not_built_again(workshop: Workshop) -> None:
    done, scale = workshop.build({1: [0.5], 4: [0.5]})
    assert len(workshop.builder.calls) == 2
    assert scale.turns == [(1, 2), (4, 2)]
    assert done.fastest is not None
    assert done.fastest.float_profiles == {0, 1}


def test_a_smaller_plan_that_is_no_longer_faster_is_dropped(workshop: Workshop) -> None:
    done, _ = workshop.build({1: [0.5, 1.0], 4: [2.0]})
    assert workshop.files == {"model.plan", "build.json", "fastest.json"}
    assert done.fastest is not None
    assert done.fastest.choices[0].verdict == "within noise"


def test_the_whole_plan_is_kept_where_the_samples_do_not_fit_the_winners(workshop: Workshop) -> None:
    other = Profile.parse("x=1x5,1x5,1x5")
    spec = [((1, 5),) * 3, ((2, 3), (4, 3), (8, 3))]
    done, scale = workshop.build({1: [0.5], 4: [2.0]}, profiles=(other, MANY))
    assert len(workshop.builder.calls) == 2
    kept = json.loads((workshop.folder / PLACE / "float.plan").read_bytes())["profiles"]
    assert [tuple(tuple(shape) for shape in profile) for profile in kept] == spec
    assert done.fastest is not None
    assert done.fastest.float_profiles == {0}
    assert done.fastest.check is not None
    assert done.fastest.check.samples == 2
    assert scale.turns == [(1, 2), (4, 2)]


def test_a_build_without_the_option_removes_the_float_plan(workshop: Workshop) -> None:
    workshop.build({1: [0.5], 4: [0.5]})
    assert "float.plan" in workshop.files
    assert build_from_artifact(workshop.folder).fastest is None
    assert workshop.files == {"model.plan", "build.json"}
    assert "fastest" not in Artifact.open(workshop.folder).manifest.targets["tensorrt"]


def test_the_real_measurement_decides_as_its_figures_say(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engine.bench._ROUND_SECONDS", 0.002)
    done = build_from_artifact(workshop.folder, profiles=(ONE, MANY), fastest=True, rounds=2)
    assert done.fastest is not None
    for choice in done.fastest.choices:
        assert len(choice.int8_rounds_ms) == len(choice.float_rounds_ms) == 2
        assert (choice.chosen == "float") == (max(choice.float_rounds_ms) < min(choice.int8_rounds_ms))
    assert ("float.plan" in workshop.files) == bool(done.fastest.float_profiles)


# What is refused


def test_a_float_plan_that_computes_something_else_leaves_no_trace(workshop: Workshop) -> None:
    with np.load(workshop.folder / "samples.npz") as stored:
        values = {name: stored[name] for name in stored.files}
    np.savez(workshop.folder / "samples.npz", **{**values, "fp32/y": values["fp32/y"] * 1.1})
    Artifact.open(workshop.folder).updated(files=("samples.npz",))
    before = tree(workshop.folder)
    with pytest.raises(CheckFailed, match=r"the float plan: output 'y' .* differs .* by 0\.0909") as caught:
        workshop.build({1: [0.5], 4: [0.5]})
    assert "leave --fastest out" in str(caught.value.remedy)
    assert tree(workshop.folder) == before
    workshop.build({1: [1.5], 4: [1.5]})  # INT8 stays everywhere: nothing of the float plan is used


@pytest.mark.parametrize("graph", ["int8", "fp32"])
def test_samples_without_the_recorded_outputs_check_nothing(workshop: Workshop, graph: str) -> None:
    with np.load(workshop.folder / "samples.npz") as stored:
        values = {name: stored[name] for name in stored.files if not name.startswith(graph)}
    np.savez(workshop.folder / "samples.npz", **values)
    Artifact.open(workshop.folder).updated(files=("samples.npz",))
    with pytest.raises(CheckFailed, match=f"no recorded output of the {graph} graph"):
        workshop.build({1: [0.5], 4: [0.5]})


def test_a_float_model_that_changed_is_not_built_from(workshop: Workshop) -> None:
    (workshop.folder / "model.fp32.onnx").write_bytes(b"something else")
    with pytest.raises(CheckFailed, match=r"model\.fp32\.onnx is not the file that the manifest lists"):
        workshop.build({})
    assert workshop.builder.calls == []
    build_from_artifact(workshop.folder)  # without the option nobody reads it


@pytest.mark.parametrize(
    "api",
    [
        Api(trt=SimpleNamespace(BuilderFlag=SimpleNamespace(FP16=1)), rtx=True, version="1.7.1"),
        Api(trt=SimpleNamespace(BuilderFlag=SimpleNamespace()), rtx=False, version="11.4.0"),
    ],
)
def test_versions_without_fp16_kernels_for_a_float_graph_are_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, api: Api
) -> None:
    monkeypatch.setattr(fastest, "load_api", lambda target: api)
    with pytest.raises(InputError, match="computes in the types that the graph has") as caught:
        build_from_artifact(workshop.folder, fastest=True)
    assert caught.value.remedy == "leave --fastest out"
    assert workshop.builder.calls == []


def test_an_engine_with_half_inputs_is_checked_too(card: SimpleNamespace) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Runner(plan(dtype="float16")) as runner:
        check = check_engine_outputs(runner, Samples({"x": values}, {"y": 2 * values}), 0.01)
    assert check.relative_l2 == {"y": 0.0}
