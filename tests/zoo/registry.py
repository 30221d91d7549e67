"""One list of all networks, with example inputs small enough for a quick test on two cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.zoo.export import export_onnx

SEED = 20


@dataclass(frozen=True)
class ZooModel:
    """An ONNX file and what it eats.

    ``shapes`` gives each input's shape with the batch at 2 (float32 unless ``dtypes`` says otherwise); ``dynamic``
    names the axes that are dynamic in the file.
    """

    name: str
    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dynamic: Mapping[str, Mapping[int, str]]
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def feeds(self, batch: int = 2, seed: int = SEED) -> dict[str, np.ndarray]:
        """Random inputs: normal floats; token ids below 1000; a mask of ones with a short tail of zeros."""
        random = np.random.default_rng(seed)
        feeds: dict[str, np.ndarray] = {}
        for name, shape in self.shapes.items():
            full = (batch, *shape[1:])
            if self.dtypes.get(name, "float32") == "float32":
                feeds[name] = random.standard_normal(full).astype(np.float32)
            elif "mask" in name:
                feeds[name] = np.ones(full, np.int64)
                feeds[name][:, -2:] = 0
            else:
                feeds[name] = random.integers(1, 1000, full)
        return feeds

    def profile(self, largest: int = 4) -> str:
        """An optimisation profile in the command line's form: batch 1, 2, ``largest``."""
        parts = []
        for name, shape in self.shapes.items():
            if self.dynamic.get(name):
                low, mid, high = ("x".join(map(str, (batch, *shape[1:]))) for batch in (1, 2, largest))
                parts.append(f"{name}={low},{mid},{high}")
        return ";".join(parts)


def _torch_image(
    make: Callable[[], object], size: int, channels: int = 3, outputs: tuple[str, ...] = ("output",)
) -> Callable[[str, Path], ZooModel]:
    def builder(name: str, folder: Path) -> ZooModel:
        import torch

        torch.manual_seed(SEED)
        shapes = {"x": (2, channels, size, size)}
        dynamic = {"x": {0: "batch"}}
        path = export_onnx(
            make(), {"x": torch.zeros(shapes["x"])}, folder / f"{name}.onnx", outputs=outputs,
            dynamic_axes=dynamic | {output: {0: "batch"} for output in outputs},
        )  # fmt: skip
        return ZooModel(name, path, shapes, dynamic)

    return builder


def _lazy(module: str, function: str, **arguments: object) -> Callable[[], object]:
    def make() -> object:
        import importlib

        return getattr(importlib.import_module(f"tests.zoo.{module}"), function)(**arguments)

    return make


def _tagger(name: str, folder: Path) -> ZooModel:
    import torch

    torch.manual_seed(SEED)
    shapes = {"x": (2, 32, 24)}
    dynamic = {"x": {0: "batch"}}
    module = _lazy("dense", "Tagger")()
    path = export_onnx(
        module,
        {"x": torch.zeros(shapes["x"])},
        folder / f"{name}.onnx",
        dynamic_axes=dynamic | {"output": {0: "batch"}},
    )
    return ZooModel(name, path, shapes, dynamic)


def _bert(make: Callable[[], object]) -> Callable[[str, Path], ZooModel]:
    def builder(name: str, folder: Path) -> ZooModel:
        import torch

        torch.manual_seed(SEED)
        shapes = {"input_ids": (2, 16), "attention_mask": (2, 16)}
        dynamic = {key: {0: "batch", 1: "length"} for key in shapes}
        inputs = {key: torch.ones(shape, dtype=torch.int64) for key, shape in shapes.items()}
        path = export_onnx(
            make(),
            inputs,
            folder / f"{name}.onnx",
            outputs=("embedding",),
            dynamic_axes=dynamic | {"embedding": {0: "batch"}},
        )
        return ZooModel(name, path, shapes, dynamic, dict.fromkeys(shapes, "int64"))

    return builder


def _file(function: str, shape: tuple[int, ...]) -> Callable[[str, Path], ZooModel]:
    def builder(name: str, folder: Path) -> ZooModel:
        path = _lazy("trained", function)()
        assert isinstance(path, Path)
        return ZooModel(name, path, {"x": shape}, {"x": {0: "batch", 2: "height", 3: "width"}})

    return builder


ZOO: dict[str, Callable[[str, Path], ZooModel]] = {
    "efficientnet-lite0": _torch_image(_lazy("trained", "efficientnet_lite0"), 224),
    "resnet18": _torch_image(_lazy("convnets", "resnet18", classes=100), 64),
    "resnet50": _torch_image(_lazy("convnets", "resnet50", classes=100), 64),
    "mobilenetv2": _torch_image(_lazy("convnets", "MobileNetV2", classes=100), 64),
    "mobilenetv3": _torch_image(_lazy("convnets", "MobileNetV3", classes=100), 64),
    "convnext": _torch_image(_lazy("convnets", "ConvNeXt"), 64),
    "detector": _torch_image(_lazy("dense", "Detector"), 64, outputs=("boxes", "scores")),
    "unet": _torch_image(_lazy("dense", "UNet"), 64),
    "vit": _torch_image(_lazy("transformers", "ViT"), 64),
    "lstm": _tagger,
    "minilm": _bert(_lazy("trained", "minilm")),
    "ocr-detector": _file("ocr_detector", (2, 3, 64, 64)),
    "ocr-recogniser": _file("ocr_recogniser", (2, 3, 48, 64)),
}


def build(name: str, folder: Path) -> ZooModel:
    """The network ``name`` of :data:`ZOO`, its ONNX file written into ``folder`` where it is not one already."""
    return ZOO[name](name, folder)
