"""The INT8 pipeline: export, prepare, calibrate, quantise, build, verify, package."""

__version__ = "0.1.0"
