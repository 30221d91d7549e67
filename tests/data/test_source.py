from __future__ import annotations

import numpy as np

from pipeline.data.source import sample_digest


def test_sample_digest_sees_names_dtypes_shapes_and_values() -> None:
    base = np.arange(6, dtype=np.float32)
    samples = [
        {"x": base}, {"y": base}, {"x": base.reshape(2, 3)}, {"x": base.astype(np.float64)}, {"x": base[::-1].copy()},
        {"x": base.astype(np.int32)},
    ]  # fmt: skip
    assert len({sample_digest(sample) for sample in samples}) == len(samples)
    assert sample_digest({"x": base, "y": base}) == sample_digest({"y": base, "x": base})
