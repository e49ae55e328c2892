"""The earliest begin of an item, whatever the order of the compute; with time reversed, the least
time that follows its end.

Times add up along the items before an item. But its ancestors also share streams: all of those that
cannot begin before t run between t and its begin, one after the other on the compute stream, and
likewise with their transfers on each group's stream; the items that must follow the last of them
run after that. Between two chained on-path collectives this counts all compute that depends on the
first and that the second depends on, not only the longest way. The begin of the first enters that
of the second, so this adds up along the chain.
"""

from typing import NamedTuple

import numpy as np

from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Bools, Ints


class Ticks(NamedTuple):
    """Times of items, in ticks: (N,) each."""

    first: Ints
    """No begin is before it."""
    span: Ints
    """From begin to end."""
    work: Ints
    """On the compute stream, between its begin and the begin of whatever comes after it."""
    load: Ints
    """On its group's stream, likewise; 0 for compute nodes."""
    stream: Ints
    """Stream of its group; 0 for compute nodes."""


@compiled
def earliest(
    before_begin: Ints,
    before_list: Ints,
    place: Ints,
    ticks: Ticks,
    num_streams: int,
    gates: Bools,
    max_move: int,
) -> Ints:
    """Return the earliest begin of each item, (V1); the ancestors of ``gates`` are looked at
    together.

    ``max_move`` is how far a compute node may move; the number of compute nodes where it may move
    anywhere.
    """
    num_items = len(place)
    begin = np.zeros(num_items, np.int64)
    by_begin = np.empty(num_items, np.int64)
    before = np.zeros(num_items, np.bool_)
    follows = np.zeros(num_items, np.int64)
    run, least = np.zeros(num_streams + 1, np.int64), np.zeros(num_streams + 1, np.int64)
    done = np.zeros(
        num_items + 1, np.int64
    )  # [s]: when the first s compute nodes as captured have all ended
    worked = np.int64(0)
    for i in range(num_items):
        at = ticks.first[i]
        for q in range(before_begin[i], before_begin[i + 1]):
            at = max(at, begin[before_list[q]] + ticks.span[before_list[q]])
        if place[i] > 2 * max_move:
            at = max(at, done[place[i] - 2 * max_move])
        if gates[i]:
            mark_ancestors(
                before_begin, before_list, place, ticks.span, i, max_move, before, follows
            )
            most = np.int64(0)
            for j in range(num_items):
                most = max(most, follows[j])
            for s in range(num_streams + 1):
                run[s], least[s] = 0, most
            for a in range(i - 1, -1, -1):
                j = by_begin[a]
                if before[j]:
                    run[0] += ticks.work[j]
                    least[0] = min(least[0], follows[j])
                    at = max(at, begin[j] + run[0] + least[0])
                    if ticks.load[j] > 0:
                        s = ticks.stream[j] + 1
                        run[s] += ticks.load[j]
                        least[s] = min(least[s], follows[j])
                        at = max(at, begin[j] + run[s] + least[s])
        begin[i] = at
        if place[i] >= 0:
            worked += ticks.work[i]
            done[place[i] + 1] = max(done[place[i]], at + ticks.span[i], worked)
        a = i
        while a > 0 and begin[by_begin[a - 1]] > at:
            by_begin[a] = by_begin[a - 1]
            a -= 1
        by_begin[a] = i
    return begin


@compiled
def mark_ancestors(
    before_begin: Ints,
    before_list: Ints,
    place: Ints,
    span: Ints,
    item: int,
    max_move: int,
    before: Bools,
    follows: Ints,
) -> None:
    """Mark the items before ``item`` in every order, (V2), and write the least time that follows
    the end of each of them before ``item`` begins.
    """
    before[:] = False
    for j in range(len(follows)):
        follows[j] = 0
    before[item] = True
    latest = np.int64(-1)  # place of the latest compute node found
    for j in range(item, -1, -1):
        if place[j] >= 0:
            if place[j] < latest - 2 * max_move:
                before[j] = True
            elif before[j] and latest < 0:
                latest = place[j]
        if before[j]:
            after = follows[j] + span[j] if j < item else np.int64(0)
            for q in range(before_begin[j], before_begin[j + 1]):
                before[before_list[q]] = True
                follows[before_list[q]] = max(follows[before_list[q]], after)
    before[item] = False
