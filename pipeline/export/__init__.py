"""Stage 1, export: a ``.onnx`` file or a user's PyTorch model becomes ``model.onnx``."""

from pipeline.export.result import ExportCheck, ExportResult
from pipeline.export.stage import run

__all__ = ["ExportCheck", "ExportResult", "run"]
