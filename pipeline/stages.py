"""A build from the first stage to the last: their order, what is said of it, and what goes into the artifact.

How each stage is run is in :mod:`pipeline.stage_runs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import artifact as layout
from pipeline import package
from pipeline.artifact import Artifact, engine_folder
from pipeline.combinations import check_options, idle_for_model
from pipeline.config import check_profiles, stated_inputs
from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.progress import SILENT, Progress
from pipeline.engine.profiles import samples_outside
from pipeline.provenance import manifest
from pipeline.stage_runs import EQUALISED, FloatModel, StageRuns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pipeline.accuracy import Target
    from pipeline.build import BuildResult
    from pipeline.config import BuildConfig
    from pipeline.placement import PlacementPlan
    from pipeline.prepare import PrepareResult
    from pipeline.quantize import QuantizeResult
    from pipeline.runner import Finished
    from pipeline.verify import VerifyResult

__all__ = ["Build", "build"]

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


class Build(StageRuns):
    """One build: the configuration and what the stages have produced so far."""

    def __init__(self, config: BuildConfig, *, force: bool, fresh: bool, progress: Progress) -> None:
        super().__init__(config, progress=progress)
        self.force = force
        self.fresh = fresh

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
                equalised=any(change.kind == EQUALISED for change in prepared.result.changes),
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
                reached = self.magnitudes(model, plan, source, split.calibration)
                quantized = self.quantize(prepared, plan, calibrated, calibrator, reached)
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
        from pipeline.placement.registry import rules_in_force

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
