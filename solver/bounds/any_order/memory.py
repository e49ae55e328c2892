"""Bounds on memory that hold for every compute order.

    k        a compute node
    S_s      the compute nodes that are at or behind the birth of storage s in every order
    U_s      the compute nodes that are at or before the last use of s in every order
    B_s      the least bytes of s, also as a part of a bucket's buffer
    C        chains (s_1, ..., s_n), n <= 3: s_i+1 is allocated by a node that uses s_i, or is the
             result of a collective with the input s_i
    C_k      some of these with k in S_s_1 and in U_s_n, no two of which share a storage

    (A1)  k in S_s where k uses s or follows a node that does; k in U_s where k touches s or a node
          that follows k does: a node touches s also where a view of s follows it
    (A2)  live_k >= kept + sum_{(s_1, ..., s_n) in C_k} min_i B_s_i

From the birth of s_1 to the last use of s_n one storage of a chain is always alive, since s_i is
alive where s_i+1 is allocated.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from apsched.problem.problem import Problem
from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.arrays.reordered import Life, Orders
from apsched.solver.bounds.step_time import bytes_at_first

_LONGEST_CHAIN = 3
"""With these the bound is the floor of the graphs of LLaMA-3 and DeepSeek, where compute moves by
200 places or anywhere. With one storage it is up to 26 % lower there, with two up to 0.2 %.
"""
_MOST_BEFORE = 8
"""Storages before a storage, the largest: a node may take and allocate hundreds
(``aten._foreach_add``).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertainlyAlive:
    """The bytes that are alive at each compute node in every schedule."""

    live_bytes: Ints
    """(m,) Bytes of all storages but those set apart, with those that the caller keeps."""
    all_apart: Bools
    """(m,) Whether all storages set apart are alive."""


def memory_bound_of_any_order(orders: Orders, max_move: int | None) -> int:
    """Return a lower bound of the peak of every schedule whose compute moves by at most
    ``max_move`` places (``None``: anywhere); tensors that the caller keeps are included.
    """
    kept_bytes = orders.arrays.kept_bytes
    alive = certainly_alive(orders, max_move)
    at_last = kept_bytes + sum(life.size_bytes for life in orders.lives() if life.to_the_end)
    return max(
        int(alive.live_bytes.max(initial=kept_bytes)), bytes_at_first(orders.arrays), at_last
    )


def certainly_alive(
    orders: Orders, max_move: int | None, apart: Collection[int] = ()
) -> CertainlyAlive:
    """Return (A2), the bytes that are alive at each compute node in every schedule whose compute
    moves by at most ``max_move`` places, and where the storages ``apart`` all are, too.

    Chains of one storage count first, then those of two; of equal ones those with the most bytes.
    Work: chains times words of a set of nodes.
    """
    num_compute = len(orders.arrays.compute_ticks)
    everywhere = (1 << num_compute) - 1
    until, since = _before_and_behind(orders, max_move)
    lives = list(orders.lives())
    born = [everywhere if life.from_beginning else _union(since, life.users) for life in lives]
    needed = [everywhere if life.to_the_end else _union(until, life.nodes) for life in lives]
    all_apart = everywhere
    for s, life in enumerate(lives):
        if life.storage in apart:
            all_apart &= born[s] & needed[s]
    live_bytes = np.full(num_compute, orders.arrays.kept_bytes, dtype=np.int64)
    counted = [0] * len(lives)  # nodes at which a storage is in a chain that counts
    for size_bytes, chain in _chains(orders.problem, lives, apart):
        alive = born[chain[0]] & needed[chain[-1]]
        for s in chain:
            alive &= ~counted[s]
        if alive:
            _add(live_bytes, size_bytes, alive)
            for s in chain:
                counted[s] |= alive
    return CertainlyAlive(live_bytes=live_bytes, all_apart=_bits(all_apart, num_compute) > 0)


def _chains(
    problem: Problem, lives: Sequence[Life], apart: Collection[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the chains of storages, as indices in ``lives``, without those ``apart``, and the least
    size in each: short chains first, of equal ones those with the most bytes.
    """
    alone = {life.storage: s for s, life in enumerate(lives) if life.storage not in apart}
    yield from sorted(((lives[s].size_bytes, (s,)) for s in alone.values()), reverse=True)
    before = {
        s: heapq.nlargest(
            _MOST_BEFORE,
            (alone[t] for t in made_of if t in alone),
            key=lambda t: (lives[t].buffer_bytes, t),
        )
        for storage, made_of in _made_of(problem).items()
        if (s := alone.get(storage)) is not None
    }
    chains: list[tuple[int, ...]] = [(s,) for s in alone.values()]
    for _ in range(_LONGEST_CHAIN - 1):
        chains = [(s, *chain) for chain in chains for s in before.get(chain[0], ())]
        sized = ((min(lives[s].buffer_bytes for s in chain), chain) for chain in chains)
        yield from sorted(sized, reverse=True)


def _made_of(problem: Problem) -> dict[int, list[int]]:
    """Return the storages before each storage in chains of two.

    Between both, a bucket has its data in a buffer: of an all-gather from the copy-in on, which
    frees its input, to the copy-out; of a reduction from the copy-in on.
    """
    used_by: dict[int, list[int]] = {}
    for s, storage in enumerate(problem.storages):
        for node in storage.uses:
            if node != storage.birth:
                used_by.setdefault(node, []).append(s)
    of_collective = {node for c in problem.collectives for node in (c.start, c.wait)}
    found = {
        s: used_by.get(storage.birth, [])
        for s, storage in enumerate(problem.storages)
        if storage.birth >= 0 and storage.birth not in of_collective
    }
    for c in problem.collectives:
        if problem.storages[c.output_storage].birth == c.start:
            found[c.output_storage] = [c.input_storage]
    return found


def _before_and_behind(orders: Orders, max_move: int | None) -> tuple[list[int], list[int]]:
    """Return, by (A1), for each compute node, as bits, the node and those before it in every order,
    and the node and those behind it.

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


def _add(live_bytes: Ints, size_bytes: int, nodes: int) -> None:
    """Add ``size_bytes`` to the entries of ``nodes``, one or more, as bits."""
    first, end = (nodes & -nodes).bit_length() - 1, nodes.bit_length()
    live_bytes[first:end] += size_bytes * _bits(nodes >> first, end - first)


def _bits(number: int, count: int) -> Ints:
    packed = np.frombuffer(number.to_bytes(count // 8 + 1, "little"), dtype=np.uint8)
    bits: Ints = np.unpackbits(packed, count=count, bitorder="little").astype(np.int64)
    return bits
