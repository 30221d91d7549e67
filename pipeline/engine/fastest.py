"""Which plan serves which profile: INT8, or FP16 where that was measured to be faster.

At batch 1 the layers of small networks are at the floor of a kernel launch, and INT8 has nothing to win there: some of
its kernels are slower than the FP16 ones. Mixing both in one engine does not help, since each return from FP16 to INT8
costs a pass of its own. So a second, float plan is kept beside the INT8 plan, for the profiles where it won.

Its answers are those of an FP16 engine of the FP32 model: nearer to FP32 than INT8's, and not equal to them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.core.errors import CheckFailed, InputError
from pipeline.core.files import explain_os_errors, write_text
from pipeline.core.progress import SILENT, Progress
from pipeline.engine.bench import PLACES, Candidate, Measurement, compare, measure_compute
from pipeline.engine.builder import build_engine
from pipeline.engine.compat import load_api
from pipeline.engine.profiles import choose_profile
from pipeline.engine.recorded import EngineCheck, Samples, check_engine_outputs, fits
from pipeline.engine.records import FASTEST_FILE, FLOAT_PLAN_FILE, FLOAT_RECORD_FILE, PLAN_FILE, BuildOptions
from pipeline.engine.runner import Runner
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.config import Profile
    from pipeline.engine.profiles import Shape
    from pipeline.engine.records import EngineRecord
    from pipeline.engine.serving import Serving

__all__ = ["Fastest", "FloatBuild", "ProfileChoice", "decide", "float_options", "measured_profiles", "require_fp16"]

FLOAT_TOLERANCE = 0.02
"""Relative L2 of an FP16 engine against the FP32 model in onnxruntime. Rounding to 11 bits in each of 50 layers gives
about 50 ** 0.5 * 2 ** -11 = 0.0035; a lost layer or an overflow gives about 1."""
_SCRATCH = ".float"


class ProfileChoice(Record):
    """One profile, both plans measured at its optimum, interleaved, with CUDA graph."""

    profile: str
    shapes: dict[str, tuple[int, ...]]
    int8_ms: float | None
    """Median of the rounds; None where nothing was measured."""
    float_ms: float | None
    int8_rounds_ms: tuple[float, ...] = ()
    """Mean of each round: their range is the noise."""
    float_rounds_ms: tuple[float, ...] = ()
    verdict: Literal["faster", "slower", "within noise", "not measured"]
    """Of float against INT8. Not measured: such as a profile whose optimum another one serves."""
    chosen: Literal["int8", "float"]

    def __str__(self) -> str:
        if self.int8_ms is None or self.float_ms is None:
            return f"profile {self.profile}: not measured, it stays INT8"
        return (
            f"profile {self.profile}: INT8 {self.int8_ms:.4f} ms, float {self.float_ms:.4f} ms: float is "
            f"{self.verdict}; {'float' if self.chosen == 'float' else 'INT8'} serves it"
        )


class Fastest(Record):
    """The choice for each profile of an engine, in the engine's order."""

    choices: tuple[ProfileChoice, ...]
    check: EngineCheck | None = None
    """The float plan against the outputs recorded for the FP32 model; None where none is kept."""

    @property
    def float_profiles(self) -> frozenset[int]:
        """Numbers of the profiles that the float plan serves."""
        return frozenset(number for number, choice in enumerate(self.choices) if choice.chosen == "float")


def optimum(profile: Profile) -> dict[str, Shape]:
    return {name: shape_range.opt for name, shape_range in profile.inputs.items()}


def measured_profiles(profiles: Sequence[Profile]) -> tuple[int, ...]:
    """The profiles that serve their own optimum: of those with equal optima, one."""
    return tuple(n for n, profile in enumerate(profiles) if choose_profile(profiles, optimum(profile)) == n)


def decide(
    profiles: Sequence[Profile], measured: Mapping[int, tuple[Measurement, Measurement]]
) -> tuple[ProfileChoice, ...]:
    """The plan for each profile. Float only where it was faster outside the noise.

    Args:
        measured: number of a profile to INT8's and float's figures at its optimum.
    """
    choices = []
    for number, profile in enumerate(profiles):
        pair = measured.get(number)
        if pair is None:
            choices.append(
                ProfileChoice(
                    profile=str(profile),
                    shapes=optimum(profile),
                    int8_ms=None,
                    float_ms=None,
                    verdict="not measured",
                    chosen="int8",
                )
            )
            continue
        int8, other = pair
        verdict = compare(other, int8)
        choices.append(
            ProfileChoice(
                profile=str(profile),
                shapes=optimum(profile),
                int8_ms=float(np.median(int8.rounds_ms)),
                float_ms=float(np.median(other.rounds_ms)),
                int8_rounds_ms=int8.rounds_ms,
                float_rounds_ms=other.rounds_ms,
                verdict=verdict,
                chosen="float" if verdict == "faster" else "int8",
            )
        )
    return tuple(choices)


def float_options(options: BuildOptions, *, half_inputs: bool = False, half_outputs: bool = False) -> BuildOptions:
    """The float plan's options: those of the INT8 plan, so that both take and give the same, with FP16 kernels.

    Args:
        half_inputs, half_outputs: the INT8 graph itself has them in float16, the FP32 model not.
    """
    types = {
        "half_inputs": options.half_inputs or half_inputs,
        "half_outputs": options.half_outputs or half_outputs,
    }
    return options.model_copy(update={"fp16": True, "calibration_cache": None, **types})


def require_fp16(target: str) -> None:
    """Refuse, before anything is built, what cannot build an FP16 engine of an FP32 graph or cannot measure it.

    Raises:
        InputError: TensorRT-RTX, or TensorRT from 11 on.
    """
    api = load_api(target)
    if api.rtx or not api.weak_typing:
        raise InputError(
            f"{api.title} computes in the types that the graph has: there is no FP16 engine of the FP32 model that "
            "could be faster than INT8",
            remedy="leave --fastest out",
        )


@dataclass
class FloatBuild:
    """The part of a build that looks for the fastest plan of each profile.

    Args:
        model: the artifact's FP32 model.
        samples: ``samples.npz`` with the outputs recorded for it.
        folder: where ``model.plan`` lies, and where the float plan and the table go.
        record: the INT8 plan's.
        half_inputs, half_outputs: as of :func:`float_options`.
    """

    model: Path
    samples: Path
    folder: Path
    record: EngineRecord
    half_inputs: bool = False
    half_outputs: bool = False
    rounds: int = 5
    tolerance: float = FLOAT_TOLERANCE
    timeout_s: float | None = None
    progress: Progress = field(default=SILENT)

    def run(self) -> Fastest:
        """Build the float plan, measure it against the INT8 plan, keep it where it is faster.

        Writes ``fastest.json``, and ``float.plan`` with ``float.json`` where float won a profile: a plan with those
        profiles alone. It is another plan than the one that won, so its figures are taken again and decide.

        Raises:
            CheckFailed: the float plan's answers are not those recorded for the FP32 model.
            InputError, ToolError: as :func:`pipeline.engine.builder.build_engine`.
        """
        recorded = Samples.read(self.samples, "fp32")
        scratch = self.folder / _SCRATCH
        plan = scratch / PLAN_FILE
        try:
            record = self._build(plan, self.record.profiles)
            with self._runner(self.folder / PLAN_FILE, self.record) as int8:
                measured = self._measure(int8, plan, record, measured_profiles(int8.profiles), recorded.feeds)
                fastest = Fastest(choices=decide(int8.profiles, measured))
                winners = tuple(sorted(fastest.float_profiles))
                fewer = tuple(self.record.profiles[number] for number in winners) if self.record.profiles else ()
                # Where the samples do not fit the winners alone, the whole plan is kept: it can be checked.
                if winners and len(winners) < len(int8.profiles) and fits(recorded.feeds, fewer):
                    record = self._build(plan, fewer)
                    measured |= self._measure(int8, plan, record, winners, recorded.feeds)
                    fastest = Fastest(choices=decide(int8.profiles, measured))
            for choice in fastest.choices:
                self.progress.note(str(choice))
            if fastest.float_profiles:
                fastest = fastest.model_copy(update={"check": self._check(plan, record, recorded)})
                with explain_os_errors(self.folder):
                    plan.replace(self.folder / FLOAT_PLAN_FILE)
                write_text(self.folder / FLOAT_RECORD_FILE, record.model_dump_json(indent=2) + "\n")
            write_text(self.folder / FASTEST_FILE, fastest.model_dump_json(indent=2) + "\n")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return fastest

    def _build(self, plan: Path, profiles: Sequence[Profile]) -> EngineRecord:
        self.progress.note("building the FP16 engine to compare with")
        return build_engine(
            self.model,
            target=self.record.target,
            profiles=profiles,
            plan_path=plan,
            options=float_options(
                self.record.options, half_inputs=self.half_inputs, half_outputs=self.half_outputs
            ),
            timeout_s=self.timeout_s,
            progress=self.progress,
        )

    def _runner(self, plan: Path, record: EngineRecord) -> Runner:
        return Runner(plan, target=record.target, record=record, cuda_graphs=True, in_flight=PLACES)

    def _measure(
        self,
        int8: Serving,
        plan: Path,
        record: EngineRecord,
        numbers: Iterable[int],
        samples: Mapping[str, np.ndarray],
    ) -> dict[int, tuple[Measurement, Measurement]]:
        found = {}
        with self._runner(plan, record) as other:
            candidates = [Candidate("int8", int8, True), Candidate("float", other, True)]
            with self.progress.task("measuring INT8 against float", total=None, unit="profiles") as task:
                for number in numbers:
                    shapes = optimum(int8.profiles[number])
                    first, second = measure_compute(
                        candidates, shapes, rounds=self.rounds, places=PLACES, samples=samples
                    )
                    found[number] = (first, second)
                    task.advance()
        return found

    def _check(self, plan: Path, record: EngineRecord, samples: Samples) -> EngineCheck:
        with Runner(plan, target=record.target, record=record) as runner:
            try:
                return check_engine_outputs(runner, samples, self.tolerance)
            except CheckFailed as error:
                raise CheckFailed(
                    f"the float plan: {error.message}",
                    remedy="nothing was added; leave --fastest out: the INT8 engine had passed its check",
                    figures=error.figures,
                ) from error
