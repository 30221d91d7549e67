"""`quantize doctor`: which targets work here, why the others do not, and what is installed."""

from __future__ import annotations

from typing import Any

import click

from pipeline.cli.common import console, output_options, print_json, user_errors

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


@click.command()
@output_options
@user_errors
def command(as_json: bool, quiet: bool, verbose: bool) -> None:
    """Say which targets work on this machine, why the others do not, and what is installed."""
    found = examine()
    if as_json:
        print_json(found)
        return
    from rich.table import Table
    from rich.text import Text

    out = console()
    targets = Table(title="targets", title_justify="left")
    for column in ("target", "works", "version", "why"):
        targets.add_column(column, overflow="fold")
    for status in found["targets"]:
        mark = Text("yes", style="green") if status["works"] else Text("no", style="red")
        targets.add_row(status["name"], mark, status["version"] or "-", status["reason"])
    out.print(targets)
    for title in ("machine", "packages"):
        table = Table(title=title, title_justify="left", show_header=False)
        for key, value in found[title].items():
            table.add_row(key, value or "not installed", style=None if value else "dim")
        out.print(table)


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
