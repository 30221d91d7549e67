"""From what the user named to a :class:`QuantContext`: an artifact, a Q/DQ graph, a calibration cache, a saved one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.artifact import MANIFEST, SCALES, Artifact
from pipeline.consistency.context import Evidence, QuantContext, TensorContext
from pipeline.consistency.graph import context_of_graph
from pipeline.core.errors import InputError
from pipeline.core.files import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["context_of_artifact", "context_of_cache", "load_context", "save_context"]

_KIND = "quantize context"
_SCHEMA = 1
_KINDS = "an artifact folder, a Q/DQ .onnx file, a calibration.cache or a context .json"


def load_context(path: Path, *, label: str | None = None) -> QuantContext:
    """The context that ``path`` holds; the file's content says of which kind it is.

    Raises:
        InputError: nothing is there, it is of no known kind, or it is damaged.
    """
    path = Path(path)
    label = label or str(path)
    if path.is_dir():
        return context_of_artifact(path, label=label)
    if not path.exists():
        raise InputError(f"{path} does not exist", remedy=f"give {_KINDS}")
    if path.suffix == ".onnx":
        return context_of_graph(path, label=label)
    with path.open("rb") as stream:
        start = stream.read(64).lstrip()
    if start.startswith(b"TRT-"):
        return context_of_cache(path, label=label)
    if start.startswith(b"{"):
        return _saved_context(path, label=label)
    if path.suffix in (".plan", ".engine"):
        raise InputError(
            f"{path} is an engine, and an engine does not say its scales",
            remedy="they are measured where it runs: `quantize consistency --on-device ARTIFACT`",
        )
    raise InputError(f"{path} is of no known kind", remedy=f"give {_KINDS}")


def context_of_artifact(folder: Path, *, label: str | None = None) -> QuantContext:
    """What ``scales.json`` and the manifest of an artifact say.

    Raises:
        InputError: no artifact, or ``scales.json`` is damaged.
    """
    artifact = Artifact.open(folder)
    path = artifact.path(SCALES)
    try:
        content = json.loads(path.read_text())
        activations = [_activation(name, entry) for name, entry in content["tensors"].items()]
        weights = [_weight(name, entry) for name, entry in content["weights"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged: {error}", remedy="the file is as the manifest lists it: build the artifact again"
        ) from error
    manifest = artifact.manifest
    return QuantContext(
        label=label or str(folder),
        tensors=(*activations, *weights),
        calibrator=manifest.calibration.calibrator,
        params=tuple(manifest.calibration.params.items()),
        complete=("activation", "weight"),
        model=manifest.source.sha256,
        data=manifest.data.sha256,
        tools=manifest.tools,
    )


def _activation(name: str, entry: Mapping[str, Any]) -> TensorContext:
    return TensorContext(
        name=name,
        scales=(entry["scale"],),
        calibrator=entry["calibrator"],
        evidence=Evidence(samples=entry["samples"], minimum=entry["min"], maximum=entry["max"]),
    )


def _weight(name: str, entry: Mapping[str, Any]) -> TensorContext:
    return TensorContext(name=name, kind="weight", scales=tuple(entry["scale"]), axis=entry["axis"])


def context_of_cache(path: Path, *, label: str | None = None) -> QuantContext:
    """The activation scales in a TensorRT calibration cache; it has no weights, and says neither model nor data.

    Raises:
        InputError: no cache, or a scale that is not a positive finite number.
    """
    from calibrators.cache import read_cache

    return QuantContext(
        label=label or str(path),
        tensors=tuple(TensorContext(name=name, scales=(scale,)) for name, scale in read_cache(path).scales.items()),
    )


def save_context(path: Path, context: QuantContext) -> None:
    """Write a context as JSON, to be compared with another machine's."""
    content = context.model_dump(mode="json")
    write_json(path, {"kind": _KIND, "schema": _SCHEMA, "digest": context.digest, "context": content})


def _saved_context(path: Path, *, label: str) -> QuantContext:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}", remedy=f"give {_KINDS}") from error
    if content.get("kind") != _KIND:
        beside = f"; give the folder {path.parent}" if path.name in (SCALES, MANIFEST) else f"; give {_KINDS}"
        raise InputError(f"{path} is no saved context{beside}")
    if content.get("schema") != _SCHEMA:
        raise InputError(f"{path} has schema {content.get('schema')!r}, this version reads {_SCHEMA}")
    try:
        context = QuantContext.model_validate_json(json.dumps(content["context"]))
    except (KeyError, ValidationError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if context.digest != content.get("digest"):
        raise InputError(
            f"{path} is damaged: its content has the digest {context.digest[:12]}, "
            f"it says {str(content.get('digest'))[:12]}",
            remedy="copy it again from the machine that wrote it",
        )
    return context.model_copy(update={"label": label})
