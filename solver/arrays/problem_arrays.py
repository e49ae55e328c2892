"""The problem in the form that search works on: a fixed compute order of compute nodes, and units
that move between them.

Normal form of a schedule (search and model choose among such schedules; the rest follows):

- The compute order is the compute nodes in captured order. Slot g is the place before compute node
  g; slot m is the place after the last.
- The launch unit of a bucket is the prologues of its members, the copy-in (if it has two members or
  more), and the start.
- The wait unit is the wait, then the epilogues of members that need no copy-out. The copy-out unit
  of a member is its copy-out and its epilogue.
- A view stands right after the last node that it depends on, where it keeps nothing alive that
  would not be alive anyway.

An *attached node* is a node of such a unit: prologue, start, wait or epilogue. Storages that only
inputs, compute nodes and the output touch have fixed lives: they are a baseline. The lives of the
others depend on the places of the attached nodes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from apsched.solver.arrays.contention import ContentionArrays, shares

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KIND_CODES = {
    CollectiveKind.ALL_GATHER: 0,
    CollectiveKind.REDUCE_SCATTER: 1,
    CollectiveKind.ALL_REDUCE: 2,
}
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, OTHER_KIND = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class ProblemArrays:
    """Arrays over compute nodes (m of them), collectives, attached nodes and storages. CSR pairs
    end in ``_begin`` and ``_list``.

    No slots: derived values are computed once, and again by ``dataclasses.replace``.
    """

    compute_ticks: Ints
    """(m,) durations."""
    base_slot_bytes: Ints
    """(m+1,) fixed storages alive in slot g."""
    base_compute_bytes: Ints
    """(m+1,) fixed storages alive at compute node k; entry m is the output."""
    kind: Ints
    """(C,) kind code."""
    key: Ints
    stream: Ints
    size_bytes: Ints
    input_bytes: Ints
    output_bytes: Ints
    coalesces: Bools
    """(C,) a bucket may carry it without a buffer, and that has a price."""
    member_ticks: Ints
    """(C,) ticks that it adds to the transfer of such a bucket."""
    launch_ticks: Ints
    """(C,) price of launching it alone, on the compute stream."""
    bucket_launch_ticks: Ints
    """(C,) price of launching a bucket of its key."""
    transfer_ticks: Ints
    """(C,) alone, on its stream."""
    copy_out_ticks: Ints
    on_path: Bools
    bucketable: Bools
    start_rank: Ints
    ready_slot: Ints
    """(C,) first slot where its launch may stand, as far as compute nodes decide."""
    need_slot: Ints
    """(C,) last slot where its wait may stand; m where only outputs need it."""
    after_begin: Ints
    after_list: Ints
    """Collectives whose wait must come before its launch."""
    attached_of_start: Ints
    attached_of_wait: Ints
    collective_of_wait: Ints
    """(F,) collective whose wait the attached node is; -1 for other attached nodes."""
    prologue_begin: Ints
    prologue_list: Ints
    """Attached nodes of its prologue."""
    copied_bytes: Ints
    """(C,) bytes that it adds to a copy-in."""
    cast_attached: Ints
    """(C,) the attached node of its cast, which a bucket has not; -1 for none."""
    epilogue_begin: Ints
    epilogue_list: Ints
    attached_ticks: Ints
    """(F,) duration of prologue and epilogue attached nodes."""
    storage_bytes: Ints
    """(S,) storages whose life depends on attached nodes."""
    storage_birth_compute: Ints
    """(S,) compute node that allocates it; -1 where it is there from the beginning or an attached
    node allocates it.
    """
    storage_birth_attached: Ints
    storage_last_compute: Ints
    """(S,) last compute node that touches it (m: the output); -1 for none."""
    touch_begin: Ints
    touch_list: Ints
    """Attached nodes that touch it."""
    input_storage: Ints
    """(C,) index of its input among these storages; -1 where that is kept."""
    output_storage: Ints
    group: Ints
    """(C,) group of the plan whose members share one bucket; -1 for none."""
    closed: Bools
    """(C,) no other collective joins its group."""
    launch_last: Ints
    """(C,) last slot where the plan allows its launch; m without a rule. The first is part of
    ``ready_slot``.
    """
    wait_first: Ints
    """(C,) first slot where the plan lets its wait stand."""
    wait_last: Ints
    """(C,) last slot where the plan lets its wait stand."""
    kept_bytes: int
    num_streams: int
    shares: ContentionArrays | None
    """Contention of streams; ``None``: none."""

    @cached_property
    def time_before(self) -> Ints:
        """(m+1,) ticks of the compute nodes before each one; entry m is all of them."""
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(self.compute_ticks)))

    @cached_property
    def time_after(self) -> Ints:
        """(m+1,) ticks of each compute node and all behind it; entry m is 0."""
        after: Ints = self.time_before[-1] - self.time_before
        return after

    @cached_property
    def prologue_ticks(self) -> Ints:
        """(C,)"""
        return _sums(self.attached_ticks, self.prologue_begin, self.prologue_list)

    @cached_property
    def epilogue_ticks(self) -> Ints:
        """(C,)"""
        return _sums(self.attached_ticks, self.epilogue_begin, self.epilogue_list)

    @cached_property
    def cast_ticks(self) -> Ints:
        """(C,) part of the prologue that a bucket has not."""
        return np.where(self.cast_attached >= 0, self.attached_ticks[self.cast_attached], 0)

    @cached_property
    def own_work(self) -> Ints:
        """(C,) ticks of prologue and epilogue."""
        return self.prologue_ticks + self.epilogue_ticks

    @cached_property
    def gathers(self) -> Bools:
        """(C,) gathers that may move and that the compute order needs."""
        mask: Bools = (
            (self.kind == ALL_GATHER) & ~self.on_path & (self.need_slot < len(self.compute_ticks))
        )
        return mask

    @cached_property
    def reductions(self) -> Bools:
        """(C,) reductions that may move and that only outputs need."""
        mask: Bools = (
            (self.kind != ALL_GATHER) & ~self.on_path & (self.need_slot >= len(self.compute_ticks))
        )
        return mask

    @cached_property
    def late_ready_slot(self) -> Ints:
        """(C,) first slot where its launch may stand: a collective that waits for another one is
        not ready before that one.
        """
        ready = self.ready_slot.copy()
        for c in range(len(ready)):  # in the order of starts: what it waits for comes before it
            for d in self.awaited_by(c):
                ready[c] = max(ready[c], ready[d])
        return ready

    def awaited_by(self, c: int) -> Ints:
        """Return the collectives whose wait must come before the launch of ``c``."""
        return self.after_list[self.after_begin[c] : self.after_begin[c + 1]]

    def prologue_of(self, c: int) -> Ints:
        """Return the attached nodes of the prologue of ``c``."""
        return self.prologue_list[self.prologue_begin[c] : self.prologue_begin[c + 1]]

    def epilogue_of(self, c: int) -> Ints:
        """Return the attached nodes of the epilogue of ``c``."""
        return self.epilogue_list[self.epilogue_begin[c] : self.epilogue_begin[c + 1]]

    def touches_of(self, s: int) -> Ints:
        """Return the attached nodes that touch storage ``s``."""
        return self.touch_list[self.touch_begin[s] : self.touch_begin[s + 1]]


@dataclass(slots=True)
class _Hosts:
    """For each node where it stands: the last compute node and the attached nodes that it follows
    at once.
    """

    compute_order: list[int]
    attached: list[frozenset[int]]


def problem_arrays(problem: Problem) -> ProblemArrays:
    """Return ``problem`` in compact form."""
    compute_index = {node: k for k, node in enumerate(problem.compute_order)}
    attached_index = _attached_index(problem)
    hosts = _hosts(problem, compute_index, attached_index)
    ready, need, after = _places(problem, hosts, compute_index, attached_index)
    storages = _storages(problem, hosts)
    moving = [
        s for s, life in enumerate(storages) if not (problem.storages[s].kept or _is_fixed(life))
    ]
    base_slot, base_compute = _baseline(problem, storages, set(moving), len(problem.compute_order))
    touch_begin, touch_list = _csr([sorted(storages[s][2]) for s in moving])
    after_begin, after_list = _csr(after)
    births = [problem.storages[s].birth for s in moving]
    return ProblemArrays(
        compute_ticks=_array(problem.duration_ticks[node] for node in problem.compute_order),
        base_slot_bytes=base_slot,
        base_compute_bytes=base_compute,
        ready_slot=_array(
            max(r, c.restriction.start_slots[0] if c.restriction.start_slots else 0)
            for r, c in zip(ready, problem.collectives, strict=True)
        ),
        need_slot=_array(need),
        after_begin=after_begin,
        after_list=after_list,
        storage_bytes=_array(problem.storages[s].size_bytes for s in moving),
        storage_birth_compute=_array(compute_index.get(birth, -1) for birth in births),
        storage_birth_attached=_array(attached_index.get(birth, -1) for birth in births),
        storage_last_compute=_array(storages[s][1] for s in moving),
        touch_begin=touch_begin,
        touch_list=touch_list,
        **_collectives(problem, {s: i for i, s in enumerate(moving)}),
        **_attached(problem, attached_index),
        **_restrictions(problem),
        kept_bytes=problem.kept_bytes,
        num_streams=len(problem.streams),
        shares=shares(problem),
    )


def _collectives(problem: Problem, index_of_storage: dict[int, int]) -> dict[str, Any]:
    """Return the properties and costs of collectives, each in a launch of its own."""
    cs = problem.collectives
    keys = [problem.keys[c.key] for c in cs]
    return {
        "kind": _array(KIND_CODES.get(k.kind, OTHER_KIND) for k in keys),
        "key": _array(c.key for c in cs),
        "stream": _array(k.stream for k in keys),
        "size_bytes": _array(c.size_bytes for c in cs),
        "input_bytes": _array(c.input_bytes for c in cs),
        "output_bytes": _array(c.output_bytes for c in cs),
        "copied_bytes": _array(c.copied_bytes for c in cs),
        "coalesces": _bools(
            c.may_be_coalesced and k.coalesced_member_ticks is not None
            for c, k in zip(cs, keys, strict=True)
        ),
        "member_ticks": _array(k.coalesced_member_ticks or 0 for k in keys),
        "launch_ticks": _array(problem.duration_ticks[c.start] for c in cs),
        "bucket_launch_ticks": _array(k.launch_ticks for k in keys),
        "transfer_ticks": _array(k.price(c.size_bytes) for c, k in zip(cs, keys, strict=True)),
        "copy_out_ticks": _array(problem.copy_price(c.output_bytes) for c in cs),
        "on_path": _bools(c.on_path for c in cs),
        "bucketable": _bools(c.may_share for c in cs),
        "start_rank": _array(c.start for c in cs),
        "input_storage": _array(index_of_storage.get(c.input_storage, -1) for c in cs),
        "output_storage": _array(index_of_storage.get(c.output_storage, -1) for c in cs),
    }


def _attached(problem: Problem, index: dict[int, int]) -> dict[str, Any]:
    """Return the attached nodes, by their ``index``: of which collective each one is."""
    cs = problem.collectives
    nodes = sorted(index, key=index.__getitem__)
    collective_of_wait = {c.wait: i for i, c in enumerate(cs)}
    prologue_begin, prologue_list = _csr([[index[n] for n in c.prologue] for c in cs])
    epilogue_begin, epilogue_list = _csr([[index[n] for n in c.epilogue] for c in cs])
    return {
        "attached_ticks": _array(
            problem.duration_ticks[n] if problem.kinds[n] is NodeKind.COMPUTE else 0 for n in nodes
        ),
        "attached_of_start": _array(index[c.start] for c in cs),
        "attached_of_wait": _array(index[c.wait] for c in cs),
        "collective_of_wait": _array(collective_of_wait.get(n, -1) for n in nodes),
        "cast_attached": _array(index[c.cast[0]] if c.cast else -1 for c in cs),
        "prologue_begin": prologue_begin,
        "prologue_list": prologue_list,
        "epilogue_begin": epilogue_begin,
        "epilogue_list": epilogue_list,
    }


def _restrictions(problem: Problem) -> dict[str, Any]:
    restrictions, num_compute = (
        [c.restriction for c in problem.collectives],
        len(problem.compute_order),
    )
    wait_slots = [r.wait_slots or (0, num_compute) for r in restrictions]
    return {
        "group": _array(-1 if r.group is None else r.group for r in restrictions),
        "closed": _bools(r.closed for r in restrictions),
        "launch_last": _array(
            r.start_slots[1] if r.start_slots else num_compute for r in restrictions
        ),
        "wait_first": _array(first for first, _ in wait_slots),
        "wait_last": _array(last for _, last in wait_slots),
    }


def _attached_index(problem: Problem) -> dict[int, int]:
    nodes = sorted(
        n for c in problem.collectives for n in (*c.prologue, c.start, c.wait, *c.epilogue)
    )
    return {node: f for f, node in enumerate(dict.fromkeys(nodes))}


def _hosts(
    problem: Problem, compute_index: dict[int, int], attached_index: dict[int, int]
) -> _Hosts:
    hosts = _Hosts(compute_order=[], attached=[])
    for node in range(problem.num_nodes):
        if node in compute_index:
            hosts.compute_order.append(compute_index[node])
            hosts.attached.append(frozenset())
        elif node in attached_index:
            hosts.compute_order.append(-1)
            hosts.attached.append(frozenset((attached_index[node],)))
        elif problem.kinds[node] is NodeKind.OUTPUT:
            hosts.compute_order.append(len(compute_index))
            hosts.attached.append(frozenset())
        else:
            before = problem.predecessors[node]
            hosts.compute_order.append(max((hosts.compute_order[p] for p in before), default=-1))
            hosts.attached.append(frozenset().union(*(hosts.attached[p] for p in before)))
    return hosts


def _places(
    problem: Problem, hosts: _Hosts, compute_index: dict[int, int], attached_index: dict[int, int]
) -> tuple[list[int], list[int], list[list[int]]]:
    """Return for each collective its ready slot, its need slot, and the collectives whose wait
    comes before its launch.
    """
    owner: dict[int, int] = {}  # wait and epilogue attached nodes -> their collective
    collective_of: dict[int, int] = {}  # any attached node -> its collective
    for c, collective in enumerate(problem.collectives):
        for node in (collective.wait, *collective.epilogue):
            owner[attached_index[node]] = c
        for node in (*collective.prologue, collective.start, collective.wait, *collective.epilogue):
            collective_of[attached_index[node]] = c
    num_compute = len(problem.compute_order)
    ready, need = [], [num_compute] * len(problem.collectives)
    after: list[list[int]] = []
    for c, collective in enumerate(problem.collectives):
        before = {
            p
            for node in (*collective.prologue, collective.start)
            for p in problem.predecessors[node]
        }
        ready.append(1 + max((hosts.compute_order[p] for p in before), default=-1))
        attached = set().union(*(hosts.attached[p] for p in before)) if before else set()
        after.append(sorted({owner[f] for f in attached if f in owner and owner[f] != c}))
    for k, node in enumerate(problem.compute_order):
        for p in problem.predecessors[node]:
            for f in hosts.attached[p]:
                need[collective_of[f]] = min(need[collective_of[f]], k)
    for c in reversed(
        range(len(after))
    ):  # what another collective takes further is needed where that one's result is
        for d in after[c]:
            need[d] = min(need[d], need[c])
    return ready, need, after


def _storages(problem: Problem, hosts: _Hosts) -> list[tuple[int, int, frozenset[int], bool]]:
    """Return (first compute node, last compute node, attached nodes, alive from the beginning) of
    every storage; -1 for no compute node.
    """
    result = []
    for storage in problem.storages:
        compute_order = [
            hosts.compute_order[u] for u in storage.uses if hosts.compute_order[u] >= 0
        ]
        attached = frozenset().union(*(hosts.attached[u] for u in storage.uses))
        result.append(
            (
                min(compute_order, default=-1),
                max(compute_order, default=-1),
                attached,
                storage.birth < 0,
            )
        )
    return result


def _is_fixed(life: tuple[int, int, frozenset[int], bool]) -> bool:
    """Whether a storage lives from slot to slot whatever launches and waits do; an input that
    nothing uses is gone before slot 0.
    """
    _, last, attached, from_beginning = life
    return not attached and not (from_beginning and last < 0)


def _baseline(
    problem: Problem,
    storages: list[tuple[int, int, frozenset[int], bool]],
    moving: set[int],
    num_compute: int,
) -> tuple[Ints, Ints]:
    """Return the bytes of storages with fixed lives in each slot and at each compute node."""
    slot = np.zeros(num_compute + 3, dtype=np.int64)
    at = np.zeros(num_compute + 3, dtype=np.int64)
    for s, (first, last, _, from_beginning) in enumerate(storages):
        storage = problem.storages[s]
        if storage.kept or s in moving:
            continue
        begin = 0 if from_beginning else first
        if not from_beginning and first < 0:
            continue
        # alive in the slots between its first and last node; from the beginning: in slot 0 too
        slot[0 if from_beginning else begin + 1] += storage.size_bytes
        slot[last + 1] -= storage.size_bytes
        if last >= 0:
            at[begin] += storage.size_bytes
            at[last + 1] -= storage.size_bytes
    return np.cumsum(slot)[: num_compute + 1], np.cumsum(at)[: num_compute + 1]


def _sums(values: Ints, begin: Ints, entries: Ints) -> Ints:
    """Return for each row of a CSR pair the sum of the values that it lists."""
    total = np.concatenate(([0], np.cumsum(values[entries])))
    sums: Ints = total[begin[1:]] - total[begin[:-1]]
    return sums


def _csr(lists: list[list[int]]) -> tuple[Ints, Ints]:
    begin = np.zeros(len(lists) + 1, dtype=np.int64)
    begin[1:] = np.cumsum([len(values) for values in lists])
    return begin, _array(v for values in lists for v in values)


def _array(values: object) -> Ints:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]


def _bools(values: Iterable[bool]) -> Bools:
    return np.array(list(values), dtype=np.bool_)
