"""`python -m pipeline.engine ARTIFACT`: the same as `quantize build --from ARTIFACT`, where click is not installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline.config import Profile
from pipeline.core.errors import QuantizeError
from pipeline.engine.from_artifact import build_from_artifact
from pipeline.engine.records import BuildOptions


def main() -> int:
    """Build, check and add the engine; the exit code is that of the command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.engine", description=(__doc__ or "").partition(":")[2])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--target", choices=("tensorrt", "rtx"), default="tensorrt")
    parser.add_argument("--profile", action="append", default=[], help="NAME=MIN,OPT,MAX[;...] [those of the artifact]")
    parser.add_argument("--fp16", action="store_true", help="TensorRT <= 10: FP16 kernels for the rest")
    parser.add_argument("--fastest", action="store_true", help="keep an FP16 plan for the profiles where it is faster")
    options = parser.parse_args()
    try:
        profiles = [Profile.parse(text) for text in options.profile]
        built = build_from_artifact(
            options.artifact,
            target=options.target,
            options=BuildOptions(fp16=options.fp16),
            profiles=profiles,
            fastest=options.fastest,
        )
    except (QuantizeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, QuantizeError) else 2
    print(built.model_dump_json(indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
