"""Build an engine in a child process and say what happened, in TensorRT's own words."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import CheckFailed, InputError, QuantizeError, ToolError
from pipeline.core.files import explain_os_errors, fsync_dir, sha256_file, write_text
from pipeline.core.progress import SILENT
from pipeline.engine.inspect import count_layers
from pipeline.engine.messages import worst_words
from pipeline.engine.process import run_child
from pipeline.engine.records import DEFAULT_OPTIONS, LAYERS_FILE, BuildOptions, EngineRecord, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config import Profile
    from pipeline.core.progress import Progress, Task

__all__ = ["build_engine"]

_KEPT_MESSAGES = 2000
_ERRORS: dict[str, type[QuantizeError]] = {kind.__name__: kind for kind in (InputError, ToolError, CheckFailed)}


class _Conversation:
    """What the child said."""

    def __init__(self, task: Task) -> None:
        self.messages: list[Message] = []
        self.dropped = 0
        self.result: dict[str, Any] | None = None
        self.failure: dict[str, Any] | None = None
        self._task = task

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "message":
            message = Message.model_validate(event)
            if len(self.messages) >= _KEPT_MESSAGES and message.severity in ("info", "verbose"):
                self.dropped += 1
            else:
                self.messages.append(message)
        elif kind == "step":
            self._task.advance()
        elif kind == "result":
            self.result = event
        elif kind == "failure":
            self.failure = event


def build_engine(
    model: Path,
    *,
    target: str,
    profiles: Sequence[Profile],
    plan_path: Path,
    options: BuildOptions = DEFAULT_OPTIONS,
    timeout_s: float | None = None,
    progress: Progress = SILENT,
) -> EngineRecord:
    """Build ``model`` for ``target`` (rtx or tensorrt) and write the plan to ``plan_path``, whole or not at all.

    ``layers.json`` appears beside the plan where the engine can be loaded here. The build runs in a child process: a
    crash in TensorRT ends that one, and what TensorRT had said until then is in the error.

    Args:
        profiles: none for a model whose inputs are all static.
        timeout_s: give up after so many seconds.

    Raises:
        InputError: TensorRT cannot take the model, the profiles or the options; unsupported operators are all listed.
        ToolError: TensorRT failed, crashed, or took longer than ``timeout_s``.
    """
    plan_path = Path(plan_path)
    with explain_os_errors(plan_path):
        plan_path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=plan_path.parent, prefix=f".{plan_path.name}.", suffix=".tmp")
    os.close(handle)
    temp = Path(name)
    request = {
        "target": target,
        "model": str(Path(model).resolve()),
        "plan": str(temp.resolve()),
        "profiles": [profile.model_dump(mode="json") for profile in profiles],
        "options": options.model_dump(mode="json"),
    }
    try:
        with progress.task(f"building the {target} engine", total=None, unit="steps") as task:
            conversation = _Conversation(task)
            with tempfile.TemporaryDirectory(prefix="quantize-build-") as scratch:
                request_path = Path(scratch) / "request.json"
                request_path.write_text(json.dumps(request))
                ended = run_child(
                    "pipeline.engine.child", [str(request_path)], on_event=conversation, timeout_s=timeout_s
                )
        if conversation.failure is not None:
            failure = conversation.failure
            raise _ERRORS[failure["kind"]](failure["message"], remedy=failure["remedy"])
        if ended.timed_out:
            raise ToolError(
                f"the {target} build of {model} was stopped after {timeout_s:.0f} s{_last_words(conversation)}",
                remedy="allow more time, or lower the optimisation level",
            )
        if conversation.result is None or ended.status:
            words = worst_words(conversation.messages)
            detail = "".join(f"\n  {line}" for line in [*words.splitlines(), *ended.log.splitlines()[-5:]])
            raise ToolError(
                f"the {target} build of {model} ended with {ended.how}{_last_words(conversation)}{detail}",
                remedy="TensorRT crashed; `quantize doctor` shows the versions, build with -v for its verbose messages",
            )
        return _finish(conversation, target, profiles, options, temp, plan_path)
    finally:
        temp.unlink(missing_ok=True)


def _last_words(conversation: _Conversation) -> str:
    spoken = [message.text for message in conversation.messages if message.source != "check"]
    return f"; its last message was: {spoken[-1].strip()}" if spoken else " before TensorRT said anything"


def _finish(
    conversation: _Conversation,
    target: str,
    profiles: Sequence[Profile],
    options: BuildOptions,
    temp: Path,
    plan_path: Path,
) -> EngineRecord:
    result = dict(conversation.result or {})
    layers = result.pop("layers")
    if layers is not None:
        write_text(plan_path.with_name(LAYERS_FILE), layers)
    record = EngineRecord(
        target=target,
        plan_sha256=sha256_file(temp),
        plan_bytes=temp.stat().st_size,
        profiles=tuple(profiles),
        options=options,
        layers=count_layers(layers) if layers is not None else None,
        messages=tuple(conversation.messages),
        messages_dropped=conversation.dropped,
        **result,
    )
    with explain_os_errors(plan_path):
        temp.chmod(0o644)
        temp.replace(plan_path)
    fsync_dir(plan_path.parent)
    return record
