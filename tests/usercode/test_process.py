from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pipeline.usercode
from pipeline.core.errors import InputError, QuantizeError, ToolError
from pipeline.usercode import UserProcess, parse_code

TASK = {"task": "samples", "inputs": [["x", 2]]}


def _run(tmp_path: Path, body: str, name: str = "rows", *, timeout_s: float | None = None) -> list[np.ndarray]:
    (tmp_path / "mine.py").write_text("import numpy as np, os, sys\n" + body)
    return _collect(f"{tmp_path}/mine.py:{name}", timeout_s=timeout_s)


def _collect(spec: str, *, timeout_s: float | None = None) -> list[np.ndarray]:
    code = parse_code(spec)
    assert code is not None
    found = []
    with UserProcess(code, TASK, timeout_s=timeout_s) as process:
        while True:
            process.answer(True)
            header, arrays = process.receive()
            if header["kind"] == "end":
                return found
            found.append(arrays["x"])


def _failure(tmp_path: Path, body: str, kind: type[QuantizeError] = InputError, name: str = "rows") -> str:
    with pytest.raises(kind) as caught:
        _run(tmp_path, body, name)
    return str(caught.value)


def test_forms_of_a_spec(tmp_path) -> None:
    (tmp_path / "a b.py").write_text("")
    file = parse_code(f"{tmp_path}/a b.py:Model.make")
    assert file is not None
    assert (file.directory, file.file, file.attribute) == (tmp_path, tmp_path / "a b.py", "Model.make")
    assert file.display == "a b.py:Model.make"
    module = parse_code("package.module:make")
    assert module is not None
    assert (module.directory, module.module, module.display) == (Path.cwd(), "package.module", "package.module:make")
    for text in ("model.onnx", "model", "package.module", "file.py", "file.py:", "a-b:c", "https://x"):
        assert parse_code(text) is None
    with pytest.raises(InputError, match=r"gone\.py does not exist, named in"):
        parse_code(f"{tmp_path}/gone.py:make")


def test_users_own_pipeline_and_plugins_modules(tmp_path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").write_text("")
    (tmp_path / "pipeline" / "config.py").write_text("VALUE = 3")
    (tmp_path / "plugins.py").write_text("VALUE = 4")
    (tmp_path / "child.py").write_text("VALUE = 5")
    (tmp_path / "framing.py").write_text("VALUE = 6")
    body = (
        "import child, framing, pipeline.config, plugins\n"
        "def rows(): yield np.array([pipeline.config.VALUE, plugins.VALUE, child.VALUE, framing.VALUE], 'f')"
    )
    assert _run(tmp_path, body)[0].tolist() == [3, 4, 5, 6]


def test_nothing_of_this_project_is_imported_in_the_child(tmp_path) -> None:
    body = (
        "def rows():\n"
        f"  root = {str(Path(pipeline.__file__).parent)!r}\n"
        "  own = [name for name, m in sys.modules.items() if str(getattr(m, '__file__', '')).startswith(root)]\n"
        "  others = [n for n in own if not n.startswith('_quantize_usercode') and n != '__main__']\n"
        "  yield np.array([len(others)], 'f')\n"
        "  yield np.array(['torch' in sys.modules, 'onnx' in sys.modules], 'f')"
    )
    found = _run(tmp_path, body)
    assert found[0].tolist() == [0]
    assert found[1].tolist() == [0, 0]


def test_module_spec_is_looked_up_in_the_current_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "data.py").write_text("import numpy as np\ndef rows(): yield np.ones(2, 'f')")
    monkeypatch.chdir(tmp_path)
    assert len(_collect("pack.data:rows")) == 1
    code = parse_code("pack.data:rows")
    assert code is not None
    first = code.source_sha256()
    (tmp_path / "pack" / "data.py").write_text("rows = []")
    assert code.source_sha256() != first


def test_siblings_and_the_file_itself_can_be_imported(tmp_path) -> None:
    (tmp_path / "other.py").write_text("def value():\n  import mine\n  return mine.CONSTANT")
    assert _run(tmp_path, "import other\nCONSTANT = 9\ndef rows(): yield np.array([other.value()], 'f')")[0] == 9


def test_exception_shows_the_users_frames_only(tmp_path) -> None:
    message = _failure(
        tmp_path, "def inner():\n  raise ValueError('no good')\ndef rows():\n  print('reading')\n  yield inner()\n"
    )
    assert "mine.py:rows failed: ValueError: no good" in message
    assert "line 6, in rows" in message
    assert "line 3, in inner" in message
    assert "last output:\n  reading" in message
    assert "samples.py" not in message
    assert "main.py" not in message


def test_error_inside_a_library_shows_where_it_was_called(tmp_path) -> None:
    message = _failure(tmp_path, "def rows():\n  yield np.linalg.inv(np.zeros((2, 2)))")
    assert "Singular matrix" in message
    assert "line 3, in rows" in message
    assert "linalg.py" not in message


def test_syntax_error_and_missing_module(tmp_path) -> None:
    assert "SyntaxError" in _failure(tmp_path, "def rows(:\n")
    assert "ModuleNotFoundError: No module named 'not_there'" in _failure(tmp_path, "import not_there")
    with pytest.raises(InputError, match="No module named 'no_such_package'"):
        _collect("no_such_package.module:rows")


def test_missing_callable_suggests_one(tmp_path) -> None:
    message = _failure(tmp_path, "def images(): pass", name="image")
    assert "has no 'image'\ndid you mean 'images'?" in message
    assert "it has " in _failure(tmp_path, "def images(): pass", name="zzz")


def test_exit_of_the_users_code(tmp_path) -> None:
    message = _failure(tmp_path, "def rows():\n  print('bye')\n  sys.exit(3)")
    assert "failed: it called sys.exit(3)" in message
    assert "line 4, in rows" in message
    message = _failure(tmp_path, "def rows():\n  print('dying')\n  os._exit(5)")
    assert "ended its process with status 5" in message
    assert "last output:\n  dying" in message


def test_death_by_a_signal(tmp_path) -> None:
    message = _failure(tmp_path, "def rows():\n  yield np.ones(2, 'f')\n  os.kill(os.getpid(), 11)", ToolError)
    assert "was killed by SIGSEGV" in message
    message = _failure(tmp_path, "def rows(): os.kill(os.getpid(), 9)", ToolError)
    assert "was killed by SIGKILL (often: out of memory)" in message


def test_only_the_last_lines_of_much_output_are_shown(tmp_path) -> None:
    message = _failure(tmp_path, "def rows():\n  for i in range(50000): print('line', i)\n  raise KeyError('x')")
    assert "line 49999" in message
    assert len(message.splitlines()) < 30


def test_time_limit(tmp_path) -> None:
    start = time.monotonic()
    with pytest.raises(ToolError, match=r"did not finish within 0\.6 s and was ended") as caught:
        _run(tmp_path, "import time\ndef rows():\n  print('begin')\n  time.sleep(60)\n  yield 1", timeout_s=0.6)
    assert time.monotonic() - start < 30
    assert "begin" in str(caught.value)


def test_processes_that_the_users_code_started_end_with_it(tmp_path) -> None:
    body = (
        "import subprocess\n"
        "def rows():\n"
        "  worker = subprocess.Popen(['sleep', '600'])\n"
        "  while True: yield np.array([worker.pid], 'f8')\n"
    )
    (tmp_path / "mine.py").write_text("import numpy as np\n" + body)
    code = parse_code(f"{tmp_path}/mine.py:rows")
    assert code is not None
    with UserProcess(code, TASK) as process:
        process.answer(True)
        worker = int(process.receive()[1]["x"][0])
        os.kill(worker, 0)
    for _ in range(100):
        if not _alive(worker):
            return
        time.sleep(0.05)
    pytest.fail("the worker lives on")


def _alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_forked_worker_that_holds_the_pipe_does_not_hide_the_death(tmp_path) -> None:
    body = "import time\ndef rows():\n  if os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\n  os._exit(7)"
    assert "ended its process with status 7" in _failure(tmp_path, body)


@pytest.mark.parametrize("after", ["while True: yield np.ones(2, 'f')", "time.sleep(600)"], ids=["waits", "works"])
def test_child_and_what_it_started_end_when_the_parent_is_killed(tmp_path, after: str) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np, os, subprocess, time\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} {{other.pid}}')\n"
        f"def rows():\n  yield np.ones(2, 'f')\n  {after}\n"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\n"
            "from pipeline.usercode import UserProcess, parse_code\n"
            f"with UserProcess(parse_code({str(tmp_path / 'mine.py') + ':rows'!r}), {TASK!r}) as p:\n"
            "    p.answer(True); p.answer(True); p.receive(); print('ready', flush=True); time.sleep(600)\n",
        ],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    children = [int(number) for number in (tmp_path / "pid").read_text().split()]
    assert all(map(_alive, children))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(200):
        if not any(map(_alive, children)):
            return
        time.sleep(0.05)
    pytest.fail("a child lives on")


def test_long_lines_of_output_are_cut(tmp_path) -> None:
    message = _failure(tmp_path, "def rows():\n  print('a' * 5000 + 'end')\n  yield 1 / 0")
    assert "aaaend" in message
    assert len(message) < 1000


def test_safe_path_in_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert len(_run(tmp_path, "def rows(): yield np.ones(2, 'f')")) == 1
