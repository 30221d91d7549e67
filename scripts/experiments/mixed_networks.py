"""Networks with seeded random weights, for `quantize build scripts/experiments/mixed_networks.py:NAME --min-sqnr`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_SEED = 20


def mobilenet_v3() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Hard-swish, hard-sigmoid and squeeze-and-excitation; input ``x``: Nx3x128x128."""
    from tests.zoo.convnets import MobileNetV3

    torch.manual_seed(_SEED)
    return MobileNetV3(classes=100).eval(), {"x": torch.zeros(1, 3, 128, 128)}


def silu_detector() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A detector of SiLU blocks with two outputs, boxes and scores; input ``x``: Nx3x128x128."""
    from tests.zoo.dense import Detector

    torch.manual_seed(_SEED)
    return Detector().eval(), {"x": torch.zeros(1, 3, 128, 128)}
