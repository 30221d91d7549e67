"""The search inside a build: which samples it sees, its stage, and the stage that quantises the point taken.

The held-aside samples are parted: on one half the search judges its points, the other half it never sees. What the
build then verifies on is the second half, so that no figure in the manifest was chosen for being good.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifact import MANIFEST, Artifact
from pipeline.core.errors import InputError
from pipeline.core.files import sha256_file, sha256_json
from pipeline.data.parting import Parts, parted, spread
from pipeline.mixed import stage
from pipeline.mixed.choosing import choose, point_plan
from pipeline.mixed.verified import missed_as_verified, verified_figures
from pipeline.provenance import installed_versions
from pipeline.runner import code_digest
from pipeline.stage_runs import FloatModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from calibrators import Calibrator
    from pipeline.accuracy import Target
    from pipeline.artifact import Manifest
    from pipeline.calibrate import CalibrationResult
    from pipeline.data import Batch, DataSource, Split
    from pipeline.placement import PlacementPlan
    from pipeline.prepare import PrepareResult
    from pipeline.quantize import QuantizeResult
    from pipeline.runner import Finished
    from pipeline.stage_runs import StageRuns
    from pipeline.verify import VerifyResult

__all__ = ["MixedBuild", "manifest_entry", "stored_target"]

_TOOLS = ("numpy", "numba", "onnx", "onnx-ir", "onnxruntime")


class MixedBuild:
    """Mixed precision for one build, once its statistics are there.

    Args:
        labels: sample number to class.
    """

    def __init__(
        self,
        build: StageRuns,
        prepared: Finished[PrepareResult],
        plan: PlacementPlan,
        calibrated: Finished[CalibrationResult],
        calibrator: Calibrator,
        source: DataSource,
        split: Split,
        labels: Mapping[int, int] | None,
    ) -> None:
        from pipeline.data import static_batch

        self.build = build
        self.prepared = prepared
        self.plan = plan
        self.calibrated = calibrated
        self.calibrator = calibrator
        self.source = source
        self.labels = labels
        self.calibration = split.calibration
        multiple = static_batch(prepared.result.inputs) or 1
        self.searched = spread(split.calibration, build.config.mixed.samples, multiple)
        self.parts: Parts = parted(split.verification, multiple, held_aside=split.held_aside)

    def search(self, target: Target) -> Finished[stage.MixedResult]:
        """The finished search for ``target``: run, or taken from the cache; with ``choose`` never run.

        Raises:
            InputError, CheckFailed: as :func:`pipeline.mixed.run` says; or ``choose`` is given and there is none.
        """
        config = self.build.config
        choose = config.mixed.choose
        times = config.mixed.layer_times
        inputs = self._inputs(target)

        def action(folder: Path) -> stage.MixedResult:
            from calibrators.statistics import load_statistics
            from pipeline.mixed.times import node_times, pass_times

            if choose is not None:
                raise InputError(
                    f"--choose {choose}: {self.build.out} has no finished search for this model, data, options and "
                    "version of the program",
                    remedy="run the build with a target (--max-drop, --min-sqnr or --min-agreement) first; then the "
                    "same command with --choose takes any point of its table",
                )
            statistics, _ = load_statistics(self.calibrated.result.statistics_path)
            nodes = {decision.node for decision in self.plan.decisions if decision.quantized}
            return stage.run(
                self.prepared.result.model_path,
                statistics,
                self.calibrator,
                folder=folder,
                config=config.placement,
                target=target,
                searched=lambda: self._batches(self.searched),
                checked=lambda: self._batches(self.parts.check),
                unseen=(lambda: self._batches(self.parts.unseen)) if self.parts.unseen else None,
                calibration=None if config.equalise else lambda: self._batches(self.calibration),
                labels=self.labels,
                times=node_times(*times, nodes) if times else None,
                passes=pass_times(*times) if times else None,
                identity=sha256_json({**inputs, "target": None, "times": None, "code": code_digest()}),
                others=sorted(self.build.runner.work.glob(f"*mixed-*/{stage.EVALUATIONS}")),
                progress=self.build.progress,
            )

        return self.build.runner.run("mixed", stage.MixedResult, inputs, action, resumes=True)

    def _batches(self, numbers: frozenset[int]) -> Iterator[Batch]:
        return self.build.batches(self.source, numbers, self.prepared.result.inputs)

    def _inputs(self, target: Target) -> dict[str, Any]:
        config = self.build.config
        return {
            "model": self.prepared.files,
            "statistics": self.calibrated.files,
            "plan": self.plan.model_dump(mode="json"),
            "placement": config.placement.model_dump(mode="json"),
            "calibrator": {"name": self.calibrator.name, "params": dict(self.calibrator.params)},
            "equalised": config.equalise,
            "data": self.source.key(),
            "calibration": sorted(self.calibration),
            "searched": sorted(self.searched),
            "checked": sorted(self.parts.check),
            "unseen": sorted(self.parts.unseen),
            "batch_size": config.batch_size,
            "labels": sha256_file(config.labels) if config.labels else None,
            "target": target.model_dump(mode="json"),
            "times": [sha256_file(path) for path in config.mixed.layer_times or ()],
            "tools": installed_versions(_TOOLS),
        }

    def quantize(
        self, found: Finished[stage.MixedResult]
    ) -> tuple[FloatModel, PlacementPlan, Finished[QuantizeResult]]:
        """Quantise the point that is asked for, or the one taken: its float model, its plan and the quantised graph.

        Raises:
            InputError: there is no such point.
        """
        from calibrators.statistics import load_statistics
        from pipeline.quantize import QuantizeResult

        config, number = self.build.config.placement, self.build.config.mixed.choose
        result = found.result
        model = FloatModel.of(self.prepared, self.calibrated)
        if result.point(number).equalised:
            path = result.equalised_model
            inside = f"{stage.EQUALISED}/{path.name}"  # and the file of its weights, where they are in one
            files = {Path(name).name: digest for name, digest in found.files.items() if name.startswith(inside)}
            model = FloatModel(path, files, result.equalised_statistics, model.inputs)
        plan = point_plan(result, model.path, config, number)
        reached = self.build.magnitudes(model, plan, self.source, self.calibration)
        largest = reached.result.largest if reached is not None else None

        def action(folder: Path) -> QuantizeResult:
            statistics, _ = load_statistics(model.statistics)
            return choose(
                result,
                plan,
                model.path,
                statistics,
                self.calibrator,
                folder=folder,
                config=config,
                number=number,
                largest=largest,
                progress=self.build.progress,
            )

        inputs = {
            "search": found.files,
            "number": number,
            "largest": largest,
            "model": model.files,
            "placement": config.model_dump(mode="json"),
            "calibrator": {"name": self.calibrator.name, "params": dict(self.calibrator.params)},
            "tools": installed_versions(("numpy", "numba", "onnx", "onnx-ir")),
        }
        return model, plan, self.build.runner.run("quantize", QuantizeResult, inputs, action)

    def files(self, found: Finished[stage.MixedResult]) -> dict[str, Path]:
        """Name in the artifact -> where the search left it."""
        return {f"reports/{name}": found.result.folder / name for name in (stage.PARETO_JSON, stage.PARETO_PNG)}

    def recorded(
        self, found: Finished[stage.MixedResult], manifest: Manifest, verified: Finished[VerifyResult]
    ) -> Manifest:
        """``manifest`` with the table and the point that was built, and with warnings about them."""
        result, asked = found.result, self.build.config.mixed.choose
        warnings = [self.parts.note] if self.parts.note else []
        warnings += self._misses(result, verified.result)
        for text in warnings:
            if text != result.sentence():  # the search said it
                self.build.progress.warn(text)
        figures = verified_figures(verified.result)
        entry = {
            **manifest_entry(result, asked, found.seconds),
            "verified": {**figures.model_dump(mode="json"), "meets": result.target.met(figures)},
        }
        return manifest.model_copy(update={"mixed": entry, "warnings": (*manifest.warnings, *warnings)})

    def _misses(self, result: stage.MixedResult, verified: VerifyResult) -> Iterator[str]:
        """Where the point that was built misses the target: by what it was judged by, on other samples, as verified."""
        asked, target = self.build.config.mixed.choose, result.target
        point = result.point(asked)
        if not point.meets:
            yield (
                result.sentence()
                if asked is None
                else f"point {asked} was asked for: {target.describe(point.figures)}, and not {target}"
            )
            return
        figures = verified_figures(verified)
        unseen = point.unseen
        if unseen is None and self.parts.unseen:  # only the first point and the taken one are measured on them
            unseen = figures
        if unseen is not None and not target.met(unseen):
            yield (
                f"{target.describe(unseen)} on the {unseen.samples} held-aside samples that the "
                f"search never saw, {target.describe(point.figures)} on the {point.figures.samples} that it "
                f"judged by; the target is {target}"
            )
        elif missed := missed_as_verified(target, figures, unseen or point.figures):
            yield missed


def manifest_entry(result: stage.MixedResult, number: int | None, seconds: float) -> dict[str, Any]:
    """What the manifest says of a search: the target, the point that was built, and every point in short.

    Args:
        number: of the point; None: the one taken.
        seconds: that the search took.
    """
    point = result.point(number)
    return {
        "target": result.target.model_dump(mode="json"),
        "text": str(result.target),
        "reached": result.reached,
        "point": point.number,
        "restored": list(point.restored),
        "given_back": [
            {
                "nodes": list(unit.nodes),
                "cost": unit.cost,
                "sqnr_before_db": unit.sqnr_before_db,
                "sqnr_after_db": unit.sqnr_after_db,
            }
            for unit in result.given_back(number)
        ],
        "repairs": sum(record.kept for record in result.repairs) if point.repaired else 0,
        "unit": result.unit,
        "search_samples": result.search_samples,
        "check_samples": result.check_samples,
        "unseen_samples": result.unseen_samples,
        "search_seconds": round(seconds, 1),
        "points": [
            {**item.model_dump(mode="json", exclude={"restored"}), "restored": len(item.restored)}
            for item in result.points
        ],
    }


def stored_target(folder: Path, choose: int) -> Target:
    """The target of the search in the artifact ``folder``.

    Raises:
        InputError: there is no artifact, or none that was searched for.
    """
    from pipeline.accuracy import Target

    entry = Artifact.open(folder).manifest.mixed if (folder / MANIFEST).is_file() else {}
    if not entry:
        raise InputError(
            f"--choose {choose}: there is no search in {folder} to choose from",
            remedy="build with a target first: --max-drop, --min-sqnr or --min-agreement",
        )
    return Target.model_validate(entry["target"])
