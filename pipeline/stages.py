"""A build from the first stage to the last, each run through :class:`pipeline.runner.StageRunner`.

Nothing of a stage's work is here: only the order, what each one's result depends on (its cache key) and how one stage's
result becomes the next one's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline import artifact as layout
from pipeline import package
from pipeline.artifact import WORK, Artifact, engine_folder
from pipeline.combinations import check_options, idle_for_model
from pipeline.config import check_profiles, stated_inputs, validated
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.files import sha256_file
from pipeline.core.progress import SILENT, Progress
from pipeline.engine.profiles import Request, samples_outside
from pipeline.engine.records import BuildOptions
from pipeline.provenance import installed_versions, manifest
from pipeline.records import StageResult
from pipeline.runner import Finished, StageRunner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from calibrators import Calibrator
    from pipeline.build import BuildResult
    from pipeline.calibrate import CalibrationResult
    from pipeline.config import BuildConfig
    from pipeline.data import Batch, DataSource, Split
    from pipeline.export import ExportResult
    from pipeline.mixed import Target
    from pipeline.placement import PlacementPlan
    from pipeline.prepare import PrepareResult
    from pipeline.quantize import QuantizeResult
    from pipeline.records import TensorSpec
    from pipeline.verify import VerifyResult

__all__ = ["Build", "FloatModel", "build", "installed_versions"]

R = TypeVar("R", bound=StageResult)

_PREPARE_SAMPLES = 2
_EQUALISED = "channels equalised"
_FAR = 0.1
"""Relative L2 of an output: MiniLM has 0.16 without and 0.07 with equalised channels."""
_FEW = 0.1
"""Share of INT8 tensors in front of matrix products below which they are not the cause: for the classifier behind the
convolutions of EfficientNet-Lite0, 1 of 51, equalising changes nothing; for PaddleOCR's recogniser, 9 of 45, it halves
the error."""


def build(
    config: BuildConfig,
    *,
    force: bool = False,
    fresh: bool = False,
    targets: Sequence[str] | None = None,
    progress: Progress = SILENT,
) -> Artifact:
    """Run every stage that has no finished result of equal inputs, and package the artifact into ``config.out``.

    Args:
        force: replace the artifact of another model.
        fresh: take nothing from an earlier run.
        targets: those of ``config``, where its options were checked for them already; None: that is done here.

    Raises:
        InputError, ToolError: as the stages say; what was finished before stays finished.
        CheckFailed: as the stages say; or no mix of precisions meets the target, in which case the artifact is written
            with the nearest one.
    """
    return Build(config, force=force, fresh=fresh, progress=progress).run(targets)


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


class Build:
    """One build: the configuration and what the stages have produced so far."""

    def __init__(self, config: BuildConfig, *, force: bool, fresh: bool, progress: Progress) -> None:
        self.config = config
        self.force = force
        self.progress = progress
        self.fresh = fresh
        self.out = config.out.absolute()
        self.runner = StageRunner(self.out / WORK, progress)
        self.engine_options: BuildOptions = validated(BuildOptions, config.engine, origin="engine options")

    def run(self, targets: Sequence[str] | None = None) -> Artifact:
        """As :func:`build`, with its ``targets``."""
        import calibrators
        from pipeline.data import check_class_scores, load_labels
        from pipeline.verify import doubts as far_from_float

        calibrator = calibrators.get(self.config.calibrator.name, self.config.calibrator.params)
        if targets is None:
            targets = self.targets()
            check_options(self.config, self.engine_options, targets)
        doubts = self.check_early()
        wanted = self.mixed_target()
        package.check_folder(self.out, force=self.force)
        with self.runner.locked():
            if self.fresh:
                self.runner.prune()
            exported = self.export()
            package.check_owner(self.out, exported.result.source_sha256, force=self.force)
            check_profiles(self.config.profiles, exported.result.inputs)
            if self.config.labels is not None:
                check_class_scores(exported.result.outputs)
            source, split = self.data(exported.result)
            labels = load_labels(self.config.labels, source) if self.config.labels else None
            prepared = self.prepare(exported, source, split)
            if self.config.equalise:
                prepared = self.equalise(prepared, source, split)
            plan = self.plan(prepared)
            said = doubts + idle_for_model(
                self.config,
                prequantized=plan.prequantized,
                equalised=any(change.kind == _EQUALISED for change in prepared.result.changes),
                opset=exported.result.opset,
            )
            cache = self.engine_options.calibration_cache
            if cache is not None and plan.quantized_nodes:
                raise InputError(
                    f"--implicit {cache}: the graph that is built has Q/DQ nodes, with which TensorRT would ignore the "
                    "calibration cache",
                    remedy="leave --implicit out, or keep every node float: --exclude '*'",
                )
            calibrated = self.calibrate(prepared, plan, source, split)
            split, unknown = self.split_of_taken(split, source, calibrated.result)
            said += samples_outside(self.config.profiles, dict(calibrated.result.shapes)) + unknown
            for text in said:
                self.progress.warn(text)
            aside, mixed = split.verification, None
            if wanted is None:
                model = FloatModel.of(prepared, calibrated)
                quantized = self.quantize(prepared, plan, calibrated, calibrator)
            else:
                from pipeline.mixed.building import MixedBuild

                search = MixedBuild(self, prepared, plan, calibrated, calibrator, source, split, labels)
                mixed = search.search(wanted)
                model, plan, quantized = search.quantize(mixed)
                aside = search.parts.unseen or aside
            built = {target: self.compile(quantized, target) for target in targets}
            verified = self.verify(model, quantized, plan, source, aside, labels, held_aside=split.held_aside)
            found = [*far_from_float(verified.result)]
            if mixed is None:
                found += self.advice(prepared.result, plan, verified.result)
            for text in found:
                self.progress.warn(text)
                said += (text,)
            record = manifest(
                self.config,
                exported,
                prepared,
                calibrated,
                quantized,
                built,
                verified,
                source,
                split,
                calibrator,
                said,
                prequantized=plan.prequantized,
            )
            files = self.files(model, quantized, built, verified)
            if mixed is not None:
                record = search.recorded(mixed, record, verified)
                files.update(search.files(mixed))
            done = package.run(files, record, folder=self.out, progress=self.progress)
            self.runner.prune()
        if mixed is not None and self.config.mixed.choose is None and not mixed.result.reached:
            raise CheckFailed(
                mixed.result.sentence(),
                remedy=f"that one is in {self.out}; a lower target, another calibrator or more data may be met",
                figures={"artifact": str(done.folder), **done.manifest.model_dump(mode="json")},
            )
        return done

    def advice(self, prepared: PrepareResult, plan: PlacementPlan, verified: VerifyResult) -> Iterator[str]:
        """What is known to help where INT8 is far from FP32."""
        from pipeline.placement.equalise import products_to_equalise

        far = [output for output in verified.outputs if (output.relative_l2_mean or 0.0) > _FAR]
        if not far or self.config.equalise or plan.prequantized:
            return
        count = products_to_equalise(prepared.model_path, plan)
        if count > _FEW * len(plan.tensors):
            inputs = "1 matrix product's input has" if count == 1 else f"{count} inputs of matrix products have"
            yield (
                f"output {far[0].name!r} is {far[0].relative_l2_mean:.2f} away from FP32 (relative L2), and {inputs} "
                "one scale for channels that may differ much: --equalise levels them, the float graph stays the same"
            )

    def mixed_target(self) -> Target | None:
        """What a mix of precisions has to reach; None: it is not asked for.

        Raises:
            InputError: a point of a search is asked for, and there is none, or nothing is to be taken from it.
        """
        config = self.config.mixed
        if config.choose is not None and self.fresh:
            raise InputError(
                f"--choose {config.choose} takes a point of an earlier search, and --fresh takes nothing from it",
                remedy="leave one of them out",
            )
        if config.choose is not None and config.target is None:
            from pipeline.mixed.building import stored_target

            return stored_target(self.out, config.choose)
        return config.target

    def targets(self) -> tuple[str, ...]:
        from pipeline.engine.probe import default_targets, require_working

        require_working(self.config.targets)
        return self.config.targets or default_targets()

    def check_early(self) -> tuple[str, ...]:
        """What files, names and the machine show to be wrong at once, before a model is loaded.

        Returns:
            Warnings about them.

        Raises:
            InputError: a file that is not there or not what it should be, preprocessing of arrays or none of images,
                labels that do not fit the data, the name of a placement rule that does not exist, or packages for the
                device to calibrate on are missing.
            ToolError: that device is missing.
        """
        from pipeline.activations_cuda import check_device
        from pipeline.data import check_source, load_labels
        from pipeline.placement.rule import rules_in_force

        config = self.config
        listed = check_source(config.data, config.preprocess, stated_inputs(config.inputs, config.profiles))
        rules_in_force(config.placement.rules_off)
        if config.labels is not None:
            load_labels(config.labels, listed)
        if config.calibration is None:
            check_device(config.device)
        elif not config.calibration.is_file():
            raise InputError(
                f"calibration {config.calibration} does not exist", remedy="`quantize calibrate` writes one"
            )
        cache = self.engine_options.calibration_cache
        if cache is not None and not cache.is_file():
            raise InputError(f"calibration cache {cache} does not exist", remedy="name the file that --implicit reads")
        if config.mixed.layer_times is None:
            return ()
        from pipeline.mixed.times import doubts

        return doubts(*config.mixed.layer_times)

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
            change = Change(kind=_EQUALISED, where=tuple(tensor.tensor for tensor in done.tensors))
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

    def quantize(
        self,
        prepared: Finished[PrepareResult],
        plan: PlacementPlan,
        calibrated: Finished[CalibrationResult],
        calibrator: Calibrator,
    ) -> Finished[QuantizeResult]:
        from calibrators.statistics import load_statistics
        from pipeline import quantize

        def action(folder: Path) -> QuantizeResult:
            statistics, _ = load_statistics(calibrated.result.statistics_path)
            return quantize.run(
                prepared.result.model_path,
                plan,
                statistics,
                calibrator,
                folder=folder,
                config=self.config.placement,
                progress=self.progress,
            )

        inputs = {
            "model": prepared.files,
            "statistics": calibrated.files,
            "plan": plan.model_dump(mode="json"),
            "placement": self.config.placement.model_dump(mode="json"),
            "calibrator": {"name": calibrator.name, "params": dict(calibrator.params)},
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

    def files(
        self,
        model: FloatModel,
        quantized: Finished[QuantizeResult],
        built: dict[str, Finished[BuildResult]],
        verified: Finished[VerifyResult],
    ) -> dict[str, Path]:
        """Name in the artifact -> where the stage left it."""
        files = {layout.FP32_MODEL: model.path, layout.CALIBRATION: model.statistics}
        for name in model.files:
            if name != model.path.name:
                files[name] = model.path.parent / name
        files.update({name: quantized.result.folder / name for name in quantized.files})
        for target, stage in built.items():
            files.update({f"{engine_folder(target)}/{name}": stage.result.folder / name for name in stage.files})
        for name in verified.files:
            files[name if name == layout.SAMPLES else f"reports/{name}"] = verified.result.folder / name
        return files


def _read_from(result: R, source: DataSource) -> R:
    """The result with the files that a user's data callable opened as dependencies, so that an edit is noticed."""
    return result.model_copy(update={"dependencies": (*result.dependencies, *source.dependencies)})
