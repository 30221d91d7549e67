"""`quantize init`: a commented configuration."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.common import JsonCommand, user_errors

TEMPLATE = """\
# Configuration of `quantize build -c build.yaml`. A flag on the command line overrides a line here.

# An .onnx file, package.module:callable or file.py:callable (returns a torch.nn.Module, or module and example inputs).
model: model.onnx

# A folder of images, a .npy or .npz file (one key per model input, samples along the first axis), or
# file.py:callable yielding arrays or dicts of arrays.
data: calibration/

# Where the artifact goes.
out: artifacts/model

# Images only: a preset (none, imagenet, efficientnet-lite), or keys. mean and std are in units of pixel values 0..255,
# in the order of the channels as fed; a preset's follow channels: imagenet;channels=bgr has mean=103.53,116.28,123.675.
# preprocess: imagenet
# preprocess: {resize: 256, crop: 224x224, mean: [123.675, 116.28, 103.53], std: [58.395, 57.12, 57.375], layout: nchw}

# Smallest, optimal and largest shape of each dynamic input; one entry per TensorRT optimisation profile.
# profiles:
#   - x=1x3x224x224,8x3x224x224,64x3x224x224

# A PyTorch model that returns no example inputs: name, shape and type of each. Left out: float32, the profiles' shapes.
# inputs: [ids:1x16:int64, mask:1x16:int64]

# rtx, tensorrt, onnx; left out: what is installed and works here (`quantize doctor`).
# targets: [rtx]

# minmax, ema, percentile, ema-percentile, entropy, mse, legacy.
calibrator:
  name: mse
  # params: {percentile: 99.9}

# Samples to calibrate on; the others are held aside to verify on.
samples: 128
# verify_samples: 64
batch_size: 8

# For top-1: columns file,class_index (image folder) or index,class_index (arrays).
# labels: labels.csv

# Move the spread between channels into weights: brings most for transformers.
# equalise: true

# Nodes by name, shell pattern or operator type.
# placement:
#   exclude: ["/head/*"]
#   precision: fp16
#   fp16_io: both

# A target starts automatic mixed precision: layers go back to float until it is met. One of max_drop (needs labels),
# min_sqnr and min_agreement; `quantize build -c build.yaml --choose K` then builds any point of its table.
# mixed:
#   max_drop: 0.5%
"""


@click.command(cls=JsonCommand)
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default=Path("build.yaml"))
@click.option("--force", is_flag=True, help="Replace an existing file.")
@user_errors
def command(path: Path, force: bool) -> None:
    """Write a commented configuration to PATH (build.yaml)."""
    from pipeline.core.errors import InputError
    from pipeline.core.files import check_can_write, write_text

    check_can_write(path)
    if path.exists() and not force:
        raise InputError(f"{path} exists", remedy="choose another name, or replace it with --force")
    write_text(path, TEMPLATE)
    click.echo(f"{path} written; edit it, then run: quantize build -c {path}")
