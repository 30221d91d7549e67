#!/usr/bin/env python3
"""Write the classes, enum members and class members of a TensorRT Python module as JSON.

The lists in tests/engine/data/api-*.json came from here; the tests hold every use of TensorRT in `pipeline.engine`
against them, so that no version has to be installed for that check.

    dump_tensorrt_api.py --module tensorrt_rtx --out tests/engine/data/api-rtx-1.7.json
    dump_tensorrt_api.py --wheel tensorrt_cu12_bindings-10.16.1.11-cp311-*.whl --out tests/engine/data/api-10.16.json
    dump_tensorrt_api.py --wheel tensorrt_cu13_bindings-11.4.0.106-cp311-*.whl --out tests/engine/data/api-11.4.json
    dump_tensorrt_api.py --wheel tensorrt-8.6.0-cp310-*.whl --python python3.10 --out tests/engine/data/api-8.6.json

The wheels come from `pip download --no-deps`; the Python must be the one in the wheel's name. Libraries that the module
links to and that the machine lacks are replaced by empty stand-ins (needs gcc, nm and readelf): nothing in them runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CHILD = """
import enum, importlib, json, sys
module = importlib.import_module(sys.argv[1])
is_enum = lambda kind: hasattr(kind, "__members__")
public = lambda names: sorted(name for name in names if not name.startswith("_"))
kinds = {name: kind for name, kind in vars(module).items() if isinstance(kind, type) and not name.startswith("_")}
json.dump({
    "version": module.__version__,
    "module": sorted(name for name in vars(module) if not name.startswith("_")),
    "classes": {name: public(dir(kind)) for name, kind in sorted(kinds.items()) if not is_enum(kind)},
    "enums": {name: sorted(kind.__members__) for name, kind in sorted(kinds.items()) if is_enum(kind)},
}, sys.stdout)
"""


def needed_libraries(library: Path) -> list[str]:
    text = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)


def loadable(soname: str) -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", f"import ctypes; ctypes.CDLL({soname!r})"], capture_output=True
        ).returncode
        == 0
    )


def write_stub(folder: Path, soname: str, symbols: list[str], *, versioned: bool) -> None:
    """An empty shared library; ``versioned`` symbols carry the soname as version, as cuBLAS's and cuDNN's do."""
    source, script = folder / "stub.c", folder / "stub.map"
    source.write_text("".join(f"int {symbol}(void) {{ return 1; }}\n" for symbol in symbols))
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / soname), str(source), f"-Wl,-soname,{soname}"]
    if versioned:
        script.write_text(f"{soname} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)


def undefined_symbols(library: Path) -> list[str]:
    return subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
    ).stdout.split()


def prepare_wheel(wheel: Path, folder: Path) -> tuple[str, str]:
    """Unpack ``wheel`` and stand in for the libraries it lacks.

    Returns:
        The module's name and the search path for its libraries.
    """
    site, stubs = folder / "site", folder / "stubs"
    stubs.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    package = next(path.parent for path in site.glob("*/__init__.py"))
    libraries = sorted(package.glob("*.so*"))
    shipped = {library.name for library in libraries}
    for library in libraries:
        for soname in needed_libraries(library):
            if soname in shipped or (stubs / soname).exists() or loadable(soname):
                continue
            words = undefined_symbols(library)
            tagged = sorted({word.split("@")[0] for word in words if word.endswith(f"@{soname}")})
            plain = sorted(
                {
                    word
                    for word in words
                    if re.fullmatch(
                        r"\w+_INTERNAL|getInferLibVersion|getNvOnnxParserVersion|"
                        r"getPluginRegistry|getBuilderPluginRegistry|initLibNvInferPlugins",
                        word,
                    )
                }
            )
            write_stub(stubs, soname, tagged or plain, versioned=bool(tagged))
    if package.name != "tensorrt":  # the bindings wheels name their package after themselves
        (site / "tensorrt").symlink_to(package.name)
    return package.name, f"{stubs}:{package}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", help="a module that can be imported here")
    parser.add_argument("--wheel", type=Path, help="a wheel to unpack instead")
    parser.add_argument("--python", default=sys.executable, help="interpreter that the wheel is for")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        environment = dict(os.environ)
        module = args.module
        if args.wheel:
            module, libraries = prepare_wheel(args.wheel, Path(scratch))
            environment |= {"PYTHONPATH": str(Path(scratch) / "site"), "LD_LIBRARY_PATH": libraries}
        result = subprocess.run(
            [args.python, "-c", CHILD, module], check=True, capture_output=True, text=True, env=environment
        )
    value = json.loads(result.stdout[result.stdout.index("{") :])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps(value, indent=None, separators=(",", ":"), sort_keys=True).replace('],"', '],\n"') + "\n"
    )
    print(f"{args.out}: {value['version']}, {len(value['classes'])} classes, {len(value['enums'])} enums")


if __name__ == "__main__":
    main()
