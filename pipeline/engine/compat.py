"""Everything that differs between TensorRT 8.6, 10, 11 and TensorRT-RTX, in one place.

Other modules use only what is called the same everywhere; a test holds every attribute that they and this module use
against the class and enum lists of the four versions. Enum numbers moved between versions, so only names are kept.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import InputError

if TYPE_CHECKING:
    from pipeline.engine.records import BuildOptions

__all__ = ["MODULES", "NEWEST_OPSET", "OLDEST_OPSET", "RTX_CARDS", "Api", "load_api", "rtx_runs_on"]

MODULES = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
OLDEST_OPSET = 9
NEWEST_OPSET = 25
_NEWEST_OPSET_8 = 17
"""8.6 takes an opset-18 ReduceMean, whose axes are an input, for a reduction over all axes."""
RTX_CARDS = ("8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities that an RTX engine runs on unless it is built for others; newer ones too."""
_RTX_MINIMUM = (1, 5)
_TENSORRT_MINIMUM = (8, 6)


@dataclass(frozen=True)
class Api:
    """A TensorRT Python module and what it can do."""

    trt: Any
    rtx: bool
    version: str

    @property
    def release(self) -> tuple[int, int]:
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)

    @property
    def title(self) -> str:
        return f"TensorRT-RTX {self.version}" if self.rtx else f"TensorRT {self.version}"

    # Types: weak (the builder chooses them, flags permit) up to 10, strong (the graph says) from 9.1 on.

    @property
    def weak_typing(self) -> bool:
        return hasattr(self.trt.BuilderFlag, "FP16")

    @property
    def strong_typing(self) -> bool:
        return hasattr(self.trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")

    @property
    def calibrators(self) -> bool:
        """Implicit INT8 exists."""
        return hasattr(self.trt, "IInt8EntropyCalibrator2")

    @property
    def newest_opset(self) -> int:
        return _NEWEST_OPSET_8 if self.release < (9, 0) and not self.rtx else NEWEST_OPSET

    @property
    def needs_kernel_shape(self) -> bool:
        """8.6 does not work out the kernel of a convolution whose weight comes from another node."""
        return self.release < (9, 0) and not self.rtx

    @property
    def builds_without_gpu(self) -> bool:
        return self.rtx

    @property
    def timing_caches(self) -> bool:
        """RTX has the calls, and they do nothing: it compiles for the card when the engine is loaded."""
        return not self.rtx

    @property
    def debug_tensors(self) -> bool:
        """What survives fusion can be read while an engine runs, and fusion stays as it is."""
        return hasattr(self.trt, "INetworkDefinition") and hasattr(
            self.trt.INetworkDefinition, "mark_unfused_tensors_as_debug_tensors"
        )

    def require_debug_tensors(self) -> None:
        """Raise InputError where there are none."""
        if not self.debug_tensors:
            raise InputError(
                f"{self.title} has no unfused debug tensors: they take TensorRT 10.12 or newer",
                remedy="record marked outputs instead: --engine-capture marked-outputs",
            )

    def weakly_typed(self, options: BuildOptions) -> bool:
        """Whether the network for ``options`` leaves types to the builder."""
        return self.weak_typing and (
            not self.strong_typing or options.fp16 or options.half_io or options.calibration_cache is not None
        )

    @property
    def shares_profiles(self) -> bool:
        """Several contexts may use one profile without asking; 8.6 wants a preview feature at build time."""
        return self.rtx or self.release >= (9, 0)

    def share_profiles(self, config: Any) -> None:
        """Let several execution contexts of the engine use one profile: requests in flight, one graph per shape."""
        if not self.shares_profiles:
            config.set_preview_feature(self.trt.PreviewFeature.PROFILE_SHARING_0806, True)

    def network_flags(self, *, weakly_typed: bool) -> int:
        """The bits for ``Builder.create_network``."""
        flags = self.trt.NetworkDefinitionCreationFlag
        if not weakly_typed:
            return 1 << int(flags.STRONGLY_TYPED)
        return 1 << int(flags.EXPLICIT_BATCH)

    def set_precision_flags(self, config: Any, options: BuildOptions, *, quantised: bool, half: bool) -> None:
        """INT8 and FP16 flags of a weakly typed network; a strongly typed one must not have any.

        Args:
            quantised: the graph has Q/DQ nodes.
            half: the graph itself uses float16.
        """
        if not self.weakly_typed(options):
            return
        flags = self.trt.BuilderFlag
        if quantised or options.calibration_cache is not None:
            config.set_flag(flags.INT8)
        if options.fp16 or options.half_io or half:
            config.set_flag(flags.FP16)

    def set_io_types(self, network: Any, options: BuildOptions) -> None:
        """float16 for the float32 inputs and outputs that ``options`` say; before other tensors are marked."""
        tensors = [network.get_input(number) for number in range(network.num_inputs)] if options.half_inputs else []
        if options.half_outputs:
            tensors += [network.get_output(number) for number in range(network.num_outputs)]
        for tensor in tensors:
            if tensor.dtype == self.trt.DataType.FLOAT:
                tensor.dtype = self.trt.DataType.HALF

    def check_options(self, options: BuildOptions) -> None:
        """Raise InputError for what this version cannot do, before anything starts."""
        if options.fp16 and not self.weak_typing:
            raise InputError(
                f"{self.title} has no FP16 flag: an engine computes in the types that the graph has",
                remedy="set placement.precision to fp16, which writes the types into the graph, and leave --fp16 out",
            )
        if options.half_io and not self.weak_typing:
            raise InputError(
                f"{self.title} takes inputs and gives outputs in the types that the graph has",
                remedy="write them into the graph: --fp16-io inputs, outputs or both; and leave --half-inputs and "
                "--half-outputs out",
            )
        if options.calibration_cache is not None and not self.calibrators:
            raise InputError(
                f"{self.title} has no implicit INT8 and reads no calibration cache (removed in TensorRT 11)",
                remedy="build the Q/DQ graph instead: leave --implicit out",
            )
        if options.version_compatible and self.rtx:
            raise InputError(
                f"{self.title} cannot build version-compatible engines: it lacks the lean runtime library",
                remedy="build the engine with the version that will run it",
            )
        if options.hardware_compatibility != "none":
            if self.rtx:
                raise InputError(
                    f"{self.title} ignores the hardware compatibility level",
                    remedy="name the cards instead: --compute-capability 8.6 --compute-capability 8.9",
                )
            if not hasattr(self.trt.HardwareCompatibilityLevel, options.hardware_compatibility.upper()):
                raise InputError(f"{self.title} has no hardware compatibility level {options.hardware_compatibility!r}")
        if options.compute_capabilities:
            if not self.rtx:
                raise InputError(
                    f"{self.title} builds for the card in this machine: compute capabilities cannot be chosen",
                    remedy="leave --compute-capability out, or use --hardware-compatibility ampere_plus",
                )
            for text in options.compute_capabilities:
                self._compute_capability(text)
        if options.watch_unfused:
            self.require_debug_tensors()
        for name in options.tactic_sources or ():
            if not hasattr(self.trt.TacticSource, name):
                known = ", ".join(sorted(self.trt.TacticSource.__members__))
                raise InputError(f"{self.title} has no tactic source {name!r}; known: {known}")

    def _compute_capability(self, text: str) -> Any:
        kind = self.trt.ComputeCapability
        name = "SM" + text.replace(".", "")
        if not hasattr(kind, name):
            known = ", ".join(sorted(f"{n[2:-1]}.{n[-1]}" for n in kind.__members__ if n.startswith("SM")))
            raise InputError(f"{self.title} builds no engine for compute capability {text}; known: {known}")
        return getattr(kind, name)

    def set_target(self, config: Any, options: BuildOptions) -> None:
        """Which cards the engine is for, and how portable it is."""
        if options.version_compatible:
            config.set_flag(self.trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.hardware_compatibility != "none":
            level = options.hardware_compatibility.upper()
            config.hardware_compatibility_level = getattr(self.trt.HardwareCompatibilityLevel, level)
        if options.compute_capabilities:
            config.num_compute_capabilities = len(options.compute_capabilities)
            for number, text in enumerate(options.compute_capabilities):
                config.set_compute_capability(self._compute_capability(text), number)

    def set_tactic_sources(self, config: Any, names: tuple[str, ...]) -> None:
        config.set_tactic_sources(sum(1 << int(getattr(self.trt.TacticSource, name)) for name in names))

    # The parser

    @staticmethod
    def error_node(error: Any) -> tuple[str, str]:
        """Name and operator of a parser error's node; empty strings where the version does not say (8.6)."""
        if not hasattr(error, "node_name"):
            return "", ""
        return str(error.node_name()), str(error.node_operator())

    # Engines and contexts

    @staticmethod
    def device_memory_bytes(engine: Any) -> int:
        """Scratch memory that an execution context needs, for the largest of the profiles."""
        if hasattr(engine, "device_memory_size_v2"):
            return int(engine.device_memory_size_v2)
        return int(engine.device_memory_size)

    def create_context(self, engine: Any) -> Any:
        """An execution context that brings no scratch memory of its own; None when TensorRT refuses."""
        if hasattr(self.trt, "ExecutionContextAllocationStrategy"):
            return engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        return engine.create_execution_context_without_device_memory()

    @staticmethod
    def set_device_memory(context: Any, address: int, size: int) -> None:
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(address, size)
        else:
            context.device_memory = address

    @staticmethod
    def mark_unfused(network: Any) -> bool:
        """Make the tensors that will survive fusion debug tensors; False: TensorRT refuses."""
        return bool(network.mark_unfused_tensors_as_debug_tensors())

    @staticmethod
    def watch_unfused(context: Any, listener: Any) -> bool:
        """Have unfused tensors handed to ``listener`` in every run of ``context``; False: TensorRT refuses.

        The state is a property whose setter drops TensorRT's answer, so it is read back.
        """
        if not context.set_debug_listener(listener):
            return False
        context.unfused_tensors_debug_state = True
        return bool(context.unfused_tensors_debug_state)

    def engine_validity(self, runtime: Any, plan: bytes) -> tuple[str, int] | None:
        """RTX: ``(VALID, SUBOPTIMAL or INVALID, diagnostics)`` from the plan's first bytes; None elsewhere."""
        if not hasattr(runtime, "get_engine_validity"):
            return None
        validity, diagnostics = runtime.get_engine_validity(plan[: runtime.engine_header_size])
        return validity.name, int(diagnostics)


def rtx_runs_on(compute_capability: str, built_for: tuple[str, ...] = ()) -> bool:
    """Whether an RTX engine runs on a card."""
    if built_for:
        return compute_capability in built_for
    newest = int(RTX_CARDS[-1].partition(".")[0])
    return compute_capability in RTX_CARDS or int(compute_capability.partition(".")[0]) > newest


def load_api(target: str) -> Api:
    """The module for ``target``, ``rtx`` or ``tensorrt``.

    Raises:
        InputError: it is not installed, its libraries are missing, or it is too old.
    """
    name = MODULES[target]
    extra = "rtx" if target == "rtx" else "gpu"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"target {target} needs the package {name!r}, which cannot be imported: {error}",
            remedy=f"pip install 'quantize-trt[{extra}]'",
        ) from error
    api = Api(trt=module, rtx=target == "rtx", version=str(module.__version__))
    minimum = _RTX_MINIMUM if api.rtx else _TENSORRT_MINIMUM
    if api.release < minimum:
        raise InputError(
            f"{api.title} is too old, {minimum[0]}.{minimum[1]} is the oldest that works",
            remedy=f"pip install --upgrade 'quantize-trt[{extra}]'",
        )
    return api
