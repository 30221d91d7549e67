"""Families of ONNX operators that more than one package asks for."""

from __future__ import annotations

from typing import Final

__all__ = ["ACTIVATIONS"]

ACTIVATIONS: Final = frozenset(
    {
        "Celu", "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu",
        "Sigmoid", "Softplus", "Softsign", "Swish", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip
"""A function of each value of one tensor (PRelu's slopes are constants): what kernels compute before they store."""
