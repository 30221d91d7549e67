"""Options of an experiment that do nothing in a combination, as one table: asked before anything is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.combinations import DEPENDENT, PASS, Dependent, Need, Situation, given_options, idle_among

if TYPE_CHECKING:
    from collections.abc import Collection

    from pipeline.combinations import Idle
    from pipeline.compare.config import CompareConfig
    from pipeline.engine.records import BuildOptions

__all__ = ["COMPARED", "idle_in_comparison"]

NOISE = Need(
    "noise on activations",
    lambda situation: any(situation.given.get("shift_sigma", ())),
    "give --shift-sigma 0.05 as well",
)
FEWER = Need(
    "calibrating on fewer samples too",
    lambda situation: "calibration_sizes" in situation.given,
    "give --calibration-size 8,16 as well",
)
ARTIFACT = Need("the artifact that --build makes", lambda situation: situation.artifact, "give --build as well")
ONE_CALIBRATOR = Need(
    "a build, and --build takes the calibrator that is recommended",
    lambda situation: False,
    "name it in --calibrators",
)

COMPARED = (
    Dependent("shift_absolute", NOISE, "--shift-absolute"),
    Dependent("shift_draws", NOISE, "--shift-draws"),
    Dependent("calibration_sizes", PASS, "--calibration-size"),
    Dependent("calibration_subsets", FEWER, "--calibration-subsets"),
    Dependent("calibrator", ONE_CALIBRATOR),
    Dependent("name", ARTIFACT),
    Dependent("targets", ARTIFACT),
    Dependent("equalise", ARTIFACT),
    Dependent("mixed.max_drop", ARTIFACT),
    Dependent("mixed.min_sqnr", ARTIFACT),
    Dependent("mixed.min_agreement", ARTIFACT),
    Dependent("mixed.choose", ARTIFACT),
    *DEPENDENT,
)
"""Those of a build too: engine options are for the engines that are measured, and for the artifact's."""


def idle_in_comparison(
    config: CompareConfig, options: BuildOptions, targets: Collection[str], *, typed: Collection[str], artifact: bool
) -> tuple[Idle, ...]:
    """The options that do nothing in an experiment, each once, in the order of :data:`COMPARED`.

    Args:
        options: the engine options of ``config``.
        targets: of the artifact; none without one.
        typed: keys of options from the command line, dotted: they count with their default value too.
        artifact: one is built afterwards.
    """
    situation = Situation(
        given=given_options(config, options, typed),
        targets=tuple(sorted({*targets, config.target})),
        search=config.mixed.wanted and artifact,
        artifact=artifact,
    )
    return idle_among(COMPARED, situation)
