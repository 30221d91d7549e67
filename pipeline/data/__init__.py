"""Calibration and test data: sources, batches, the split into calibration and verification, labels."""

from pipeline.data.batching import Batch, batched, static_batch
from pipeline.data.labels import check_class_scores, load_labels
from pipeline.data.opening import check_source, open_source
from pipeline.data.repeating import open_again
from pipeline.data.source import DataSource, Sample
from pipeline.data.splitting import Split, select, split, split_source

__all__ = [
    "Batch",
    "DataSource",
    "Sample",
    "Split",
    "batched",
    "check_class_scores",
    "check_source",
    "load_labels",
    "open_again",
    "open_source",
    "select",
    "split",
    "split_source",
    "static_batch",
]
