"""Looking into an engine: from what the build wrote, or by measuring."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipeline.artifact import Artifact
from pipeline.cli.engine_view import print_view
from pipeline.core.errors import InputError
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


def test_times_and_findings_at_a_batch(card: SimpleNamespace, tmp_path: Path) -> None:
    a, b = old_tensor("a", INT8_32, 1, 24, 8, 8), old_tensor("b", INT8_32, 1, 64, 8, 8)
    c = old_tensor("c", "Row major linear FP16 format", 1, 64, 8, 8)
    artifact = with_layers(
        make_artifact(tmp_path / "a", engine=True), text(convolution("first", a, b), convolution("second", c, c))
    )
    view = view_engine(artifact, "tensorrt", batch=1)
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
    assert view_engine(artifact, "tensorrt", batch=4).layers == ()


def test_the_view_is_machine_readable(tmp_path: Path) -> None:
    view = view_engine(with_layers(make_artifact(tmp_path / "a", engine=True), OLD), "tensorrt")
    assert json.loads(view.model_dump_json())["layers"][1]["channels"] == [3, 64]
