"""What the engine code returns and takes: messages, devices, options, the record of a build."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from pipeline.config import Profile
from pipeline.records import Record

__all__ = ["DEFAULT_OPTIONS", "BuildOptions", "DeviceInfo", "EngineRecord", "LayerCounts", "Message", "Severity"]

PLAN_FILE = "model.plan"
BUILD_FILE = "build.json"
FLOAT_PLAN_FILE = "float.plan"
"""Beside the INT8 plan, for the profiles where it was measured to be faster (:mod:`pipeline.engine.fastest`)."""
FLOAT_RECORD_FILE = "float.json"
FASTEST_FILE = "fastest.json"
LAYERS_FILE = "layers.json"
"""The engine inspector's words, beside the plan where the engine could be loaded."""

_LONGEST_CARD = 8
"""Characters; no compute capability has as many."""

Severity = Literal["internal_error", "error", "warning", "info", "verbose"]


class Message(Record):
    """One line from TensorRT, in the order it came."""

    severity: Severity
    source: Literal["logger", "parser", "error recorder", "timing cache", "check"]
    """``check``: our own look at the graph before TensorRT sees it; ``timing cache``: said by TensorRT while it read or
    merged timing caches, which never makes a build fail."""
    text: str


class DeviceInfo(Record):
    """The card that an engine was built on."""

    name: str
    compute_capability: str
    """Such as ``9.0``."""
    driver: str
    """Version of the NVIDIA driver, such as ``580.159.04``."""
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.compute_capability}, driver {self.driver})"


class BuildOptions(Record):
    """How an engine is built. None leaves a choice to this package or to TensorRT."""

    fp16: bool = False
    """The part that stays float may use FP16 kernels (weakly typed networks: TensorRT <= 10). From TensorRT 11 on, and
    with RTX, the types are in the graph (``placement.precision: fp16``)."""
    half_inputs: bool = False
    """The engine takes its float32 inputs as float16: half the bytes to copy (weakly typed: TensorRT <= 10). With any
    version where the graph has the types itself (``placement.fp16_io``)."""
    half_outputs: bool = False
    """It gives its float32 outputs as float16; as :attr:`half_inputs`."""
    calibration_cache: Path | None = None
    """Implicit INT8 (TensorRT <= 10): scales from this file instead of Q/DQ nodes in the graph."""
    workspace_bytes: int | None = Field(default=None, ge=0)
    optimization_level: int | None = Field(default=None, ge=0, le=5)
    tactic_sources: tuple[str, ...] | None = None
    """Names of ``TacticSource`` members; None: TensorRT's default."""
    version_compatible: bool = False
    hardware_compatibility: Literal["none", "ampere_plus", "same_compute_capability"] = "none"
    compute_capabilities: tuple[str, ...] = ()
    """RTX: the cards to build for, such as ``8.6``; empty: 8.0 and everything newer that it supports."""
    max_aux_streams: int | None = Field(default=None, ge=0)
    avg_timing_iterations: int | None = Field(default=None, ge=1)
    """The builder picks each kernel by the mean of so many runs; None: TensorRT's own number, one. More make the choice
    steadier and the first build longer. Timing caches of different numbers are kept apart."""
    timing_cache: bool = True
    """Keep what the builder measures and use it in the next build (TensorRT proper, on a card)."""
    timing_cache_folder: Path | None = None
    """None: ``$XDG_CACHE_HOME/quantize/timing``."""
    mark_outputs: tuple[str, ...] = ()
    """Tensors to return beside the graph's outputs (per-layer capture). Each one may prevent a fusion."""
    mark_how: Literal["itself", "doubled", "dequantised again"] = "itself"
    """How they are returned, see :mod:`pipeline.engine.marking`."""
    mark_strictly: bool = True
    """A tensor of ``mark_outputs`` that TensorRT's network lacks is an error; False: a warning, and it is left out."""
    watch_unfused: bool = False
    """Tensors that survive fusion become debug tensors (TensorRT 10.12, RTX), see
    :mod:`pipeline.engine.debug_tensors`. Fusion stays as it is."""
    verbose: bool = False
    """Keep TensorRT's verbose messages."""

    @property
    def half_io(self) -> bool:
        """Some inputs or outputs become float16 when the engine is built."""
        return self.half_inputs or self.half_outputs

    @field_validator("compute_capabilities")
    @classmethod
    def _compute_capabilities(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            major, dot, minor = text.partition(".")
            if not (dot and major.isdecimal() and minor.isdecimal() and len(text) < _LONGEST_CARD):
                raise ValueError(f"compute capability {text!r} is not of the form 8.6")
        return value


DEFAULT_OPTIONS = BuildOptions()


class LayerCounts(Record):
    """The engine's layers by what matters for INT8; ``layers.json`` beside the plan has them all."""

    layers: int
    convolutions_int8: int
    """Fully connected layers that TensorRT runs as convolutions are among them."""
    convolutions_float: int
    reformats: int
    """Passes that only change layout or type, the quantisation of inputs among them."""
    pointwise: int = 0
    """Passes over whole tensors that were fused into no other layer."""
    per_profile: tuple[LayerCounts, ...] = ()
    """With several profiles: of each, in order. A request runs the layers of one; the figures above are their sum."""


class EngineRecord(Record):
    """What was built, from what, with what, where."""

    target: str
    tensorrt: str
    """Version of the TensorRT that built the engine."""
    plan_sha256: str
    plan_bytes: int
    build_seconds: float
    """Wall time of parsing and building, without the child process's start."""
    peak_memory_bytes: int
    """Largest resident set of the building process."""
    peak_gpu_memory_bytes: int | None
    """Largest growth of the card's used memory during the build, sampled; None without a GPU."""
    device: DeviceInfo | None
    """None: built without a GPU."""
    profiles: tuple[Profile, ...]
    options: BuildOptions
    timing_cache: Literal["off", "new", "reused", "partly reused", "not supported"]
    layers: LayerCounts | None
    """None where the engine could not be looked into: no GPU, or one that the engine does not run on."""
    messages: tuple[Message, ...]
    messages_dropped: int = 0
    """Messages beyond the first 2,000, of severity info or verbose."""

    @property
    def built_on(self) -> str:
        """The card in words, or ``built without a GPU``."""
        return str(self.device or "built without a GPU")

    def manifest_entry(self) -> dict[str, Any]:
        """What the manifest says of this engine: everything but TensorRT's messages and the profiles."""
        entry = self.model_dump(mode="json", exclude={"messages", "profiles"})
        return {**entry, "version": self.tensorrt, "built_on": self.built_on}

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(message.text for message in self.messages if message.severity == "warning")
