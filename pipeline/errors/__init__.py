"""Per-layer error of an INT8 graph against its FP32 original: capture, metrics, attribution."""
