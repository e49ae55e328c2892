"""Buckets weighed along a chain of items that follow each other in every order: the bound along
paths, where compute may move.

The items of a chain begin one after the other, whatever the order of the rest. All compute that
follows one item of the chain and precedes the next one runs between the two. So the chain is a
program with a fixed order: its compute nodes are the steps of the chain, a gather is needed before
the first step that it precedes, a reduction is ready behind the last step that it follows. The
program has no time for launches and copies, since they may hide behind the transfers that the chain
waits for.
"""

from dataclasses import replace

import numpy as np

from apsched.costs.price_curve import PriceCurve
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.bounds.any_order.items import Items
from apsched.solver.bounds.any_order.jobs import Ends, Loose, ends_of
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.step_time import TimeBound

_MOST_STEPS = 160
_FREE = PriceCurve(size_bytes=(0, 1), price_ticks=(0, 0))


def chain_bound(instance: Instance, loose: Loose, ends: Ends, way: Ints) -> TimeBound:
    """Return the bound of the program that a chain is, (V7), along the longest ``way``."""
    arrays = instance.arrays
    chain = _chain(loose, way)
    items, work = loose.items, loose.work
    span = items.spread(loose.compute_ticks, work.launch + work.transfer)
    alone = items.spread(loose.compute_ticks, work.main)
    steps = between(items.before_begin, items.before_list, span, alone, chain)
    head, tail = (
        items.spread(ends.head_of_compute, ends.head),
        items.spread(ends.tail_of_compute, ends.tail),
    )
    ticks = np.concatenate((head[chain[:1]], steps, (span + tail)[chain[-1:]]))
    level, limit = levels(items.before_begin, items.before_list, chain)
    free = np.zeros_like(arrays.launch_ticks)
    never = np.full_like(arrays.need_slot, len(ticks))
    as_chain = replace(
        arrays,
        compute_ticks=ticks,
        ready_slot=level[items.of_collective] + 1,
        need_slot=np.where(arrays.on_path, never, limit[items.of_collective] + 1),
        launch_ticks=free,
        bucket_launch_ticks=free,
        copy_out_ticks=free,
        copied_bytes=free,
        attached_ticks=np.zeros_like(arrays.attached_ticks),
    )
    bare = tuple(
        replace(c, prologue=(), epilogue=(), cast=(), cast_bytes=0)
        for c in instance.problem.collectives
    )
    bare_problem = replace(instance.problem, collectives=bare, copy_price=_FREE)
    found = path_bound(replace(instance, problem=bare_problem, arrays=as_chain))
    return replace(found, source=BoundSource.WEIGHED_ALONG_CHAIN)


def longest_way(loose: Loose) -> Ints:
    """Return the items of the longest way, ascending."""
    return way_through(loose, np.arange(len(loose.items)))


def on_path_of(loose: Loose, way: Ints) -> Ints:
    """Return the collectives on the path among the items ``way``."""
    on_path = np.zeros(len(loose.items), dtype=np.bool_)
    on_path[loose.items.of_collective] = loose.on_path
    return way[on_path[way]]


def _chain(loose: Loose, way: Ints) -> Ints:
    """Return items of the longest ``way`` through the program, ascending: its collectives on the
    path, or a sample where there are none.
    """
    on_path = on_path_of(loose, way)
    wanted = on_path if len(on_path) else way
    chosen: Ints = wanted[
        np.unique(
            np.linspace(0, len(wanted) - 1, min(len(wanted), _MOST_STEPS)).round().astype(np.int64)
        )
    ]
    return chosen


def way_through(loose: Loose, through: Ints) -> Ints:
    """Return the items of the longest way that has one of ``through``, ascending: by heads and
    tails without a cap on moves, which are sums along ways.
    """
    if not len(through):
        return through
    items, ends = loose.items, ends_of(loose, None)
    span = items.spread(loose.compute_ticks, loose.work.launch + loose.work.transfer)
    head, tail = (
        items.spread(ends.head_of_compute, ends.head),
        items.spread(ends.tail_of_compute, ends.tail),
    )
    middle = int(through[np.argmax((head + span + tail)[through])])
    back = _way(items, head + span, middle)[::-1]
    after = items.backwards()
    onward = [len(items) - 1 - i for i in _way(after, (tail + span)[::-1], len(items) - 1 - middle)]
    return np.array([*back, middle, *onward], dtype=np.int64)


def _way(items: Items, end: Ints, item: int) -> list[int]:
    """Return the items before ``item``, each the one before the next that ends last."""
    way = []
    while items.before_begin[item] < items.before_begin[item + 1]:
        before = items.before_list[items.before_begin[item] : items.before_begin[item + 1]]
        item = int(before[np.argmax(end[before])])
        way.append(item)
    return way


@compiled
def between(before_begin: Ints, before_list: Ints, span: Ints, work: Ints, chain: Ints) -> Ints:
    """Return for each step of ``chain`` but the last the least time from its begin to that of the
    next.
    """
    ticks = np.zeros(len(chain) - 1, np.int64)
    longest = np.full(
        len(span), -1, np.int64
    )  # from the end of the first to the begin of an item; -1 where that does not follow it
    before = np.zeros(len(span), np.bool_)
    for i in range(len(chain) - 1):
        first, last = chain[i], chain[i + 1]
        longest[first : last + 1] = -1
        before[first : last + 1] = False
        for j in range(first + 1, last + 1):
            for q in range(before_begin[j], before_begin[j + 1]):
                p = before_list[q]
                if p == first:
                    longest[j] = max(longest[j], 0)
                elif p > first and longest[p] >= 0:
                    longest[j] = max(longest[j], longest[p] + span[p])
        before[last] = True
        total = np.int64(0)
        for j in range(last, first, -1):
            if before[j]:
                if j < last and longest[j] >= 0:
                    total += work[j]
                for q in range(before_begin[j], before_begin[j + 1]):
                    if before_list[q] > first:
                        before[before_list[q]] = True
        ticks[i] = span[first] + max(longest[last], total)
    return ticks


@compiled
def levels(before_begin: Ints, before_list: Ints, chain: Ints) -> tuple[Ints, Ints]:
    """Return for each item the last step of ``chain`` that it follows or is, and the first
    following it; -1 and past the end for none.
    """
    num_items, num_steps = len(before_begin) - 1, len(chain)
    step = np.full(num_items, -1, np.int64)
    for k in range(num_steps):
        step[chain[k]] = k
    level = np.full(num_items, -1, np.int64)
    limit = np.full(num_items, num_steps, np.int64)
    for j in range(num_items):
        level[j] = step[j]
        for q in range(before_begin[j], before_begin[j + 1]):
            level[j] = max(level[j], level[before_list[q]])
    for j in range(num_items - 1, -1, -1):
        first = step[j] if step[j] >= 0 else limit[j]
        for q in range(before_begin[j], before_begin[j + 1]):
            limit[before_list[q]] = min(limit[before_list[q]], first)
    return level, limit
