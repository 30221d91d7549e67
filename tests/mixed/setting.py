"""Networks with statistics, ready for a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

import calibrators
from calibrators import Calibrator, TensorStatistics
from calibrators.accumulate import add_batch
from pipeline import prepare
from pipeline.config import PlacementConfig
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch
from pipeline.placement import make_plan

if TYPE_CHECKING:
    import torch


def silu_blocks(inner: int) -> torch.nn.Module:
    """Convolutions of 16 channels with SiLU, ``inner`` of them behind the first, then 10 classes; random weights."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.SiLU()]
    for _ in range(inner):
        blocks += [nn.Conv2d(16, 16, 3, padding=1), nn.SiLU()]
    module = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight)
            nn.init.zeros_(part.bias)
    return module


@dataclass
class Setting:
    model: Path
    statistics: dict[str, TensorStatistics]
    calibrator: Calibrator
    config: PlacementConfig
    searched: Callable[[], list[Batch]]
    checked: Callable[[], list[Batch]]

    def arguments(self) -> tuple[Path, dict[str, TensorStatistics], Calibrator]:
        return self.model, self.statistics, self.calibrator


def batches_of(values: np.ndarray, name: str = "x", size: int = 8, start: int = 0) -> list[Batch]:
    return [
        Batch(i, tuple(range(start + at, start + min(at + size, len(values)))), {name: values[at : at + size]})
        for i, at in enumerate(range(0, len(values), size))
    ]


def set_up(
    model: Path, data: np.ndarray, folder: Path, *, calibrator: str = "minmax", searched: int = 8, prepared: bool = True
) -> Setting:
    """Prepare, calibrate on all of ``data``; the first samples are searched on, the others checked."""
    if prepared:
        folder.mkdir(parents=True, exist_ok=True)
        model = prepare.run(model, folder=folder).at(folder).model_path
    config = PlacementConfig()
    plan = make_plan(model, config)
    session = make_session(model, capture=plan.tensors)
    names = [output.name for output in session.get_outputs()]
    statistics = {name: TensorStatistics() for name in plan.tensors}
    for batch in batches_of(data):
        values = dict(zip(names, session.run(None, batch.feeds), strict=True)) | batch.feeds
        for name in plan.tensors:
            add_batch(statistics[name], values[name], batch.index)
    return Setting(
        model,
        statistics,
        calibrators.get(calibrator),
        config,
        lambda: batches_of(data[:searched]),
        lambda: batches_of(data[searched:], start=searched),
    )


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path
