#!/usr/bin/env python3
"""Which layers of a TensorRT-RTX plan compute on INT8, without a GPU.

A plan of TensorRT-RTX 1.7 holds its compiled program as readable text: ``tensor={... name="..." type=...}`` and
operations such as ``corrltn={ name=... output={...} input={...} layers="[ONNX Layer: ...]..." }``. That form is
undocumented and may change with any release: good for research, not for a product.

    rtx_int8_layers.py PLAN [PLACEMENT_JSON]
    rtx_int8_layers.py --zoo [--equalise] [NAME...]

The first form prints every convolution and matrix product with the types of its operands; with the ``placement.json``
of the quantise stage also how many of the intended INT8 layers are, and which are not. The second takes the networks
of tests/zoo through prepare, placement, calibration (one random batch, minmax: the ranges do not matter here), quantise
and the build of a TensorRT-RTX engine, and prints a row of a table for each.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_TENSOR = re.compile(r'tensor=\{[^{}]*?(?:\{[^{}]*\}[^{}]*?)*name="([^"]*)"[^\n]*?type=(\w+) \}')
_OPERATION = re.compile(r"^\s*(\w+)=\{ name=(\S+|\"[^\"]*\")", re.MULTILINE)
_LIST = re.compile(r'"([^"]*)"')
_LAYER = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
PRODUCTS = ("corrltn", "fully_connected", "deconv", "conv_bwd", "gemm", "batch_gemm", "dgrad")
"""Kinds of operation that multiply and add; the names of those seen, and their likely relatives."""
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
ATTENTION = "_gemm_mha"
"""Name of the functions that compute a whole attention (query, key, value in)."""


@dataclass(frozen=True)
class Operation:
    """One convolution or matrix product of the program."""

    kind: str
    name: str
    types: tuple[str, ...]
    """Of its inputs, in order; ``?`` for one that is not listed among the tensors."""
    layers: tuple[str, ...]
    """ONNX nodes that it was made from."""

    @property
    def int8(self) -> bool:
        return self.types[:2] == ("int8", "int8")


def read_plan(data: bytes) -> list[Operation]:
    """Convolutions and matrix products in a plan; each once, though a plan of several profiles repeats them."""
    text = data.decode("latin1")
    types = dict(_TENSOR.findall(text))
    types |= dict(re.findall(r'sub_tensor=\{[^\n]*?name="([^"]*)"[^\n]*?type=(\w+) \}', text))
    found: dict[str, Operation] = {}
    for match in _OPERATION.finditer(text):
        kind = match.group(1)
        line = text[match.start() : text.find("\n", match.start())]
        inputs = re.search(r"input=\{([^{}]*)\}", line)
        attention = re.search(rf"name=({ATTENTION}\w*) fqn", line)
        if attention is not None:
            inputs = re.search(r"input_args=\{([^{}]*)\}", line)
        elif kind not in PRODUCTS:
            continue
        if inputs is None:
            continue
        layers = re.search(r'layers="([^"]*)"', line)
        names = tuple(_LAYER.findall(layers.group(1))) if layers else ()
        operands = tuple(types.get(name, "?") for name in _LIST.findall(inputs.group(1)))
        name = match.group(2).strip('"')
        if attention is not None:
            kind, name = "attention", names[0] if names else name
        operation = Operation(kind, name, operands, names)
        found.setdefault(operation.name, operation)
    return list(found.values())


def int8_nodes(operations: list[Operation]) -> set[str]:
    """ONNX nodes that an INT8 x INT8 operation was made from."""
    return {layer for operation in operations if operation.int8 for layer in operation.layers}


def kinds(data: bytes) -> dict[str, int]:
    """How often each kind of operation occurs."""
    counts: dict[str, int] = {}
    for match in _OPERATION.finditer(data.decode("latin1")):
        counts[match.group(1)] = counts.get(match.group(1), 0) + 1
    return counts


def zoo_row(name: str, folder: Path, *, equalised: bool) -> str:
    """Quantise the zoo's network ``name``, build its engine and count; a Markdown table row."""
    import calibrators
    from calibrators.statistics import load_statistics
    from pipeline import calibrate, export, prepare, quantize
    from pipeline.config import PlacementConfig, Profile
    from pipeline.data.batching import Batch
    from pipeline.engine.builder import build_engine
    from pipeline.placement import equalise, make_plan
    from tests.zoo import build

    config, model = PlacementConfig(), build(name, folder)
    batches = [Batch(0, (0, 1), model.feeds())]
    exported = export.run(str(model.path), inputs=(), profiles=(), opset=17, folder=folder / "export").model_path
    fp32 = prepare.run(exported, folder=folder / "prepare").model_path
    if equalised:
        fp32 = equalise.run(fp32, batches, folder=folder / "equalise", config=config).model_path
    plan = make_plan(fp32, config)
    calibrated = calibrate.run(fp32, plan.tensors, batches, folder=folder / "calibrate")
    statistics, _ = load_statistics(calibrated.statistics_path)
    minmax = calibrators.get("minmax")
    int8 = quantize.run(fp32, plan, statistics, minmax, folder=folder / "quantize", config=config).model_path
    target = folder / "model.plan"
    build_engine(int8, target="rtx", profiles=[Profile.parse(model.profile())], plan_path=target)
    done = int8_nodes(read_plan(target.read_bytes()))
    weighted = [item for item in plan.decisions if item.op in WEIGHTED]
    wanted = [item for item in weighted if item.quantized]
    rules: dict[str, int] = {}
    for item in weighted:
        if not item.quantized:
            rules[item.rule] = rules.get(item.rule, 0) + 1
    by_rule = ", ".join(f"{count} {rule}" for rule, count in rules.items()) or "none"
    missing = ", ".join(f"{item.op} {item.node}" for item in wanted if item.node not in done) or "none"
    count = sum(item.node in done for item in wanted)
    size = target.stat().st_size / 1e6
    return f"| {name} | {len(weighted)} | {by_rule} | {len(wanted)} | {count} | {missing} | {size:.1f} |"


def zoo(names: list[str], *, equalised: bool) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.zoo import ZOO

    print("| network | convolutions and products | float by rule | intended INT8 | INT8 in the plan | not | plan, MB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names or list(ZOO):
        with tempfile.TemporaryDirectory() as folder:
            print(zoo_row(name, Path(folder), equalised=equalised), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", action="store_true", help="networks of tests/zoo instead of a plan")
    parser.add_argument("--equalise", action="store_true")
    parser.add_argument("names", nargs="*", metavar="PLAN [PLACEMENT_JSON] or NAME...")
    options = parser.parse_args(arguments)
    if options.zoo:
        zoo(options.names, equalised=options.equalise)
        return 0
    if not 1 <= len(options.names) <= 2:
        parser.error("give a plan, and its placement.json if there is one")
    operations = read_plan(Path(options.names[0]).read_bytes())
    for operation in operations:
        kind = "INT8" if operation.int8 else "float"
        print(f"{kind:6}{operation.kind:17}{operation.name:60} {' '.join(operation.types)}")
    if len(options.names) == 2:
        placement = json.loads(Path(options.names[1]).read_text())
        wanted = [
            decision["node"]
            for decision in placement["decisions"]
            if decision["quantized"] and decision["op"] in WEIGHTED
        ]
        done = int8_nodes(operations)
        print(f"{sum(node in done for node in wanted)} of {len(wanted)} intended layers are INT8 x INT8")
        for node in wanted:
            if node not in done:
                print(f"  not INT8: {node}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
