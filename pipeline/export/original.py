"""A child process that runs a user's model in 16 bits: onnxruntime's CPU kernels end the process on some of those."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engine.process import Reporter, die_with_parent, run_child

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from pipeline.records import TensorSpec

__all__ = ["main", "run_original"]

_OUTPUTS = "outputs.npz"


def run_original(
    model: Path, inputs: Sequence[TensorSpec], shapes: Sequence[dict[str, tuple[int, ...]]]
) -> tuple[int, dict[str, np.ndarray[Any, Any]]] | str:
    """:func:`pipeline.equivalence.run_on_random` in a process of its own."""
    import numpy as np

    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        task = {"inputs": [spec.model_dump(mode="json") for spec in inputs], "shapes": list(shapes)}
        arguments = [str(model.absolute()), json.dumps(task), folder]
        ended = run_child("pipeline.export.original", arguments, on_event=events.append, timeout_s=None)
        last = events[-1] if events else {}
        if "number" in last:
            with np.load(Path(folder) / _OUTPUTS, allow_pickle=False) as saved:
                return int(last["number"]), dict(saved)
    return str(last.get("refused") or f"onnxruntime ended with {ended.how} on it")


def main(arguments: list[str]) -> None:
    """The child: ``arguments`` are the model, the task, the folder for the outputs and the pipe's descriptor."""
    import numpy as np

    from pipeline.equivalence import run_on_random
    from pipeline.records import TensorSpec

    die_with_parent()
    model, text, folder, descriptor = arguments
    reporter, task = Reporter(int(descriptor)), json.loads(text)
    inputs = [TensorSpec.model_validate(item) for item in task["inputs"]]
    ran = run_on_random(Path(model), inputs, task["shapes"])
    if isinstance(ran, str):
        reporter.send("refused", refused=ran)
        return
    number, outputs = ran
    np.savez(Path(folder) / _OUTPUTS, **outputs)  # type: ignore[arg-type]
    reporter.send("ran", number=number)
