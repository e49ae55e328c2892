"""Solve a problem of several chains: one chain behind the other, and merged in several ways.

Each merge is an order of the same nodes. The solver takes it for the order as captured, from which
compute moves; the schedule is brought back to the problem as it was captured, and judged there. A
cheap solve of each merge says which is worth a whole one. Chains further apart hold fewer
activations at once: where none of the merges fits the caps, they are put further and further apart,
up to one behind the other.
"""

from dataclasses import dataclass, field, replace

from apsched.config import Caps, SolveOptions
from apsched.problem.permuted import brought_back, permuted
from apsched.problem.problem import Problem
from apsched.schedule.result import ALTERNATING, IN_A_ROW, Scored, SolveResult
from apsched.schedule.score import score
from apsched.solver.answer import within_slack
from apsched.solver.interleave.least_memory import MERGES, merges_apart, moves_in_merge
from apsched.solver.interleave.merge import Merge, merged
from apsched.solver.solve import solve

_SHARE_OF_A_GLANCE = 0.02
"""Share of the budget for the short solve of one merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The answer to one merge."""

    merge: Merge
    order: tuple[int, ...]
    scored: Scored
    """As a schedule of the problem."""
    result: SolveResult
    """The result for the merged problem."""


def interleaved(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    in_a_row: SolveResult,
    enough_ticks: int,
) -> SolveResult:
    """Return the best answer to ``problem``, at most as slow as ``in_a_row``, which is that without
    its chains; the bounds are not those of all orders.

    Nothing is looked at where ``in_a_row`` takes no longer than ``enough_ticks``. Where it does not
    fit, a merge may: compute that moves lets go of a few bytes earlier.
    """
    solver = _MergeSolver(problem, caps)
    rows = in_a_row.baselines
    row = None if in_a_row.best is None else _kept(problem, caps, in_a_row.best)
    if row is not None:
        rows += (replace(row, name=IN_A_ROW),)
    enough = row is not None and row.step_time_ticks <= enough_ticks
    found = [] if enough else _looked_at(solver, options)
    rows += tuple(
        replace(f.scored, name=ALTERNATING) for f in found if f.merge == Merge(by_turns=True)
    )
    best = min(found, key=_ticks, default=None)
    if best is not None and row is not None and _ticks(best) < row.step_time_ticks:
        best = min((best, *solver(best.merge, options)), key=_ticks)
    is_row = row is not None and row.fits and (best is None or row.step_time_ticks <= _ticks(best))
    if best is None or is_row:
        answer = replace(in_a_row, best=row, baselines=rows)
    else:
        answer = _of_merge(best, in_a_row, rows)
    known = [_fastest_ticks(f) for f in (*found, best) if f is not None]
    if row is not None and row.fits:
        known.append(in_a_row.fastest_ticks)
    return within_slack(answer, options, min(known)) if known else answer


def _ticks(found: _Found) -> int:
    return found.scored.step_time_ticks


def _fastest_ticks(found: _Found) -> int:
    """Return the least step time of a merge; where the schedule takes another time in the problem,
    that of the answer.
    """
    assert found.result.best is not None
    exact = found.scored.step_time_ticks == found.result.best.step_time_ticks
    return found.result.fastest_ticks if exact else found.scored.step_time_ticks


def _of_merge(best: _Found, in_a_row: SolveResult, rows: tuple[Scored, ...]) -> SolveResult:
    """Return the answer to a merge as an answer to the problem."""
    return replace(
        best.result,
        best=replace(best.scored, name="apsched"),
        baselines=rows,
        fastest_ticks=_fastest_ticks(best),
        floor_memory_bytes=min(best.result.floor_memory_bytes, in_a_row.floor_memory_bytes),
        solved_by=f"{best.result.solved_by}, chains merged {best.merge}",
    )


def _kept(problem: Problem, caps: Caps, best: Scored) -> Scored:
    """Return the schedule ``best`` with its figures, and the caps that it breaks where compute
    counts its places in its own chain.
    """
    return score(problem, best.name, best.schedule, caps)


def _looked_at(solver: "_MergeSolver", options: SolveOptions) -> list[_Found]:
    """Return the result of a short solve of each merge within the caps."""
    glance = replace(options, budget=options.budget * _SHARE_OF_A_GLANCE)
    found = [f for merge in MERGES for f in solver(merge, glance)]
    for merge in () if found else merges_apart(solver.problem):
        found += solver(merge, glance)
    return found


@dataclass(frozen=True, slots=True)
class _MergeSolver:
    """Solves merges of the chains of a problem; merges with the same order once."""

    problem: Problem
    caps: Caps
    _known: dict[tuple[tuple[int, ...], SolveOptions], _Found | None] = field(default_factory=dict)

    def __call__(self, merge: Merge, options: SolveOptions) -> list[_Found]:
        """Return the answer to ``merge`` where it keeps the caps of the problem, else none."""
        order = merged(self.problem, merge)
        if (order, options) not in self._known:
            self._known[order, options] = self._solved(merge, order, options)
        found = self._known[order, options]
        return [] if found is None else [replace(found, merge=merge)]

    def _solved(self, merge: Merge, order: tuple[int, ...], options: SolveOptions) -> _Found | None:
        problem, caps = self.problem, self.caps
        reordered = permuted(problem, order)
        for most in moves_in_merge(caps):
            within = replace(caps, max_compute_move=most)
            result = solve(reordered, within, options, explained=False)
            if result.best is None:
                return None
            schedule = brought_back(problem, order, result.best.schedule)
            scored = score(problem, "apsched", schedule, caps)
            if scored.fits:
                return _Found(merge=merge, order=order, scored=scored, result=result)
        return None
