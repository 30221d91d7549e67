"""Two artifacts of the same network, layer by layer: placement, ranges, weights and errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact import FP32_MODEL, INT8_MODEL, Artifact
from pipeline.core.errors import InputError
from pipeline.errors.attribution import LayerComparison, compare_layers
from pipeline.errors.graphs import Graph, float_graph
from pipeline.errors.hybrid import quantisation_of
from pipeline.errors.matching import match_nodes
from pipeline.errors.table import read_table
from pipeline.records import Record

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ArtifactDifference", "LayerDifference", "diff_artifacts"]


class LayerDifference(Record):
    """One node that at least one of the two artifacts quantises. None: not known or does not apply."""

    node: str
    op: str
    placement: str
    """``both``, ``A only``, ``B only``, or ``differs``."""
    range_ratio: float | None
    """Range in B over range in A of the first activation input that both quantise."""
    weights_change: float | None
    """‖w_B − w_A‖ / ‖w_A‖ of the dequantised weights."""
    error_a: float | None
    """Accumulated relative L2 error, mean over the samples of A's report in which FP32 is not almost zero."""
    error_b: float | None

    @property
    def error_change(self) -> float | None:
        return None if self.error_a is None or self.error_b is None else self.error_b - self.error_a

    @property
    def same(self) -> bool:
        """Nothing differs but, perhaps, what the layers before it hand over."""
        same_range = self.range_ratio is None or math.isclose(self.range_ratio, 1.0, rel_tol=1e-6)
        return self.placement == "both" and same_range and (self.weights_change or 0.0) < 1e-6


class ArtifactDifference(Record):
    """Everything that differs; the layers in network order."""

    a: str
    b: str
    same_model: bool
    """Both were built from the same source model."""
    same_samples: bool
    """Both reports were measured on the same sample numbers; otherwise their errors cannot be set side by side."""
    settings: dict[str, tuple[str, str]]
    """Setting or figure of the manifest to its value in A and in B, where they differ."""
    layers: tuple[LayerDifference, ...]


def diff_artifacts(a: Path, b: Path) -> ArtifactDifference:
    """Compare two artifacts.

    Raises:
        InputError: one is no artifact, or they are not of the same network.
    """
    opened = Artifact.open(a), Artifact.open(b)
    fp32 = [float_graph(artifact.path(FP32_MODEL)) for artifact in opened]
    int8 = [Graph(artifact.path(INT8_MODEL)) for artifact in opened]
    try:
        names = match_nodes(fp32[0], int8[1])
    except InputError as error:
        raise InputError(f"{a} and {b}: {error.message}", remedy="compare artifacts of one network") from error
    layers = compare_layers(fp32[0], quantisation_of(int8[0]), quantisation_of(int8[1], names))
    tables = [_errors(artifact) for artifact in opened]
    back = {ours: theirs for theirs, ours in names.items()}
    samples = [None if table is None else set(table["sample"].tolist()) for table in tables]
    means = [{} if table is None else _means(table) for table in tables]
    return ArtifactDifference(
        a=str(a),
        b=str(b),
        same_model=opened[0].manifest.source.sha256 == opened[1].manifest.source.sha256,
        same_samples=samples[0] is not None and samples[0] == samples[1],
        settings=_settings(*opened),
        layers=tuple(
            _layer(layer, means[0].get(layer.node), means[1].get(back.get(layer.node, ""))) for layer in layers
        ),
    )


def _means(table: pd.DataFrame) -> dict[str, float]:
    """By node, without those that have no relative error in any sample."""
    means = table.groupby("node")["relative_l2"].mean().dropna()
    return {str(node): float(mean) for node, mean in means.items()}


_SIDES = {"PTQ only": "A only", "QAT only": "B only"}


def _layer(layer: LayerComparison, error_a: float | None, error_b: float | None) -> LayerDifference:
    return LayerDifference(
        node=layer.node,
        op=layer.op,
        placement=_SIDES.get(layer.placement, layer.placement),
        range_ratio=layer.range_ratio,
        weights_change=layer.weights_change,
        error_a=error_a,
        error_b=error_b,
    )


def _errors(artifact: Artifact) -> pd.DataFrame | None:
    for name in ("reports/errors.parquet", "reports/errors.csv"):
        if name in artifact.manifest.files:
            return read_table(artifact.path(name))
    return None


def _settings(a: Artifact, b: Artifact) -> dict[str, tuple[str, str]]:
    """Calibrator, data, precision of the outputs: what the two manifests say differently."""
    found = {}
    for name, first, second in zip(_NAMES, _values(a), _values(b), strict=True):
        if first != second:
            found[name] = (first, second)
    return found


_NAMES = (
    "source model",
    "calibrator",
    "calibration data",
    "calibration samples",
    "top-1 INT8",
    "output relative L2",
    "output largest error",
    "output cosine",
)


def _values(artifact: Artifact) -> tuple[str, ...]:
    manifest = artifact.manifest
    figures = manifest.verification
    outputs = figures.get("outputs") or [{}]

    def number(value: object) -> str:
        return "-" if not isinstance(value, float) else f"{value:.5g}"

    return (
        manifest.source.sha256[:12],
        str(manifest.calibration),
        manifest.data.sha256[:12],
        str(manifest.data.calibration_samples),
        number(figures.get("top1_int8")),
        number(outputs[0].get("relative_l2_mean")),
        number(outputs[0].get("max_abs")),
        number(outputs[0].get("cosine_mean")),
    )
