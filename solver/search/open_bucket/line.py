"""Collectives that may share buckets, in the order of their need or readiness, and the work between
them on the compute stream and on their own.
"""

from dataclasses import dataclass

import numpy as np

from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The gathers of a key by need, or its reductions by ready slot from the last to the first; all
    of them wait for equally long chains of other collectives.

    A reduction seen from the end of the step is like a gather seen from its beginning: the transfer
    stands before a slot, and the stream carries one after the other.
    """

    gathers: bool
    members: Ints
    """(n,) collectives."""
    gap_ticks: Ints
    """(n,) on the compute stream from each member to the next, from the last to the end."""
    other_ticks: Ints
    """(n,) transfers of the other direction on the same stream in that gap, each as if alone."""
    first_ticks: int
    """On the compute stream before the first member."""


def lines(pricer: Pricer, reached_ticks: Ints) -> tuple[Line, ...]:
    """Return the lines of two or more members.

    ``reached_ticks`` (m+1,) is when the compute stream comes to each slot.
    """
    arrays = pricer.arrays
    found = []
    for mask in (arrays.gathers, arrays.reductions):
        kinds = np.stack((arrays.key, pricer.tables.depth))
        for kind in np.unique(kinds[:, mask], axis=1).T:
            members = np.nonzero(mask & (kind == kinds.T).all(axis=1))[0]
            if len(members) > 1:
                found.append(_line(arrays, members, reached_ticks, mask is arrays.gathers))
    return tuple(found)


def _line(arrays: ProblemArrays, members: Ints, reached_ticks: Ints, gathers: bool) -> Line:
    others: Bools = arrays.reductions if gathers else arrays.gathers
    others = others & (arrays.stream == arrays.stream[members[0]])
    slots = _slots(arrays, members)
    order = np.argsort(slots if gathers else -slots, kind="stable")
    begins, other_begins = (
        at if gathers else reached_ticks[-1] - at
        for at in (reached_ticks[slots[order]], reached_ticks[_slots(arrays, others)])
    )
    place = np.searchsorted(begins, other_begins, side="left") - 1
    behind = place >= 0
    other_ticks = np.bincount(
        place[behind], arrays.transfer_ticks[others][behind], len(members)
    ).astype(np.int64)
    return Line(
        gathers=gathers,
        members=members[order],
        gap_ticks=np.diff(np.append(begins, reached_ticks[-1])),
        other_ticks=other_ticks,
        first_ticks=int(begins[0]),
    )


def _slots(arrays: ProblemArrays, which: Ints | Bools) -> Ints:
    """Return the need slot of each of ``which`` that is a gather, the ready slot of others."""
    return np.where(arrays.gathers, arrays.need_slot, arrays.late_ready_slot)[which]
