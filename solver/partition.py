"""Partitions of the collectives into buckets, priced: what a program launches."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.problem import Problem
from apsched.solver.compact import ALL_GATHER, Compact, Ints
from apsched.units import allocated_bytes

Members = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Buckets as arrays; a collective alone is a bucket of one."""

    buckets: tuple[Members, ...]
    bucket_of: Ints
    """(C,)"""
    member_begin: Ints
    member_list: Ints
    launch_ticks: Ints
    """(B,) on the compute stream."""
    transfer_ticks: Ints
    """(B,) on the group's stream."""
    copy_in_ticks: Ints
    """(B,) 0 for a bucket of one."""
    in_buffer_bytes: Ints
    """(B,) concatenated input as allocated; 0 for a bucket of one."""
    out_buffer_bytes: Ints
    """(B,) gathered or reduced buffer as allocated; 0 for a bucket of one."""
    ready_gap: Ints
    """(B,)"""
    need_gap: Ints
    """(B,)"""


class Pricer:
    """Figures of a bucket from its members, remembered."""

    def __init__(self, problem: Problem, compact: Compact) -> None:
        self.problem = problem
        self.compact = compact
        self._known: dict[Members, tuple[int, ...]] = {}
        self.chain_depth = _chain_depths(compact)

    def figures(self, members: Members) -> tuple[int, ...]:
        """Return launch, transfer and copy-in ticks, buffer bytes in and out, ready gap and need gap of a bucket."""
        known = self._known.get(members)
        if known is None:
            known = self._known[members] = self._price(members)
        return known

    def _price(self, members: Members) -> tuple[int, ...]:
        compact, problem = self.compact, self.problem
        ready = max(int(compact.ready_gap[c]) for c in members)
        need = min(int(compact.need_gap[c]) for c in members)
        first = members[0]
        if len(members) == 1:
            return int(compact.launch_ticks[first]), int(compact.transfer_ticks[first]), 0, 0, 0, ready, need
        cs = [problem.collectives[c] for c in members]
        key = problem.keys[cs[0].key]
        inputs, outputs = sum(c.input_bytes for c in cs), sum(c.output_bytes for c in cs)
        return (
            key.launch_ticks,
            key.price(sum(c.size_bytes for c in cs)),
            problem.copy_price(sum(c.copied_bytes for c in cs)),
            allocated_bytes(inputs),
            allocated_bytes(outputs),
            ready,
            need,
        )

    def partition(self, buckets: Iterable[Members]) -> Partition:
        """Return ``buckets``, which must cover every collective once, as arrays."""
        buckets = tuple(buckets)
        rows = np.array([self.figures(b) for b in buckets], dtype=np.int64).reshape(len(buckets), 7)
        bucket_of = np.empty(len(self.compact.kind), dtype=np.int64)
        begin = np.zeros(len(buckets) + 1, dtype=np.int64)
        np.cumsum([len(b) for b in buckets], out=begin[1:])
        members = np.fromiter((c for b in buckets for c in b), dtype=np.int64, count=int(begin[-1]))
        bucket_of[members] = np.repeat(np.arange(len(buckets)), np.diff(begin))
        launch, transfer, copy_in, inputs, outputs, ready, need = (np.ascontiguousarray(rows[:, i]) for i in range(7))
        return Partition(
            buckets=buckets,
            bucket_of=bucket_of,
            member_begin=begin,
            member_list=members,
            launch_ticks=launch,
            transfer_ticks=transfer,
            copy_in_ticks=copy_in,
            in_buffer_bytes=inputs,
            out_buffer_bytes=outputs,
            ready_gap=ready,
            need_gap=need,
        )

    def allowed(self, members: Members, caps: Caps) -> bool:
        """Whether ``members`` may share a launch: one key, bucketable, ready before needed, within the caps on bytes and span.

        Chains of collectives are not looked at: see ``same_depth``.
        """
        if len(members) == 1:
            return True
        compact = self.compact
        if any(not compact.bucketable[c] for c in members) or len({int(compact.key[c]) for c in members}) > 1:
            return False
        ready, need = self.figures(members)[5:7]
        if ready > need:
            return False
        if caps.bucket_cap_bytes is not None and sum(int(compact.size_bytes[c]) for c in members) > caps.bucket_cap_bytes:
            return False
        ranks = [int(compact.start_rank[c]) for c in members]
        return caps.max_topo_span is None or max(ranks) - min(ranks) <= caps.max_topo_span

    def same_depth(self, members: Members) -> bool:
        """Whether ``members`` wait for equally long chains of other collectives: then no two buckets can wait for each other."""
        return all(self.chain_depth[c] == self.chain_depth[members[0]] for c in members)


def _chain_depths(compact: Compact) -> list[int]:
    """Return for each collective how many others must be waited for, one after the other, before its launch."""
    depth: list[int] = []
    for c in range(len(compact.kind)):  # ordered by start, so those before it are known
        before = compact.after_list[compact.after_begin[c] : compact.after_begin[c + 1]]
        depth.append(1 + max((depth[d] for d in before), default=-1))
    return depth


def singles(compact: Compact) -> list[Members]:
    """Return the partition without buckets."""
    return [(c,) for c in range(len(compact.kind))]


def need_order(compact: Compact, members: Iterable[int]) -> list[int]:
    """Return collectives in the order in which they become urgent: gathers by need, reductions by readiness."""
    return sorted(members, key=lambda c: (_when(compact, c), c))


def _when(compact: Compact, c: int) -> int:
    return int(compact.need_gap[c]) if compact.kind[c] == ALL_GATHER else int(compact.ready_gap[c])
