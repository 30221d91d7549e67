"""CUDA kernels for PyCUDA."""
