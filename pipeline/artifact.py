"""The artifact: what a build leaves and serving reads. Needs the standard library and pydantic only.

``manifest.json`` is written last, so a folder without one was never finished; it lists the SHA-256 of every other file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from pipeline.config import Preprocess, Profile
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.files import sha256_file, write_json
from pipeline.records import Record, TensorSpec

__all__ = [
    "CALIBRATION",
    "CALIBRATION_CACHE",
    "FP32_MODEL",
    "INT8_MODEL",
    "MANIFEST",
    "OTHER_SAMPLES",
    "PLACEMENT",
    "REPORTS",
    "SAMPLES",
    "SCALES",
    "SCHEMA",
    "STAGED",
    "SUMMARY",
    "WORK",
    "Artifact",
    "CalibrationRecord",
    "DataOptions",
    "DataRecord",
    "Difference",
    "FileRecord",
    "Manifest",
    "SourceRecord",
    "calibrator_text",
    "engine_folder",
]

SCHEMA = 1
MANIFEST = "manifest.json"
FP32_MODEL = "model.fp32.onnx"
INT8_MODEL = "model.int8.onnx"
SCALES = "scales.json"
CALIBRATION = "calibration.npz"
CALIBRATION_CACHE = "calibration.cache"
PLACEMENT = "placement.json"
SAMPLES = "samples.npz"
REPORTS = "reports"
"""Figures of the samples that the build verified on."""
OTHER_SAMPLES = "reports/other-samples"
"""A report that ``quantize errors`` made of other samples."""
SUMMARY = "reports/summary.md"
_SWITCHES = {"tensorrt_range": "range as TensorRT's"}
"""Parameters that are 0 or 1, and what 1 means."""
_FIGURES = ("build_seconds", "peak_memory_bytes", "plan_bytes")
"""Of a target's record, where it has an engine."""
WORK = ".work"
"""Finished stages, kept so that the next build goes on from them. Not part of the artifact."""
STAGED = f"{WORK}/.errors.partial"
"""Where the files of a report are written. Once the manifest lists them they are the artifact's, and are moved."""


class FileRecord(Record):
    sha256: str
    bytes: int


class SourceRecord(Record):
    """Where the model came from. ``sha256``: of the ``.onnx`` file, or of the ONNX exported from Python."""

    kind: str
    spec: str
    sha256: str


class DataOptions(Record):
    """How the data were read, so that they or others can be read in the same way."""

    data: str
    """As typed."""
    preprocess: Preprocess | None
    """Of images; None: arrays, or none was declared."""
    batch_size: int
    on_nonfinite: Literal["error", "skip"]


class DataRecord(Record):
    """The data a build read. ``sha256`` covers the content of all of it; samples are counts."""

    spec: str
    sha256: str
    calibration_samples: int
    verification_samples: int
    held_aside: bool
    options: DataOptions | None = None
    """None: an artifact of a version that did not record them."""


class CalibrationRecord(Record):
    calibrator: str
    params: dict[str, float]
    batches: int
    skipped_batches: int
    tensors: int
    given: bool = False
    """The model came with Q/DQ nodes: their scales are in use, and the calibrator did nothing."""

    def __str__(self) -> str:
        return "the model's own Q/DQ nodes" if self.given else calibrator_text(self.calibrator, self.params)


class _OutputRead(BaseModel):
    """What commands read of an output's figures, :class:`pipeline.errors.figures.OutputFigures`; versions differ."""

    name: str
    agreement: float | None = None
    almost_zero: int = 0
    cosine_mean: float | None = None
    cosine_min: float | None = None
    far: int = 0
    max_abs: float | None = None
    max_abs_sample: int | None = None
    note: str = ""
    relative_l2_max: float | None = None
    relative_l2_mean: float | None = None
    value_range: float | None = None


class _VerificationRead(BaseModel):
    """What commands read of a verification."""

    outputs: tuple[_OutputRead, ...] = ()
    almost_zero_layers: dict[str, int] | None = None
    layers: int = 0
    samples: int = 0
    top1_fp32: float | None = None
    top1_int8: float | None = None


class Manifest(Record):
    """Everything a reader must know to trust the files beside it."""

    schema_version: int = SCHEMA
    name: str
    created: str
    """UTC, ISO 8601."""
    tools: dict[str, str]
    """Package name to version."""
    source: SourceRecord
    data: DataRecord
    calibration: CalibrationRecord
    inputs: tuple[TensorSpec, ...]
    """Of the FP32 model; data are read in these types."""
    outputs: tuple[TensorSpec, ...]
    fp16_io: tuple[str, ...] = ()
    """Inputs and outputs that are float16 in the INT8 graph and its engines, where the FP32 model has float32."""
    profiles: tuple[str, ...]
    """In the text form of ``--profile``."""
    targets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Target name to its build record (also in ``engines/<target>/build.json``)."""
    verification: dict[str, Any] = Field(default_factory=dict)
    mixed: dict[str, Any] = Field(default_factory=dict)
    """Of a build with a target: the target, the point taken and the table of all; empty without one."""
    warnings: tuple[str, ...] = ()
    files: dict[str, FileRecord] = Field(default_factory=dict)
    """Path relative to the artifact, with forward slashes."""

    @property
    def half_inputs(self) -> bool:
        """The INT8 graph takes float16."""
        return any(spec.name in self.fp16_io for spec in self.inputs)

    @property
    def half_outputs(self) -> bool:
        """The INT8 graph gives float16."""
        return any(spec.name in self.fp16_io for spec in self.outputs)

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        """A manifest from elsewhere must not make a build read or remove files outside its folder."""
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(f"the file {name!r} does not lie in the artifact")
        return files

    @field_validator("profiles")
    @classmethod
    def _readable(cls, profiles: tuple[str, ...]) -> tuple[str, ...]:
        for text in profiles:
            Profile.parse(text)
        return profiles

    @field_validator("verification")
    @classmethod
    def _verified(cls, figures: dict[str, Any]) -> dict[str, Any]:
        try:
            read = _VerificationRead.model_validate(figures)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        pairs: list[tuple[BaseModel, str, str]] = [(read, "top1_fp32", "top1_int8")]
        for output in read.outputs:
            pairs += [(output, "relative_l2_mean", "relative_l2_max"), (output, "max_abs", "value_range")]
        for record, one, other in pairs:
            if (getattr(record, one) is None) != (getattr(record, other) is None):
                raise ValueError(f"{one} and {other} are there together or not at all")
        return figures

    @field_validator("targets")
    @classmethod
    def _counted(cls, targets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for target, record in targets.items():
            for key in _FIGURES:
                if not isinstance(record.get(key), (int, float, type(None))):
                    raise ValueError(f"{key} of {target} is {record[key]!r}, expected a number")
        return targets


class Difference(Record):
    """A file that is not what the manifest says. ``kind``: missing, changed, unlisted, unplaced (in :data:`STAGED`)."""

    file: str
    kind: str
    expected: str | None = None
    found: str | None = None

    def __str__(self) -> str:
        if self.kind == "changed":
            return f"{self.file}: SHA-256 is {self.found}, the manifest has {self.expected}"
        if self.kind == "unplaced":
            return f"{self.file}: still in {STAGED}, for `quantize errors` was cut off when it put its report in place"
        return f"{self.file}: {'missing' if self.kind == 'missing' else 'not in the manifest'}"


def calibrator_text(name: str, params: Mapping[str, float]) -> str:
    """A calibrator with its parameters for people, such as ``percentile (percentile 99.9)``."""
    shown = [
        _SWITCHES.get(key, f"{key} {value:g}")
        for key, value in sorted(params.items())
        if value or key not in _SWITCHES
    ]
    return f"{name} ({', '.join(shown)})" if shown else name


def engine_folder(target: str) -> str:
    return f"engines/{target}"


class Artifact:
    """An artifact folder with its manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._unchanged: set[str] = set()

    @classmethod
    def open(cls, folder: Path) -> Artifact:
        """Read the manifest; no other file is touched.

        Raises:
            InputError: no folder, no manifest (the build was not finished), or a manifest of another schema.
        """
        folder = Path(folder)
        path = folder / MANIFEST
        try:
            raw = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError) as error:
            unfinished = (folder / WORK).is_dir()
            raise InputError(
                f"{folder} has no {MANIFEST}"
                + (": its build was not finished" if unfinished else " and is no artifact"),
                remedy="run the same `quantize build` again, it goes on where it stopped"
                if unfinished
                else "give a folder written by `quantize build`",
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"{path} cannot be read: {error}", remedy="restore it, or build again with --force"
            ) from error
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA:
            raise InputError(
                f"{path} has schema version {version!r}, this program reads {SCHEMA}",
                remedy="use the release that wrote it",
            )
        try:
            return cls(folder, Manifest.model_validate_json(json.dumps(raw)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(
                f"{path} is not a valid manifest: {where}: {first['msg'].removeprefix('Value error, ')}",
                remedy="restore it, or build again with --force",
            ) from error

    def path(self, name: str, *, remedy: str = "") -> Path:
        """The file ``name``, hashed when it is first asked for; with it ``NAME.*``, where large models have weights.

        Args:
            remedy: how to mend a file that was changed; empty: as a build does.

        Raises:
            InputError: the manifest does not list it or it is gone.
            CheckFailed: it, or what lies beside it, has another SHA-256 than the manifest.
        """
        path = self.folder / name
        if name not in self.manifest.files or not path.is_file():
            raise InputError(
                f"{self.folder} has no {name}", remedy=f"`quantize verify {self.folder}` says what is wrong with it"
            )
        if name not in self._unchanged:
            for other in self.manifest.files:
                if other.startswith(f"{name}."):
                    self.path(other, remedy=remedy)
            if sha256_file(path) != self.manifest.files[name].sha256:
                raise CheckFailed(
                    f"{path} is not the file that the manifest lists",
                    remedy=remedy or f"restore it, or build again; `quantize verify {self.folder}` checks every file",
                )
            self._unchanged.add(name)
        return path

    def staged(self, name: str) -> bool:
        """Whether the file that the manifest lists as ``name`` is still in :data:`STAGED`."""
        path, record = self.folder / STAGED / name, self.manifest.files.get(name)
        return record is not None and path.is_file() and sha256_file(path) == record.sha256

    def differences(self) -> list[Difference]:
        """Hash every file and compare with the manifest; an empty list means that all is as written."""
        found: list[Difference] = []
        for name, record in sorted(self.manifest.files.items()):
            path = self.folder / name
            digest = sha256_file(path) if path.is_file() else None
            if digest != record.sha256:
                kind = "unplaced" if self.staged(name) else "missing" if digest is None else "changed"
                found.append(Difference(file=name, kind=kind, expected=record.sha256, found=digest))
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if (
                path.is_file()
                and name != MANIFEST
                and not name.startswith(f"{WORK}/")
                and name not in self.manifest.files
            ):
                found.append(Difference(file=name, kind="unlisted"))
        return found

    def updated(self, *, files: tuple[str, ...], staged: bool = False, **fields: Any) -> Artifact:
        """Write a manifest in which ``files`` (relative names) are hashed anew and ``fields`` are replaced.

        Args:
            staged: the files are in :data:`STAGED` and will be moved.
        """
        place = self.folder / STAGED if staged else self.folder
        records = dict(self.manifest.files)
        records.update({name: file_record(place / name) for name in files})
        manifest = self.manifest.model_copy(update={"files": records, **fields})
        write_manifest(self.folder, manifest)
        return Artifact(self.folder, manifest)


def file_record(path: Path) -> FileRecord:
    return FileRecord(sha256=sha256_file(path), bytes=path.stat().st_size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, manifest.model_dump(mode="json"))
