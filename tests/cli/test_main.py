"""The command line frame: light imports, init, verify, inspect, completion, error texts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipeline.cli import COMMANDS, main
from pipeline.cli.init import TEMPLATE
from pipeline.config import BuildConfig, load_config, validated
from tests.test_package import packaged

HEAVY = (
    "torch",
    "onnx",
    "onnxruntime",
    "onnx_ir",
    "onnxscript",
    "numba",
    "pandas",
    "seaborn",
    "matplotlib",
    "numpy",
    "tensorrt_rtx",
    "pydantic",
)


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys, pipeline.cli; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_has_help(name: str) -> None:
    code, output = run(name, "--help")
    assert code == 0
    assert "Usage:" in output


def test_an_unknown_command_offers_the_nearest() -> None:
    code, output = run("biuld")
    assert code == 2
    assert "did you mean 'build'" in output


def test_init_writes_valid_yaml_once(tmp_path: Path) -> None:
    path = tmp_path / "build.yaml"
    assert run("init", str(path))[0] == 0
    assert yaml.safe_load(path.read_text())["model"] == "model.onnx"
    assert path.read_text() == TEMPLATE
    options = re.sub(r"^# ((?:  )?(?:- )?[a-z_]+[:=])", r"\1", TEMPLATE, flags=re.M)  # every line that is an option
    text = re.sub(r"^preprocess: imagenet\n", "", options, flags=re.M)  # the other form of the same
    path.write_text(text)
    assert set(BuildConfig.model_fields) >= set(yaml.safe_load(text)) >= {"inputs", "profiles", "equalise", "mixed"}
    assert validated(BuildConfig, load_config(path), origin=str(path)).inputs[0].dtype == "int64"
    code, output = run("init", str(path))
    assert code == 2
    assert "--force" in output
    assert run("init", str(path), "--force")[0] == 0


def test_verify_and_inspect(tmp_path: Path) -> None:
    artifact = packaged(tmp_path)
    assert run("verify", str(artifact.folder)) == (0, f"{artifact.folder}: all 3 files are as written\n")
    assert run("inspect", str(artifact.folder))[0] == 0
    assert json.loads(run("inspect", "--json", str(artifact.folder))[1])["name"] == "net"
    (artifact.folder / "model.int8.onnx").unlink()
    code, output = run("verify", str(artifact.folder))
    assert code == 1
    assert "model.int8.onnx: missing" in output
    failed = CliRunner().invoke(main, ["verify", "--json", str(artifact.folder)])
    assert failed.exit_code == 1
    shown = json.loads(failed.stdout)
    assert shown["differences"][0]["file"] == "model.int8.onnx"
    assert shown["error"].startswith(f"{artifact.folder} differs from its manifest")
    assert (shown["exit_code"], shown["files"] > 0) == (1, True)
    assert "model.int8.onnx: missing" in failed.stderr


def test_errors_are_one_message_without_traceback(tmp_path: Path) -> None:
    code, output = run("verify", str(tmp_path))
    assert code == 2
    assert output.startswith("error: ")
    assert "Traceback" not in output


def test_build_says_what_is_missing(tmp_path: Path) -> None:
    code, output = run("build", "m.onnx", "--out", str(tmp_path / "o"))
    assert code == 2
    assert "no calibration data" in output
    assert "random data is never used" in output
    code, output = run("build", "--data", "d", "--out", str(tmp_path / "o"))
    assert code == 2
    assert "MODEL is missing" in output
    code, output = run("build", "m.onnx", "--data", "d", "--out", str(tmp_path / "o"), "--calibrator", "entropi")
    assert code == 2
    assert "did you mean 'entropy'" in output
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("calibrator: 5", ["--calibrator", "minmax", "--percentile", "99"], "no parameter 'percentile'"),
        ("calibrator: 5", ["--percentile", "99"], "calibrator: Input should be a valid dictionary"),
        ("calibrator: [1]", ["--percentile", "99"], "calibrator: Input should be a valid dictionary"),
        ("calibrator: {params: 5}", ["--percentile", "99"], "calibrator.params: Input should be a valid dictionary"),
        ("placement: [conv]", ["--exclude", "conv"], "placement: Input should be a valid dictionary"),
    ],
)
def test_flags_over_a_file_with_wrong_types(tmp_path: Path, text: str, flags: list[str], message: str) -> None:
    (tmp_path / "build.yaml").write_text(text)
    code, output = run("build", "m.onnx", "-c", str(tmp_path / "build.yaml"), "--data", "d", "--out", "o", *flags)
    assert code == 2
    assert message in output


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    artifact = packaged(tmp_path)
    artifact.updated(files=(), name="net[/x]", warnings=("tensor '[red]a[/b]' is constant",))
    code, output = run("inspect", str(artifact.folder))
    assert code == 0
    assert "net[/x]" in output
    assert "warning: tensor '[red]a[/b]' is constant" in output
    assert run("doctor")[0] == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    code, output = run("completion", shell)
    assert code == 0
    assert "_QUANTIZE_COMPLETE" in output
