"""A bound on memory that holds for every compute order."""

from collections.abc import Iterable

import numpy as np

from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.step_time import bytes_at_first


def memory_bound_of_any_order(orders: Orders) -> int:
    """Return a lower bound of the peak of every schedule, for any order of the compute; tensors
    that the caller keeps are included.

    At compute node k everything is alive that is there from the beginning, or is touched by k or a
    node that comes before it in every order, and is touched by k or a node that comes behind it in
    every order. Work: nodes times words of a set of nodes.
    """
    num_compute = len(orders.arrays.compute_ticks)
    begin, listed = orders.surely_before
    until = [
        1 << k for k in range(num_compute)
    ]  # as bits: the node, and those before it in every order
    since = [1 << k for k in range(num_compute)]  # the node, and those behind it
    before = [listed[begin[k] : begin[k + 1]].tolist() for k in range(num_compute)]
    for k in range(num_compute):
        for j in before[k]:
            until[k] |= until[j]
    for k in reversed(range(num_compute)):
        for j in before[k]:
            since[j] |= since[k]
    live = np.zeros(num_compute, dtype=np.int64)
    for life in orders.lives():
        alive = (1 << num_compute) - 1
        if not life.from_beginning:
            alive &= _union(since, life.nodes)
        if not life.to_the_end:
            alive &= _union(until, life.nodes)
        if alive:
            live += life.size_bytes * _bits(alive, num_compute)
    return max(orders.arrays.kept_bytes + int(live.max(initial=0)), bytes_at_first(orders.arrays))


def _union(sets: list[int], nodes: Iterable[int]) -> int:
    result = 0
    for k in nodes:
        result |= sets[k]
    return result


def _bits(number: int, count: int) -> Ints:
    packed = np.frombuffer(number.to_bytes(count // 8 + 1, "little"), dtype=np.uint8)
    bits: Ints = np.unpackbits(packed, count=count, bitorder="little").astype(np.int64)
    return bits
