"""The child process that builds one engine. It talks to :mod:`pipeline.engine.builder` through a pipe."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config import Profile, check_profiles
from pipeline.core.errors import InputError, QuantizeError, ToolError
from pipeline.core.memory import peak_resident_bytes
from pipeline.engine import timing_cache
from pipeline.engine.calibration import cache_for, make_calibrator
from pipeline.engine.checks import check_model
from pipeline.engine.clips import pass_clips
from pipeline.engine.compat import Api, load_api
from pipeline.engine.device import MemoryMeter, describe_device, no_device_reason
from pipeline.engine.marking import mark_outputs
from pipeline.engine.messages import make_error_recorder, make_logger, skipped_tactics, worst_words
from pipeline.engine.onnx_wire import Model, read_model
from pipeline.engine.process import Reporter, Sampler, die_with_parent
from pipeline.engine.records import BuildOptions, DeviceInfo, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["main", "workspace_limit"]

_UNSUPPORTED = ("UNSUPPORTED_NODE", "UNSUPPORTED_GRAPH")
_WORKSPACE_FLOOR_BYTES = 4 << 30
_WORKSPACE_PER_WEIGHT_BYTE = 32
_WORKSPACE_CARD_SHARE = 0.5


class Build:
    """One build, step by step. Whatever TensorRT says goes to ``reporter`` at once and into ``messages``."""

    def __init__(
        self, api: Api, model_path: Path, profiles: tuple[Profile, ...], options: BuildOptions, reporter: Reporter
    ) -> None:
        self.api, self.path, self.profiles, self.options, self.reporter = api, model_path, profiles, options, reporter
        self.messages: list[Message] = []
        self.device = describe_device()
        self.topic: Literal["timing cache"] | None = None

    def receive(self, message: Message) -> None:
        text = message.text.replace(f"{self.path.parent}{os.sep}", "")
        message = message.model_copy(update={"text": text, "source": self.topic or message.source})
        self.messages.append(message)
        self.reporter.send("message", **message.model_dump())

    @contextmanager
    def _speaking_of(self, topic: Literal["timing cache"]) -> Iterator[None]:
        """What TensorRT says in here is recorded under ``topic``."""
        self.topic = topic
        try:
            yield
        finally:
            self.topic = None

    def run(self, plan_path: Path) -> dict[str, Any]:
        """Build, write the plan to ``plan_path`` and return what the record needs."""
        api, options = self.api, self.options
        api.check_options(options)
        if not api.builds_without_gpu and self.device is None:
            raise ToolError(
                f"{api.title} cannot build here: {no_device_reason()}",
                remedy="build on the machine that serves: quantize build --from ARTIFACT --target tensorrt",
            )
        model = read_model(self.path)
        check_profiles(self.profiles, model.inputs)
        for message in check_model(self.path, model, api):
            self.receive(message)
        implicit = options.calibration_cache is not None
        if implicit and model.quantised:
            raise InputError(
                f"{self.path} has Q/DQ nodes: TensorRT would ignore the calibration cache",
                remedy="give the FP32 model to --implicit",
            )
        cache = cache_for(api, options.calibration_cache) if options.calibration_cache is not None else b""

        self.logger = make_logger(api, self.receive, verbose=options.verbose)
        try:
            builder = api.trt.Builder(self.logger)
        except TypeError as error:  # pybind11: the factory returned nullptr
            raise ToolError(self._failed("does not start")) from error
        meter = MemoryMeter()
        start = time.perf_counter()
        with Sampler(meter.used_bytes) as sampler:
            network = builder.create_network(api.network_flags(weakly_typed=api.weakly_typed(options)))
            if network is None:
                raise ToolError(self._failed("creates no network"))
            recorder = make_error_recorder(api, self.receive)
            builder.error_recorder = recorder
            parser = api.trt.OnnxParser(network, self.logger)
            if not parser.parse_from_file(str(self.path)):
                raise self._parse_error(parser, model)
            self._pass_clips(network, model)
            api.set_io_types(network, options)
            if options.mark_outputs:
                self._mark_outputs(network)
            if options.watch_unfused and not api.mark_unfused(network):
                raise ToolError(self._failed("makes no debug tensors"))
            config = builder.create_builder_config()
            self._configure(config, model)
            asked: list[str] = []
            if implicit:
                calibrator, asked = make_calibrator(api, cache)
                config.int8_calibrator = calibrator
            self._add_profiles(builder, network, config)
            cache_state, save_timings = self._timing_cache(config)
            self._watch_progress(config)
            plan = builder.build_serialized_network(network, config)
            if asked:
                raise InputError(
                    f"{api.title} did not accept the calibration cache {options.calibration_cache}: it asked for data",
                    remedy="calibrate again",
                )
            if plan is None:
                raise ToolError(self._failed(f"builds no engine from {self.path}"))
            seconds = time.perf_counter() - start
        save_timings()
        for text in skipped_tactics(self.messages)[:1]:
            limit = config.get_memory_pool_limit(api.trt.MemoryPoolType.WORKSPACE)
            self.receive(
                Message(
                    severity="warning",
                    source="check",
                    text=f"the workspace limit of {limit / 2**20:.0f} MiB made TensorRT leave kernels out, "
                    f"faster ones perhaps ({text}); raise it: --workspace",
                )
            )
        data = memoryview(plan)
        _write(plan_path, data)
        layers = self._layers(data)
        return {
            "tensorrt": api.version,
            "build_seconds": seconds,
            "peak_memory_bytes": peak_resident_bytes(),
            "peak_gpu_memory_bytes": sampler.growth,
            "device": self.device.model_dump() if self.device else None,
            "timing_cache": cache_state,
            "layers": layers,
        }

    def _pass_clips(self, network: Any, model: Model) -> None:
        if passed := pass_clips(network, self.api, model.graph, returned=self.options.mark_outputs):
            text = f"computed in another form, with the same INT8 values: {', '.join(passed)}"
            self.receive(Message(severity="info", source="check", text=text))

    def _mark_outputs(self, network: Any) -> None:
        options = self.options
        what = f"{self.api.title}'s network of {self.path}"
        missing = mark_outputs(
            network, self.api, options.mark_outputs, options.mark_how, what=what, strictly=options.mark_strictly
        )
        for name in missing:
            text = f"tensor {name!r} does not exist in {what}: it is not returned"
            self.receive(Message(severity="warning", source="check", text=text))

    def _failed(self, what: str) -> str:
        words = worst_words(self.messages)
        return f"{self.api.title} {what}" + (f":\n  {words}" if words else ", and says nothing more")

    def _parse_error(self, parser: Any, model: Model) -> QuantizeError:
        """Every error that the parser has, with node name and operator."""
        nodes = model.graph.nodes
        lines, unsupported = [], False
        for number in range(parser.num_errors):
            error = parser.get_error(number)
            code, index = _enum_name(error.code()), int(error.node())
            name, operator = self.api.error_node(error)
            if not operator and 0 <= index < len(nodes):
                name, operator = nodes[index].label(), nodes[index].op_type
            where = _where(name, operator) if operator else "model"
            words = str(error.desc()).strip()
            if words in ("false", ""):  # the parser's check of a known operator that it has no importer for
                words = "this operator is not supported"
            text = f"{where}: {words} [{code} in {error.func()}]"
            self.receive(Message(severity="error", source="parser", text=text))
            lines.append(text)
            unsupported |= code.startswith(_UNSUPPORTED) or "Plugin not found" in words
        if unsupported and len(lines) == 1:
            lines += self._more_unsupported(parser, model, lines[0])
        joined = "\n  ".join(lines) if lines else worst_words(self.messages) or "no reason given"
        title = (
            f"{self.api.title} cannot import {len(lines)} {'node' if len(lines) == 1 else 'nodes'} of {self.path}"
            if unsupported
            else f"{self.api.title} cannot import {self.path}"
        )
        remedy = (
            "replace these operators in the model, or build for target onnx"
            if unsupported
            else "check the graph at this node"
        )
        return InputError(f"{title}:\n  {joined}", remedy=remedy)

    def _more_unsupported(self, parser: Any, model: Model, known: str) -> list[str]:
        """An importer stops at the first node that it cannot take; these are the others of that kind, and the nodes
        whose operator the parser does not know."""
        failed = {
            node.op_type for _, node in model.graph.walk() if known.startswith(_where(node.label(), node.op_type))
        }
        texts = [
            f"{_where(node.label(), node.op_type)}: this operator is not supported"
            for _, node in model.graph.walk()
            if node.domain in ("", "ai.onnx") and (node.op_type in failed or not parser.supports_operator(node.op_type))
        ]
        return [text for text in texts if not known.startswith(text.partition(": ")[0])]

    def _configure(self, config: Any, model: Model) -> None:
        api, options = self.api, self.options
        api.set_precision_flags(config, options, quantised=model.quantised, half=model.uses_half)
        api.set_target(config, options)
        api.share_profiles(config)
        config.profiling_verbosity = api.trt.ProfilingVerbosity.DETAILED
        limit = options.workspace_bytes if options.workspace_bytes is not None else workspace_limit(model, self.device)
        if limit is not None:
            config.set_memory_pool_limit(api.trt.MemoryPoolType.WORKSPACE, limit)
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        if options.max_aux_streams is not None:
            config.max_aux_streams = options.max_aux_streams
        if options.avg_timing_iterations is not None:
            config.avg_timing_iterations = options.avg_timing_iterations
        if options.tactic_sources is not None:
            api.set_tactic_sources(config, options.tactic_sources)

    def _add_profiles(self, builder: Any, network: Any, config: Any) -> None:
        inputs = [network.get_input(number) for number in range(network.num_inputs)]
        for tensor in inputs:
            if tensor.is_shape_tensor:
                raise InputError(
                    f"input {tensor.name!r} decides a shape inside the graph: it would need a profile of values",
                    remedy="make it a constant when the model is exported",
                )
        for number, profile in enumerate(self.profiles):
            handle = builder.create_optimization_profile()
            for tensor in inputs:
                shapes = profile.inputs.get(tensor.name)
                if shapes is not None and any(dim < 0 for dim in tensor.shape):
                    handle.set_shape(tensor.name, shapes.min, shapes.opt, shapes.max)
            if config.add_optimization_profile(handle) < 0:
                raise InputError(self._failed(f"refuses profile {number} ({profile})"))
        if self.options.calibration_cache is not None and self.profiles:
            config.set_calibration_profile(handle)

    def _timing_cache(self, config: Any) -> tuple[str, Callable[[], None]]:
        """Attach it: its state for the record, and what to call once the engine is built."""
        if not self.options.timing_cache:
            return "off", lambda: None
        if not self.api.timing_caches or self.device is None:
            return "not supported", lambda: None
        folder = self.options.timing_cache_folder or timing_cache.default_folder()
        path = timing_cache.cache_file(folder, self.api, self.device, self.options.avg_timing_iterations)
        with self._speaking_of("timing cache"):
            self.attached = timing_cache.attach(config, path)
        if self.attached.remark:
            text = f"timing cache {path}: {self.attached.remark}"
            self.receive(Message(severity="warning", source="check", text=text))

        def save() -> None:
            with self._speaking_of("timing cache"):
                timing_cache.save(config, path, self.attached)

        return self.attached.state, save

    def _watch_progress(self, config: Any) -> None:
        """Hand TensorRT's own progress on, where the version has it (from 10 on)."""
        if not hasattr(config, "progress_monitor"):
            return
        base, reporter = self.api.trt.IProgressMonitor, self.reporter

        class Monitor(base):  # type: ignore[valid-type,misc]
            def __init__(self) -> None:
                base.__init__(self)

            def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
                """Phases nest and overlap; only their steps are counted."""

            def phase_finish(self, phase: str) -> None:
                """Nothing to close."""

            def step_complete(self, phase: str, step: int) -> bool:
                reporter.send("step")
                return True

        self.monitor = Monitor()
        config.progress_monitor = self.monitor

    def _layers(self, plan: memoryview) -> str | None:
        """The engine inspector's JSON; None where the engine cannot be loaded: no card, or one it is not for."""
        if self.device is None:
            return None
        runtime = self.api.trt.Runtime(self.logger)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            return None
        inspector = engine.create_engine_inspector()
        return str(inspector.get_engine_information(self.api.trt.LayerInformationFormat.JSON))


def _enum_name(value: Any) -> str:
    """The member's name; TensorRT 8.6's parser enum has a method where later ones have a property."""
    name = value.name
    return str(name() if callable(name) else name)


def _where(name: str, operator: str) -> str:
    return f"node {name!r} ({operator})"


def workspace_limit(model: Model, device: DeviceInfo | None) -> int | None:
    """Scratch memory that kernels may use: 32 times the weights, at least 4 GiB, at most half of the card.

    None without a card: TensorRT's own default stays.
    """
    if device is None:
        return None
    return min(
        max(_WORKSPACE_PER_WEIGHT_BYTE * model.weight_bytes, _WORKSPACE_FLOOR_BYTES),
        int(_WORKSPACE_CARD_SHARE * device.memory_bytes),
    )


def _write(path: Path, data: memoryview) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def main(arguments: list[str]) -> None:
    """``[request file, pipe]``: build and report."""
    die_with_parent()
    request_path, descriptor = arguments
    reporter = Reporter(int(descriptor))
    request = json.loads(Path(request_path).read_text())
    try:
        api = load_api(request["target"])
        options = BuildOptions.model_validate(request["options"])
        profiles = tuple(Profile.model_validate(profile) for profile in request["profiles"])
        result = Build(api, Path(request["model"]), profiles, options, reporter).run(Path(request["plan"]))
    except QuantizeError as error:
        reporter.send("failure", kind=type(error).__name__, message=error.message, remedy=error.remedy)
    else:
        reporter.send("result", **result)
