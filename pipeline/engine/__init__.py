"""TensorRT: one compatibility module, engines built in child processes, a runner, an inspector, measurements.

Everything here runs with numpy, pydantic and TensorRT/PyCUDA alone, on Python 3.10, so that a serving machine needs
nothing else.
"""
