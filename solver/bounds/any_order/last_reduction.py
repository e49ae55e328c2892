"""Reductions that end after the last compute node, in every order of the compute: one that is
ready late, against all others of its stream.

Compute that a later order leaves to the end, to run beside the transfer of the last reduction,
makes gradients whose own transfers then follow that one on its stream. Either way it costs: before
the last launch its time on the compute stream, behind it that of its reduction.
"""

import numpy as np

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Ints, ProblemArrays
from apsched.solver.bounds.any_order.heads import mark_ancestors
from apsched.solver.bounds.any_order.jobs import Ends, Loose
from apsched.solver.bounds.linear_program import Costs
from apsched.solver.bounds.step_time import TimeBound

_MOST_LAST = 12
"""Reductions tried as the last of each stream."""
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Weights tried of the busiest other stream."""


def tail_bound(
    arrays: ProblemArrays, loose: Loose, ends: Ends, costs: Costs, max_move: int | None
) -> TimeBound:
    """Return the best bound over reductions that may be the last of their stream, (V8)."""
    items, compute_ticks = loose.items, loose.compute_ticks
    reductions = np.nonzero((arrays.kind != ALL_GATHER) & ~loose.on_path)[0]
    behind = np.minimum(
        costs.transfer, np.where(arrays.bucketable, costs.slope, costs.transfer)
    ).astype(np.int64)
    load = np.bincount(
        loose.stream[reductions], weights=behind[reductions], minlength=len(loose.streams)
    )
    span = items.spread(compute_ticks, loose.work.launch + loose.work.transfer)
    before, follows = np.zeros(len(items), np.bool_), np.zeros(len(items), np.int64)
    best = TimeBound(ticks=0, source=BoundSource.COMPUTE)
    for stream in np.unique(loose.stream[reductions]).tolist():
        on_stream = reductions[loose.stream[reductions] == stream]
        others = [
            s for s in np.argsort(-load, kind="stable").tolist() if s != stream and load[s] > 0
        ][:1]
        elsewhere = reductions[np.isin(loose.stream[reductions], others)]
        owner = owners(
            items.before_begin, items.before_list, items.of_collective, on_stream, elsewhere
        )[items.of_compute]
        late = on_stream[np.argsort(-(ends.head + loose.work.transfer)[on_stream], kind="stable")][
            :_MOST_LAST
        ]
        for last in late.tolist():
            most = len(compute_ticks) if max_move is None else max_move
            mark_ancestors(
                items.before_begin,
                items.before_list,
                items.place,
                span,
                int(items.of_collective[last]),
                most,
                before,
                follows,
            )
            done = before[items.of_compute]
            item_before = before[items.of_collective]
            own = np.bincount(
                owner[~done & (owner >= 0)],
                weights=compute_ticks[~done & (owner >= 0)],
                minlength=len(item_before),
            )
            sooner = own.astype(np.int64) + loose.work.main
            run = int(compute_ticks[done].sum()) + int(
                loose.work.main[item_before].sum() + loose.work.main[last]
            )
            open_on_stream, open_elsewhere = (
                on_stream[~item_before[on_stream] & (on_stream != last)],
                elsewhere[~item_before[elsewhere]],
            )
            for share in _SHARES if len(elsewhere) else (0.0,):
                ticks = run + (1 - share) * (float(costs.transfer[last]) - 1)
                ticks += (
                    np.minimum(sooner, (1 - share) * behind)[open_on_stream].sum()
                    + np.minimum(sooner, share * behind)[open_elsewhere].sum()
                )
                if ticks * (1 - 1e-9) > best.ticks:
                    best = TimeBound(
                        ticks=int(ticks * (1 - 1e-9)),
                        source=f"compute + tail of group {loose.streams[stream]}",
                    )
    return best


@compiled
def owners(
    before_begin: Ints,
    before_list: Ints,
    of_collective: Ints,
    first_choice: Ints,
    second_choice: Ints,
) -> Ints:
    """Return for each item a collective of ``first_choice``, or else of ``second_choice``, that it
    is or comes before; -1 for none.
    """
    owner = np.full(len(before_begin) - 1, -1, np.int64)
    rank = np.zeros(len(of_collective), np.int64)
    rank[first_choice], rank[second_choice] = 2, 1
    collective = np.full(len(owner), -1, np.int64)
    for c in range(len(of_collective)):
        if rank[c] > 0:
            collective[of_collective[c]] = c
    for j in range(len(owner) - 1, -1, -1):
        if collective[j] >= 0:
            owner[j] = collective[j]
        if owner[j] < 0:
            continue
        for q in range(before_begin[j], before_begin[j + 1]):
            p = before_list[q]
            if owner[p] < 0 or rank[owner[p]] < rank[owner[j]]:
                owner[p] = owner[j]
    return owner
