#!/usr/bin/env python3
"""Are the scales that a real engine uses those of its artifact? On a GPU machine; numpy, pydantic, TensorRT and PyCUDA.

    gpu_on_device.py ARTIFACT... --out OUT [--target tensorrt] [--work DIR]

For each artifact the probe is built (an engine of the same Q/DQ graph that returns every DequantizeLinear's output),
run on the recorded samples, and the scale of each tensor is measured from its values. The outputs of the artifact's own
engine, or of the probe where it has none for the target, are compared with the recorded ones. Writes on_device.md and
on_device.json; exit code 1 when a scale or an output is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.artifact import Artifact, engine_folder
from pipeline.consistency.device import DEFAULT_RTOL, check_on_device, check_probe, device_text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="tensorrt", choices=["tensorrt", "rtx"])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "quantize-probes")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    lines = [
        "| artifact | visible scales | within 1e-5 | largest difference | too few levels | wrong | outputs | seconds |"
    ]
    lines.append("|---" * 8 + "|")
    results = []
    for folder in given.artifacts:
        start = time.monotonic()
        probe = given.work / f"{folder.resolve().name}.plan"
        has_engine = f"{engine_folder(given.target)}/model.plan" in Artifact.open(folder).manifest.files
        check = (check_on_device if has_engine else check_probe)(
            folder, target=given.target, probe=probe, rtol=DEFAULT_RTOL
        )
        seconds = time.monotonic() - start
        print(f"{folder}:\n{device_text(check)}", flush=True)
        right = [scale for scale in check.scales if scale.verdict == "ok"]
        largest = max((scale.relative or 0.0 for scale in right), default=0.0)
        outputs = ", ".join(f"{o.output} {o.relative_l2:.3g} (allowed {o.allowed:.3g})" for o in check.outputs)
        cells = [
            folder.name, str(len(check.determined)), str(len(right)), f"{largest:.2g}",
            str(len(check.scales) - len(check.determined)), str(len(check.wrong)), outputs, f"{seconds:.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
        passed = check.passed and bool(check.determined)
        results.append({"artifact": folder.name, "passed": passed, "seconds": seconds, **check.model_dump(mode="json")})
    text = "\n".join(lines) + "\n"
    print(text)
    (given.out / "on_device.md").write_text(text)
    (given.out / "on_device.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
