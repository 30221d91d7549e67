"""From the configuration to what is evaluated: samples on the disk, INT8 graphs by calibrator and calibration set."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pipeline import artifact as layout
from pipeline import stages
from pipeline.combinations import idle_for_model
from pipeline.compare.activations import activation_outputs
from pipeline.compare.archive import open_archive
from pipeline.compare.config import MIN_SAMPLES, CompareConfig
from pipeline.compare.figures import facts_of
from pipeline.compare.follow_up import check_exported
from pipeline.compare.histogram import clipped_values
from pipeline.compare.images import coding_of_arrays, coding_of_images, image_input
from pipeline.compare.measured import Measured
from pipeline.compare.metric import metric_code
from pipeline.compare.records import SAMPLES_NPZ, Extremes, SamplesResult
from pipeline.compare.runs import file_set, files_of
from pipeline.compare.task import FileSet, Setting
from pipeline.core.errors import InputError
from pipeline.errors.graphs import Graph
from pipeline.stage_runs import FloatModel

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.calibrate import CalibrationResult
    from pipeline.compare.images import PixelCoding
    from pipeline.compare.variants import Variant
    from pipeline.core.progress import Progress
    from pipeline.data import DataSource, Split
    from pipeline.export import ExportResult
    from pipeline.placement import PlacementPlan
    from pipeline.prepare import PrepareResult
    from pipeline.runner import Finished

__all__ = ["Candidate", "Preparation"]

_BATCH_BYTES: Final = 1_000_000
_MOST_ROWS: Final = 64


@dataclass(frozen=True)
class Candidate:
    """An INT8 graph to evaluate."""

    measured: Measured
    files: FileSet


class Preparation:
    """The build's stages up to the INT8 graphs, as far as the experiment needs them.

    Raises (all methods):
        InputError: model, data, labels or options do not fit.
        ToolError: there is no device to calibrate on.
    """

    def __init__(self, config: CompareConfig, *, artifact: bool = False, progress: Progress) -> None:
        self.config = config
        self.artifact = artifact
        self.progress = progress
        self.build = stages.Build(config, force=False, fresh=False, progress=progress)
        self.runner = self.build.runner

    def check(self) -> None:
        """What is wrong before any work, as for a build."""
        for text in self.build.check_early():
            self.progress.warn(text)

    def begin(self) -> None:
        """Export, prepare, split and calibrate."""
        self.exported: Finished[ExportResult] = self.build.export()
        self._check_exported(self.exported.result)
        self.source, self.split = self._data(self.exported.result)
        self.labels = self._labels()
        self.prepared: Finished[PrepareResult] = self.build.prepare(self.exported, self.source, self.split)
        self.plan: PlacementPlan = self.build.plan(self.prepared)
        if self.plan.prequantized or not self.plan.tensors:
            reason = "has Q/DQ nodes already" if self.plan.prequantized else "has no layer that can be quantised"
            raise InputError(
                f"there is nothing to compare: the model {reason}",
                remedy="give the float model" if self.plan.prequantized else "`quantize explain` says why",
            )
        for text in idle_for_model(
            self.config, prequantized=False, equalised=False, opset=self.exported.result.opset
        ):
            self.progress.warn(text)
        self.activations = self._noisy_activations()
        self.calibrated: Finished[CalibrationResult] = self.build.calibrate(
            self.prepared, self.plan, self.source, self.split
        )
        model = FloatModel.of(self.prepared, self.calibrated)
        self.reached = self.build.magnitudes(model, self.plan, self.source, self.split.calibration)

    def _check_exported(self, exported: ExportResult) -> None:
        from pipeline.data import check_class_scores

        config = self.config
        if self.artifact:
            check_exported(config, exported)
        elif config.labels is not None and config.metric is None:
            check_class_scores(exported.outputs)
        if config.shift_images and config.preprocess is None:
            image_input(exported.inputs)

    def _noisy_activations(self) -> tuple[str, ...]:
        from pipeline.onnxfile import load_model

        if not any(self.config.shift_sigma):
            return ()
        found = activation_outputs(load_model(self.prepared.result.model_path))
        if not found:
            raise InputError(
                "noise on activations is asked for, and the model has no activation layer",
                remedy="leave --shift-sigma out, or shift the inputs with --shift-images",
            )
        return found

    def _data(self, exported: ExportResult) -> tuple[DataSource, Split]:
        from pipeline.data import open_source, split_source

        config = self.config
        source = open_source(config.data, exported.inputs, config.preprocess)
        split = split_source(
            source,
            exported.inputs,
            samples=config.samples,
            verify=config.verify_samples,
            labelled=config.labels is not None,
        )
        for note in split.notes:
            self.progress.note(note)
        if not split.held_aside:
            raise InputError(
                f"{source.describe()}: all samples calibrate, none is held aside to compare on",
                remedy="give more data, or fewer --samples to calibrate on",
            )
        if len(split.verification) < MIN_SAMPLES:
            raise InputError(
                f"{len(split.verification)} samples are held aside, too few to tell calibrators apart "
                f"(at least {MIN_SAMPLES} are needed, hundreds tell something)",
                remedy="give more data, or fewer --samples to calibrate on",
            )
        if wrong := [size for size in config.calibration_sizes if size > len(split.calibration)]:
            raise InputError(
                f"a calibration size of {wrong[0]} is asked for, {len(split.calibration)} samples calibrate",
                remedy="give more --samples, or smaller sizes",
            )
        return source, split

    def _labels(self) -> tuple[tuple[int, int], ...] | None:
        from pipeline.data import load_labels

        if self.config.labels is None:
            return None
        labels = load_labels(self.config.labels, self.source)
        return tuple((sample, labels[sample]) for sample in sorted(self.split.verification) if sample in labels)

    def setting(self) -> tuple[Setting, FileSet | None]:
        """What the evaluations have in common, and the calibration samples where they are needed on the disk."""
        from pipeline.data import static_batch

        config = self.config
        inputs = self.exported.result.inputs
        samples = self._stored("samples", self.split.verification)
        relative = any(config.shift_sigma) and not config.shift_absolute
        calibration = (
            self._stored("calibration-samples", self.split.calibration)
            if relative or (config.shift_images and config.preprocess is None)
            else None
        )
        code = None if config.metric is None else metric_code(config.metric)
        setting = Setting(
            fp32=files_of(self.prepared, self.prepared.result.model_path.name),
            samples=files_of(samples, SAMPLES_NPZ),
            total=samples.result.samples,
            static_batch=static_batch(inputs) is not None,
            labels=self.labels,
            outputs=facts_of(Graph(self.prepared.result.model_path), labelled=self.labels is not None),
            metric=config.metric,
            metric_sha256=None if code is None else code.source_sha256(),
            metric_file=None if code is None or code.file is None else file_set(code.file),
            activations=self.activations,
            coding=self._coding(calibration),
            absolute=config.shift_absolute,
            seed=config.seed,
        )
        return setting, None if calibration is None or not relative else files_of(calibration, SAMPLES_NPZ)

    def _coding(self, calibration: Finished[SamplesResult] | None) -> PixelCoding | None:
        if not self.config.shift_images:
            return None
        inputs = self.exported.result.inputs
        if self.config.preprocess is not None:
            return coding_of_images(self.config.preprocess, inputs)
        spec, _ = image_input(inputs)
        if calibration is None:
            raise ValueError("the calibration samples are stored for this")
        extremes = calibration.result.extremes[spec.name]
        return coding_of_arrays(inputs, extremes.low, extremes.high)

    def _stored(self, name: str, numbers: frozenset[int]) -> Finished[SamplesResult]:
        """Preprocess samples once and keep them for all evaluations."""
        from pipeline.data import batched, select

        inputs = self.exported.result.inputs
        size = self._samples_at_a_time(numbers)

        def action(folder: Path) -> SamplesResult:
            extremes: dict[str, Extremes] = {}
            with (
                self.progress.task("reading samples", total=len(numbers), unit="samples") as bar,
                open_archive(folder / SAMPLES_NPZ) as writer,
            ):
                for batch in batched(select(self.source, numbers), size, inputs):
                    writer.add_batch(batch.samples, batch.feeds)
                    for key, values in batch.feeds.items():
                        low, high = float(values.min()), float(values.max())
                        known = extremes.get(key, Extremes(low=low, high=high))
                        extremes[key] = Extremes(low=min(low, known.low), high=max(high, known.high))
                    bar.advance(len(batch.samples))
            return SamplesResult(samples=len(numbers), extremes=extremes, dependencies=self.source.dependencies).at(
                folder
            )

        key = {
            "data": self.source.key(),
            "samples": sorted(numbers),
            "batch_size": size,
            "inputs": [spec.model_dump(mode="json") for spec in inputs],
            "preprocess": None if self.config.preprocess is None else self.config.preprocess.model_dump(mode="json"),
        }
        return self.runner.run(name, SamplesResult, key, action)

    def _samples_at_a_time(self, numbers: frozenset[int]) -> int:
        """Rows of a stored batch, which is what one call of onnxruntime gets: few for large samples, so that their
        activations stay near the caches, many for small ones."""
        from pipeline.data import select

        _, first = next(select(self.source, frozenset([min(numbers)])))
        bytes_each = sum(values.nbytes for values in first.values())
        return int(min(max(_BATCH_BYTES // max(bytes_each, 1), 1), _MOST_ROWS))

    def candidates(self, variants: Iterable[Variant]) -> list[Candidate]:
        """One INT8 graph per variant, from the experiment's calibration samples."""
        variants = tuple(variants)
        self._note_static_batch(variants)
        found = [self._candidate(variant, self.calibrated, len(self.split.calibration), None) for variant in variants]
        first: dict[str, str] = {}
        for candidate in found:
            label = candidate.measured.label
            same = first.setdefault(candidate.measured.graph, label)
            if same != label:
                self.progress.note(f"{label} gives the same graph as {same}: evaluated once")
        return found

    def _note_static_batch(self, variants: Iterable[Variant]) -> None:
        from pipeline.data import static_batch

        size = static_batch(self.exported.result.inputs)
        if size is not None and any(variant.calibrator.startswith("ema") for variant in variants):
            self.progress.note(
                f"the model's batch is static: a step of the moving averages is {size} sample(s); "
                "give --profile for a dynamic batch and --batch-size for the step"
            )

    def subset_candidates(self, variants: Iterable[Variant]) -> list[Candidate]:
        """INT8 graphs calibrated on fewer samples: ``calibration_subsets`` random choices of each size, those of one
        number nested in each other."""
        config = self.config
        pool = sorted(self.split.calibration)
        variants = tuple(variants)
        found: list[Candidate] = []
        for size in (size for size in config.calibration_sizes if size < len(pool)):
            for subset in range(config.calibration_subsets):
                order = np.random.Generator(np.random.Philox(key=[config.seed, subset])).permutation(len(pool))
                chosen = frozenset(pool[int(index)] for index in order[:size])
                calibrated = self.build.calibrate(
                    self.prepared, self.plan, self.source, replace(self.split, calibration=chosen)
                )
                found += [self._candidate(variant, calibrated, size, subset) for variant in variants]
        return found

    def _candidate(
        self, variant: Variant, calibrated: Finished[CalibrationResult], samples: int, subset: int | None
    ) -> Candidate:
        from calibrators import load_statistics

        finished = self.build.quantize(self.prepared, self.plan, calibrated, variant.make(), self.reached)
        statistics, _ = load_statistics(calibrated.result.statistics_path)
        entries: dict[str, Any] = json.loads((finished.result.folder / layout.SCALES).read_text())["tensors"]
        counted = [(statistics[name], float(entry["amax"])) for name, entry in entries.items() if name in statistics]
        elements = sum(stats.finite for stats, _ in counted)
        measured = Measured(
            label=variant.label,
            graph=finished.files[layout.INT8_MODEL],
            calibration_samples=samples,
            subset=subset,
            variant=variant,
            clipping_share=sum(clipped_values(stats, amax) for stats, amax in counted) / max(elements, 1),
        )
        return Candidate(measured, files_of(finished, layout.INT8_MODEL))
