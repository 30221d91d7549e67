"""Families of ONNX operators, as the placement rules see them."""

from __future__ import annotations

from typing import Final

from pipeline.core.operators import ACTIVATIONS

__all__ = [
    "CONVOLUTIONS", "INCLUDABLE", "LAYOUT", "MATRIX_PRODUCTS", "POINTWISE", "QUANTIZERS", "RECURRENT", "REDUCTIONS",
    "SELECTIONS", "UNARY", "WEIGHTED",
]  # fmt: skip

CONVOLUTIONS: Final = ("Conv", "ConvTranspose")
MATRIX_PRODUCTS: Final = ("Gemm", "MatMul")
WEIGHTED: Final = (*CONVOLUTIONS, *MATRIX_PRODUCTS)

UNARY: Final = (
    *sorted(ACTIVATIONS - {"PRelu"}), "Erf", "Abs", "Neg", "Sqrt", "Exp", "Log", "Reciprocal", "Dropout",
    "BatchNormalization",
)  # fmt: skip
"""One computed input, element by element."""

POINTWISE: Final = (*UNARY, "Add", "Sub", "Mul", "Div", "Min", "Max", "Pow", "PRelu")
"""Element by element; TensorRT fuses these into the kernel before them."""

LAYOUT: Final = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "DepthToSpace", "SpaceToDepth")
"""The same values in another order or shape."""

SELECTIONS: Final = ("Slice", "Split", "Gather")
"""Some of the values."""

REDUCTIONS: Final = (
    "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSum",
    "ReduceLogSumExp",
)  # fmt: skip
RECURRENT: Final = ("LSTM", "GRU", "RNN")
QUANTIZERS: Final = ("QuantizeLinear", "DequantizeLinear")

INCLUDABLE: Final = (
    *WEIGHTED, *LAYOUT, *SELECTIONS, "Add", "Mul", "MaxPool", "AveragePool", "GlobalAveragePool",
    "Concat", "Resize", "Pad", "Relu",
)  # fmt: skip
"""What ``include`` may ask for: TensorRT has these on INT8 inputs."""
