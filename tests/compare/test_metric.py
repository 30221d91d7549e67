"""The user's metric runs in a child process, and what is wrong with it is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.compare.metric import metric_code, metric_process
from pipeline.core.errors import InputError, ToolError

OUTPUTS = {"scores": np.array([[0.1, 0.9], [0.8, 0.2]], np.float32)}


def call(folder: Path, body: str, labels: list[int] | None = None) -> np.ndarray:
    file = folder / "mine.py"
    file.write_text("import os\nimport numpy as np\n\n" + body)
    with metric_process(f"{file}:metric", file) as metric:
        first = metric(OUTPUTS, (4, 7), labels)
        assert np.array_equal(metric(OUTPUTS, (4, 7), labels), first)
        assert str(file) in {dependency.path for dependency in metric.dependencies()}
        return first


def test_it_gets_outputs_samples_and_labels(tmp_path: Path) -> None:
    body = "def metric(outputs, samples, labels):\n    return outputs['scores'][:, 1] + samples + 10 * labels\n"
    assert call(tmp_path, body, [1, 0]) == pytest.approx([0.9 + 4 + 10, 0.2 + 7])


def test_without_labels_it_gets_none(tmp_path: Path) -> None:
    body = "def metric(outputs, samples, labels):\n    assert labels is None\n    return [1, 0]\n"
    assert call(tmp_path, body).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def metric(o, s, l):\n    raise KeyError('boxes')\n", r"failed: KeyError: 'boxes'[\s\S]*line 5"),
        ("def metric(o, s, l):\n    return [1.0, np.nan]\n", "gave nan for sample 7"),
        ("def metric(o, s, l):\n    return [-np.inf, 0]\n", "gave -inf for sample 4"),
        ("def metric(o, s, l):\n    return 0.5\n", r"an array of shape \(\) for 2 samples"),
        ("def metric(o, s, l):\n    return [1, 2, 3]\n", r"an array of shape \(3,\) for 2 samples"),
        ("def metric(o, s, l):\n    return 'good'\n", "returned str, which is no array of numbers"),
        ("metric = 3\n", "the metric is int, not a callable"),
        ("def metrics(o, s, l):\n    return [1, 1]\n", "has no 'metric'"),
        ("def metric(o, s, l):\n    raise SystemExit(3)\n", r"it called sys.exit\(3\)"),
    ],
)
def test_what_goes_wrong_in_it_is_an_input_error(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(tmp_path, body)


def test_a_killed_metric_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="was killed by SIGKILL"):
        call(tmp_path, "def metric(o, s, l):\n    os.kill(os.getpid(), 9)\n")


def test_a_name_that_is_no_callable_in_a_file() -> None:
    with pytest.raises(InputError, match=r"--metric 'accuracy' is not file.py:callable"):
        metric_code("accuracy")
