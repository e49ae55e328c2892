"""Partitions of the collectives into buckets, with prices: the launches of a program."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.bucket_prices import (
    COPY_IN_TICKS,
    FLAT,
    IN_BUFFER,
    LAUNCH_TICKS,
    NEED_SLOT,
    OUT_BUFFER,
    READY_SLOT,
    TRANSFER_TICKS,
    Tables,
    bucket_figures,
    members_of,
    tables,
    with_places,
)
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Bools, Ints

Members = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Buckets as arrays; a collective alone is a bucket of one."""

    buckets: tuple[Members, ...]
    bucket_of: Ints
    """(C,)"""
    member_begin: Ints
    member_list: Ints
    flat: Bools
    """(B,) it has several members, and a buffer."""
    launch_ticks: Ints
    """(B,) on the compute stream."""
    transfer_ticks: Ints
    """(B,) on the group's stream."""
    copy_in_ticks: Ints
    """(B,) 0 where it is not flat."""
    in_buffer_bytes: Ints
    """(B,) concatenated input as allocated; 0 where it is not flat."""
    out_buffer_bytes: Ints
    """(B,) gathered or reduced buffer as allocated; 0 where it is not flat."""
    ready_slot: Ints
    """(B,)"""
    need_slot: Ints
    """(B,)"""

    @property
    def coalesced(self) -> Bools:
        """(B,) it has several members, and no buffer."""
        mask: Bools = (np.diff(self.member_begin) > 1) & ~self.flat
        return mask


class Pricer:
    """Figures of buckets from their members."""

    def __init__(self, instance: Instance, like: "Pricer | None" = None) -> None:
        """``like`` is a pricer of the same problem under another order of its compute."""
        arrays = instance.arrays
        self.instance = instance
        self.problem = instance.problem
        self.arrays = arrays
        self.tables: Tables = tables(instance) if like is None else with_places(like.tables, arrays)
        self._none = np.zeros(len(arrays.kind), dtype=np.bool_)

    def figures(self, members: Members) -> tuple[int, ...]:
        """Return the figures of a bucket, flat where it has several members."""
        begin = np.array([0, len(members)], dtype=np.int64)
        return tuple(
            bucket_figures(self.tables, begin, np.array(members, dtype=np.int64), self._none)[
                0
            ].tolist()
        )

    def partition(self, buckets: Iterable[Members], coalesced: Bools | None = None) -> Partition:
        """Return ``buckets``, which must cover every collective once, as arrays.

        ``coalesced`` (C,) says of the first member of a bucket whether that is coalesced, where it
        may be.
        """
        buckets = tuple(buckets)
        bucket_of = np.empty(len(self.arrays.kind), dtype=np.int64)
        begin = np.zeros(len(buckets) + 1, dtype=np.int64)
        np.cumsum([len(b) for b in buckets], out=begin[1:])
        members = np.fromiter((c for b in buckets for c in b), dtype=np.int64, count=int(begin[-1]))
        bucket_of[members] = np.repeat(np.arange(len(buckets)), np.diff(begin))
        return self._partition(buckets, bucket_of, begin, members, coalesced)

    def partition_of(self, labels: Ints, coalesced: Bools | None = None) -> Partition:
        """Return the partition in which collectives with one label (the index of one of them) share
        a bucket.
        """
        bucket_of, begin, members = members_of(labels)
        buckets = (
            tuple(tuple(run.tolist()) for run in np.split(members, begin[1:-1]))
            if len(members)
            else ()
        )
        return self._partition(buckets, bucket_of, begin, members, coalesced)

    def allowed(self, members: Members, caps: Caps) -> bool:
        """Whether ``members`` may share a launch: one key, bucketable, ready before needed, within
        the caps on bytes and span.

        Chains of collectives are not looked at: see ``apsched.solver.arrays.bucket_prices.legal``.
        """
        if len(members) == 1:
            return True
        arrays = self.arrays
        if (
            any(not arrays.bucketable[c] for c in members)
            or len({int(arrays.key[c]) for c in members}) > 1
        ):
            return False
        if max(int(arrays.ready_slot[c]) for c in members) > min(
            int(min(arrays.need_slot[c], arrays.launch_last[c])) for c in members
        ):
            return False
        if arrays.closed[list(members)].any() and len({int(arrays.group[c]) for c in members}) > 1:
            return False
        if (
            caps.bucket_cap_bytes is not None
            and sum(int(arrays.size_bytes[c]) for c in members) > caps.bucket_cap_bytes
        ):
            return False
        ranks = [int(arrays.start_rank[c]) for c in members]
        return caps.max_topo_span is None or max(ranks) - min(ranks) <= caps.max_topo_span

    def _partition(
        self,
        buckets: tuple[Members, ...],
        bucket_of: Ints,
        begin: Ints,
        members: Ints,
        coalesced: Bools | None,
    ) -> Partition:
        coalesced = self._none if coalesced is None else coalesced
        figures = np.ascontiguousarray(bucket_figures(self.tables, begin, members, coalesced).T)
        return Partition(
            buckets=buckets,
            bucket_of=bucket_of,
            member_begin=begin,
            member_list=members,
            flat=figures[FLAT] == 1,
            launch_ticks=figures[LAUNCH_TICKS],
            transfer_ticks=figures[TRANSFER_TICKS],
            copy_in_ticks=figures[COPY_IN_TICKS],
            in_buffer_bytes=figures[IN_BUFFER],
            out_buffer_bytes=figures[OUT_BUFFER],
            ready_slot=figures[READY_SLOT],
            need_slot=figures[NEED_SLOT],
        )
