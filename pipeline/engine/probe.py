"""Which targets work on this machine, and why the others do not.

Everything that could end the process happens in a child.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError, QuantizeError
from pipeline.engine.compat import MODULES, RTX_CARDS, load_api, rtx_runs_on
from pipeline.engine.device import describe_device, no_device_reason
from pipeline.engine.process import python_command
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["TargetStatus", "default_targets", "probe", "require_working"]

_TIMEOUT_S = 120
_DISTRIBUTIONS = {
    "rtx": ("tensorrt_rtx", "tensorrt-rtx"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-bindings"),
    "onnx": ("onnxruntime", "onnxruntime-gpu"),
}


class TargetStatus(Record):
    name: str
    works: bool
    """An engine for this target can be built here."""
    version: str | None
    reason: str
    """Why it does not work; where it does: what can be done with it here."""


def _version(target: str) -> str | None:
    for name in _DISTRIBUTIONS[target]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def probe(target: str) -> TargetStatus:
    """Whether ``target`` (rtx, tensorrt or onnx) works here. Asked once per process."""
    version = _version(target)
    if target == "onnx":
        works = importlib.util.find_spec("onnxruntime") is not None
        reason = "the Q/DQ graph itself, loaded in onnxruntime" if works else "onnxruntime is not installed"
        return TargetStatus(name=target, works=works, version=version, reason=reason)
    if importlib.util.find_spec(MODULES[target]) is None:
        extra = "rtx" if target == "rtx" else "gpu"
        reason = f"{MODULES[target]} is not installed: pip install 'quantize-trt[{extra}]'"
        return TargetStatus(name=target, works=False, version=None, reason=reason)
    missing = no_device_reason()
    if target == "tensorrt" and missing:
        return TargetStatus(
            name=target, works=False, version=version, reason=f"{missing}; TensorRT builds on the card it runs on"
        )
    try:
        answer = subprocess.run(
            python_command("pipeline.engine.probe", target),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TargetStatus(name=target, works=False, version=version, reason=f"no builder within {_TIMEOUT_S} s")
    if answer.returncode:
        words = (answer.stderr or answer.stdout).strip().splitlines()
        how = f"signal {-answer.returncode}" if answer.returncode < 0 else f"status {answer.returncode}"
        return TargetStatus(
            name=target, works=False, version=version, reason=f"its process ended with {how}: {' '.join(words[-2:])}"
        )
    return TargetStatus.model_validate_json(answer.stdout.splitlines()[-1])


def require_working(targets: Iterable[str], *, note: str = "") -> None:
    """Refuse targets that do not work here.

    Args:
        note: what follows from it, after the reason.

    Raises:
        InputError: the first of them.
    """
    for target in targets:
        status = probe(target)
        if not status.works:
            raise InputError(
                f"target {target} does not work here: {status.reason}{note}",
                remedy="`quantize doctor` says which targets do",
            )


def default_targets() -> tuple[str, ...]:
    """The targets that work here, in the order rtx, tensorrt, onnx."""
    return tuple(target for target in ("rtx", "tensorrt", "onnx") if probe(target).works)


def main(arguments: list[str]) -> None:
    """In the child: make a builder and print a :class:`TargetStatus`."""
    (target,) = arguments
    version = None
    try:
        api = load_api(target)
        version = api.version
        builder = api.trt.Builder(api.trt.Logger(api.trt.Logger.ERROR))
        works, reason = builder is not None, "no builder"
    except (QuantizeError, TypeError, RuntimeError) as error:
        works, reason = False, str(error)
    if works:
        device = describe_device()
        if target == "tensorrt":
            reason = f"builds and runs on the {device.name}" if device else "builds here"
        elif device is None:
            reason = f"builds here; engines cannot run here: {no_device_reason()}"
        elif rtx_runs_on(device.compute_capability):
            reason = f"builds and runs on the {device.name}"
        else:
            reason = (
                f"builds here; engines do not run on the {device.name}, whose compute capability is "
                f"{device.compute_capability} (TensorRT-RTX runs on {', '.join(RTX_CARDS)} and newer)"
            )
    status = TargetStatus(name=target, works=works, version=version, reason=reason)
    sys.stdout.write(status.model_dump_json() + "\n")
