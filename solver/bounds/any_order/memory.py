"""Bounds on memory that hold for every compute order."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.step_time import bytes_at_first


@dataclass(frozen=True, slots=True, kw_only=True)
class CertainlyAlive:
    """The storages that are alive at each compute node in every schedule."""

    live_bytes: Ints
    """(m,) Bytes of all storages but those set apart, with those that the caller keeps."""
    all_apart: Bools
    """(m,) Whether all storages set apart are alive."""


def memory_bound_of_any_order(orders: Orders, max_move: int | None) -> int:
    """Return a lower bound of the peak of every schedule whose compute moves by at most
    ``max_move`` places (``None``: anywhere); tensors that the caller keeps are included.
    """
    alive = certainly_alive(orders, max_move)
    return max(
        int(alive.live_bytes.max(initial=orders.arrays.kept_bytes)), bytes_at_first(orders.arrays)
    )


def certainly_alive(
    orders: Orders, max_move: int | None, apart: Collection[int] = ()
) -> CertainlyAlive:
    """Return the bytes that are alive at each compute node in every schedule whose compute moves by
    at most ``max_move`` places, and where the storages ``apart`` all are, too.

    At compute node k everything is alive that is there from the beginning, or is touched by k or a
    node that comes before it in every order, and is touched by k or a node that comes behind it in
    every order. Work: nodes times words of a set of nodes.
    """
    num_compute = len(orders.arrays.compute_ticks)
    everywhere = (1 << num_compute) - 1
    until, since = _before_and_behind(orders, max_move)
    live = np.full(num_compute, orders.arrays.kept_bytes, dtype=np.int64)
    all_apart = everywhere
    for life in orders.lives():
        alive = everywhere
        if not life.from_beginning:
            alive &= _union(since, life.nodes)
        if not life.to_the_end:
            alive &= _union(until, life.nodes)
        if life.storage in apart:
            all_apart &= alive
        elif alive:
            live += life.size_bytes * _bits(alive, num_compute)
    return CertainlyAlive(live_bytes=live, all_apart=_bits(all_apart, num_compute) > 0)


def _before_and_behind(orders: Orders, max_move: int | None) -> tuple[list[int], list[int]]:
    """Return for each compute node, as bits, the node and those before it in every order, and the
    node and those behind it.

    Where nodes move by at most w places, each stays behind all that were captured more than 2 w
    places before it.
    """
    num_compute = len(orders.arrays.compute_ticks)
    begin, listed = orders.surely_before
    until = [1 << k for k in range(num_compute)]
    since = [1 << k for k in range(num_compute)]
    if max_move is not None and not orders.problem.chains:  # places count within a chain
        everywhere = (1 << num_compute) - 1
        for k in range(num_compute):
            first_behind = k + 2 * max_move + 1
            until[k] |= (1 << max(k - 2 * max_move, 0)) - 1
            since[k] |= everywhere >> first_behind << first_behind
    before = [listed[begin[k] : begin[k + 1]].tolist() for k in range(num_compute)]
    for k in range(num_compute):
        for j in before[k]:
            until[k] |= until[j]
    for k in reversed(range(num_compute)):
        for j in before[k]:
            since[j] |= since[k]
    return until, since


def _union(sets: list[int], nodes: Iterable[int]) -> int:
    result = 0
    for k in nodes:
        result |= sets[k]
    return result


def _bits(number: int, count: int) -> Ints:
    packed = np.frombuffer(number.to_bytes(count // 8 + 1, "little"), dtype=np.uint8)
    bits: Ints = np.unpackbits(packed, count=count, bitorder="little").astype(np.int64)
    return bits
