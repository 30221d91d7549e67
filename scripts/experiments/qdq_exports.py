"""Export small networks quantised by other tools, as those tools do it: what a user's "model with Q/DQ" really is.

Run once per tool, in an environment that has it; the project itself is not needed:

    python scripts/experiments/qdq_exports.py float        exports   # any environment with torch
    python scripts/experiments/qdq_exports.py modelopt     exports   # nvidia-modelopt[onnx], torch
    python scripts/experiments/qdq_exports.py brevitas     exports   # brevitas, torch
    python scripts/experiments/qdq_exports.py onnxruntime  exports   # onnxruntime
    python scripts/experiments/qdq_exports.py torchao      exports   # torchao, torch >= 2.13
    python scripts/experiments/qdq_exports.py reproduction exports   # torch: pytorch-quantization's export, see there

Each writes ``<network>-<tool>-<form>.onnx`` for the networks below; ``float`` comes first (its models are what
ModelOpt's and onnxruntime's post-training tools start from) and writes the calibration data too. A form that a tool
cannot export is told and left out. ``qdq_check.py`` then builds each.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

IMAGE = (3, 16, 16)
TOKENS, WIDTH = 8, 16
OPSET = 17
Export = Callable[[Path], None]


# --- the networks


def networks() -> dict[str, Callable[[], Any]]:
    """Name -> a function that builds the float network, seeded."""
    import torch
    from torch import nn

    class Convnet(nn.Module):
        """Conv-BN-ReLU, then a residual block with a depthwise convolution, then a classifier."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
            self.pointwise = nn.Conv2d(16, 16, 1)
            self.relu, self.relu_depthwise, self.relu_sum = nn.ReLU(), nn.ReLU(), nn.ReLU()
            self.pool = nn.MaxPool2d(2)
            self.head = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            x = self.relu(self.stem_norm(self.stem(x)))
            y = self.pointwise(self.relu_depthwise(self.depthwise(x)))
            x = self.pool(self.relu_sum(x + y))
            return self.head(x.mean((2, 3)))

    class Block(nn.Module):
        """A transformer block: attention over TOKENS, two heads, and a feed-forward part."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.out = nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.gelu = nn.GELU()

        def heads(self, x: Any) -> Any:
            return x.reshape(-1, TOKENS, 2, WIDTH // 2).transpose(1, 2)

        def forward(self, x: Any) -> Any:
            y = self.norm1(x)
            q, k, v = self.heads(self.query(y)), self.heads(self.key(y)), self.heads(self.value(y))
            attention = torch.softmax(q @ k.transpose(2, 3) / (WIDTH // 2) ** 0.5, dim=-1)
            x = x + self.out((attention @ v).transpose(1, 2).reshape(-1, TOKENS, WIDTH))
            return x + self.down(self.gelu(self.up(self.norm2(x))))

    class Basic(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
            self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
            self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
            self.skip = nn.Conv2d(inputs, width, 1, stride, bias=False) if inputs != width else None
            self.skip_norm = nn.BatchNorm2d(width) if inputs != width else None

        def forward(self, x: Any) -> Any:
            y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
            return self.relu2(y + (x if self.skip is None else self.skip_norm(self.skip(x))))  # type: ignore[misc]

    class ResNet18(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
            self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
            widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
            pairs = itertools.pairwise(widths)
            self.blocks = nn.Sequential(*(Basic(a, b, 1 if a == b else 2) for a, b in pairs))
            self.head = nn.Linear(512, 1000)

        def forward(self, x: Any) -> Any:
            return self.head(self.blocks(self.pool(self.relu(self.norm(self.stem(x))))).mean((2, 3)))

    def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
        def build() -> Any:
            torch.manual_seed(0)
            return make()

        return build

    return {"convnet": seeded(Convnet), "block": seeded(Block), "resnet18": seeded(ResNet18)}


def sample(network: str, count: int = 32) -> np.ndarray[Any, Any]:
    """float32 (count, ...) inputs, the same in every environment."""
    shape = {"convnet": IMAGE, "block": (TOKENS, WIDTH), "resnet18": (3, 64, 64)}[network]
    return np.random.default_rng(7).standard_normal((count, *shape)).astype(np.float32)


def train(model: Any, network: str, steps: int) -> Any:
    """Some steps of SGD towards fixed random targets, so that BatchNorm and weights are no initial ones."""
    import torch

    x = torch.from_numpy(sample(network))
    model.train()
    with torch.no_grad():
        target = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(3))
    rate = 0.0005 if network == "resnet18" else 0.02
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(model(x), target).backward()
        optimiser.step()
    return model.eval()


def trained(network: str) -> Any:
    return train(networks()[network](), network, 12 if network == "resnet18" else 20)


def onnx_export(model: Any, network: str, path: Path, *, opset: int = OPSET) -> None:
    """By torch's TorchScript exporter, with a dynamic batch."""
    import torch

    torch.onnx.export(
        model, (torch.from_numpy(sample(network, 2)),), path, opset_version=opset, dynamo=False,
        input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
    )  # fmt: skip


# --- the tools


def float_models(network: str, folder: Path) -> dict[str, Export]:
    np.save(folder / f"{network}.npy", sample(network, 96))
    return {"fp32": lambda path: onnx_export(trained(network), network, path)}


def modelopt(network: str, folder: Path) -> dict[str, Export]:
    """ModelOpt's quantiser of torch modules (with and without steps of QAT), and that of ONNX files."""
    import modelopt.onnx.quantization as moq
    import modelopt.torch.quantization as mtq
    import torch

    x = sample(network)

    def torch_form(config: dict[str, Any], steps: int) -> Export:
        def export(path: Path) -> None:
            model = mtq.quantize(trained(network), config, lambda module: module(torch.from_numpy(x)))
            onnx_export(train(model, network, steps) if steps else model.eval(), network, path)

        return export

    def onnx_form(**options: Any) -> Export:
        def export(path: Path) -> None:
            moq.quantize(
                str(folder / f"{network}-float-fp32.onnx"),
                quantize_mode="int8",
                calibration_data={"x": x},
                calibration_eps=["cpu"],
                output_path=str(path),
                **options,
            )

        return export

    return {
        "torch-qat": torch_form(mtq.INT8_DEFAULT_CFG, 2),
        "torch-smoothquant": torch_form(mtq.INT8_SMOOTHQUANT_CFG, 0),
        "onnx-fp32": onnx_form(calibration_method="max", high_precision_dtype="fp32"),
        "onnx-fp16": onnx_form(calibration_method="entropy"),
        "onnx-dq-only": onnx_form(calibration_method="max", high_precision_dtype="fp32", dq_only=True),
    }


def reproduction(network: str, folder: Path) -> dict[str, Export]:
    """What pytorch-quantization 2.x exports, without it: PyPI has a stub of it alone.

    Its TensorQuantizer, in the mode for export, calls torch's own fake_quantize functions with a zero point of 0 and
    the range -128..127 (per tensor for inputs, per output channel for weights), which torch.onnx writes as Q and DQ;
    its QuantConv2d and QuantLinear call it on input and weight. ``unsigned`` is its option of that name, 0..255.
    """
    import torch
    from torch import nn

    class TensorQuantizer(nn.Module):
        def __init__(self, axis: int | None, unsigned: bool = False) -> None:
            super().__init__()
            self.axis, self.unsigned, self.amax, self.fixed = axis, unsigned, None, False

        def forward(self, x: Any) -> Any:
            if not self.fixed:
                dims = tuple(d for d in range(x.dim()) if d != self.axis)
                seen = x.detach().abs().amax(dims)
                self.amax = seen if self.amax is None or self.axis is not None else torch.maximum(self.amax, seen)
            assert self.amax is not None
            low, high = (0, 255) if self.unsigned else (-128, 127)
            scale = self.amax / high
            if self.axis is None:
                return torch.fake_quantize_per_tensor_affine(x, scale.item(), 0, low, high)
            zero = torch.zeros_like(scale, dtype=torch.int32)
            return torch.fake_quantize_per_channel_affine(x, scale, zero, self.axis, low, high)

    class Quantised(nn.Module):
        def __init__(self, layer: nn.Module, unsigned: bool) -> None:
            super().__init__()
            self.layer, self.input, self.weight = layer, TensorQuantizer(None, unsigned), TensorQuantizer(0)

        def forward(self, x: Any) -> Any:
            layer, weight, x = self.layer, self.weight(self.layer.weight), self.input(x)
            if isinstance(layer, nn.Linear):
                return nn.functional.linear(x, weight, layer.bias)
            return layer._conv_forward(x, weight, layer.bias)  # type: ignore[operator]

    behind_relu = ("depthwise", "pointwise", "conv2", "head")

    def wrap(module: Any, unsigned: bool) -> None:
        for name, child in list(module.named_children()):
            if isinstance(child, (nn.Conv2d, nn.Linear)):
                setattr(module, name, Quantised(child, unsigned and name in behind_relu))
            else:
                wrap(child, unsigned)

    def form(unsigned: bool, steps: int) -> Export:
        def export(path: Path) -> None:
            model = trained(network)
            wrap(model, unsigned)
            model(torch.from_numpy(sample(network)))
            train(model, network, steps)
            for module in model.modules():
                if isinstance(module, TensorQuantizer):
                    module.fixed = True
            onnx_export(model, network, path, opset=13)

        return export

    return {"int8-qat": form(False, 2)} | ({} if network == "block" else {"uint8": form(True, 0)})


def brevitas(network: str, folder: Path) -> dict[str, Export]:
    """Brevitas layers in place of torch's, steps of QAT, and ``export_onnx_qcdq``."""
    import torch
    from brevitas import nn as qnn
    from brevitas import quant
    from brevitas.export import export_onnx_qcdq, export_qonnx
    from torch import nn

    def swap(module: Any, *, weight: Any, act: Any, relu: Any, bias: Any, bits: int) -> None:
        for name, child in list(module.named_children()):
            common = {"weight_quant": weight, "input_quant": act, "bias_quant": bias if child_bias(child) else None}
            if bits != 8:
                common |= {"weight_bit_width": bits, "input_bit_width": bits}
            if isinstance(child, nn.Conv2d):
                new: Any = qnn.QuantConv2d(
                    child.in_channels, child.out_channels, child.kernel_size, child.stride, child.padding,
                    groups=child.groups, bias=child_bias(child), **common,
                )  # fmt: skip
            elif isinstance(child, nn.Linear):
                new = qnn.QuantLinear(child.in_features, child.out_features, bias=child_bias(child), **common)
            elif isinstance(child, nn.ReLU) and relu is not None:
                new = qnn.QuantReLU(act_quant=relu)
            else:
                swap(child, weight=weight, act=act, relu=relu, bias=bias, bits=bits)
                continue
            new.load_state_dict(child.state_dict(), strict=False)
            setattr(module, name, new)

    def child_bias(child: Any) -> bool:
        return getattr(child, "bias", None) is not None

    def form(*, weight: Any, act: Any, relu: Any = None, bias: Any = None, bits: int = 8, dynamo: bool = False,
             exporter: Any = export_onnx_qcdq, **options: Any) -> Export:  # fmt: skip
        def export(path: Path) -> None:
            model = trained(network)
            swap(model, weight=weight, act=act, relu=relu, bias=bias, bits=bits)
            train(model, network, 2)
            batch = torch.from_numpy(sample(network, 2))
            shapes = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)} if dynamo else {
                "dynamic_axes": {"x": {0: "batch"}, "y": {0: "batch"}}, "opset_version": OPSET,
            }  # fmt: skip
            exporter(
                model, args=batch, export_path=str(path), input_names=["x"], output_names=["y"], dynamo=dynamo,
                **shapes, **options,
            )  # fmt: skip

        return export

    tensor, channel = quant.Int8WeightPerTensorFloat, quant.Int8WeightPerChannelFloat
    symmetric, shifted = quant.Int8ActPerTensorFloat, quant.ShiftedUint8ActPerTensorFloat
    return {
        "per-channel": form(weight=channel, act=symmetric),
        "per-channel-dynamo": form(weight=channel, act=symmetric, dynamo=True),
        "per-tensor": form(weight=tensor, act=symmetric),
        "weight-q": form(weight=channel, act=symmetric, export_weight_q_node=True),
        "int32-bias": form(weight=channel, act=symmetric, bias=quant.Int32Bias),
        "relu-uint8": form(weight=channel, act=symmetric, relu=quant.Uint8ActPerTensorFloat),
        "shifted-uint8": form(weight=channel, act=shifted),
        "shifted-weights": form(weight=quant.ShiftedUint8WeightPerChannelFloat, act=symmetric),
        "4-bit": form(weight=channel, act=symmetric, bits=4),
        "qonnx": form(weight=channel, act=symmetric, exporter=export_qonnx),
    }


def onnxruntime(network: str, folder: Path) -> dict[str, Export]:
    """onnxruntime's static (QDQ and QOperator) and dynamic quantisation."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source, ready = folder / f"{network}-float-fp32.onnx", folder / f"{network}-float-preprocessed.onnx"
    quant_pre_process(str(source), str(ready))

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [{"x": batch} for batch in np.split(sample(network), 4)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    def static(kind: QuantFormat, act: QuantType, weight: QuantType, *, symmetric: bool = False, channels: bool = True,
               **extra: Any) -> Export:  # fmt: skip
        options = {"ActivationSymmetric": True, "WeightSymmetric": True} if symmetric else {}
        return lambda path: quantize_static(
            ready, path, Reader(), kind, activation_type=act, weight_type=weight, per_channel=channels,
            extra_options=options | extra,
        )  # fmt: skip

    qdq, qoperator, int8, uint8 = QuantFormat.QDQ, QuantFormat.QOperator, QuantType.QInt8, QuantType.QUInt8
    for_tensorrt = {"QuantizeBias": False, "AddQDQPairToWeight": True}
    return {
        "qdq-int8-symmetric": static(qdq, int8, int8, symmetric=True),
        "qdq-int8-per-tensor": static(qdq, int8, int8, symmetric=True, channels=False),
        "qdq-int8-tensorrt": static(qdq, int8, int8, symmetric=True, **for_tensorrt),
        "qdq-uint8-symmetric": static(qdq, uint8, int8, symmetric=True),
        "qdq-uint8-both-symmetric": static(qdq, uint8, uint8, symmetric=True, channels=False),
        "qdq-uint8": static(qdq, uint8, int8),
        "qdq-int8-default": static(qdq, int8, int8),
        "qdq-int16": static(qdq, QuantType.QInt16, int8, symmetric=True),
        "qdq-contrib": static(qdq, int8, int8, symmetric=True, UseQDQContribOps=True),
        "qoperator": static(qoperator, uint8, int8),
        "dynamic": lambda path: quantize_dynamic(ready, path),
    }


def torchao(network: str, folder: Path) -> dict[str, Export]:
    """torch's PT2E flow with torchao's X86InductorQuantizer, exported by torch.onnx's exporter."""
    import torch
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e import HistogramObserver, move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    x = torch.from_numpy(sample(network))

    def symmetric() -> Any:
        """The quantiser's configuration for int8 activations with zero point 0."""
        found = x86.get_default_x86_inductor_quantization_config()
        act = QuantizationSpec(
            dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_symmetric, is_dynamic=False,
            observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=2**-12),
        )  # fmt: skip
        return dataclasses.replace(found, input_activation=act, output_activation=act)

    def form(qat: bool, config: Any = None) -> Export:
        def export(path: Path) -> None:
            batch = ({0: torch.export.Dim("batch", min=2)},)
            model = trained(network)
            module = torch.export.export(model.train() if qat else model, (x,), dynamic_shapes=batch).module()
            quantizer = x86.X86InductorQuantizer()
            quantizer.set_global(config or x86.get_default_x86_inductor_quantization_config(is_qat=qat))
            prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(module, quantizer)
            prepared(x)
            converted = convert_pt2e(prepared)
            move_exported_model_to_eval(converted)
            torch.onnx.export(
                converted, (x,), path, dynamo=True, input_names=["x"], output_names=["y"], dynamic_shapes=batch,
                external_data=False,
            )  # fmt: skip

        return export

    return {"pt2e": form(False), "pt2e-qat": form(True), "pt2e-symmetric": form(False, symmetric())}


def strip(path: Path) -> None:
    import onnx

    model = onnx.load(path)
    del model.graph.metadata_props[:], model.graph.value_info[:]
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
    onnx.save(model, path)


TOOLS: dict[str, Callable[[str, Path], dict[str, Export]]] = {
    "float": float_models, "modelopt": modelopt, "reproduction": reproduction, "brevitas": brevitas,
    "onnxruntime": onnxruntime, "torchao": torchao,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--network", action="append", choices=("convnet", "block", "resnet18"))
    parser.add_argument("--form", action="append", help="Only these forms.")
    parser.add_argument("--strip", action="store_true", help="Leave out metadata and comments (for test data).")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    for network in args.network or ("convnet", "block", "resnet18"):
        for form, export in TOOLS[args.tool](network, args.folder).items():
            if args.form and form not in args.form:
                continue
            path = args.folder / f"{network}-{args.tool}-{form}.onnx"
            try:
                export(path)
            except Exception as error:  # whatever a tool raises: the next form may work
                print(f"{path.name}: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
            else:
                if args.strip:
                    strip(path)
                print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
