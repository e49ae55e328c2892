"""Constraint (20): the order of the compute where the model decides it (see
``apsched.solver.cpsat.constraints``).
"""

from apsched.schedule.schedule import StepKind
from apsched.solver.cpsat.variables import Variables


def order_of_the_compute(v: Variables) -> None:
    """(20) Order of the compute: blocks stand before one another, keep the cap on moves, and run
    one after the other.

    for all blocks A, B:  r[B] = sum_A n[A] o[A,B],  |r[B] - first[B]| <= max move
    pos(k) = (r[B] + (k - first[B]) + 1) W for k in B
    o[A,B]: s[first of B] >= s[k] + d[k] for the last k of A;   otherwise the other way round

    As captured there is nothing to decide, and this is empty.
    """
    free = v.compute_order.free
    if free is None:
        return
    for b, first in enumerate(free.first[:-1]):
        rank = sum(
            (free.first[a + 1] - free.first[a]) * v.stands_before(a, b)
            for a in range(len(free.sooner))
            if a != b
        )
        if free.max_move is not None:
            v.model.add(rank - first <= free.max_move)
            v.model.add(first - rank <= free.max_move)
        for k in range(first, free.first[b + 1]):
            v.model.add(
                v.compute_position(k) == (rank + (k - first + 1)) * v.position_step
            ).with_name(f"position[{k}]")
            if k > first:
                v.model.add(
                    v.compute_begin[k]
                    >= v.compute_begin[k - 1] + int(v.arrays.compute_ticks[k - 1])
                )
    for (a, b), literal in v.order.items():
        for one, other, holds in ((a, b, literal), (b, a, literal.negated())):
            last = free.first[one + 1] - 1
            v.model.add(
                v.compute_begin[free.first[other]]
                >= v.compute_begin[last] + int(v.arrays.compute_ticks[last])
            ).only_enforce_if(holds)


def prefetch_in_any_order(v: Variables, most: int) -> None:
    """At least one of the compute nodes that need a member has at most ``most`` others between the
    start and itself.
    """
    num_compute = len(v.arrays.compute_ticks)
    for h in v.alone:
        started = sum(v.after_compute[(StepKind.START, h), k] for k in range(num_compute))
        near = []
        for c in v.members(h):
            for k in v.compute_order.needed[c]:
                first = v.model.new_bool_var(f"first_need[{h},{c},{k}]")
                v.model.add_implication(first, v.joins[c, h])
                position = v.compute_position(k)
                v.model.add(position <= (most + 1 + started) * v.position_step).only_enforce_if(
                    first
                )
                near.append(first)
        for c in v.members(h):
            if v.compute_order.needed[c]:
                v.model.add_bool_or([v.joins[c, h].negated(), *near])
