"""Each stage of a build, run through :class:`pipeline.runner.StageRunner`.

Nothing of a stage's work is here: only what its result depends on (its cache key) and how the results before it become
its input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline import artifact as layout
from pipeline.artifact import WORK
from pipeline.config import validated
from pipeline.core.files import sha256_file
from pipeline.engine.profiles import Request
from pipeline.engine.records import BuildOptions
from pipeline.provenance import installed_versions
from pipeline.records import StageResult
from pipeline.runner import Finished, StageRunner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from calibrators import Calibrator
    from pipeline.build import BuildResult
    from pipeline.calibrate import CalibrationResult
    from pipeline.config import BuildConfig
    from pipeline.core.progress import Progress
    from pipeline.data import Batch, DataSource, Split
    from pipeline.export import ExportResult
    from pipeline.magnitudes import MagnitudesResult
    from pipeline.placement import PlacementPlan
    from pipeline.prepare import PrepareResult
    from pipeline.quantize import QuantizeResult
    from pipeline.records import TensorSpec
    from pipeline.verify import VerifyResult

__all__ = ["EQUALISED", "FloatModel", "StageRuns"]

R = TypeVar("R", bound=StageResult)

EQUALISED = "channels equalised"
"""The kind of the change that :meth:`StageRuns.equalise` notes in the prepare stage's result."""
_PREPARE_SAMPLES = 2


@dataclass(frozen=True)
class FloatModel:
    """The float model that is quantised: the prepared one, or its form with equalised channels."""

    path: Path
    files: Mapping[str, str]
    """SHA-256 by name, beside :attr:`path`."""
    statistics: Path
    """Of its activations."""
    inputs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, prepared: Finished[PrepareResult], calibrated: Finished[CalibrationResult]) -> FloatModel:
        result = prepared.result
        return cls(result.model_path, prepared.files, calibrated.result.statistics_path, result.inputs)


class StageRuns:
    """The stages of one configuration, in its folder."""

    def __init__(self, config: BuildConfig, *, progress: Progress) -> None:
        self.config = config
        self.progress = progress
        self.out = config.out.absolute()
        self.runner = StageRunner(self.out / WORK, progress)
        self.engine_options: BuildOptions = validated(BuildOptions, config.engine, origin="engine options")

    def export(self) -> Finished[ExportResult]:
        from pipeline import export

        config = self.config
        path = Path(config.model)
        inputs = {
            "model": config.model,
            "file": sha256_file(path) if path.is_file() else None,
            "directory": str(Path.cwd()),
            "inputs": [spec.model_dump(mode="json") for spec in config.inputs],
            "profiles": [str(profile) for profile in config.profiles],
            "opset": config.opset,
            "tools": installed_versions(("torch", "onnx", "onnxscript")),
        }
        return self.runner.run(
            "export",
            export.ExportResult,
            inputs,
            lambda folder: export.run(
                config.model,
                inputs=config.inputs,
                profiles=config.profiles,
                opset=config.opset,
                folder=folder,
                progress=self.progress,
            ),
        )

    def data(self, exported: ExportResult) -> tuple[DataSource, Split]:
        from pipeline.data import open_source, split_source

        config = self.config
        source = open_source(config.data, exported.inputs, config.preprocess)
        labelled = config.labels is not None
        chosen = split_source(
            source, exported.inputs, samples=config.samples, verify=config.verify_samples, labelled=labelled
        )
        for text in chosen.notes:
            self.progress.warn(text)
        return source, chosen

    def batches(
        self, source: DataSource, numbers: frozenset[int], inputs: Sequence[TensorSpec], *, limit: int | None = None
    ) -> Iterator[Batch]:
        from pipeline.data import batched, select

        stream = select(source, numbers)
        return batched(islice(stream, limit) if limit else stream, self.config.batch_size, inputs)

    def prepare(self, exported: Finished[ExportResult], source: DataSource, split: Split) -> Finished[PrepareResult]:
        from pipeline import prepare
        from pipeline.data import static_batch

        def action(folder: Path) -> PrepareResult:
            count = max(_PREPARE_SAMPLES, static_batch(exported.result.inputs) or 1)
            few = self.batches(source, split.calibration, exported.result.inputs, limit=count)
            result = prepare.run(
                exported.result.model_path,
                folder=folder,
                sample_feeds=[batch.feeds for batch in few],
                progress=self.progress,
            )
            return _read_from(result, source)

        inputs = {
            "model": exported.files,
            "data": source.key(),
            "tools": installed_versions(("onnx", "onnx-ir", "onnxscript", "onnxruntime")),
        }
        return self.runner.run("prepare", prepare.PrepareResult, inputs, action)

    def equalise(self, prepared: Finished[PrepareResult], source: DataSource, split: Split) -> Finished[PrepareResult]:
        """The prepared model with equalised channels, which computes the same."""
        from pipeline.placement import equalise
        from pipeline.prepare import Change, PrepareResult

        def action(folder: Path) -> PrepareResult:
            done = equalise.run(
                prepared.result.model_path,
                self.batches(source, split.calibration, prepared.result.inputs),
                folder=folder,
                config=self.config.placement,
                progress=self.progress,
            )
            change = Change(kind=EQUALISED, where=tuple(tensor.tensor for tensor in done.tensors))
            changes = (*prepared.result.changes, *((change,) if change.where else ()))
            return _read_from(prepared.result.model_copy(update={"changes": changes}), source)

        inputs = {
            "model": prepared.files,
            "placement": self.config.placement.model_dump(mode="json"),
            "data": source.key(),
            "samples": sorted(split.calibration),
            "tools": installed_versions(("numpy", "onnx", "onnx-ir", "onnxruntime")),
        }
        return self.runner.run("equalise", PrepareResult, inputs, action)

    def plan(self, prepared: Finished[PrepareResult]) -> PlacementPlan:
        from pipeline.placement import make_plan

        return make_plan(prepared.result.model_path, self.config.placement)

    def calibrate(
        self, prepared: Finished[PrepareResult], plan: PlacementPlan, source: DataSource, split: Split
    ) -> Finished[CalibrationResult]:
        from pipeline import calibrate
        from pipeline.data.batching import noting_shapes

        config = self.config
        tensors = plan.tensors
        if config.calibration is not None:
            taken = config.calibration
            return self.runner.run(
                "calibrate",
                calibrate.CalibrationResult,
                {"taken": sha256_file(taken), "tensors": list(tensors), "model": prepared.files},
                lambda folder: calibrate.take(
                    taken, tensors, model=prepared.result.model_path, folder=folder, progress=self.progress
                ),
            )
        inputs = {
            "model": prepared.files,
            "tensors": list(tensors),
            "data": source.key(),
            "samples": sorted(split.calibration),
            "batch_size": config.batch_size,
            "on_nonfinite": config.on_nonfinite,
            "device": config.device,
            "tools": installed_versions(("numpy", "numba", "onnxruntime")),
        }

        def action(folder: Path) -> CalibrationResult:
            seen: dict[Request, int] = {}
            result = calibrate.run(
                prepared.result.model_path,
                tensors,
                noting_shapes(self.batches(source, split.calibration, prepared.result.inputs), seen),
                folder=folder,
                on_nonfinite=config.on_nonfinite,
                device=config.device,
                progress=self.progress,
                total=len(split.calibration),
                data_key=source.key(),
            )
            return _read_from(result.model_copy(update={"shapes": tuple(seen.items())}), source)

        return self.runner.run("calibrate", calibrate.CalibrationResult, inputs, action, resumes=True)

    def split_of_taken(
        self, split: Split, source: DataSource, calibrated: CalibrationResult
    ) -> tuple[Split, tuple[str, ...]]:
        """``split`` where statistics were taken from a file, and a warning where nobody knows what is held aside.

        Samples are spaced by their number alone, so an equal number of samples of the same data is the same samples.
        """
        if self.config.calibration is None or not split.held_aside:
            return split, ()
        if calibrated.data == (source.key(),) and calibrated.samples == len(split.calibration):
            return split, ()
        return replace(split, held_aside=False), (
            f"which samples {self.config.calibration} is of is not known ({calibrated.samples} of them): those "
            "verified on may be among them, and the figures then flatter; with its own data and number of --samples it "
            "is known",
        )

    def magnitudes(
        self, model: FloatModel, plan: PlacementPlan, source: DataSource, samples: frozenset[int]
    ) -> Finished[MagnitudesResult] | None:
        """How far the tensors reach that may become FP16, on a few of ``samples``; None: nodes stay float32 anyway."""
        from pipeline import magnitudes
        from pipeline.data import static_batch
        from pipeline.data.parting import spread
        from pipeline.placement.half import half_tensors

        if self.config.placement.precision != "fp16":
            return None
        tensors = half_tensors(model.path, plan)
        chosen = spread(samples, magnitudes.SAMPLES, static_batch(model.inputs) or 1)

        def action(folder: Path) -> MagnitudesResult:
            result = magnitudes.run(
                model.path,
                tensors,
                self.batches(source, chosen, model.inputs),
                folder=folder,
                progress=self.progress,
                total=len(chosen),
            )
            return _read_from(result, source)

        inputs = {
            "model": model.files,
            "tensors": list(tensors),
            "data": source.key(),
            "samples": sorted(chosen),
            "batch_size": self.config.batch_size,
            "tools": installed_versions(("numpy", "onnx", "onnxruntime")),
        }
        return self.runner.run("magnitudes", magnitudes.MagnitudesResult, inputs, action)

    def quantize(
        self,
        prepared: Finished[PrepareResult],
        plan: PlacementPlan,
        calibrated: Finished[CalibrationResult],
        calibrator: Calibrator,
        reached: Finished[MagnitudesResult] | None = None,
    ) -> Finished[QuantizeResult]:
        """``reached``: of :meth:`magnitudes`."""
        from calibrators.statistics import load_statistics
        from pipeline import quantize

        largest = reached.result.largest if reached is not None else None

        def action(folder: Path) -> QuantizeResult:
            statistics, _ = load_statistics(calibrated.result.statistics_path)
            return quantize.run(
                prepared.result.model_path,
                plan,
                statistics,
                calibrator,
                folder=folder,
                config=self.config.placement,
                largest=largest,
                progress=self.progress,
            )

        inputs = {
            "model": prepared.files,
            "statistics": calibrated.files,
            "plan": plan.model_dump(mode="json"),
            "placement": self.config.placement.model_dump(mode="json"),
            "calibrator": {"name": calibrator.name, "params": dict(calibrator.params)},
            "largest": largest,
            "tools": installed_versions(("numpy", "numba", "onnx", "onnx-ir")),
        }
        return self.runner.run("quantize", quantize.QuantizeResult, inputs, action)

    def compile(self, quantized: Finished[QuantizeResult], target: str) -> Finished[BuildResult]:
        from pipeline import build as stage
        from pipeline.engine.device import describe_device
        from pipeline.engine.probe import probe

        inputs = {
            "model": quantized.files[layout.INT8_MODEL],
            "target": target,
            "options": self.engine_options.model_dump(mode="json"),
            "version": probe(target).version,
            "card": str(describe_device()) if target == "tensorrt" else None,
            "profiles": [str(profile) for profile in self.config.profiles],
        }
        return self.runner.run(
            f"build-{target}",
            stage.BuildResult,
            inputs,
            lambda folder: stage.run(
                quantized.result.folder / layout.INT8_MODEL,
                target=target,
                profiles=self.config.profiles,
                folder=folder,
                options=self.engine_options,
                progress=self.progress,
            ),
        )

    def verify(
        self,
        model: FloatModel,
        quantized: Finished[QuantizeResult],
        plan: PlacementPlan,
        source: DataSource,
        samples: frozenset[int],
        labels: Mapping[int, int] | None,
        *,
        held_aside: bool,
    ) -> Finished[VerifyResult]:
        from pipeline import verify

        def action(folder: Path) -> VerifyResult:
            result = verify.run(
                model.path,
                quantized.result.folder / layout.INT8_MODEL,
                plan,
                self.batches(source, samples, model.inputs),
                folder=folder,
                labels=labels,
                held_aside=held_aside,
                progress=self.progress,
                total=len(samples),
            )
            return _read_from(result, source)

        inputs = {
            "fp32": model.files,
            "int8": quantized.files[layout.INT8_MODEL],
            "plan": plan.model_dump(mode="json"),
            "data": source.key(),
            "samples": sorted(samples),
            "batch_size": self.config.batch_size,
            "labels": sha256_file(self.config.labels) if self.config.labels else None,
            "tools": installed_versions(("numpy", "onnxruntime", "seaborn", "matplotlib")),
        }
        return self.runner.run("verify", verify.VerifyResult, inputs, action)


def _read_from(result: R, source: DataSource) -> R:
    """The result with the files that a user's data callable opened as dependencies, so that an edit is noticed."""
    return result.model_copy(update={"dependencies": (*result.dependencies, *source.dependencies)})
