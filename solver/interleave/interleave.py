"""Solve a problem of several chains: one chain behind the other, and merged in several ways.

Each merge is an order of the same nodes. The solver takes it for the order as captured, from which
compute moves; the schedule is brought back to the problem as it was captured, and judged there. A
cheap solve of each merge says which is worth a whole one. Chains further apart hold fewer
activations at once: where none of the merges fits the caps, they are put further and further apart,
up to one behind the other.
"""

from dataclasses import dataclass, replace

from apsched.config import Caps, SolveOptions
from apsched.problem.permuted import brought_back, permuted
from apsched.problem.problem import Problem
from apsched.schedule.result import ALTERNATING, IN_A_ROW, Scored, SolveResult
from apsched.schedule.score import score
from apsched.solver.arrays.reordered import may_move
from apsched.solver.interleave.merge import Merge, merged
from apsched.solver.interleave.units import units_of
from apsched.solver.solve import solve

_MERGES = (Merge(), Merge(by_turns=True, apart=1), Merge(by_turns=True))
_APART = (0.125, 0.25, 0.5, 0.75)
"""Shares of a chain by which the next one is behind, where nothing closer fits."""
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


def has_chains(problem: Problem, caps: Caps) -> bool:
    """Whether ``problem`` has several chains that may be interleaved."""
    return max(problem.chains, default=0) > 0 and may_move(problem, caps)


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
    if in_a_row.best is None:
        found = _looked_at(problem, caps, options)
        return _of_merge(min(found, key=_ticks), in_a_row) if found else in_a_row
    row = _kept(problem, caps, in_a_row)
    found = [] if row.step_time_ticks <= enough_ticks else _looked_at(problem, caps, options)
    best = min(found, key=_ticks, default=None)
    alternating = next((f.scored for f in found if f.merge == Merge(by_turns=True)), None)
    if best is not None and best.scored.step_time_ticks < row.step_time_ticks:
        again = _solved(problem, caps, options, best.merge)
        best = min((best, *again), key=_ticks)
    baselines = (*in_a_row.baselines, replace(row, name=IN_A_ROW))
    if alternating is not None:
        baselines += (replace(alternating, name=ALTERNATING),)
    if best is None or (row.fits and best.scored.step_time_ticks >= row.step_time_ticks):
        return replace(in_a_row, best=row, baselines=baselines)
    return replace(_of_merge(best, in_a_row), baselines=baselines)


def _ticks(found: _Found) -> int:
    return found.scored.step_time_ticks


def _of_merge(best: _Found, in_a_row: SolveResult) -> SolveResult:
    """Return the answer to a merge as an answer to the problem."""
    exact = best.scored.step_time_ticks == best.result.best.step_time_ticks  # type: ignore[union-attr]
    return replace(
        best.result,
        best=replace(best.scored, name="apsched"),
        baselines=in_a_row.baselines,
        fastest_ticks=best.result.fastest_ticks if exact else best.scored.step_time_ticks,
        floor_memory_bytes=min(best.result.floor_memory_bytes, in_a_row.floor_memory_bytes),
        solved_by=f"{best.result.solved_by}, chains merged {best.merge}",
    )


def _kept(problem: Problem, caps: Caps, in_a_row: SolveResult) -> Scored:
    """Return the schedule of ``in_a_row`` with its figures, and the caps that it breaks where
    compute counts its places in its own chain.
    """
    assert in_a_row.best is not None
    return score(problem, in_a_row.best.name, in_a_row.best.schedule, caps)


def _looked_at(problem: Problem, caps: Caps, options: SolveOptions) -> list[_Found]:
    """Return the result of a short solve of each merge within the caps."""
    glance = replace(options, budget=options.budget * _SHARE_OF_A_GLANCE)
    found = [f for merge in _MERGES for f in _solved(problem, caps, glance, merge)]
    longest = max(map(len, units_of(problem, stretches=False)))
    for share in () if found else _APART:
        merge = Merge(apart=int(share * longest))
        found += _solved(problem, caps, glance, merge)
    return found


def _solved(problem: Problem, caps: Caps, options: SolveOptions, merge: Merge) -> list[_Found]:
    """Return the answer to ``merge`` where it keeps the caps of ``problem``, else none.

    Each node within so many places of the merged order is within twice as many places of its own
    chain; where a node is further than the cap, half of it is surely near enough.
    """
    order = merged(problem, merge)
    reordered = permuted(problem, order)
    moves = caps.max_compute_move
    for most in (moves,) if moves is None else (moves, moves // 2):
        result = solve(reordered, replace(caps, max_compute_move=most), options)
        if result.best is None:
            return []
        scored = score(problem, "apsched", brought_back(problem, order, result.best.schedule), caps)
        if scored.fits:
            return [_Found(merge=merge, order=order, scored=scored, result=result)]
    return []
