"""What a measurement found: one row per layer and sample, and figures per quantised tensor."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.core.errors import InputError
from pipeline.core.files import write_bytes, write_text
from pipeline.errors.activations import ActivationFigures
from pipeline.errors.doubtful import almost_zero
from pipeline.errors.layers import Layer
from pipeline.errors.metrics import PEAK

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

__all__ = ["COLUMNS", "RELATIVE", "ErrorTable", "LayerInfo", "read_table"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Mask: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

COLUMNS = {
    "relative_l2": "accumulated relative L2: the whole graph in INT8",
    "sqnr_db": "accumulated signal to quantisation noise, dB",
    "cosine": "accumulated cosine to FP32",
    "max_abs": "accumulated largest absolute difference",
    PEAK: "largest absolute FP32 value",
    "local_relative_l2": "local relative L2: only this layer in INT8",
    "local_sqnr_db": "local signal to quantisation noise, dB",
    "local_cosine": "local cosine to FP32",
    "local_max_abs": "local largest absolute difference",
    "weights_relative_l2": "relative L2 with only this layer's weights in INT8",
    "activations_relative_l2": "relative L2 with only this layer's activations in INT8",
    "clipped_share": "share of the layer's INT8 input values beyond their threshold",
    "clipping_error_share": "share of the input's quantisation error energy that is clipping; the rest is rounding",
    "engine_relative_l2": "relative L2 of the engine's tensor to FP32",
    "engine_sqnr_db": "engine: signal to quantisation noise, dB",
    "engine_cosine": "engine: cosine to FP32",
    "engine_max_abs": "engine: largest absolute difference",
    "engine_int8_relative_l2": "relative L2 of the engine's tensor to the Q/DQ graph's",
}
"""Columns of figures and what they say. NaN: not measured or does not apply, as a figure relative to FP32 does not
where that is almost zero (:mod:`pipeline.errors.doubtful`)."""
RELATIVE = tuple(name for name in COLUMNS if name.endswith(("relative_l2", "sqnr_db", "cosine")))
"""Columns of figures relative to FP32, or (``engine_int8``) to what stands for it."""


@dataclass(frozen=True)
class LayerInfo:
    """What stands beside a layer's figures."""

    layer: Layer
    inputs: tuple[str, ...] = ()
    """Activations it reads in INT8; keys of :attr:`ErrorTable.activations`."""
    before: tuple[str, ...] = ()
    """Quantised layers whose output reaches it with no other quantised layer between, by tensor."""
    after: tuple[str, ...] = ()
    engine: str = ""
    """How the engine shows the tensor: empty (no engine), ``shown`` (and as what), or why not (``fused``, ``not
    compared``)."""
    known_range: float = 0.0
    """Largest absolute value that its operator can give; 0: not known."""


@dataclass
class ErrorTable:
    """Figures of shape (layers, samples) by column name, and what belongs to them."""

    layers: tuple[LayerInfo, ...]
    samples: tuple[int, ...]
    columns: dict[str, Floats]
    activations: dict[str, ActivationFigures] = field(default_factory=dict)
    calibrators: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """Calibrator to tensor to (amax, relative L2 of the tensor quantised with it)."""
    engine_label: str = ""
    """Which engine the engine's tensors come from, with its version."""
    engine_recorded: str = ""
    """In which way, see :class:`pipeline.engine.ways.Way`; empty without an engine, or where a file does not say."""

    def almost_zero(self) -> Mask:
        """Where FP32 is almost zero (:func:`pipeline.errors.doubtful.almost_zero`), shape (layers, samples)."""
        peaks = self.columns.get(PEAK)
        if peaks is None:
            return np.zeros((len(self.layers), len(self.samples)), np.bool_)
        return almost_zero(peaks, np.array([info.known_range for info in self.layers]))

    def layers_almost_zero(self) -> dict[str, int]:
        """Layer (its tensor) to the number of samples in which FP32 is almost zero, where there are any."""
        counts = self.almost_zero().sum(axis=1).tolist()
        return {info.layer.tensor: count for info, count in zip(self.layers, counts, strict=True) if count}

    def without_almost_zero(self) -> ErrorTable:
        """The table with NaN for every relative figure where FP32 is almost zero."""
        mask = self.almost_zero()
        columns = {
            name: np.where(mask, np.nan, values) if name in RELATIVE else values
            for name, values in self.columns.items()
        }
        return replace(self, columns=columns)

    def mean(self, column: str) -> Floats:
        """Mean over the samples that have a figure, shape (layers,); NaN where none has."""
        values = self.columns.get(column)
        if values is None:
            return np.full(len(self.layers), np.nan)
        present = np.isfinite(values)
        count = present.sum(axis=1)
        total = np.where(present, values, 0.0).sum(axis=1)
        means: Floats = np.divide(total, count, out=np.full(len(self.layers), np.nan), where=count > 0)
        return means

    def maximum(self, column: str) -> Floats:
        """Largest over the samples, shape (layers,); NaN where there is none."""
        values = self.columns.get(column)
        if values is None:
            return np.full(len(self.layers), np.nan)
        largest = np.where(np.isfinite(values), values, -np.inf).max(axis=1, initial=-np.inf)
        return np.where(np.isfinite(largest), largest, np.nan)

    def frame(self) -> pd.DataFrame:
        """One row per layer and sample, layers in network order."""
        import pandas as pd

        count = len(self.samples)
        data: dict[str, Any] = {
            "order": np.repeat(np.arange(len(self.layers)), count),
            "layer": np.repeat([info.layer.tensor for info in self.layers], count),
            "node": np.repeat([info.layer.node for info in self.layers], count),
            "op": np.repeat([info.layer.op for info in self.layers], count),
            "sample": np.tile(self.samples, len(self.layers)),
        }
        for name in COLUMNS:
            if name in self.columns:
                data[name] = self.columns[name].reshape(-1)
        if self.engine_label:
            data["engine"] = np.repeat([info.engine for info in self.layers], count)
            data["engine_recorded"] = self.engine_recorded
        frame: pd.DataFrame = pd.DataFrame(data)
        return frame

    def write(self, folder: Path) -> None:
        """``errors.parquet`` and ``errors.csv``."""
        frame = self.frame()
        stream = io.BytesIO()
        frame.to_parquet(stream, index=False, compression="zstd")
        write_bytes(folder / "errors.parquet", stream.getvalue())
        write_text(folder / "errors.csv", frame.to_csv(index=False, float_format="%.8g", lineterminator="\n"))


def read_table(path: Path) -> pd.DataFrame:
    """The rows of an ``errors.parquet`` or ``errors.csv``.

    Raises:
        InputError: the file is missing, damaged, or lacks the columns that identify a row.
    """
    import pandas as pd

    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist", remedy="`quantize errors ARTIFACT` writes it") from error
    except Exception as error:
        raise InputError(
            f"{path} is not a readable table: {error}", remedy="`quantize errors ARTIFACT` writes it anew"
        ) from error
    wanted: Sequence[str] = ("layer", "node", "op", "sample", "relative_l2")
    if missing := [name for name in wanted if name not in frame.columns]:
        raise InputError(f"{path} has no column {missing[0]!r}", remedy="`quantize errors ARTIFACT` writes it anew")
    return frame
