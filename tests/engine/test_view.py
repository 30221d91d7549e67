"""Looking into an engine: from what the build wrote, or by measuring."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipeline.artifact import Artifact
from pipeline.cli.engine_view import print_view
from pipeline.core.errors import InputError
from pipeline.engine.profiles import Shape
from pipeline.engine.runner import Runner
from pipeline.engine.view import view_engine
from tests.engine.artifacts import make_artifact
from tests.engine.test_inspect import INT8_32, OLD, convolution, old_tensor, text


def with_layers(artifact: Artifact, content: str) -> Artifact:
    (artifact.folder / "engines/tensorrt/layers.json").write_text(content)
    return artifact.updated(files=("engines/tensorrt/layers.json",))


def shown(artifact: Artifact, batch: int | None = None) -> str:
    out = Console(width=160, record=True, file=io.StringIO())
    print_view(out, view_engine(artifact, "tensorrt", batch=batch))
    return out.export_text()


def test_layers_written_by_the_build_are_shown_without_a_card(tmp_path: Path) -> None:
    output = shown(with_layers(make_artifact(tmp_path / "a", engine=True), OLD))
    for words in ("conv1 + relu1", "int8", "sm80_xmma_fprop", "1 convolutions, 1 in INT8, 0 in float", "Fake card"):
        assert words in output


def at_run_time(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    def layer_information(runner: Runner, shapes: Mapping[str, Shape] | None = None) -> str:
        assert shapes, "the plan alone says less"
        return content

    monkeypatch.setattr(Runner, "layer_information", layer_information)


def test_times_and_findings_at_a_batch(
    card: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = old_tensor("a", INT8_32, 1, 24, 8, 8), old_tensor("b", INT8_32, 1, 64, 8, 8)
    c = old_tensor("c", "Row major linear FP16 format", 1, 64, 8, 8)
    other = convolution("first [profile 1]", a, b)
    at_run_time(monkeypatch, text(convolution("first", a, b), convolution("second", c, c), other))
    artifact = with_layers(make_artifact(tmp_path / "a", engine=True), OLD)
    view = view_engine(artifact, "tensorrt", batch=1)
    assert [layer.name for layer in view.layers] == ["first", "second"]
    assert view.times_ms == {"first": 0.5, "second": 0.25}
    assert view.shapes == {"x": (1, 3)}
    assert [finding.kind for finding in view.findings] == ["channels", "float convolution", "profile"]
    assert [finding.ms for finding in view.findings] == [0.5, 0.25, None]
    output = shown(artifact, batch=1)
    for words in ("0.5000", "0.750 ms in all at x 1x3", "1 in float: second", "channels (0.5000 ms): first", "-> "):
        assert words in output


def test_an_engine_that_tells_nothing_is_asked_when_measured(card: SimpleNamespace, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "a", engine=True)
    with pytest.raises(InputError, match="cannot be looked into there"):
        view_engine(artifact, "tensorrt")
    (layer,) = view_engine(artifact, "tensorrt", batch=4).layers
    assert layer.name == "(4, 3) on profile 0"


def test_of_a_convolution_without_formats_the_weights_say_what_it_computes_in(tmp_path: Path) -> None:
    unknown = old_tensor("a", "N/A due to dynamic shapes", -1, 32, 8, 8)
    layers = text(
        convolution("one", unknown, unknown),
        convolution("two", unknown, unknown, Weights={"Type": "Half", "Count": 1}),
        convolution("three", unknown, unknown, Weights={"Type": "", "Count": 1}),
    )
    output = shown(with_layers(make_artifact(tmp_path / "a", engine=True), layers))
    for words in ("3 convolutions, 1 in INT8, 1 in float: two", "float16", "int8", "unknown"):
        assert words in output


def test_the_view_is_machine_readable(tmp_path: Path) -> None:
    view = view_engine(with_layers(make_artifact(tmp_path / "a", engine=True), OLD), "tensorrt")
    assert json.loads(view.model_dump_json())["layers"][1]["channels"] == [3, 64]
