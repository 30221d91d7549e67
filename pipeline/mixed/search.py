"""Which layers go back to float: most error mended per unit of time lost, until the target is met.

1. Sensitivity: each unit (a node, or a block of neighbours where there are many) is restored alone and the output error
   measured on the search set.
2. The path: units are restored one after another, always the one with the largest gain per cost. Sensitivities do not
   add up, so the gain of the next unit is measured again with everything restored so far (a stale gain is a guess: the
   best one is re-measured until it stays the best, three times at most).
3. The whole network is checked on the check set at growing lengths of the path, then in between for the shortest length
   that meets the target.
4. Restored units that turn out not to be needed go back to INT8, the most costly first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.core.errors import InputError
from pipeline.mixed.candidate import Candidate
from pipeline.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.core.progress import Task
    from pipeline.mixed.cost import Costs
    from pipeline.mixed.evaluate import Evaluator
    from pipeline.mixed.repairs import Repairs
    from pipeline.mixed.target import Figures, Target

__all__ = ["Checked", "Sensitivity", "Unit", "make_units", "search", "sensitivities"]

_MOST_UNITS = 96
_REMEASURED = 3
_TAKEN_BACK = 6


@dataclass(frozen=True)
class Unit:
    """Nodes that are restored together."""

    nodes: tuple[str, ...]
    cost: float
    """What restoring them loses."""

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
    least = min((costs.saved.get(node, 0.0) for node in nodes if costs.saved.get(node, 0.0) > 0), default=1.0)
    # A node that costs nothing to restore would come first whatever it gains: count it as the cheapest one.
    return [Unit(block, max(costs.lost(block), least)) for block in blocks]


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


def _noise(figures: Figures) -> float:
    return float(10.0 ** (-figures.sqnr_db / 10.0))


class _Path:
    """Units in the order in which they are restored, made as far as it is asked for."""

    def __init__(self, found: Sequence[Sensitivity], repairs: Repairs, evaluator: Evaluator) -> None:
        self._waiting = sorted(found, key=_rank)
        self._evaluator = evaluator
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
        for _ in range(_REMEASURED):
            if not self._waiting:
                return None
            first = self._waiting.pop(0)
            candidate = current.restoring(*first.nodes)
            after = _noise(self._evaluator.measure(candidate))
            fresh = first.model_copy(update={"noise_before": self._noise, "noise_after": after})
            if not self._waiting or fresh.gain_per_cost >= self._waiting[0].gain_per_cost:
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
    task: Task,
) -> Found:
    """Walk the path until the target is met on the check set.

    Args:
        found: sensitivities, measured with ``repairs``.
        searching, checking: evaluators of the two sets.
        task: advances once per check.
    """
    path = _Path(found, repairs, searching)
    result = Found()

    def check(candidate: Candidate) -> Checked:
        checked = Checked(candidate, checking.measure(candidate))
        if all(item.candidate.key != candidate.key for item in result.checked):
            result.checked.append(checked)
        task.advance()
        return checked

    length, failed = 0, -1
    best = check(Candidate(repairs=repairs))
    while not target.met(best.figures):
        failed = length
        longer = max(1, 2 * length)
        candidate = path.at(longer)
        while candidate is None and longer > failed + 1:
            longer -= 1
            candidate = path.at(longer)
        if candidate is None:
            break
        length = longer
        best = check(candidate)
    if not target.met(best.figures):
        result.best = min(result.checked, key=lambda item: target.shortfall(item.figures))
        return result
    low, high = failed, length
    while high - low > 1:
        middle = (low + high) // 2
        candidate = path.at(middle)
        checked = check(candidate) if candidate is not None else best
        if target.met(checked.figures):
            high, best = middle, checked
        else:
            low = middle
    result.best = _taken_back(best, found, target, check)
    result.reached = True
    return result


def _taken_back(best: Checked, found: Sequence[Sensitivity], target: Target, check: _Check) -> Checked:
    """Put units back into INT8, the most costly first, while the target stays met."""
    units = [item for item in found if best.candidate.restored.issuperset(item.nodes)]
    if len(units) < 2:
        return best
    for item in sorted(units, key=lambda item: -item.cost)[:_TAKEN_BACK]:
        fewer = Candidate(best.candidate.restored - set(item.nodes), best.candidate.repairs)
        checked = check(fewer)
        if target.met(checked.figures):
            best = checked
    return best


if TYPE_CHECKING:
    from collections.abc import Callable

    _Check = Callable[[Candidate], Checked]
