"""Buckets weighed along a chain of compute nodes that follow each other in every order: the bound
along paths with launches and copies at their prices, where compute may move.

All compute runs on one stream. A compute node that follows step i of the chain runs behind it, one
that precedes step k runs before that one ends, and the others run somewhere before the end. Between
two steps only compute that follows the one and precedes the other counts; from time 0 and to the
end of the step there is more: all compute that precedes the one, or follows the other.
"""

from dataclasses import replace

import numpy as np

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.bounds.any_order.chain import levels, way_through
from apsched.solver.bounds.any_order.items import Items
from apsched.solver.bounds.any_order.jobs import Ends, Loose
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.paths.path_work import PathWork
from apsched.solver.bounds.step_time import TimeBound


def compute_chain_bound(instance: Instance, loose: Loose, anywhere: Ends) -> TimeBound:
    """Return the bound of the program that the compute nodes of the longest way are, (V10); that is
    the longest by the ends ``anywhere``, without a cap on moves.
    """
    arrays, items, max_move = instance.arrays, loose.items, instance.caps.max_compute_move
    way = way_through(loose, anywhere, np.arange(len(items)))
    chain = way[items.place[way] >= 0]
    num_steps = len(chain) + 1  # the first stands for all before the chain, and takes no time
    level, limit = levels(items.before_begin, items.before_list, chain)
    if max_move is not None:
        level, limit = _within(items, chain, level, limit, 2 * max_move)
    steps = np.arange(len(chain))
    own_limit = limit.copy()
    own_limit[chain] = steps
    ready, need = level + 2, limit + 1
    of = items.of_compute
    work = PathWork.between_steps(loose.compute_ticks, level[of] + 1, own_limit[of] + 2, num_steps)
    work = _with_ways(work, loose, ready, need, level, own_limit, chain)
    never = np.full_like(arrays.need_slot, num_steps)
    as_chain = replace(
        arrays,
        compute_ticks=np.append(0, loose.compute_ticks[items.place[chain]]),
        ready_slot=ready[items.of_collective],
        need_slot=np.where(arrays.on_path, never, need[items.of_collective]),
    )
    found = path_bound(replace(instance, arrays=as_chain), work)
    return replace(found, source=BoundSource.WEIGHED_ALONG_CHAIN)


def _within(items: Items, chain: Ints, level: Ints, limit: Ints, most: int) -> tuple[Ints, Ints]:
    """Return the steps that each item follows and precedes where compute nodes captured more than
    ``most`` places apart keep their order, (V2).
    """
    place, places = items.place, items.place[chain]
    compute = place >= 0
    level, limit = level.copy(), limit.copy()
    level[compute] = np.maximum(
        level[compute], np.searchsorted(places, place[compute] - most, side="left") - 1
    )
    limit[compute] = np.minimum(
        limit[compute], np.searchsorted(places, place[compute] + most, side="right")
    )
    spread_levels(items.before_begin, items.before_list, level, limit, compute)
    return level, limit


@compiled
def spread_levels(
    before_begin: Ints, before_list: Ints, level: Ints, limit: Ints, compute: Bools
) -> None:
    """Have collectives follow all steps that the items before them follow, and precede all that
    the items behind them precede.
    """
    num_items = len(level)
    for j in range(num_items):
        if not compute[j]:
            for q in range(before_begin[j], before_begin[j + 1]):
                level[j] = max(level[j], level[before_list[q]])
    for j in range(num_items - 1, -1, -1):
        for q in range(before_begin[j], before_begin[j + 1]):
            if not compute[before_list[q]]:
                limit[before_list[q]] = min(limit[before_list[q]], limit[j])


def _with_ways(
    work: PathWork,
    loose: Loose,
    ready: Ints,
    need: Ints,
    level: Ints,
    limit: Ints,
    chain: Ints,
) -> PathWork:
    """Return ``work`` with the compute on the longest way from the chain to each collective, and
    from there to the chain: it runs before the launch, and behind the wait.
    """
    items = loose.items
    ticks = items.spread(loose.compute_ticks, np.zeros_like(loose.work.launch))
    on_chain = np.zeros(len(items), dtype=np.bool_)
    on_chain[chain] = True
    up, down = ways(items.before_begin, items.before_list, ticks, level, limit, on_chain)
    of = items.of_collective
    before = np.full(len(work.before), work.before[-1])
    after = np.full(len(work.after), work.after[0])
    np.minimum.at(before, ready[of], work.before[ready[of]] + up[of])
    np.minimum.at(after, need[of], work.after[need[of]] + down[of])
    before = np.minimum.accumulate(before[::-1])[::-1]
    after = np.minimum.accumulate(after)
    return replace(
        work,
        before=np.append(0, before[1:]),
        after=np.append(after[:-1], 0),
    )


@compiled
def ways(
    before_begin: Ints, before_list: Ints, ticks: Ints, level: Ints, limit: Ints, on_chain: Bools
) -> tuple[Ints, Ints]:
    """Return for each item the longest way to its begin from the last step that it follows, and
    from its end to the first step that follows it: the ticks of the items in between.
    """
    num_items = len(ticks)
    up, down = np.zeros(num_items, np.int64), np.zeros(num_items, np.int64)
    for j in range(num_items):
        for q in range(before_begin[j], before_begin[j + 1]):
            p = before_list[q]
            if level[p] == level[j] and not on_chain[p]:
                up[j] = max(up[j], up[p] + ticks[p])
    for j in range(num_items - 1, -1, -1):
        if on_chain[j]:
            continue
        for q in range(before_begin[j], before_begin[j + 1]):
            p = before_list[q]
            if limit[p] == limit[j] and not on_chain[p]:
                down[p] = max(down[p], down[j] + ticks[j])
    return up, down
