"""Buckets weighed along a chain of compute nodes that follow each other in every order: the bound
along paths with launches and copies at their prices, where compute may move.

The steps of the chain are the compute nodes of the longest way. A compute node that follows a step
runs behind it, one that precedes a step has ended before that one begins, and the others run
somewhere. Compute that only one reduction needs runs before the launch of that reduction.
"""

from dataclasses import dataclass, replace

import numpy as np

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Bools, Ints
from apsched.solver.bounds.any_order.chain import levels
from apsched.solver.bounds.any_order.items import Items
from apsched.solver.bounds.any_order.jobs import Loose
from apsched.solver.bounds.launch_sequence import launch_sequence_bound
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.paths.path_work import PathWork
from apsched.solver.bounds.step_time import TimeBound


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """N items between the steps of a chain. Compute node g of the program that the chain is, is
    step g - 1; compute node 0 stands for all before the chain, and takes no time.
    """

    chain: Ints
    """Items that are steps, ascending."""
    level: Ints
    """(N,) last step that the item is or follows; -1 for none."""
    limit: Ints
    """(N,) first step that the item is or precedes; the number of steps for none."""
    next: Ints
    """(N,) first step that the item precedes."""

    @property
    def num_compute(self) -> int:
        """Compute nodes of the program."""
        return len(self.chain) + 1


def compute_chain_bound(instance: Instance, loose: Loose, way: Ints) -> TimeBound:
    """Return the bound of the program that the compute nodes of the longest ``way`` are, (V10): the
    better one of paths and of sequences of launches.
    """
    chain, work = _program(instance, loose, way)
    found = replace(path_bound(chain, work), source=BoundSource.WEIGHED_ALONG_CHAIN)
    return launch_sequence_bound(chain, found.ticks, work) or found


def _program(instance: Instance, loose: Loose, way: Ints) -> tuple[Instance, PathWork]:
    """Return the program of the chain, and the compute along it."""
    arrays, items = instance.arrays, loose.items
    steps = _steps(items, way, instance.caps.max_compute_move)
    num_compute = steps.num_compute
    need_slot = np.where(arrays.on_path, num_compute, steps.next[items.of_collective] + 1)
    as_chain = replace(
        arrays,
        compute_ticks=np.append(0, loose.compute_ticks[items.place[steps.chain]]),
        ready_slot=steps.level[items.of_collective] + 2,
        need_slot=need_slot,
    )
    last = (arrays.kind != ALL_GATHER) & ~arrays.on_path & (need_slot == num_compute)
    work = _with_ways(_work(loose, steps, last), loose, steps)
    return replace(instance, arrays=as_chain), work


def _steps(items: Items, way: Ints, max_move: int | None) -> _Steps:
    chain = way[items.place[way] >= 0]
    level, following = levels(items.before_begin, items.before_list, chain)
    if max_move is not None:
        _keep_far_apart(items, chain, 2 * max_move, level, following)
    limit = following.copy()
    limit[chain] = np.arange(len(chain))
    return _Steps(chain=chain, level=level, limit=limit, next=following)


def _keep_far_apart(items: Items, chain: Ints, most: int, level: Ints, limit: Ints) -> None:
    """Write the steps that each item follows and precedes where compute nodes captured more than
    ``most`` places apart keep their order, as ``mark_ancestors`` has it.
    """
    place, places = items.place, items.place[chain]
    compute = place >= 0
    before = np.searchsorted(places, place - most, side="left") - 1
    behind = np.searchsorted(places, place + most, side="right")
    level[compute] = np.maximum(level, before)[compute]
    limit[compute] = np.minimum(limit, behind)[compute]
    spread(items.before_begin, items.before_list, compute, level, limit)


@compiled
def spread(before_begin: Ints, before_list: Ints, compute: Bools, level: Ints, limit: Ints) -> None:
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


def _work(loose: Loose, steps: _Steps, last: Bools) -> PathWork:
    """Return all compute between the steps; that of the collectives ``last`` alone is their own.

    A collective whose own compute takes longer than its transfer owns none if steps are known that
    follow it: paths to these count all of it.
    """
    items, ticks = loose.items, loose.compute_ticks
    of, num_collectives = items.of_compute, len(last)
    release, due = steps.level[of] + 1, steps.limit[of] + 2
    number = items.spread(np.full_like(of, -1), np.where(last, np.arange(num_collectives), -1))
    owner = owners(items.before_begin, items.before_list, steps.level, number)[of]
    owner[items.place[steps.chain]] = -1
    owned = owner >= 0
    own = np.bincount(owner[owned], ticks[owned], num_collectives).astype(np.int64)
    followed = np.zeros(num_collectives, dtype=np.bool_)
    followed[owner[owned & (due <= steps.num_compute)]] = True
    disowned = followed & (own > loose.work.transfer)
    own[disowned] = 0
    owned &= ~disowned[owner]
    return PathWork.between_steps(
        ticks=ticks,
        release=release,
        due=np.where(owned, steps.num_compute + 1, due),
        num_compute=steps.num_compute,
        own=own,
    )


@compiled
def owners(before_begin: Ints, before_list: Ints, level: Ints, number: Ints) -> Ints:
    """Return for each compute node the ``number`` of the collective that alone needs it and follows
    the same last step; -1 for none.
    """
    num_items = len(level)
    owner = np.full(num_items, -2, np.int64)  # -2: nothing follows; -1: no collective alone
    for j in range(num_items - 1, -1, -1):
        of = max(owner[j], number[j])
        for q in range(before_begin[j], before_begin[j + 1]):
            p = before_list[q]
            alone = of >= 0 and level[p] == level[j] and (owner[p] == -2 or owner[p] == of)
            owner[p] = of if alone else -1
    return np.maximum(owner, -1)


def _with_ways(work: PathWork, loose: Loose, steps: _Steps) -> PathWork:
    """Return ``work`` with the longest ways between steps and collectives: they run before the
    launch, and behind the wait.
    """
    items, of = loose.items, loose.items.of_collective
    ticks = items.spread(loose.compute_ticks, np.full_like(of, -1))
    ticks[steps.chain] = -1
    up, down = ways(items.before_begin, items.before_list, ticks, steps.level, steps.limit)
    ready, need = steps.level[of] + 2, steps.next[of] + 1
    before = np.full_like(work.before, work.before[-1])
    after = np.full_like(work.after, work.after[0])
    np.minimum.at(before, ready, work.before[ready] + up[of])
    np.minimum.at(after, need, work.after[need] + down[of])
    before, after = np.minimum.accumulate(before[::-1])[::-1], np.minimum.accumulate(after)
    return replace(work, before=np.append(0, before[1:]), after=np.append(after[:-1], 0))


@compiled
def ways(
    before_begin: Ints, before_list: Ints, ticks: Ints, level: Ints, limit: Ints
) -> tuple[Ints, Ints]:
    """Return for each item the longest way to its begin from the last step that it follows, and
    from its end to the first step that follows it, over compute nodes: items with ``ticks``, -1 for
    steps and collectives.
    """
    num_items = len(ticks)
    up, down = np.zeros(num_items, np.int64), np.zeros(num_items, np.int64)
    for j in range(num_items):
        for q in range(before_begin[j], before_begin[j + 1]):
            p = before_list[q]
            if ticks[p] >= 0 and level[p] == level[j]:
                up[j] = max(up[j], up[p] + ticks[p])
    for j in range(num_items - 1, -1, -1):
        for q in range(before_begin[j], before_begin[j + 1]):
            p = before_list[q]
            if ticks[j] >= 0 and limit[p] == limit[j]:
                down[p] = max(down[p], down[j] + ticks[j])
    return up, down
