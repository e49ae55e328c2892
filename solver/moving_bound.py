"""Lower bounds on step time that hold where compute may move; proofs in ``docs/formulation.md``.

Nothing is known of the order of the compute but what depends on what, and how far a node may move. Begins of items from the beginning
and, with time reversed, from the end are the heads and tails of jobs: compute and launches on the compute stream, transfers on the
streams of their groups.

    (V1)  begin of an item >= t + sum of what its ancestors that cannot begin before t take on any one stream; >= end of what is before it
    (V2)  a node comes before another if it is its ancestor, or was captured more than twice the cap on moves before it
    (V3)  step time >= min head + sum of ticks + min tail of any jobs that share a stream
    (V4)  jobs of the compute stream: compute; of collectives their least launch, copies, prologue and epilogue
    (V5)  jobs of a group's stream: transfers at the least rate of any bucket, or alone
    (V6)  the rows of the LP: all of the compute stream, and the sets for which (V3) is longest, weighed against each other

What a memory cap forces in the order as captured it need not force in another one, so none of that enters.
"""

from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.problem import Problem
from apsched.solver.bounds import TimeBound, least_launch, least_work, work_bound
from apsched.solver.compact import ALL_GATHER, Bools, Compact, Ints
from apsched.solver.lp_bound import WEIGHED, Costs, Row, costs_of, decidable, lagrangian
from apsched.solver.moving_heads import Ticks, earliest
from apsched.solver.moving_items import Items, items_of
from apsched.solver.one_machine import critical_jobs, one_machine
from apsched.solver.orders import Orders

_MOST_GATES = 384
"""Collectives, beside those on the path, whose ancestors are looked at together."""
_AS_GOOD = 5e-4
"""Of several bounds that differ by less than this share, the first says what the best of them rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The least of what each collective takes, alone or in a bucket: (C,) ticks."""

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
class _Jobs:
    """Jobs that share a stream: (n,) each."""

    head: Ints
    tail: Ints
    ticks: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Heads and tails of spine nodes and of collectives: a collective begins with its launch and ends with its transfer."""

    head_of_spine: Ints
    tail_of_spine: Ints
    head: Ints
    tail: Ints


def moving_bound(problem: Problem, compact: Compact, orders: Orders, caps: Caps) -> TimeBound:
    """Return the best bound on any schedule in which compute moves within ``caps``; ``compact`` is as captured."""
    spine_ticks = compact.spine_ticks
    if not len(compact.kind):
        return TimeBound(ticks=int(spine_ticks.sum()), source="compute")
    costs = costs_of(problem, compact, caps)
    work = _least(problem, compact, costs)
    items = items_of(compact, orders)
    span = _span(compact, items, work, caps)
    between = "compute between collectives on the path" if compact.on_path.any() else "critical path"
    longest = max(
        int((span.head_of_spine + spine_ticks + span.tail_of_spine).max(initial=0)),
        int((span.head + work.launch + work.transfer + span.tail).max()),
    )
    everything = int(spine_ticks.sum()) + work_bound(problem, compact, least_work(problem, compact), np.arange(len(compact.kind)))
    found = [TimeBound(ticks=longest, source=between), TimeBound(ticks=everything, source="compute")]
    jobs = _compute_jobs(compact, span, work)
    found.append(TimeBound(ticks=one_machine(jobs.head, jobs.tail, jobs.ticks), source="compute"))
    for stream, mine in _streams(compact, span, work).items():
        found.append(TimeBound(ticks=one_machine(mine.head, mine.tail, mine.ticks), source=f"stream of group {problem.streams[stream]}"))
    found.append(TimeBound(ticks=lagrangian(_rows(compact, span, work, costs)), source=WEIGHED))
    best = max(bound.ticks for bound in found)
    return TimeBound(ticks=best, source=next(bound.source for bound in found if bound.ticks >= best * (1 - _AS_GOOD)))


def _least(problem: Problem, compact: Compact, costs: Costs) -> _Work:
    own = [[sum(problem.duration_ticks[n] for n in nodes) for nodes in (c.prologue, c.cast[:1], c.epilogue)] for c in problem.collectives]
    prologue, cast, epilogue = np.array(own, dtype=np.int64).reshape(-1, 3).T
    copies = (costs.copy_in + costs.copy_out).astype(np.int64)
    main = np.where(compact.bucketable, np.minimum(compact.launch_ticks, copies), compact.launch_ticks)
    rate = np.where(compact.bucketable, np.minimum(costs.rate, costs.transfer), costs.transfer)
    return _Work(
        prologue=np.where(compact.bucketable, prologue - cast, prologue),
        launch=least_launch(problem, compact),
        main=main,
        epilogue=epilogue,
        transfer=compact.transfer_ticks,
        load=rate.astype(np.int64),
    )


def _span(compact: Compact, items: Items, work: _Work, caps: Caps) -> _Span:
    num_spine = len(compact.spine_ticks)
    gates = np.zeros(len(items), np.bool_)
    gates[items.of_collective] = _gates(compact)
    max_move = num_spine if caps.max_compute_move is None else caps.max_compute_move

    def begins(of: Items, first: Ints, marked: Bools) -> Ints:
        nothing = np.zeros(num_spine, np.int64)
        ticks = Ticks(
            first=of.spread(nothing, first),
            span=of.spread(compact.spine_ticks, work.launch + work.transfer),
            work=of.spread(compact.spine_ticks, work.main),
            load=of.spread(nothing, work.load),
            stream=of.spread(nothing, compact.stream),
        )
        return earliest(of.before_begin, of.before_list, of.place, ticks, compact.num_streams, marked, max_move)

    head = begins(items, work.prologue, gates)
    tail = begins(items.backwards(), work.epilogue, gates[::-1].copy())[::-1]
    return _Span(
        head_of_spine=head[items.of_spine],
        tail_of_spine=tail[items.of_spine],
        head=head[items.of_collective],
        tail=tail[items.of_collective],
    )


def _gates(compact: Compact) -> Bools:
    """Return the collectives on the path, and a sample of the others."""
    gates = compact.on_path.copy()
    others = np.nonzero(~gates)[0]
    gates[others[np.unique(np.linspace(0, len(others) - 1, min(len(others), _MOST_GATES)).round().astype(np.int64))]] = True
    return gates


def _tail_of_launch(compact: Compact, span: _Span, work: _Work) -> Ints:
    """Return what follows the work of each collective on the compute stream: of a gather that may be the copy-out."""
    tail: Ints = np.where(compact.kind == ALL_GATHER, span.tail, span.tail + work.transfer)
    return tail


def _compute_jobs(compact: Compact, span: _Span, work: _Work) -> _Jobs:
    """Return what the compute stream runs: (V4)."""
    nothing = np.zeros(len(compact.kind), np.int64)
    ends = span.head + work.launch + work.transfer
    return _Jobs(
        head=np.concatenate((span.head_of_spine, nothing, span.head, ends)),
        tail=np.concatenate((span.tail_of_spine, span.tail + work.transfer, _tail_of_launch(compact, span, work), nothing)),
        ticks=np.concatenate((compact.spine_ticks, work.prologue, work.main, work.epilogue)),
    )


def _streams(compact: Compact, span: _Span, work: _Work) -> dict[int, _Jobs]:
    """Return the transfers of each group's stream: (V5)."""
    here = {stream: np.nonzero(compact.stream == stream)[0] for stream in range(compact.num_streams)}
    return {
        stream: _Jobs(head=(span.head + work.launch)[mine], tail=span.tail[mine], ticks=work.load[mine])
        for stream, mine in here.items()
        if len(mine)
    }


def _rows(compact: Compact, span: _Span, work: _Work, costs: Costs) -> list[Row]:
    """Return the rows of the LP, (V6): of each stream all of it, and the set for which it is longest."""
    spine_ticks, copies = compact.spine_ticks, costs.copy_in + costs.copy_out
    whole_alone = costs.launch + costs.prologue + costs.epilogue
    rows = [Row(float(spine_ticks.sum()), whole_alone, copies + costs.prologue_shared + costs.epilogue)]
    after = _tail_of_launch(compact, span, work)
    jobs = _compute_jobs(compact, span, work)
    _, head, tail = critical_jobs(jobs.head, jobs.tail, jobs.ticks)
    spine = (span.head_of_spine >= head) & (span.tail_of_spine >= tail)
    mine = (span.head >= head) & (after >= tail)
    rows.append(Row(float(head + tail + spine_ticks[spine].sum()), np.where(mine, costs.launch, 0.0), np.where(mine, copies, 0.0)))
    for stream, jobs in _streams(compact, span, work).items():
        here = compact.stream == stream
        _, head, tail = critical_jobs(jobs.head, jobs.tail, jobs.ticks)
        mine = here & (span.head + work.launch >= head) & (span.tail >= tail)
        rows.append(Row(float(head + tail), np.where(mine, costs.transfer, 0.0), np.where(mine, costs.rate, 0.0)))
        least_head, least_tail = int(jobs.head.min()), int(jobs.tail.min())
        rows.append(Row(float(least_head + least_tail), np.where(here, costs.transfer, 0.0), np.where(here, costs.rate, 0.0)))
    return decidable(compact, rows)
