"""Load an engine, and say before TensorRT does when it was built for another card or version."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifact import engine_folder
from pipeline.core.errors import InputError, ToolError
from pipeline.engine.compat import RTX_CARDS, rtx_runs_on
from pipeline.engine.device import no_device_reason
from pipeline.engine.messages import make_logger, worst_words
from pipeline.engine.records import BUILD_FILE, PLAN_FILE, EngineRecord

if TYPE_CHECKING:
    from pipeline.artifact import Artifact
    from pipeline.engine.compat import Api
    from pipeline.engine.records import DeviceInfo, Message

__all__ = ["LoadedEngine", "artifact_engine", "check_engine", "check_float_model", "load_engine"]

_AMPERE = 8
_RUNS_ON = {(8, 8), (8, 10), (10, 10), (10, 11), (11, 11)}
"""Version-compatible engines: major version built with, major version run with."""
_KEPT_MESSAGES = 500


def check_engine(record: EngineRecord, api: Api, device: DeviceInfo | None) -> tuple[str, ...]:
    """Refuse an engine that this TensorRT or this card cannot run.

    Returns:
        Warnings: it runs, though it was tuned for something else.

    Raises:
        InputError: another target, version or compute capability than it was built for.
        ToolError: no card.
    """
    remedy = "build it on this machine: quantize build --from ARTIFACT --target tensorrt"
    if record.target != ("rtx" if api.rtx else "tensorrt"):
        raise InputError(f"the engine was built for target {record.target}, this is {api.title}", remedy=remedy)
    if device is None:
        raise ToolError(
            f"no engine can run here: {no_device_reason()}", remedy="`quantize doctor` says what works here"
        )
    if record.tensorrt != api.version and not _version_compatible(record, api):
        raise InputError(
            f"the engine was built with version {record.tensorrt}, this is {api.title}; an engine runs only on "
            "the version that built it",
            remedy=remedy,
        )
    if record.target == "rtx":
        if not rtx_runs_on(device.compute_capability, record.options.compute_capabilities):
            wanted = record.options.compute_capabilities or (*RTX_CARDS, "newer")
            raise InputError(
                f"the engine was built for compute capability {', '.join(wanted)}; the {device.name} has "
                f"{device.compute_capability}",
                remedy="name this card when building: --compute-capability"
                if device.compute_capability in (*RTX_CARDS, "7.5")
                else "TensorRT-RTX does not run on this card: build with --target tensorrt",
            )
        return ()
    if record.device is None or record.device.compute_capability == device.compute_capability:
        if record.device is not None and record.device.name != device.name:
            return (
                f"the engine was tuned on the {record.device.name}, this is a {device.name}: "
                "one built here may be faster",
            )
        return ()
    level = record.options.hardware_compatibility
    if level == "ampere_plus" and int(device.compute_capability.partition(".")[0]) >= _AMPERE:
        return (
            f"a hardware-compatible engine, built on the {record.device.name}: it may be slower than one built here",
        )
    raise InputError(
        f"the engine was built for compute capability {record.device.compute_capability} ({record.device.name}); "
        f"the {device.name} has {device.compute_capability}",
        remedy=remedy,
    )


def _version_compatible(record: EngineRecord, api: Api) -> bool:
    built = tuple(int(part) for part in record.tensorrt.split(".")[:2])
    return record.options.version_compatible and built <= api.release and (built[0], api.release[0]) in _RUNS_ON


class LoadedEngine:
    """An engine with the objects that must outlive it, and what TensorRT said."""

    def __init__(self, api: Api, logger: Any, runtime: Any, engine: Any, messages: deque[Message]) -> None:
        self.api, self.logger, self.runtime, self.engine, self.messages = api, logger, runtime, engine, messages

    def close(self) -> None:
        """Give everything back, the engine before its runtime."""
        self.engine = None
        self.runtime = None


def artifact_engine(artifact: Artifact, target: str) -> tuple[Path, EngineRecord]:
    """Plan and record of one of an artifact's engines, as its manifest lists them.

    Raises:
        InputError: the artifact has no engine for ``target``.
        CheckFailed: a file of the engine is not what the manifest says.
    """
    place, files = engine_folder(target), artifact.manifest.files
    remedy = f"quantize build --from {artifact.folder} --target {target}"
    names = (f"{place}/{PLAN_FILE}", f"{place}/{BUILD_FILE}")
    if names[0] not in files:
        built = ", ".join(sorted(artifact.manifest.targets)) or "none"
        raise InputError(f"{artifact.folder} has no engine for target {target}; it has: {built}", remedy=remedy)
    plan, record = (artifact.path(name, remedy=remedy) for name in names)
    return plan, EngineRecord.model_validate_json(record.read_bytes())


def check_float_model(artifact: Artifact, wanted: str) -> None:
    """Whether a float engine can be built from the artifact.

    Args:
        wanted: what asks for one, for the error.

    Raises:
        InputError: the model came with Q/DQ nodes, which are in its float model too: TensorRT would build INT8 of it.
    """
    if artifact.manifest.calibration.given:
        raise InputError(
            f"{artifact.folder}: {wanted} needs a float model, and this one came with Q/DQ nodes of its own",
            remedy="build the float network as an artifact of its own and measure both",
        )


def load_engine(
    plan: Path | bytes, api: Api, *, device: DeviceInfo | None, record: EngineRecord | None = None
) -> LoadedEngine:
    """Deserialise ``plan`` on the card that is current.

    Args:
        device: the card; None where there is none.
        record: what ``build.json`` beside the plan says; None: TensorRT alone decides whether it fits.

    Raises:
        InputError: the file is missing or empty, or the engine is for another card or version.
        ToolError: no card, or TensorRT refuses, in its own words.
    """
    if device is None:  # TensorRT 8.6 ends the process here
        raise ToolError(
            f"no engine can run here: {no_device_reason()}", remedy="`quantize doctor` says what works here"
        )
    if record is not None:
        check_engine(record, api, device)
    name = str(plan) if isinstance(plan, Path) else "the plan"
    if isinstance(plan, Path):
        try:
            plan = plan.read_bytes()
        except FileNotFoundError as error:
            raise InputError(f"plan {name} does not exist") from error
        except OSError as error:
            raise InputError(f"cannot read {name}: {error.strerror}") from error
    if not plan:
        raise InputError(f"{name} is empty", remedy="build the engine again")
    messages: deque[Message] = deque(maxlen=_KEPT_MESSAGES)
    logger = shared_logger(api, messages)
    runtime = api.trt.Runtime(logger)
    if record is not None and record.options.version_compatible:
        runtime.engine_host_code_allowed = True  # such a plan brings the runtime it was built with
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        words = worst_words(messages)
        validity = api.engine_validity(runtime, plan)
        told = "; validity {} (diagnostics {})".format(*validity) if validity else ""
        raise ToolError(
            f"{api.title} cannot load {name}{told}" + (f":\n  {words}" if words else ", and says nothing more"),
            remedy="an engine runs on the version and kind of card that built it: build it here",
        )
    return LoadedEngine(api, logger, runtime, engine, messages)


_LOGGERS: dict[str, tuple[Any, list[deque[Message]]]] = {}


def shared_logger(api: Api, messages: deque[Message]) -> Any:
    """The one logger that TensorRT keeps per process, which from now on writes into ``messages``."""
    key = api.trt.__name__
    if key not in _LOGGERS:
        sinks: list[deque[Message]] = []
        _LOGGERS[key] = (make_logger(api, lambda message: sinks[-1].append(message), verbose=False), sinks)
    logger, sinks = _LOGGERS[key]
    sinks[:] = [messages]
    return logger
