"""What the tests on a GPU share: numpy, pydantic, TensorRT and PyCUDA only, for the GPU machine has nothing else."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import Profile
from pipeline.core.files import sha256_json, write_text
from pipeline.engine.builder import build_engine
from pipeline.engine.device import no_device_reason
from pipeline.engine.records import BuildOptions, EngineRecord

DATA = Path(__file__).parent / "data"
TIMEOUT_S = 180.0
IMAGES = "x=1x16x16x16,4x16x16x16,8x16x16x16"
PROFILES = {
    "conv_static": (),
    "nonzero": ("x=1x8,4x8,64x8",),
    "two_inputs": ("ids=1x1,4x4,8x8;factor=1x1x1,4x4x1,8x8x1",),
}


def _absent() -> str:
    if reason := no_device_reason():
        return reason
    missing = [name for name in ("tensorrt", "pycuda") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


ABSENT = _absent()
GPU = [pytest.mark.gpu, pytest.mark.skipif(bool(ABSENT), reason=f"needs a GPU with TensorRT and PyCUDA: {ABSENT}")]


@functools.cache
def scratch() -> Path:
    """One folder for the engines of a test run: that of all its processes, or one that goes when this process ends."""
    if shared := os.environ.get("QUANTIZE_GPU_TESTS"):
        return Path(shared)
    folder = tempfile.TemporaryDirectory(prefix="quantize-gpu-tests-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def options(**fields: object) -> BuildOptions:
    """Quick builds that share one timing cache."""
    return BuildOptions.model_validate(
        {"optimization_level": 2, "timing_cache_folder": scratch() / "timing", "workspace_bytes": 1 << 30, **fields}
    )


@functools.cache
def engine(model: str, *profiles: str, **fields: object) -> tuple[Path, EngineRecord]:
    """Plan and record of a fixture's engine, built once in a test run."""
    texts = profiles or PROFILES.get(model, (IMAGES,))
    folder = scratch() / f"{model}-{sha256_json([texts, sorted((k, str(v)) for k, v in fields.items())])[:16]}"
    folder.mkdir(exist_ok=True)
    plan, path = folder / "model.plan", folder / "build.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return plan, EngineRecord.model_validate_json(path.read_bytes())
        record = build_engine(
            DATA / f"{model}.onnx",
            target="tensorrt",
            profiles=[Profile.parse(text) for text in texts],
            plan_path=plan,
            options=options(**fields),
            timeout_s=TIMEOUT_S,
        )
        write_text(path, record.model_dump_json())
    return plan, record


def stored(model: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A fixture's inputs and what onnxruntime made of them."""
    with np.load(DATA / f"{model}.npz") as file:
        inputs = {name.removeprefix("inputs/"): file[name] for name in file.files if name.startswith("inputs/")}
        outputs = {name.removeprefix("outputs/"): file[name] for name in file.files if name.startswith("outputs/")}
    return inputs, outputs


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))
