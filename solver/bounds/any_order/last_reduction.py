"""Reductions that end after the last compute node, in every order of the compute: one that is
ready late, against all others of its stream.

Compute that a later order leaves to the end, to run beside the transfer of the last reduction,
makes gradients whose own transfers then follow that one on its stream. Either way it costs: before
the last launch its time on the compute stream, behind it that of its reduction.

Compute may also run where the compute stream would stall for a collective on the path. One node
runs beside one such transfer at most, as compute on the path stands between two of them: a node
that takes longer than a transfer hides no more than that. Compute at the end is missing there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Bools, Ints, ProblemArrays
from apsched.solver.bounds.any_order.chain import levels, on_path_of
from apsched.solver.bounds.any_order.heads import mark_ancestors
from apsched.solver.bounds.any_order.jobs import Ends, Loose
from apsched.solver.bounds.linear_program import Costs
from apsched.solver.bounds.step_time import TimeBound

_MOST_LAST = 12
"""Reductions tried as the last of each stream."""
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Weights tried of the busiest other stream."""
_STALL_WEIGHTS = np.linspace(0.0, 1.0, 65)
"""Weights tried of the stalls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stalls:
    """Transfers on the longest way, one behind the other, that compute may wait for."""

    chain: Ints
    """(S,) their items."""
    transfer_ticks: Ints
    """(S,)"""
    of_compute: Ints
    """(m,) most of a compute node that is beside one of them."""
    of_main: Ints
    """(C,) most of the launch and the copies of a collective that is beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    """Ticks at no weight of the stalls, and the ticks that go with their full weight."""

    ticks: Ints
    less: Ints

    def at(self, weights: np.ndarray) -> np.ndarray:
        """Return the ticks at each of ``weights``, one row for each."""
        found: np.ndarray = self.ticks - np.multiply.outer(weights, self.less)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """One reduction as the last of its stream."""

    stream: int
    transfer_ticks: float
    before: _Weighed
    """(1,) all that runs before its transfer; the transfers of stalls count."""
    on_stream: _Weighed
    """(A,) for each other reduction of the stream that may come later the work for it alone."""
    behind_on_stream: Ints
    """(A,) least transfer of it behind the last one."""
    elsewhere: _Weighed
    """(B,) the same of another stream."""
    behind_elsewhere: Ints
    run: Bools
    """(m,) compute nodes that run before its transfer."""

    def ticks(self, share: float) -> tuple[float, float]:
        """Return (V8), with ``share`` the weight of the other stream, at the best weight of the
        stalls; and that weight.
        """
        weights = _STALL_WEIGHTS if self.before.less.any() else _STALL_WEIGHTS[:1]
        found = (
            self.before.at(weights).sum(axis=1)
            + (1 - share) * (self.transfer_ticks - 1)
            + np.minimum(self.on_stream.at(weights), (1 - share) * self.behind_on_stream).sum(
                axis=1
            )
            + np.minimum(self.elsewhere.at(weights), share * self.behind_elsewhere).sum(axis=1)
        )
        best = int(found.argmax())
        return float(found[best]), float(weights[best])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The bound of a reduction as the last of its stream. It rises by ``share`` of more work before
    a compute node that runs before its transfer; the rest may be beside stalls.
    """

    bound: TimeBound
    run: Bools
    """(m,) the compute nodes before its transfer."""
    share: float


def tail_bound(
    arrays: ProblemArrays,
    loose: Loose,
    ends: Ends,
    costs: Costs,
    max_move: int | None,
    way: Ints,
) -> Tail:
    """Return the best bound over reductions that may be the last of their stream, (V8); ``way`` is
    the longest one.
    """
    nothing = TimeBound(ticks=0, source=BoundSource.COMPUTE)
    best = Tail(bound=nothing, run=np.zeros(len(loose.compute_ticks), np.bool_), share=0.0)
    for last in _lasts(arrays, loose, ends, costs, max_move, _stalls(loose, way)):
        for share in _SHARES if len(last.behind_elsewhere) else (0.0,):
            ticks, stalls = last.ticks(share)
            ticks *= 1 - 1e-9
            if ticks > best.bound.ticks:
                source = f"compute + tail of group {loose.streams[last.stream]}"
                bound = TimeBound(ticks=int(ticks), source=source)
                best = Tail(bound=bound, run=last.run, share=1 - stalls)
    return best


def _stalls(loose: Loose, way: Ints) -> _Stalls:
    items = loose.items
    chain = on_path_of(loose, way)
    transfer = items.spread(np.zeros_like(loose.compute_ticks), loose.work.transfer)[chain]
    level, limit = levels(items.before_begin, items.before_list, chain)
    most = _largest_between(transfer, level + 1, limit)
    most[chain] = 0
    main = loose.work.main
    return _Stalls(
        chain=chain,
        transfer_ticks=transfer,
        of_compute=np.minimum(loose.compute_ticks, most[items.of_compute]),
        of_main=np.where(most[items.of_collective] > 0, main, 0),  # in pieces, beside several
    )


def _largest_between(values: Ints, begin: Ints, end: Ints) -> Ints:
    """Return the largest of ``values[begin:end]`` for each pair of places; 0 where there is none.
    Two ranges of a power of two cover each.
    """
    rows = [values]  # row k: the largest of 2**k values from each place on
    while 2 ** len(rows) <= len(values):
        half = 2 ** (len(rows) - 1)
        rows.append(np.maximum(rows[-1][:-half], rows[-1][half:]))
    found = np.zeros(len(begin), dtype=np.int64)
    for k, row in enumerate(rows):
        these = np.nonzero((end - begin) // 2**k == 1)[0]
        found[these] = np.maximum(row[begin[these]], row[end[these] - 2**k])
    return found


def _lasts(
    arrays: ProblemArrays,
    loose: Loose,
    ends: Ends,
    costs: Costs,
    max_move: int | None,
    stalls: _Stalls,
) -> Iterator[_Last]:
    """Yield the reductions of each stream that can end last."""
    items = loose.items
    span = items.spread(loose.compute_ticks, loose.work.launch + loose.work.transfer)
    before, follows = np.zeros(len(items), np.bool_), np.zeros(len(items), np.int64)
    most = len(loose.compute_ticks) if max_move is None else max_move
    for pair in _pairs(arrays, loose, costs):
        end = (ends.head + loose.work.transfer)[pair.on_stream]
        late = pair.on_stream[np.argsort(-end, kind="stable")]
        for last in late[:_MOST_LAST].tolist():
            mark_ancestors(
                items.before_begin,
                items.before_list,
                items.place,
                span,
                int(items.of_collective[last]),
                most,
                before,
                follows,
            )
            yield _last(loose, stalls, pair, before, last, float(costs.transfer[last]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The reductions of a stream, and those of the busiest other stream."""

    stream: int
    on_stream: Ints
    elsewhere: Ints
    owner: Ints
    """(m,) of each compute node one of them that it comes before; -1 for none."""
    behind: Ints
    """(C,) least transfer behind another reduction of the stream."""


def _pairs(arrays: ProblemArrays, loose: Loose, costs: Costs) -> Iterator[_Pair]:
    items = loose.items
    reductions = np.nonzero((arrays.kind != ALL_GATHER) & ~loose.on_path)[0]
    stream_of = loose.stream[reductions]
    behind = np.minimum(
        costs.transfer, np.where(arrays.bucketable, costs.slope, costs.transfer)
    ).astype(np.int64)
    load = np.bincount(stream_of, weights=behind[reductions], minlength=len(loose.streams))
    busiest = [s for s in np.argsort(-load, kind="stable").tolist() if load[s] > 0]
    for stream in np.unique(stream_of).tolist():
        on_stream = reductions[stream_of == stream]
        others = [s for s in busiest if s != stream][:1]
        elsewhere = reductions[np.isin(stream_of, others)]
        owner = owners(
            items.before_begin, items.before_list, items.of_collective, on_stream, elsewhere
        )[items.of_compute]
        yield _Pair(
            stream=stream, on_stream=on_stream, elsewhere=elsewhere, owner=owner, behind=behind
        )


def _last(
    loose: Loose, stalls: _Stalls, pair: _Pair, before: Bools, last: int, transfer_ticks: float
) -> _Last:
    """Return the reduction ``last`` of ``pair``; the items ``before`` come before it."""
    compute_ticks, main, owner = loose.compute_ticks, loose.work.main, pair.owner
    run, done = before[loose.items.of_compute], before[loose.items.of_collective]
    own = ~run & (owner >= 0)
    sooner, less = (
        np.bincount(owner[own], weights=ticks[own], minlength=len(main)).astype(np.int64) + of_main
        for ticks, of_main in ((compute_ticks, main), (stalls.of_compute, stalls.of_main))
    )
    launched = done | (np.arange(len(done)) == last)
    ahead = compute_ticks[run].sum() + main[launched].sum()
    beside = stalls.of_compute[run].sum() + stalls.of_main[launched].sum()
    waits = stalls.transfer_ticks[before[stalls.chain]].sum()
    later, other = pair.on_stream[~launched[pair.on_stream]], pair.elsewhere[~done[pair.elsewhere]]
    return _Last(
        stream=pair.stream,
        transfer_ticks=transfer_ticks,
        before=_Weighed(ticks=np.array([ahead]), less=np.array([beside - waits])),
        on_stream=_Weighed(ticks=sooner[later], less=less[later]),
        behind_on_stream=pair.behind[later],
        elsewhere=_Weighed(ticks=sooner[other], less=less[other]),
        behind_elsewhere=pair.behind[other],
        run=run,
    )


@compiled
def owners(
    before_begin: Ints,
    before_list: Ints,
    of_collective: Ints,
    first_choice: Ints,
    second_choice: Ints,
) -> Ints:
    """Return for each item a collective of ``first_choice``, or else of ``second_choice``, that it
    is or comes before; -1 for none.
    """
    owner = np.full(len(before_begin) - 1, -1, np.int64)
    rank = np.zeros(len(of_collective), np.int64)
    rank[first_choice], rank[second_choice] = 2, 1
    collective = np.full(len(owner), -1, np.int64)
    for c in range(len(of_collective)):
        if rank[c] > 0:
            collective[of_collective[c]] = c
    for j in range(len(owner) - 1, -1, -1):
        if collective[j] >= 0:
            owner[j] = collective[j]
        if owner[j] < 0:
            continue
        for q in range(before_begin[j], before_begin[j + 1]):
            p = before_list[q]
            if owner[p] < 0 or rank[owner[p]] < rank[owner[j]]:
                owner[p] = owner[j]
    return owner
