"""`quantize doctor`: which targets work here, why the others do not, and what is installed."""

from __future__ import annotations

from typing import Any

import click

from pipeline.cli.common import JsonCommand, console, output_options, print_json, user_errors
from pipeline.cli.tables import add_row, new_table, print_table

_TARGETS = ("rtx", "tensorrt", "onnx")
_PACKAGES = (
    "quantize-trt",
    "numpy",
    "numba",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "tensorrt",
    "tensorrt-rtx",
    "pycuda",
    "pydantic",
)


@click.command(cls=JsonCommand)
@output_options
@user_errors
def command(as_json: bool, quiet: bool, verbose: bool) -> None:
    """Say which targets work on this machine, why the others do not, and what is installed."""
    found = examine()
    if as_json:
        print_json(found)
        return
    from rich.text import Text

    out = console()
    targets = new_table("targets", ("target", "word"), ("works", "word"), ("version", "text"), ("why", "text"))
    for status in found["targets"]:
        mark = Text("yes", style="green") if status["works"] else Text("no", style="red")
        add_row(targets, status["name"], mark, status["version"] or "-", status["reason"])
    print_table(out, targets)
    for title in ("machine", "packages"):
        table = new_table(title, ("", "word"), ("", "text"), header=False)
        for key, value in found[title].items():
            add_row(table, key, value or "not installed", style=None if value else "dim")
        print_table(out, table)


def examine() -> dict[str, Any]:
    """Targets, machine and packages, as JSON values."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from pipeline.core.ort import cpu_threads
    from pipeline.engine.device import describe_device, driver_version, no_device_reason
    from pipeline.engine.probe import probe

    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    device = describe_device()
    card = (
        f"{device.name}, compute capability {device.compute_capability}, {device.memory_bytes / 1e9:.0f} GB"
        if device
        else None
    )
    return {
        "targets": [probe(target).model_dump() for target in _TARGETS],
        "machine": {
            "GPU": card or f"none: {no_device_reason()}",
            "driver": driver_version() or "none",
            "cores": str(cpu_threads()),
            "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
            "Python": platform.python_version(),
        },
        "packages": packages,
    }
