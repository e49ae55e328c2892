"""The compact form of a problem under any order of its compute.

Compute moves in blocks: a run of neighbours that a compiler makes one kernel of stays together, so
that no order costs a fusion. A block of one node is the rule. Which blocks and collectives come
before which follows from the dependences; every order that keeps them gives a compact form by
arithmetic on arrays, without another look at the problem.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from apsched.config import Caps
from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.solver.arrays.floated import asks_for_places
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Bools, Ints, ProblemArrays
from apsched.units import ALLOCATION_BYTES

_Behind = list[tuple[frozenset[int], frozenset[int]]]
"""For each node the compute nodes and the collectives that it follows, through nodes that take no
place of their own; itself if it is one.
"""


def may_move(problem: Problem, caps: Caps) -> bool:
    """Whether compute may leave its place: the cap allows it, and no rule of the user's plan names
    places among the compute nodes.
    """
    return caps.max_compute_move != 0 and not asks_for_places(problem)


class Precedence(NamedTuple):
    """Precedences over blocks (K), collectives (C) and compute nodes as captured (m). CSR pairs."""

    first: Ints
    """(K+1,) first compute node of each block, as captured."""
    block_ticks: Ints
    """(K,)"""
    block_of: Ints
    """(m,)"""
    before_begin: Ints
    before_list: Ints
    """Blocks before a block: it takes their results, or those of collectives that come behind
    them.
    """
    behind_begin: Ints
    behind_list: Ints
    """Blocks behind a block, in the same sense."""
    needs_begin: Ints
    needs_list: Ints
    """Collectives whose results a block needs."""
    ready_begin: Ints
    ready_list: Ints
    """Compute nodes before the launch of a collective."""
    feeds_begin: Ints
    feeds_list: Ints
    """Collectives whose launch comes behind a block."""
    touch_begin: Ints
    touch_list: Ints
    """Storages that a block touches; those that the caller keeps are left out."""
    storage_bytes: Ints
    storage_birth: Ints
    """Block that allocates it; -1 where none does."""
    storage_stays: Bools
    """No block frees it: it is an output, or a collective reads it."""
    deferrable: Bools
    """(K,) no launch on the path, and nothing that one depends on, comes behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Compute nodes that touch storages; m stands for the output."""

    begin: Ints
    nodes: Ints
    """Those that use it, and those that a view of it follows: a view of a size that data decide
    stands behind the node that has the size, which may stand before the birth of the storage.
    """
    user_begin: Ints
    users: Ints
    """Those that use it themselves, none of which stands before its birth in any order."""
    birth: Ints
    """(S,) compute node that allocates it; m + 1 for none."""
    from_beginning: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The certain lifetime of a storage."""

    storage: int
    """Its index in the problem."""
    nodes: tuple[int, ...]
    """Compute nodes, as captured, that touch it, or that a view of it follows: its last use is not
    over at them.
    """
    users: tuple[int, ...]
    """Those that use it themselves: it is born at them."""
    from_beginning: bool
    to_the_end: bool
    size_bytes: int
    buffer_bytes: int
    """The least that it takes in the buffer of a bucket before it has memory of its own; as
    ``size_bytes`` where it is in none.
    """


class Orders:
    """Orders of the compute of one problem."""

    def __init__(self, instance: Instance) -> None:
        """``compact`` is the compact form of ``problem`` as captured."""
        problem = instance.problem
        assert not problem.reordered
        self.instance, self.problem, self.arrays = instance, problem, instance.arrays
        compute_index = {node: k for k, node in enumerate(problem.compute_order)}
        attached_owner = {
            n: c
            for c, col in enumerate(problem.collectives)
            for n in (*col.prologue, col.start, col.wait, *col.epilogue)
        }
        behind = _behind(problem, compute_index, attached_owner)
        moving: list[tuple[int, _Behind]] = []
        fixed: list[tuple[int, _Behind]] = []
        for s, storage in enumerate(problem.storages):
            touching = [behind[u] for u in storage.uses]
            if not storage.kept:
                unused = storage.birth < 0 and not any(nodes for nodes, _ in touching)
                (moving if unused or any(attached for _, attached in touching) else fixed).append(
                    (s, touching)
                )
        self.precedence = _precedence(instance, compute_index, behind, (*fixed, *moving))
        num_compute = len(problem.compute_order)
        self.moving = _touched(problem, moving, compute_index, num_compute)
        self.fixed = _touched(problem, fixed, compute_index, num_compute)
        self._storages = [s for s, _ in (*fixed, *moving)]
        self.fixed_bytes = np.array(
            [problem.storages[s].size_bytes for s, _ in fixed], dtype=np.int64
        )
        self.before = _csr(
            {j for p in problem.predecessors[node] for j in behind[p][0]}
            for node in problem.compute_order
        )
        """Compute nodes before a compute node, CSR; finer than blocks."""
        self.needed = _needed(problem, behind)
        """Compute nodes that need the result of a collective, CSR."""
        self.surely_before = _csr(
            _nodes_before(problem, _before_launches(instance, behind)[1], behind)
        )
        """As ``before``, and also through collectives."""
        begin = instance.arrays.after_begin
        self._chained = [c for c in range(len(begin) - 1) if begin[c + 1] > begin[c]]

    def num_open_pairs(self, most: int) -> int:
        """Return the number of pairs of blocks whose order is open; ``most + 1`` where there are
        more.
        """
        p, count = self.precedence, 0
        sooner: list[int] = []  # bit a of entry b: block a stands before block b in every order
        for b, (i, j) in enumerate(pairwise(p.before_begin.tolist())):
            before = 0
            for a in p.before_list[i:j].tolist():
                before |= sooner[a] | 1 << a
            sooner.append(before)
            count += b - before.bit_count()
            if count > most:
                return most + 1
        return count

    def arrays_of(self, order: Ints) -> ProblemArrays:
        """Return the compact form with the compute order in ``order``: compute nodes as captured,
        in their new places.
        """
        old, num_compute = self.arrays, len(order)
        place = np.empty(num_compute + 2, dtype=np.int64)
        place[order] = np.arange(num_compute)
        place[num_compute], place[-1] = num_compute, -1
        p = self.precedence
        need = _extremes(place, *self.needed, np.minimum, num_compute)
        for c in reversed(self._chained):
            for d in old.awaited_by(c):
                need[d] = min(need[d], need[c])
        slot, at = self._baseline(place, num_compute)
        return replace(
            old,
            compute_ticks=old.compute_ticks[order],
            base_slot_bytes=slot,
            base_compute_bytes=at,
            ready_slot=1 + _extremes(place, p.ready_begin, p.ready_list, np.maximum, -1),
            need_slot=need,
            storage_birth_compute=place[self.moving.birth],
            storage_last_compute=_extremes(
                place, self.moving.begin, self.moving.nodes, np.maximum, -1
            ),
        )

    def blocks_of(self, order: Ints) -> Ints:
        """Return the blocks of compute nodes in ``order``, which keeps blocks together."""
        blocks = self.precedence.block_of[order]
        begins: Ints = np.concatenate(([True], blocks[1:] != blocks[:-1]))
        return blocks[begins]

    def in_order(self, order: Ints) -> Instance:
        """Return the instance with its compute in ``order``."""
        return replace(self.instance, problem=self.problem_of(order), arrays=self.arrays_of(order))

    def problem_of(self, order: Ints) -> Problem:
        """Return the problem with its compute in ``order``."""
        compute_order = self.problem.captured_order
        return replace(self.problem, reordered=tuple(compute_order[k] for k in order.tolist()))

    def lives(self) -> Iterator[Life]:
        """Yield where each storage that the caller does not keep is alive whatever the launches and
        waits do.
        """
        num_compute = len(self.arrays.compute_ticks)
        fixed_bytes, moving_bytes = self.fixed_bytes.tolist(), self.arrays.storage_bytes.tolist()
        result_of = {int(s): c for c, s in enumerate(self.arrays.output_storage) if s >= 0}
        storages = iter(self._storages)
        for touched, sizes, moves in (
            (self.fixed, fixed_bytes, False),
            (self.moving, moving_bytes, True),
        ):
            for s, size in enumerate(sizes):
                nodes = touched.nodes[touched.begin[s] : touched.begin[s + 1]].tolist()
                users = touched.users[touched.user_begin[s] : touched.user_begin[s + 1]].tolist()
                by_attached = moves and int(self.arrays.storage_birth_attached[s]) >= 0
                in_buffer = size
                if by_attached and s in result_of:  # a buffer is rounded up once
                    in_buffer = max(size - ALLOCATION_BYTES + 1, 0)
                    if self.arrays.kind[result_of[s]] != ALL_GATHER:
                        size = in_buffer
                yield Life(
                    storage=next(storages),
                    nodes=tuple(k for k in nodes if k < num_compute),
                    users=tuple(users),
                    from_beginning=bool(touched.from_beginning[s]),
                    to_the_end=num_compute in nodes,
                    size_bytes=size,
                    buffer_bytes=in_buffer,
                )

    def _baseline(self, place: Ints, num_compute: int) -> tuple[Ints, Ints]:
        """As ``apsched.solver.arrays.problem_arrays`` has it: the bytes of storages with fixed
        lives in each slot and at each compute node.
        """
        fixed, size, early = self.fixed, self.fixed_bytes, self.fixed.from_beginning
        last = _extremes(place, fixed.begin, fixed.nodes, np.maximum, -1)
        first = np.where(
            early, 0, _extremes(place, fixed.user_begin, fixed.users, np.minimum, num_compute)
        )
        slot, at = (
            np.zeros(num_compute + 3, dtype=np.int64),
            np.zeros(num_compute + 3, dtype=np.int64),
        )
        lives = last >= 0
        np.add.at(slot, np.where(early, 0, first + 1)[lives], size[lives])
        np.add.at(slot, (last + 1)[lives], -size[lives])
        np.add.at(at, first[lives], size[lives])
        np.add.at(at, (last + 1)[lives], -size[lives])
        return np.cumsum(slot)[: num_compute + 1], np.cumsum(at)[: num_compute + 1]


def _behind(
    problem: Problem, compute_index: dict[int, int], attached_owner: dict[int, int]
) -> _Behind:
    found: _Behind = []
    nothing: frozenset[int] = frozenset()
    for node in range(problem.num_nodes):
        if node in compute_index:
            found.append((frozenset((compute_index[node],)), nothing))
        elif node in attached_owner:
            found.append((nothing, frozenset((attached_owner[node],))))
        elif problem.kinds[node] is NodeKind.OUTPUT:
            found.append((frozenset((len(compute_index),)), nothing))
        else:
            before = [found[p] for p in problem.predecessors[node]]
            found.append(
                (nothing.union(*(s for s, _ in before)), nothing.union(*(f for _, f in before)))
            )
    return found


def _precedence(
    instance: Instance,
    compute_index: dict[int, int],
    behind: _Behind,
    storages: Sequence[tuple[int, _Behind]],
) -> Precedence:
    problem = instance.problem
    ready, before_launch = _before_launches(instance, behind)
    needs_of = [
        {c for p in problem.predecessors[node] for c in behind[p][1]}
        for node in problem.compute_order
    ]
    first = _block_begins(
        problem, [set().union(*(before_launch[c] for c in needed)) for needed in needs_of]
    )
    num_blocks = len(first) - 1
    block_of = np.repeat(np.arange(num_blocks), np.diff(first))
    before: list[set[int]] = [set() for _ in range(num_blocks)]
    needs: list[set[int]] = [set() for _ in range(num_blocks)]
    for k, nodes_before in enumerate(_nodes_before(problem, before_launch, behind)):
        block = int(block_of[k])
        needs[block] |= needs_of[k]
        before[block].update(int(block_of[j]) for j in nodes_before)
        before[block].discard(block)
    feeds = _turned([{int(block_of[j]) for j in nodes} for nodes in ready], num_blocks)
    ticks = instance.arrays.time_before
    touched = [
        {int(block_of[k]) for nodes, _ in touching for k in nodes if k < len(block_of)}
        for _, touching in storages
    ]
    births = [compute_index.get(problem.storages[s].birth) for s, _ in storages]
    sent = {c.input_storage for c in problem.collectives}
    return Precedence(
        first,
        ticks[first[1:]] - ticks[first[:-1]],
        block_of,
        *_csr(before),
        *_csr(_turned(before, num_blocks)),
        *_csr(needs),
        *_csr(ready),
        *_csr(feeds),
        *_csr(_turned(touched, num_blocks)),
        np.array([problem.storages[s].size_bytes for s, _ in storages], dtype=np.int64),
        np.array([-1 if k is None else block_of[k] for k in births], dtype=np.int64),
        np.array(
            [
                s in sent or any(len(block_of) in nodes for nodes, _ in touching)
                for s, touching in storages
            ],
            dtype=np.bool_,
        ),
        _deferrable(
            instance.arrays, before, [{int(block_of[j]) for j in nodes} for nodes in before_launch]
        ),
    )


def _before_launches(instance: Instance, behind: _Behind) -> tuple[list[set[int]], list[set[int]]]:
    """Return the compute nodes before the launch of each collective: those that it takes its input
    from, and also through others.
    """
    arrays = instance.arrays
    ready: list[set[int]] = []
    before_launch: list[set[int]] = []
    for c, collective in enumerate(instance.problem.collectives):
        nodes = (*collective.prologue, collective.start)
        ready.append(
            {j for node in nodes for p in instance.problem.predecessors[node] for j in behind[p][0]}
        )
        chained = arrays.awaited_by(c)
        before_launch.append(ready[-1].union(*(before_launch[d] for d in chained)))
    return ready, before_launch


def _nodes_before(
    problem: Problem, before_launch: list[set[int]], behind: _Behind
) -> Iterator[set[int]]:
    """Yield for each compute node those that come before it: it takes their results, or those of
    collectives that come behind them.
    """
    for node in problem.compute_order:
        compute_order = [behind[p][0] for p in problem.predecessors[node]]
        yield set().union(
            *compute_order,
            *(before_launch[c] for p in problem.predecessors[node] for c in behind[p][1]),
        )


def _deferrable(
    arrays: ProblemArrays, before: list[set[int]], before_launch: list[set[int]]
) -> Bools:
    """Return for each block whether no launch on the path comes behind it."""
    deferrable = np.ones(len(before), dtype=np.bool_)
    for c in np.nonzero(arrays.on_path)[0]:
        deferrable[list(before_launch[c])] = False
    for k in reversed(range(len(before))):
        if not deferrable[k]:
            deferrable[list(before[k])] = False
    return deferrable


def _turned(rows: list[set[int]], num_columns: int) -> list[set[int]]:
    """Return for each value the rows that have it."""
    columns: list[set[int]] = [set() for _ in range(num_columns)]
    for row, values in enumerate(rows):
        for value in values:
            columns[value].add(row)
    return columns


def _block_begins(problem: Problem, through_collectives: list[set[int]]) -> Ints:
    """Return the begins of blocks, and the number of compute nodes; no block has a node that needs
    a collective of another (the sets).
    """
    kernels = problem.kernels or (-1,) * problem.num_nodes
    kernel_of = [kernels[node] for node in problem.compute_order]
    begins: list[int] = []
    for k in range(len(kernel_of)):
        if (
            not k
            or kernel_of[k] < 0
            or kernel_of[k] != kernel_of[k - 1]
            or any(j >= begins[-1] for j in through_collectives[k])
        ):
            begins.append(k)
    return np.array([*begins, len(kernel_of)], dtype=np.int64)


def _needed(problem: Problem, behind: _Behind) -> tuple[Ints, Ints]:
    """Return for each collective the compute nodes that need its result."""
    needed: list[set[int]] = [set() for _ in problem.collectives]
    for k, node in enumerate(problem.compute_order):
        for before in problem.predecessors[node]:
            for c in behind[before][1]:
                needed[c].add(k)
    return _csr(needed)


def _touched(
    problem: Problem,
    storages: list[tuple[int, _Behind]],
    compute_index: dict[int, int],
    num_compute: int,
) -> Touched:
    begin, nodes = _csr(
        [set().union(*(compute_order for compute_order, _ in touching)) for _, touching in storages]
    )
    births = [problem.storages[s].birth for s, _ in storages]
    user_begin, users = _csr(
        {compute_index[u] for u in problem.storages[s].uses if u in compute_index}
        for s, _ in storages
    )
    return Touched(
        begin=begin,
        nodes=nodes,
        user_begin=user_begin,
        users=users,
        birth=np.array(
            [compute_index.get(birth, num_compute + 1) for birth in births], dtype=np.int64
        ),
        from_beginning=np.array([birth < 0 for birth in births], dtype=np.bool_),
    )


def _csr(rows: Iterable[set[int]]) -> tuple[Ints, Ints]:
    ordered = [sorted(row) for row in rows]
    begin = np.zeros(len(ordered) + 1, dtype=np.int64)
    begin[1:] = np.cumsum([len(row) for row in ordered])
    return begin, np.array([value for row in ordered for value in row], dtype=np.int64)


def _extremes(place: Ints, begin: Ints, nodes: Ints, of: np.ufunc, empty: int) -> Ints:
    """Return the least or greatest place among the nodes of each row; ``empty`` for a row without
    any.
    """
    result = np.full(len(begin) - 1, empty, dtype=np.int64)
    some = begin[1:] > begin[:-1]
    if some.any():
        result[some] = of.reduceat(place[nodes], begin[:-1][some])
    return result
