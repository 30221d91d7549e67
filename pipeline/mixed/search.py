"""Which layers go back to float: most error mended per unit of time lost, until the target is met.

1. Sensitivity: each unit (a node, or a block of neighbours where there are many) is restored alone and the output error
   measured on the search set.
2. The path: units are restored one after another, always the one with the largest gain per cost. Sensitivities do not
   add up, so the gain of the next unit is measured again with everything restored so far (a stale gain is a guess: the
   best one is re-measured until it stays the best, three times at most).
3. The whole network is checked on the check set at growing lengths of the path (for a target in dB: from where the
   search set promises it), then in between for the shortest length that meets the target.
   One unit at least stays in INT8: the float network meets every target and is no answer.
4. Restored units that turn out not to be needed go back to INT8, the most costly first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.errors import InputError
from pipeline.mixed.candidate import Candidate
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.accuracy import Figures, Target
    from pipeline.core.progress import Task
    from pipeline.mixed.cost import Costs
    from pipeline.mixed.evaluate import Evaluator
    from pipeline.mixed.repairs import Repairs

__all__ = ["Checked", "Sensitivity", "Unit", "make_units", "search", "sensitivities"]

_MOST_UNITS = 96
_REMEASURED = 3
_TAKEN_BACK = 6
_HOPE_DB = 0.3
"""A check is made where the search set promises the target, or misses it by no more than this."""


@dataclass(frozen=True)
class Unit:
    """Nodes that are restored together."""

    nodes: tuple[str, ...]
    cost: float
    """What restoring them alone loses."""

    @property
    def name(self) -> str:
        return self.nodes[0] if len(self.nodes) == 1 else f"{self.nodes[0]} .. {self.nodes[-1]}"


class Sensitivity(Record):
    """One unit restored alone, on the search set."""

    nodes: tuple[str, ...]
    cost: float
    noise_before: float
    """Output error energy over signal energy, everything in INT8."""
    noise_after: float

    @property
    def sqnr_before_db(self) -> float:
        return _decibels(self.noise_before)

    @property
    def sqnr_after_db(self) -> float:
        return _decibels(self.noise_after)

    @property
    def gain_per_cost(self) -> float:
        return (self.noise_before - self.noise_after) / self.cost


@dataclass(frozen=True)
class Checked:
    """A candidate measured on the check set."""

    candidate: Candidate
    figures: Figures


@dataclass
class Found:
    """Every candidate that was checked, and the one to take."""

    checked: list[Checked] = field(default_factory=list)
    best: Checked | None = None
    reached: bool = False


def make_units(nodes: Sequence[str], costs: Costs) -> list[Unit]:
    """One unit per quantised node, or blocks of neighbours of about the same size where there are more than 96."""
    size = -(-len(nodes) // _MOST_UNITS)
    blocks = [tuple(nodes[start : start + size]) for start in range(0, len(nodes), size)] if nodes else []
    return [Unit(block, costs.added((), block)) for block in blocks]


def sensitivities(units: Sequence[Unit], base: Candidate, evaluator: Evaluator, task: Task) -> list[Sensitivity]:
    """Restore each unit alone.

    A unit that the placement cannot restore alone (its neighbours would then need a tensor that was not calibrated) is
    left out.
    """
    before = _noise(evaluator.measure(base))
    found = []
    for unit in units:
        try:
            after = _noise(evaluator.measure(base.restoring(*unit.nodes)))
        except InputError:
            after = before
        found.append(Sensitivity(nodes=unit.nodes, cost=unit.cost, noise_before=before, noise_after=after))
        task.advance()
    return found


def _decibels(noise: float) -> float:
    """The SQNR that :func:`_noise` came from."""
    return float(-10.0 * np.log10(noise))


def _noise(figures: Figures) -> float:
    return float(10.0 ** (-figures.sqnr_db / 10.0))


class _Path:
    """Units in the order in which they are restored, made as far as it is asked for."""

    def __init__(self, found: Sequence[Sensitivity], repairs: Repairs, evaluator: Evaluator, costs: Costs) -> None:
        self._waiting = sorted(found, key=_rank)
        self._evaluator = evaluator
        self._costs = costs
        self._steps = [Candidate(repairs=repairs)]
        self._noise = found[0].noise_before if found else 0.0

    def at(self, length: int) -> Candidate | None:
        """The candidate with ``length`` units restored; None where there are no more."""
        while len(self._steps) <= length:
            step = self._next()
            if step is None:
                return None
            self._steps.append(step)
        return self._steps[length]

    def _next(self) -> Candidate | None:
        current = self._steps[-1]
        # gains have to be measured again, costs only counted: a layer beside one in float shares its border
        costs = {item.nodes: self._costs.added(current.restored, item.nodes) for item in self._waiting}
        self._waiting = sorted((i.model_copy(update={"cost": costs[i.nodes]}) for i in self._waiting), key=_rank)
        for _ in range(_REMEASURED):
            if len(self._waiting) < 2:  # the last one stays in INT8: without it, this is the float network
                return None
            first = self._waiting.pop(0)
            candidate = current.restoring(*first.nodes)
            after = _noise(self._evaluator.measure(candidate))
            fresh = first.model_copy(update={"noise_before": self._noise, "noise_after": after})
            if fresh.gain_per_cost >= self._waiting[0].gain_per_cost:
                break
            self._waiting = sorted([*self._waiting, fresh], key=_rank)
        else:
            fresh = self._waiting.pop(0)
            candidate = current.restoring(*fresh.nodes)
            after = _noise(self._evaluator.measure(candidate))
        self._noise = after
        return candidate


def _rank(item: Sensitivity) -> tuple[float, tuple[str, ...]]:
    return -item.gain_per_cost, item.nodes


def search(
    found: Sequence[Sensitivity],
    repairs: Repairs,
    target: Target,
    searching: Evaluator,
    checking: Evaluator,
    costs: Costs,
    task: Task,
) -> Found:
    """Walk the path until the target is met on the check set.

    Args:
        found: sensitivities, measured with ``repairs``.
        searching, checking: evaluators of the two sets.
        task: advances once per check.
    """
    return _Search(found, repairs, target, searching, checking, costs, task).run()


class _Search:
    """One walk: the path, what was checked, and a guess of a check's outcome from the small search set."""

    def __init__(
        self,
        found: Sequence[Sensitivity],
        repairs: Repairs,
        target: Target,
        searching: Evaluator,
        checking: Evaluator,
        costs: Costs,
        task: Task,
    ) -> None:
        self.found = found
        self.costs = costs
        self.path = _Path(found, repairs, searching, costs)
        self.target = target
        self.searching = searching
        self.checking = checking
        self.task = task
        self.result = Found()
        start = Candidate(repairs=repairs)
        self.offset = 0.0
        self.first = self.check(start)

    def check(self, candidate: Candidate) -> Checked:
        checked = Checked(candidate, self.checking.measure(candidate))
        self.offset = checked.figures.sqnr_db - self.searching.measure(candidate).sqnr_db
        if all(item.candidate.key != candidate.key for item in self.result.checked):
            self.result.checked.append(checked)
        self.task.advance()
        return checked

    def hopeful(self, candidate: Candidate) -> bool:
        """Worth a check. A target in dB is guessed from the search set and how far that was off at the last check."""
        if self.target.kind != "min_sqnr":
            return True
        return self.searching.measure(candidate).sqnr_db + self.offset > self.target.value - _HOPE_DB

    def run(self) -> Found:
        failed, length, best = -1, 0, self.first
        while not self.target.met(best.figures):
            failed = length
            candidate, length = self._longer(length)
            if candidate is None:
                self.result.best = min(self.result.checked, key=lambda item: self.target.shortfall(item.figures))
                return self.result
            best = self.check(candidate)
        best = self._shortest(failed, length, best)
        self.result.best = self._taken_back(best)
        self.result.reached = True
        return self.result

    def _longer(self, length: int) -> tuple[Candidate | None, int]:
        """The next candidate to check, and how many units it restores: twice as many, or as many as give hope."""
        longer = max(1, 2 * length) if self.target.kind != "min_sqnr" else length + 1
        candidate = self.path.at(longer)
        while candidate is None and longer > length + 1:
            longer -= 1
            candidate = self.path.at(longer)
        while candidate is not None and not self.hopeful(candidate):
            following = self.path.at(longer + 1)
            if following is None:
                break  # nothing more can be restored: the last word is the check's
            candidate, longer = following, longer + 1
        return candidate, longer

    def _shortest(self, failed: int, length: int, best: Checked) -> Checked:
        """Between a length that fails and one that does, the shortest that does."""
        while length - failed > 1:
            middle = (failed + length) // 2
            candidate = self.path.at(middle)
            if candidate is None or not self.hopeful(candidate):
                failed = middle
                continue
            checked = self.check(candidate)
            if self.target.met(checked.figures):
                length, best = middle, checked
            else:
                failed = middle
        return best

    def _taken_back(self, best: Checked) -> Checked:
        """Put units back into INT8, the most costly first, while the target stays met."""
        units = [item for item in self.found if best.candidate.restored.issuperset(item.nodes)]
        if len(units) < 2:
            return best

        def kept(item: Sensitivity) -> float:
            """What is lost without this one in float."""
            return self.costs.lost(best.candidate.restored - set(item.nodes))

        for item in sorted(units, key=kept)[:_TAKEN_BACK]:
            fewer = Candidate(best.candidate.restored - set(item.nodes), best.candidate.repairs)
            if kept(item) > self.costs.lost(best.candidate.restored) or not self.hopeful(fewer):
                continue
            checked = self.check(fewer)
            if self.target.met(checked.figures):
                best = checked
        return best
