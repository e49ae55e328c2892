"""PlanGroups: the atoms, which no partition takes apart, by the user's plan. Without a plan every
collective is an atom.
"""

from typing import NamedTuple

import numpy as np

from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays


class PlanGroups(NamedTuple):
    """Arrays over collectives; the totals of an atom stand at its first member."""

    leader: Ints
    """First collective of its atom."""
    closed: Bools
    """No other collective joins its group."""
    size_bytes: Ints
    ready_slot: Ints
    need_slot: Ints
    """The launch must stand by then, too."""
    first_rank: Ints
    last_rank: Ints


def plan_groups(arrays: ProblemArrays) -> PlanGroups:
    """Return the atoms of ``compact``."""
    c = arrays
    first_of = {int(g): i for i, g in reversed(list(enumerate(c.group))) if g >= 0}
    leader = np.array([first_of.get(int(g), i) for i, g in enumerate(c.group)], dtype=np.int64)
    size, ready, need = (
        c.size_bytes.copy(),
        c.ready_slot.copy(),
        np.minimum(c.need_slot, c.launch_last),
    )
    first, last = c.start_rank.copy(), c.start_rank.copy()
    for i in np.nonzero(leader != np.arange(len(leader)))[0]:
        k = leader[i]
        size[k] += size[i]
        ready[k], need[k] = max(ready[k], ready[i]), min(need[k], need[i])
        first[k], last[k] = min(first[k], first[i]), max(last[k], last[i])
    return PlanGroups(
        leader=leader,
        closed=c.closed,
        size_bytes=size,
        ready_slot=ready,
        need_slot=need,
        first_rank=first,
        last_rank=last,
    )


@compiled
def whole(a: PlanGroups, labels: Ints) -> Ints:
    """Return ``labels`` with each collective in the bucket of its leader, closed atoms apart, and
    buckets named by their lowest member.
    """
    lowest = np.full(2 * len(labels), -1, np.int64)
    result = np.empty(len(labels), np.int64)
    for c in range(len(labels)):
        name = a.leader[c] if a.closed[c] else len(labels) + labels[a.leader[c]]
        if lowest[name] < 0:
            lowest[name] = c
        result[c] = lowest[name]
    return result
