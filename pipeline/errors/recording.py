"""Record an engine's layers on the machine with the GPU, for a report made elsewhere.

``python -m pipeline.errors.recording ARTIFACT OUT.npz`` runs the artifact's INT8 graph as an engine with each quantised
layer's tensor as an output, on the samples kept in the artifact. ``quantize errors ARTIFACT --engine-tensors OUT.npz``
reads the file. Needs numpy, pydantic, TensorRT and PyCUDA; nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.artifact import INT8_MODEL, PLACEMENT, SAMPLES, Artifact
from pipeline.core.errors import InputError, QuantizeError
from pipeline.core.files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "record_engine"]


def record_engine(folder: Path, path: Path, *, target: str = "tensorrt", samples: int | None = None) -> int:
    """Write ``samples`` and one array per quantised layer into ``path``; returns the number of layers.

    Args:
        samples: how many of the artifact's samples; None: all of them.

    Raises:
        InputError: no artifact, no samples in it, or nothing quantised.
        ToolError: no GPU, or TensorRT fails.
    """
    from pipeline.engine.capture import capture_outputs

    artifact = Artifact.open(folder)
    try:
        decisions = json.loads(artifact.path(PLACEMENT).read_text())["decisions"]
        tensors = [decision["outputs"][0] for decision in decisions if decision["quantized"]]
        with np.load(artifact.path(SAMPLES), allow_pickle=False) as kept:
            numbers = kept["samples"][:samples]
            prefix = "inputs/"
            feeds = {n.removeprefix(prefix): kept[n][: len(numbers)] for n in kept.files if n.startswith(prefix)}
    except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{folder}: {PLACEMENT} or {SAMPLES} cannot be read: {error}",
            remedy=f"`quantize verify {folder}` looks for damage",
        ) from error
    if not tensors:
        raise InputError(f"{folder} has no quantised layer")
    values = next(iter(capture_outputs(artifact.path(INT8_MODEL), tensors, [feeds], target=target)))
    with atomic_file(path) as stream:
        np.savez(stream, samples=numbers, **values)  # type: ignore[arg-type]
    return len(tensors)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Record an engine's layers for `quantize errors --engine-tensors`.")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("out", type=Path, help="an .npz file")
    parser.add_argument("--target", default="tensorrt", choices=("tensorrt", "rtx"))
    parser.add_argument("--samples", type=int, help="so many of the artifact's samples [all]")
    options = parser.parse_args(arguments)
    try:
        count = record_engine(options.artifact, options.out, target=options.target, samples=options.samples)
    except QuantizeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{count} layers recorded in {options.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
