"""Made-up measurements for tests of the reports."""

from __future__ import annotations

import numpy as np

from pipeline.errors.activations import BINS, ActivationFigures
from pipeline.errors.layers import Layer
from pipeline.errors.table import ErrorTable, LayerInfo


def made_up_table(
    layers: int = 12, samples: int = 8, *, engine: bool = False, calibrators: int = 3, seed: int = 0
) -> ErrorTable:
    """Three operator types in turn; layer 5 (where there is one) makes ten times the others' error, by clipping."""
    rng = np.random.default_rng(seed)
    ops = ["Conv", "MatMul", "Add"]
    infos, activations = [], {}
    for row in range(layers):
        name = f"/encoder/layers.{row // 3}/{ops[row % 3].lower()}/{ops[row % 3]}"
        tensor = f"{name}_output_0"
        before = (infos[-1].layer.tensor,) if infos else ()
        infos.append(
            LayerInfo(Layer(tensor=tensor, node=name, op=ops[row % 3]), inputs=(f"input_{row}",), before=before)
        )
        histogram = np.maximum(1e5 * np.exp(-np.arange(BINS + 1) / 25), 0).astype(np.int64)
        activations[f"input_{row}"] = ActivationFigures(
            f"input_{row}",
            2.0 + row,
            int(histogram.sum()),
            500,
            3.0 if row == 5 else 0.01,
            1.0,
            2e4,
            2.1 * (2.0 + row),
            77,
            histogram,
        )
    infos = [
        LayerInfo(info.layer, info.inputs, info.before, (infos[row + 1].layer.tensor,) if row + 1 < layers else (),
                  "" if not engine else "shown" if row % 4 else "fused: the engine cannot show it")
        for row, info in enumerate(infos)
    ]  # fmt: skip
    local = np.exp(rng.normal(-4.6, 0.5, (layers, 1)) + rng.normal(0, 0.2, (layers, samples)))
    if layers > 5:
        local[5] *= 10
    weights = local * 0.5
    weights[2::3] = np.nan
    accumulated = np.sqrt(np.cumsum(local**2, axis=0))
    clipping = np.full_like(local, 0.01)
    if layers > 5:
        clipping[5] = 0.75
    columns = {
        "relative_l2": accumulated,
        "sqnr_db": -20 * np.log10(accumulated),
        "cosine": 1 - accumulated**2 / 2,
        "max_abs": 9 * accumulated,
        "local_relative_l2": local,
        "local_sqnr_db": -20 * np.log10(local),
        "local_cosine": 1 - local**2 / 2,
        "local_max_abs": 9 * local,
        "weights_relative_l2": weights,
        "activations_relative_l2": local * 0.85,
        "clipped_share": np.full_like(local, 0.001),
        "clipping_error_share": clipping,
    }
    if engine:
        for name in ("relative_l2", "sqnr_db", "cosine", "max_abs"):
            columns[f"engine_{name}"] = columns[name] * 1.01
            columns[f"engine_{name}"][::4] = np.nan
        columns["engine_int8_relative_l2"] = np.where(np.isnan(columns["engine_relative_l2"]), np.nan, 1e-3)
    ranges = {
        f"calibrator{i}": {
            name: (figures.amax * (0.8 + 0.1 * i), 0.01 * (1 + abs(i - 1))) for name, figures in activations.items()
        }
        for i in range(calibrators)
    }
    return ErrorTable(
        tuple(infos),
        tuple(range(100, 100 + samples)),
        columns,
        activations,
        ranges,
        "TensorRT 0.0, marked outputs" if engine else "",
    )
