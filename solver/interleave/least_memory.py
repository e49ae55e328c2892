"""The least memory of a problem of several chains: one chain behind the other, and merged.

Chains that are some units apart hold fewer activations at once than one behind the other, where
the memory that one lets go of is taken by the next.
"""

from collections.abc import Iterator
from dataclasses import replace

from apsched.config import Caps, SolveOptions
from apsched.problem.permuted import brought_back, permuted
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored
from apsched.schedule.schedule import Schedule
from apsched.schedule.score import score
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders, may_move
from apsched.solver.bounds.any_order.memory import memory_bound_of_any_order
from apsched.solver.interleave.merge import Merge, merged
from apsched.solver.interleave.units import units_of
from apsched.solver.reorder import min_memory

MERGES = (Merge(), Merge(by_turns=True, apart=1), Merge(by_turns=True))
_APART = (0.125, 0.25, 0.5, 0.75)
"""Shares of a chain by which the next one is behind."""


def has_chains(problem: Problem, caps: Caps) -> bool:
    """Whether ``problem`` has several chains that may be interleaved."""
    return max(problem.chains, default=0) > 0 and may_move(problem, caps)


def merges_apart(problem: Problem) -> Iterator[Merge]:
    """Yield merges whose chains are further and further apart."""
    longest = max(map(len, units_of(problem, stretches=False)))
    for share in _APART:
        yield Merge(apart=int(share * longest))


def moves_in_merge(caps: Caps) -> tuple[int | None, ...]:
    """Return the caps on moves of compute to try in a merged order.

    Each node within so many places of the merged order is within twice as many places of its own
    chain; where a node is further than the cap, half of it is surely near enough.
    """
    moves = caps.max_compute_move
    return (moves,) if moves is None else (moves, moves // 2)


def least_memory(
    problem: Problem, caps: Caps | None = None, options: SolveOptions | None = None
) -> tuple[int, int]:
    """As :func:`apsched.solver.reorder.min_memory.least_memory`; chains may be merged, too."""
    caps, options = replace(caps or Caps(), memory_cap_bytes=None), options or SolveOptions()
    if not has_chains(problem, caps):
        return min_memory.least_memory(problem, caps, options)
    bound = memory_bound_of_any_order(Orders(Instance.of(problem, caps)), None)
    least = least_known(problem, caps, options, bound)
    if least is not None:
        return least.peak_memory_bytes, bound
    return min_memory.least_memory(replace(problem, chains=()), caps, options)[0], bound


def exceeds_memory_cap(problem: Problem, caps: Caps) -> bool:
    """Return whether a lower bound of the peak, over every order of compute that ``caps`` allow,
    exceeds the memory cap.
    """
    cap_bytes = caps.memory_cap_bytes
    if cap_bytes is None:
        return False
    max_move = None if has_chains(problem, caps) else caps.max_compute_move
    orders = Orders(Instance.of(problem, caps))
    return memory_bound_of_any_order(orders, max_move) > cap_bytes


def schedule_of_least_memory(
    problem: Problem, caps: Caps, options: SolveOptions | None = None
) -> Schedule | None:
    """As :func:`apsched.solver.reorder.min_memory.schedule_of_least_memory`; chains may be merged,
    too.
    """
    options = options or SolveOptions()
    if not has_chains(problem, caps):
        return min_memory.schedule_of_least_memory(problem, caps, options)
    least = least_known(problem, caps, options)
    return None if least is None else least.schedule


def least_known(
    problem: Problem, caps: Caps, options: SolveOptions, enough_bytes: int = 0
) -> Scored | None:
    """Return the schedule with the least peak that is known of several chains, one behind the other
    or merged, with the caps other than that on memory; ``None`` where none keeps them.

    The search ends at a peak of ``enough_bytes``.
    """
    caps = replace(caps, memory_cap_bytes=None)
    in_a_row = tuple(range(problem.num_nodes))
    least, tried = _least_around(problem, caps, options, in_a_row), {in_a_row}
    for merge in (*MERGES, *merges_apart(problem)):
        if least is not None and least.peak_memory_bytes <= enough_bytes:
            break
        order = merged(problem, merge)
        if order in tried:
            continue
        tried.add(order)
        found = _least_around(problem, caps, options, order)
        if least is None or (
            found is not None and found.peak_memory_bytes < least.peak_memory_bytes
        ):
            least = found
    return least


def _least_around(
    problem: Problem, caps: Caps, options: SolveOptions, order: tuple[int, ...]
) -> Scored | None:
    """Return the schedule with the least peak whose compute moves from its place in ``order``."""
    reordered = permuted(problem, order)
    for most in moves_in_merge(caps):
        schedule = min_memory.schedule_of_least_memory(
            reordered, replace(caps, max_compute_move=most), options
        )
        if schedule is None:
            return None
        scored = score(problem, "apsched", brought_back(problem, order, schedule), caps)
        if scored.fits:
            return scored
    return None
