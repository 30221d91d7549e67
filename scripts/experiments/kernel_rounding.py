"""How much the choice of float kernels moves a Q/DQ graph: `python scripts/experiments/kernel_rounding.py ARTIFACT`.

Computes 32 samples of the data that the artifact was built from, without graph optimisation, with it (no integer fusion
in either), and without it after every bias was changed by about a millionth of itself. Prints the relative L2 between
them, SQNR and CPU time.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipeline.artifact import Artifact
from pipeline.core.ort import make_session
from pipeline.data import batched, open_source

SAMPLES = 32
AT_ONCE = 2
CHANGE = 1e-6


def outputs(model: Path | Any, feeds: list[dict[str, Any]], *, optimise: bool) -> tuple[np.ndarray[Any, Any], float]:
    """The first output for all samples, and the CPU milliseconds of one."""
    session = make_session(model, optimise=optimise, threads=1)
    session.run(None, feeds[0])
    start = time.process_time()
    values = np.concatenate([session.run(None, feed)[0] for feed in feeds])
    return values, (time.process_time() - start) / len(values) * 1e3


def with_other_biases(path: Path) -> Any:
    """The model with each convolution's bias times 1 + N(0, CHANGE)."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    random = np.random.default_rng(0)
    biases = {node.input[2] for node in model.graph.node if node.op_type == "Conv" and len(node.input) > 2}
    for tensor in model.graph.initializer:
        if tensor.name in biases:
            values = numpy_helper.to_array(tensor)
            changed = (values * (1 + CHANGE * random.standard_normal(values.shape))).astype(values.dtype)
            tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    return model


def relative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    artifact = Artifact.open(parser.parse_args().artifact)
    options = artifact.manifest.data.options
    if options is None:
        raise SystemExit("the manifest does not say how the data were read; build the artifact again")
    source = open_source(options.data, artifact.manifest.inputs, options.preprocess)
    samples = islice(source.read(lambda _: True), SAMPLES)
    feeds = [dict(batch.feeds) for batch in batched(samples, AT_ONCE, artifact.manifest.inputs)]
    int8 = artifact.path("model.int8.onnx")
    reference, _ = outputs(artifact.path("model.fp32.onnx"), feeds, optimise=False)
    plain, plain_ms = outputs(int8, feeds, optimise=False)
    fast, fast_ms = outputs(int8, feeds, optimise=True)
    other, _ = outputs(with_other_biases(int8), feeds, optimise=False)
    print(f"INT8 against FP32: {relative(plain, reference):.2%}")
    print(f"optimised against not optimised: {relative(fast, plain):.2%}")
    print(f"biases changed by {CHANGE:g}: {relative(other, plain):.2%}")
    for label, values, ms in (("not optimised", plain, plain_ms), ("optimised", fast, fast_ms)):
        sqnr_db = -20 * np.log10(relative(values, reference))
        print(f"{label}: SQNR {sqnr_db:.2f} dB, {ms:.1f} CPU ms a sample on one thread")


if __name__ == "__main__":
    main()
