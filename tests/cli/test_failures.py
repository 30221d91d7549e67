"""Whatever fails, the exit code says whose fault it is, and `--json` gives one document."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, cast

import click
import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.cli import COMMANDS, main
from pipeline.cli.common import JsonCommand, output_options, print_json, user_errors
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.files import check_can_make, check_can_write, explain_os_errors, os_error, write_json
from tests.test_package import packaged


def failed(*arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, the document and standard error of a command that fails with ``--json``."""
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert isinstance(result.exception, SystemExit), result.exception
    document = json.loads(result.stdout)
    assert {"error", "remedy", "exit_code"} <= set(document)
    assert document["exit_code"] == result.exit_code
    assert "Traceback" not in result.stderr
    return result.exit_code, document, result.stderr


def ending(error: BaseException, *flags: str) -> Any:
    @click.command(cls=JsonCommand)
    @output_options
    @user_errors
    def command(as_json: bool, quiet: bool, verbose: bool) -> None:
        raise error

    return CliRunner().invoke(command, flags)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_usage_errors_as_json(name: str) -> None:
    code, document, said = failed(name, "--no-such-option")
    assert code == 2
    assert "No such option" in document["error"]
    assert document["remedy"] == f"`main {name} --help` lists what it takes"
    assert "No such option" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("build", "--samples", "x"), "Invalid value for '--samples': 'x' is not a valid integer"),
        (("biuld",), "did you mean 'build'"),
        (("--no-such", "build"), "--no-such"),
        (("drift", "a"), "Missing option '--data'"),
        (("bench", "a", "--batch", "²"), "'²' is not a list of numbers such as 1,8,64"),
        (("bench", "a", "--batch", "9" * 5000), "is not a list of numbers such as 1,8,64"),
        (("build", "--workspace", "9" * 5000), "is not a size such as 512M or 4GiB"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], said: str) -> None:
    code, document, _ = failed(*arguments)
    assert code == 2
    assert said in document["error"]


PATHS = [
    (name, parameter)
    for name in COMMANDS
    for parameter in cast(click.Group, main).get_command(click.Context(main), name).params  # type: ignore[union-attr]
    if isinstance(parameter.type, click.Path)
]


@pytest.mark.parametrize(
    ("name", "parameter"), PATHS, ids=lambda item: item if isinstance(item, str) else str(item.name)
)
def test_an_empty_path_is_not_the_working_folder(name: str, parameter: click.Parameter) -> None:
    flag = [] if isinstance(parameter, click.Argument) else [max(parameter.opts, key=len)]
    found = CliRunner().invoke(main, [name, *flag, *[""] * max(1, parameter.nargs)])
    assert found.exit_code == 2
    assert found.stderr.rstrip().endswith("it is empty, and no path"), found.output


def test_usage_errors_without_json_are_text() -> None:
    found = CliRunner().invoke(main, ["build", "--samples", "x"])
    assert (found.exit_code, found.stdout) == (2, "")
    found = CliRunner().invoke(main, ["rules", "--no-such", "--", "--json"])
    assert (found.exit_code, found.stdout) == (2, "")


def test_files_in_the_place_of_folders_and_folders_in_the_place_of_files(tmp_path: Path) -> None:
    artifact, file = packaged(tmp_path).folder, tmp_path / "m.onnx"
    file.write_bytes(b"m")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    other, data, broken = tmp_path / "other.json", tmp_path / "d.npy", tmp_path / "broken"
    other.write_text("{}")
    np.save(data, np.zeros((4, 3), np.float32))
    broken.mkdir()
    (broken / "manifest.json").write_text("[" * 100_000)
    build = ("build", "m", "--data", "d", "--out", tmp_path / "o")
    for arguments, said in (
        (("build", "-c", tmp_path), f"configuration {tmp_path} cannot be read: Is a directory"),
        (("build", "-c", file / "y.yaml"), "cannot be read: Not a directory"),
        ((*build, "-c", deep), "nested too deeply"),
        ((*build, "--target", "onnx", "--data", data, "--min-sqnr", "9", "--layer-times", deep, other), "Invalid JSON"),
        (("calibrate", deep, "--data", data, "-o", tmp_path / "c.npz"), f"{deep} is not a readable ONNX model"),
        (("explain", deep), f"{deep} is not a readable ONNX model"),
        (("verify", broken), "manifest.json cannot be read: maximum recursion depth"),
        (("coverage", artifact, tmp_path), f"{tmp_path} cannot be read: Is a directory"),
        (("coverage", artifact, file / "q.csv"), "cannot be read: Not a directory"),
        (("inspect", file / "x"), "m.onnx/x"),
        (("histogram", artifact, "x", "-o", tmp_path), f"cannot write {tmp_path}: it is a folder"),
        (("calibrate", "m", "--data", "d", "-o", file / "c.npz"), "cannot write"),
        (("calibrate", "m", "--data", "d", "-o", tmp_path / ("x" * 300)), "File name too long"),
    ):
        code, document, _ = failed(*arguments)
        assert (code, said in document["error"]) == (2, True), document


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
@pytest.mark.parametrize(
    "arguments",
    [
        ("errors", "a", "--out"),
        ("histogram", "a", "x", "-o"),
        ("consistency", "a", "b", "--out"),
        ("consistency", "a", "--save"),
        ("calibrate", "m", "--data", "d", "-o"),
        ("calibrate", "--merge", "a", "b", "-o"),
        ("bench", "a", "--out"),
        ("init",),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("place", ["/proc/foo/bar", "/proc/foo"])
def test_a_folder_that_cannot_be_made_is_said_before_any_work(arguments: tuple[str, ...], place: str) -> None:
    """None of the artifacts and models here exists, and what is said is about the folder."""
    found = CliRunner().invoke(main, [*arguments, place])
    assert found.exit_code == 2, found.exception
    assert f"error: cannot write {place}: " in found.stderr
    assert "Traceback" not in found.output


def test_looking_whether_a_folder_can_be_made_leaves_nothing(tmp_path: Path) -> None:
    check_can_make(tmp_path / "a" / "b")
    check_can_write(tmp_path / "a" / "b" / "file")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    check_can_make(tmp_path / "kept" / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file and a folder are in each other's place"):
        check_can_make(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "no space left on the disk while writing f"),
        (errno.EROFS, "f: Read-only file system"),
        (errno.EACCES, "f: Permission denied"),
        (errno.EISDIR, "f: Is a directory"),
        (errno.ENOTDIR, "f: Not a directory"),
        (errno.ENOENT, "f: No such file or directory"),
    ],
)
def test_errors_of_the_system_are_wrong_input(number: int, said: str) -> None:
    error = OSError(number, os.strerror(number), "f")
    found = ending(error, "--json")
    assert (found.exit_code, json.loads(found.stdout)["error"]) == (2, said)
    known = os_error(error)
    assert known is not None
    assert known.remedy


def test_a_missing_file_that_is_read_is_not_called_unwritable(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), explain_os_errors(tmp_path / "target"):
        (tmp_path / "elsewhere" / "source").read_bytes()
    broken = OSError(errno.EIO, "Input/output error", "f")
    assert os_error(broken) is None
    found = ending(broken, "--json")
    assert (found.exit_code, json.loads(found.stdout)["error"]) == (
        1,
        "the system reports an error at f: Input/output error",
    )


@pytest.mark.parametrize("error", [KeyError("k"), OSError("no library"), RecursionError("deep"), ValueError("v")])
def test_an_unexpected_error_is_said_to_be_a_bug(error: Exception) -> None:
    found = ending(error, "--json")
    document = json.loads(found.stdout)
    assert found.exit_code == document["exit_code"] == 1
    assert document["error"].startswith(f"unexpected {type(error).__name__}: ")
    assert "this is a bug in quantize, please report it with the lines that -v shows" in document["remedy"]
    assert "Traceback" not in found.output
    assert "in command" in ending(error, "-v").stderr
    assert ending(error).stdout == ""


def test_a_file_that_cannot_be_parsed_is_wrong_input_wherever_it_is_read() -> None:
    for text in ("[" * 100_000, "{", "9" * 5000):
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            found = ending(error, "--json")
            assert found.exit_code == 2
            assert json.loads(found.stdout)["error"].startswith("a file that was read is")
        else:
            pytest.fail("parsed")


def test_memory_and_interruption() -> None:
    found = ending(MemoryError("9 TiB"), "--json")
    assert (found.exit_code, json.loads(found.stdout)["error"]) == (
        1,
        "the memory of this machine is not enough: 9 TiB",
    )
    found = ending(KeyboardInterrupt(), "--json")
    assert (found.exit_code, json.loads(found.stdout)["exit_code"]) == (130, 130)


def test_a_reader_that_has_gone_is_no_error() -> None:
    found = ending(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert (found.exit_code, found.output) == (1, "")


def test_json_never_has_a_number_that_json_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nan, infinite = float("nan"), float("inf")
    print_json({"a": nan, "b": [infinite, (-infinite, 1.0)], "c": {"d": True}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, [None, 1.0]], "c": {"d": True}}
    found = ending(CheckFailed("far", figures={"sqnr": infinite}), "--json")
    assert json.loads(found.stdout)["sqnr"] is None
    with pytest.raises(ValueError, match="not JSON compliant"):  # what is kept as data is never changed
        write_json(tmp_path / "x.json", {"a": nan})


@pytest.mark.parametrize("arguments", [("inspect", "{}"), ("build", "m.onnx", "--data", "{}", "--out", "o")])
def test_arguments_that_are_not_utf8(arguments: tuple[str, ...]) -> None:
    name = os.fsdecode(b"\xff\xfe")
    code, document, _ = failed(*(word.format(name) for word in arguments))
    assert code == 2
    assert document["error"] == r"'\udcff\udcfe' is not UTF-8: rename that file or folder"


def test_a_picture_by_another_formats_name(tmp_path: Path) -> None:
    code, document, _ = failed("histogram", tmp_path, "x", "-o", tmp_path / "h.svg")
    assert code == 2
    assert document["error"] == f"cannot write {tmp_path / 'h.svg'}: the picture is a PNG, and its name says .svg"
    assert document["remedy"] == f"name it {tmp_path / 'h.png'}"
