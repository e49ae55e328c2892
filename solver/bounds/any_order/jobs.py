"""Heads, tails and jobs of a program whose compute may stand in any order that the dependences
allow.
"""

from dataclasses import dataclass

import numpy as np

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.bounds.any_order.heads import Ticks, earliest
from apsched.solver.bounds.any_order.items import Items
from apsched.solver.bounds.any_order.one_machine import one_machine
from apsched.solver.bounds.step_time import TimeBound

_MOST_GATES = 384
"""Collectives, beside those on the path, whose ancestors are looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least work of each collective, alone or in a bucket: (C,) ticks."""

    prologue: Ints
    launch: Ints
    """On the compute stream before the transfer."""
    main: Ints
    """On the compute stream without prologue and epilogue."""
    epilogue: Ints
    transfer: Ints
    """By itself; no bucket that it is in takes less."""
    load: Ints
    """Its share of a transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loose:
    """Facts about a program whose compute has no order of its own."""

    items: Items
    compute_ticks: Ints
    """(m,)"""
    work: Work
    stream: Ints
    """(C,) with the names of ``streams``."""
    on_path: Bools
    copied_out: Bools
    """(C,) in a bucket, its work on the compute stream may end behind its transfer."""
    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Jobs that share a stream: (n,) each."""

    head: Ints
    tail: Ints
    ticks: Ints

    def bound(self, source: str) -> TimeBound:
        """Return the times of their stream."""
        return TimeBound(ticks=one_machine(self.head, self.tail, self.ticks), source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Heads and tails of compute nodes and of collectives: a collective begins with its launch and
    ends with its transfer.
    """

    head_of_compute: Ints
    tail_of_compute: Ints
    head: Ints
    tail: Ints


def ends_of(loose: Loose, max_move: int | None) -> Ends:
    """Return heads and tails where compute nodes move by at most ``max_move`` places; None for
    anywhere.
    """
    num_compute, items, work = len(loose.compute_ticks), loose.items, loose.work
    gates = np.zeros(len(items), np.bool_)
    gates[items.of_collective] = _gates(loose.on_path)

    def begins(of: Items, first: Ints, marked: Bools) -> Ints:
        nothing = np.zeros(num_compute, np.int64)
        ticks = Ticks(
            first=of.spread(nothing, first),
            span=of.spread(loose.compute_ticks, work.launch + work.transfer),
            work=of.spread(loose.compute_ticks, work.main),
            load=of.spread(nothing, work.load),
            stream=of.spread(nothing, loose.stream),
        )
        most = num_compute if max_move is None else max_move
        return earliest(
            of.before_begin, of.before_list, of.place, ticks, len(loose.streams), marked, most
        )

    head = begins(items, work.prologue, gates)
    tail = begins(items.backwards(), work.epilogue, gates[::-1].copy())[::-1]
    return Ends(
        head_of_compute=head[items.of_compute],
        tail_of_compute=tail[items.of_compute],
        head=head[items.of_collective],
        tail=tail[items.of_collective],
    )


def _gates(on_path: Bools) -> Bools:
    """Return the collectives on the path, and a sample of the others."""
    gates = on_path.copy()
    others = np.nonzero(~gates)[0]
    gates[
        others[
            np.unique(
                np.linspace(0, len(others) - 1, min(len(others), _MOST_GATES))
                .round()
                .astype(np.int64)
            )
        ]
    ] = True
    return gates


def bounds_of(loose: Loose, ends: Ends) -> list[TimeBound]:
    """Return the longest path through any item, and the load of each stream."""
    between = BoundSource.BETWEEN_COLLECTIVES if loose.on_path.any() else BoundSource.CRITICAL_PATH
    through_compute = ends.head_of_compute + loose.compute_ticks + ends.tail_of_compute
    through = ends.head + loose.work.launch + loose.work.transfer + ends.tail
    longest = max(int(through_compute.max(initial=0)), int(through.max(initial=0)))
    found = [
        TimeBound(ticks=longest, source=between),
        compute_jobs(loose, ends).bound(BoundSource.COMPUTE),
    ]
    return found + [
        jobs.bound(f"stream of group {loose.streams[stream]}")
        for stream, jobs in jobs_of_streams(loose, ends).items()
    ]


def tail_of_main(loose: Loose, ends: Ends) -> Ints:
    """Return the tail of the work of each collective on the compute stream: after a copy-out the
    transfer does not follow.
    """
    tail: Ints = np.where(loose.copied_out, ends.tail, ends.tail + loose.work.transfer)
    return tail


def compute_jobs(loose: Loose, ends: Ends) -> Jobs:
    """Return the jobs of the compute stream: (V4)."""
    work = loose.work
    nothing = np.zeros(len(work.main), np.int64)
    end = ends.head + work.launch + work.transfer
    return Jobs(
        head=np.concatenate((ends.head_of_compute, nothing, ends.head, end)),
        tail=np.concatenate(
            (ends.tail_of_compute, ends.tail + work.transfer, tail_of_main(loose, ends), nothing)
        ),
        ticks=np.concatenate((loose.compute_ticks, work.prologue, work.main, work.epilogue)),
    )


def jobs_of_streams(loose: Loose, ends: Ends) -> dict[int, Jobs]:
    """Return the transfers of each group's stream: (V5)."""
    of_stream = {
        stream: np.nonzero(loose.stream == stream)[0] for stream in range(len(loose.streams))
    }
    return {
        stream: Jobs(
            head=(ends.head + loose.work.launch)[collectives],
            tail=ends.tail[collectives],
            ticks=loose.work.load[collectives],
        )
        for stream, collectives in of_stream.items()
        if len(collectives)
    }
