"""From what the user named to the work of a calibration: the float model, where it is quantised, the data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact import FP32_MODEL, Artifact
from pipeline.consistency.work import Work
from pipeline.core.errors import InputError
from pipeline.core.files import sha256_file, sha256_json
from pipeline.core.progress import SILENT
from pipeline.data import open_again, open_source, split_source

if TYPE_CHECKING:
    from pipeline.artifact import Manifest
    from pipeline.config import BuildConfig, InputSpec, PlacementConfig, Preprocess, Profile
    from pipeline.core.progress import Progress
    from pipeline.placement import PlacementPlan

__all__ = ["Opened", "open_configured", "open_work"]


class Opened:
    """The work, and what made it."""

    def __init__(
        self,
        work: Work,
        plan: PlacementPlan,
        model_sha256: str,
        *,
        opset: int | None = None,
        equalised: bool = False,
    ) -> None:
        self.work = work
        self.plan = plan
        self.model_sha256 = model_sha256
        """Over the prepared model and its external weights."""
        self.opset = opset
        """Of the exported model; None: an artifact's is taken as it is."""
        self.equalised = equalised
        """Channels of some tensor were equalised here."""


def open_configured(
    config: BuildConfig, *, folder: Path, shard: str = "cyclic", progress: Progress = SILENT
) -> Opened:
    """:func:`open_work` of what a configuration says; a warning for each option that has no effect on the model.

    Raises:
        InputError, CheckFailed, ToolError: as there.
    """
    from pipeline.combinations import idle_for_model

    opened = open_work(
        config.model,
        config.data,
        folder=folder,
        preprocess=config.preprocess,
        inputs=config.inputs,
        profiles=config.profiles,
        opset=config.opset,
        placement=config.placement,
        equalise=config.equalise,
        samples=config.samples,
        batch_size=config.batch_size,
        on_nonfinite=config.on_nonfinite,
        shard=shard,
        progress=progress,
    )
    if opened.opset is not None:
        for text in idle_for_model(config, prequantized=False, equalised=opened.equalised, opset=opened.opset):
            progress.warn(text)
    return opened


def open_work(
    model: str,
    data: str,
    *,
    folder: Path,
    preprocess: Preprocess | None = None,
    inputs: tuple[InputSpec, ...] = (),
    profiles: tuple[Profile, ...] = (),
    opset: int = 17,
    placement: PlacementConfig | None = None,
    equalise: bool = False,
    samples: int | None = None,
    batch_size: int = 8,
    on_nonfinite: str = "error",
    shard: str = "cyclic",
    progress: Progress = SILENT,
) -> Opened:
    """Make a model ready to be calibrated, as `quantize build` does.

    Args:
        model: an artifact folder (its float model and placement are taken as they are), ``.onnx`` file or callable.
        data: as ``--data`` of `quantize build`.
        folder: where the exported and prepared models go.
        inputs, profiles, opset, placement, equalise: as of a build; nothing of an artifact.
        samples: how many calibrate; None: as in the artifact, or the default of `quantize build`.

    Raises:
        InputError, CheckFailed, ToolError: as the export and prepare stages and the data sources say; or the model has
            no tensor to calibrate.
    """
    path = Path(model)
    exported_opset, equalised = None, False
    if path.is_dir():
        prepared, plan, manifest = _from_artifact(path)
        specs, samples = manifest.inputs, samples or manifest.data.calibration_samples
        source = open_again(manifest, data, preprocess, progress=progress)
        chosen = split_source(source, specs, samples=samples, verify=None, labelled=False)
    else:
        from pipeline import export, prepare
        from pipeline.config import PlacementConfig, stated_inputs
        from pipeline.data import batched, check_source, select
        from pipeline.placement import make_plan

        check_source(data, preprocess, stated_inputs(inputs, profiles))
        exported = export.run(
            model, inputs=inputs, profiles=profiles, opset=opset, folder=folder / "export", progress=progress
        )
        source = open_source(data, exported.inputs, preprocess)
        chosen = split_source(source, exported.inputs, samples=samples, verify=None, labelled=False)
        few = frozenset(sorted(chosen.calibration)[: max(2, batch_size)])
        feeds = [batch.feeds for batch in batched(select(source, few), batch_size, exported.inputs)]
        result = prepare.run(exported.model_path, folder=folder / "prepare", sample_feeds=feeds[:1], progress=progress)
        prepared, specs, exported_opset = result.model_path, result.inputs, exported.opset
        placement = placement or PlacementConfig()
        if equalise:
            from pipeline.placement import equalise as stage

            every = batched(select(source, chosen.calibration), batch_size, specs)
            done = stage.run(prepared, every, folder=folder / "equalise", config=placement, progress=progress)
            prepared, equalised = done.model_path, bool(done.tensors)
        plan = make_plan(prepared, placement)
    if not plan.tensors:
        raise InputError(
            f"{model} has no tensor to calibrate"
            + (": it is quantised already" if plan.prequantized else ": no node of it is quantised"),
            remedy="`quantize explain` says which nodes are quantised and why the others are not",
        )
    work = Work(
        model=prepared,
        tensors=plan.tensors,
        source=source,
        samples=tuple(sorted(chosen.calibration)),
        inputs=specs,
        batch_size=batch_size,
        on_nonfinite=on_nonfinite,
        shard=shard,
    )
    return Opened(work, plan, _model_sha256(prepared), opset=exported_opset, equalised=equalised)


def _from_artifact(folder: Path) -> tuple[Path, PlacementPlan, Manifest]:
    from pipeline.errors.opening import load_plan

    artifact = Artifact.open(folder)
    return artifact.path(FP32_MODEL), load_plan(artifact), artifact.manifest


def _model_sha256(model: Path) -> str:
    from pipeline.onnxfile import DATA

    weights = model.with_name(DATA)
    return sha256_json([sha256_file(path) for path in (model, weights) if path.is_file()])
