"""What every stage shares: errors, files, progress, lazy imports, onnxruntime sessions. No stage logic."""
