"""Two chains of collectives that do not depend on each other, on one compute stream.

In every order all compute between two collectives of one chain runs between them, and meanwhile
the other chain may compute or wait. So each chain is a row of *stages* of compute, each with a
transfer behind it, and two chains are a small scheduling problem of their own. It is solved
exactly, with three things made easier than they are, so that its value is a bound (V9):

- compute may stop and go on at any tick;
- all other work of the compute stream and all other transfers take no time;
- the launch of a collective waits for the gathers before it, by its head (V1), and no other node.

A stage that is begun runs until it ends, or until a transfer of the other chain ends: with both
chains ready, to run one of them in full first is never worse. The only choices are which chain runs
where both could, and whether a launch goes before or behind the next one of the other chain on the
same stream. A *label* is a state after a number of launches; of two labels with the same stages
done, one that is at most as large in every entry makes the other needless.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import le

import numpy as np

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Bools
from apsched.solver.bounds.any_order.chain import between, way_through
from apsched.solver.bounds.any_order.items import Items
from apsched.solver.bounds.any_order.jobs import Ends, Loose
from apsched.solver.bounds.step_time import TimeBound

_FEW = 8
"""Labels for each number of launches, in the search for a limit."""
_MOST = 1_000
"""Labels with the same stages done, of which the graphs of models have less than a hundred; with
more there is no bound of this kind.
"""

_Label = tuple[int, ...]
"""The time; of each chain the compute left in its stage; of each chain when its transfer ends; when
each stream is free.
"""
_Done = tuple[int, int, int]
"""Stages done of each chain, and the chain whose launch is held back, or -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """Of one chain, n launches and n + 1 stages of compute."""

    work_ticks: tuple[int, ...]
    """(n + 1,) compute before each launch, the launch included, and behind the last one."""
    head_ticks: tuple[int, ...]
    """(n,) the earliest begin of each transfer."""
    transfer_ticks: tuple[int, ...]
    stream: tuple[int, ...]

    def left_ticks(self) -> tuple[int, ...]:
        """Return for each stage all compute of those behind it."""
        behind = np.cumsum(np.array(self.work_ticks)[::-1])[::-1] - np.array(self.work_ticks)
        return tuple(behind.tolist())


def two_chains_bound(instance: Instance, loose: Loose, ends: Ends) -> TimeBound | None:
    """Return (V9), or ``None`` for a problem without two chains that have collectives on the
    path.
    """
    chains = instance.problem.chains
    if max(chains, default=0) != 1:
        return None
    stages = [_stages(instance, loose, ends, chain) for chain in (0, 1)]
    if stages[0] is None or stages[1] is None:
        return None
    ticks = _Search((stages[0], stages[1])).value()
    return None if ticks is None else TimeBound(ticks=ticks, source=BoundSource.TWO_CHAINS)


def _stages(instance: Instance, loose: Loose, ends: Ends, chain: int) -> _Stages | None:
    """Return the collectives of ``chain`` that are alone in a launch on its longest way, and the
    compute of ``chain`` between them; ``None`` where it has none.
    """
    problem, items = instance.problem, loose.items
    of_chain = np.array(problem.chains) == chain
    starts = np.array([c.start for c in problem.collectives], dtype=np.int64)
    alone = loose.on_path & ~instance.arrays.bucketable & of_chain[starts]
    if not alone.any():
        return None
    number = np.full(len(items), -1, dtype=np.int64)
    number[items.of_collective] = np.where(alone, np.arange(len(starts)), -1)
    way = way_through(loose, items.of_collective[alone])
    way = way[number[way] >= 0]
    collectives = number[way]
    captured = np.array(problem.captured_order, dtype=np.int64)
    work = items.spread(
        np.where(of_chain[captured], loose.compute_ticks, 0), np.zeros(len(starts), np.int64)
    )
    launch = loose.work.launch[collectives]
    gaps = between(items.before_begin, items.before_list, np.zeros_like(work), work, way)
    backwards = items.backwards()
    first = work[::-1][_behind(backwards, len(items) - 1 - int(way[0]))].sum()
    last = work[_behind(items, int(way[-1]))].sum()
    return _Stages(
        work_ticks=(*(np.array([first, *gaps]) + launch).tolist(), int(last)),
        head_ticks=tuple((ends.head[collectives] + launch).tolist()),
        transfer_ticks=tuple(loose.work.transfer[collectives].tolist()),
        stream=tuple(loose.stream[collectives].tolist()),
    )


def _behind(items: Items, item: int) -> Bools:
    """Return which items follow ``item``."""
    follows = np.zeros(len(items), np.bool_)
    follows[item] = True
    for later in range(item + 1, len(items)):
        row = slice(items.before_begin[later], items.before_begin[later + 1])
        follows[later] = follows[items.before_list[row]].any()
    follows[item] = False
    return follows


class _Search:
    """The labels of two chains, by the number of launches behind them."""

    def __init__(self, stages: tuple[_Stages, _Stages]) -> None:
        self._stages = stages
        self._left = [of_chain.left_ticks() for of_chain in stages]
        self._streams = sorted({s for of_chain in stages for s in of_chain.stream})
        self._ends: list[int] = []

    def value(self) -> int | None:
        """Return the least time in which both chains end; ``None`` for too many labels."""
        return self._least(self._least(None, _FEW), None)

    def _least(self, limit: int | None, most: int | None) -> int | None:
        """Return the least end; of labels that cannot end within ``limit``, and of all but ``most``
        for each number of launches, none goes on. ``None`` for too many labels.
        """
        self._ends = []
        first = (0, *(s.work_ticks[0] for s in self._stages), 0, 0, *(0 for _ in self._streams))
        num_launches = sum(len(s.transfer_ticks) for s in self._stages)
        levels: list[dict[_Done, list[_Label]]] = [
            defaultdict(list) for _ in range(num_launches + 1)
        ]
        levels[0][0, 0, -1].append(first)
        for level in range(num_launches + 1):
            if most is None and max(map(len, levels[level].values()), default=0) > _MOST:
                return None
            reached = {done: undominated(labels) for done, labels in levels[level].items()}
            levels[level] = {}
            ranked = sorted(
                (self._at_least(done, label), done, label)
                for done, labels in reached.items()
                for label in labels
            )
            for ticks, done, label in ranked[:most]:
                if limit is None or ticks <= limit:
                    for behind, after in self._next(done, label):
                        levels[behind[0] + behind[1]][behind].append(after)
        return min(self._ends)

    def _at_least(self, done: _Done, label: _Label) -> int:
        """Return the least end from ``label``: all compute that is left, one after the other."""
        left = (self._left[k][min(done[k], len(self._left[k]) - 1)] for k in (0, 1))
        return label[0] + label[1] + label[2] + sum(left)

    def _next(self, done: _Done, label: _Label) -> Iterator[tuple[_Done, _Label]]:
        """Yield the labels behind the next launch; where none is left, note the end."""
        held = done[2]
        open_ends = [label]
        while open_ends:
            now, *state = open_ends.pop()
            left, there, free = state[:2], state[2:4], state[4:]
            going = [k for k in (0, 1) if k != held and self._goes_on(done, k, left)]
            ready = [k for k in going if there[k] <= now]
            if not going:
                self._ends.append(max(now, *there))
                continue
            if not ready:
                open_ends.append((min(there[k] for k in going), *state))
                continue
            room = min((there[k] for k in going if k not in ready), default=None)
            for k in ready:
                ran = left[k] if room is None else min(left[k], room - now)
                rest = [ticks - ran if j == k else ticks for j, ticks in enumerate(left)]
                if rest[k] or done[k] == len(self._stages[k].transfer_ticks):
                    open_ends.append((now + ran, *rest, *there, *free))
                else:
                    yield from self._launched(done, k, (now + ran, *rest, *there, *free))

    def _goes_on(self, done: _Done, chain: int, left: list[int]) -> bool:
        """Whether ``chain`` has a launch or compute left."""
        return done[chain] < len(self._stages[chain].transfer_ticks) or left[chain] > 0

    def _launched(self, done: _Done, chain: int, label: _Label) -> Iterator[tuple[_Done, _Label]]:
        """Yield the labels where the stage of ``chain`` has ended: with its launch, with its launch
        and the one that was held back, and with its launch held back.
        """
        held, other = done[2], 1 - chain
        launched = self._launch(done, chain, label)
        if held < 0 or self._may_wait(launched[0], other, chain):
            yield launched
        if held >= 0:
            yield self._launch((launched[0][0], launched[0][1], -1), other, launched[1])
        elif self._may_wait(done, chain, other):
            yield from self._next((done[0], done[1], chain), label)

    def _may_wait(self, done: _Done, chain: int, other: int) -> bool:
        """Whether the next launch of ``chain`` may go behind one of ``other`` on its stream."""
        stream = self._stages[chain].stream[done[chain]]
        return stream in self._stages[other].stream[done[other] :]

    def _launch(self, done: _Done, chain: int, label: _Label) -> tuple[_Done, _Label]:
        """Return ``label`` behind the next launch of ``chain``."""
        stages, number = self._stages[chain], done[chain]
        now, *state = label
        left, there, free = state[:2], state[2:4], state[4:]
        stream = self._streams.index(stages.stream[number])
        begin = max(now, stages.head_ticks[number], free[stream])
        free[stream] = there[chain] = begin + stages.transfer_ticks[number]
        left[chain] = stages.work_ticks[number + 1]
        behind = (done[0] + (chain == 0), done[1] + (chain == 1), done[2])
        # A time that is over delays nothing: it counts as now.
        return behind, (now, *left, *(max(now, t) for t in there), *(max(now, t) for t in free))


def undominated(labels: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the labels of which no other one is at most as large in every entry, ascending."""
    kept: list[tuple[int, ...]] = []
    for label in sorted(set(labels)):
        if not any(all(map(le, other, label)) for other in kept):
            kept.append(label)
    return kept
