"""Exhaustive search over the design's decisions, for small problems. Shares no code with the
solver.

What is enumerated: every partition of the bucketable collectives of each key into buckets (any
subsets), flat or, where that has a price, coalesced, and for each of these every order of the
decisions: starts, waits, copy-ins, copy-outs, among each other and between the compute nodes, which
keep the order as captured. The rest follows from the decisions (the normal form of the solver):

- inputs come first, the output last;
- the prologue of a collective stands right before its start or, in a flat bucket, right before the
  copy-in;
- views, and the epilogue of a collective, come as soon as what they depend on is there, smallest
  node first.

The order of the payload changes neither time nor memory, so members are listed in ascending order.

The search walks over sets of done steps. What is alive or in flight after a set is a function of
the set; what is left of the past is the time of the compute stream, of each group's stream, of the
ends still to be waited for, and the peak. Of two ways to the same set, one that is no worse in all
of these is enough. A limit on time that starts at a bound and is raised keeps the walk short.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, compress, product

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from tests.helpers.oracle_steps import Move, Steps


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best schedule: least step time, then least peak, then fewest launches."""

    step_time_ticks: int
    peak_memory_bytes: int
    num_launches: int
    schedule: Schedule

    @property
    def value(self) -> tuple[int, int, int]:
        return self.step_time_ticks, self.peak_memory_bytes, self.num_launches


def best_schedule(problem: Problem, caps: Caps, *, copy_in_apart: bool = True) -> Optimum | None:
    """Return the optimum within ``caps``, or None where no schedule keeps them.

    With ``copy_in_apart`` false a copy-in stands right before its start, which may cost where a cap
    holds the start back.
    """
    walks = [
        _Walk(problem, caps, buckets, copy_in_apart, forms)
        for buckets, forms in _launches(problem, caps)
    ]
    if not walks:
        return None  # no partition keeps the plan
    walks.sort(key=lambda walk: walk.least_time)
    limit = walks[0].least_time
    while True:
        best: tuple[tuple[int, int, int], Schedule] | None = None
        pruned = False
        for walk in walks:
            if walk.least_time > limit:
                pruned = True
                continue
            found, cut = walk.fastest(
                limit if best is None else best[0][0], None if best is None else best[0]
            )
            pruned |= cut
            best = found or best
        if best is not None:
            return _confirmed(problem, caps, *best)
        if not pruned:
            return None
        limit += max(1, limit // 8)


def least_memory(problem: Problem, caps: Caps, *, copy_in_apart: bool = True) -> int | None:
    """Return the least peak that a schedule within the other caps can have, or None where none
    keeps them.
    """
    walks = (
        _Walk(problem, caps, buckets, copy_in_apart, forms)
        for buckets, forms in _launches(problem, caps)
    )
    peaks = [walk.least_peak() for walk in walks]
    return min((peak for peak in peaks if peak is not None), default=None)


def _launches(
    problem: Problem, caps: Caps
) -> Iterator[tuple[tuple[tuple[int, ...], ...], frozenset[int]]]:
    """Yield every set of buckets with every choice of those that are coalesced."""
    for buckets in partitions(problem, caps):
        free = [b for b, members in enumerate(buckets) if _may_be_coalesced(problem, members)]
        for chosen in product((False, True), repeat=len(free)):
            yield buckets, frozenset(compress(free, chosen))


def _may_be_coalesced(problem: Problem, members: tuple[int, ...]) -> bool:
    priced = problem.keys[problem.collectives[members[0]].key].coalesced_member_ticks is not None
    return priced and not any(problem.collectives[c].restriction.flat for c in members)


def orders_within(problem: Problem, max_move: int | None) -> Iterator[tuple[int, ...]]:
    """Yield all orders of the compute that the dependences and the cap allow."""
    compute_order = problem.captured_order
    ancestors: list[set[int]] = []
    for before in problem.predecessors:
        ancestors.append(set(before).union(*(ancestors[p] for p in before)))

    def extend(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == len(compute_order):
            yield done
        for k, node in enumerate(compute_order):
            if node in done or (max_move is not None and abs(len(done) - k) > max_move):
                continue
            if all(other in done or other not in ancestors[node] for other in compute_order):
                yield from extend((*done, node))

    return extend(())


def partitions(problem: Problem, caps: Caps) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every set of buckets (two or more members each) that the caps on bytes and span
    allow.
    """
    free = [c for c, collective in enumerate(problem.collectives) if collective.may_share]
    yield from (
        buckets for buckets in _partitions(problem, caps, free) if _as_planned(problem, buckets)
    )


def _partitions(
    problem: Problem, caps: Caps, free: list[int]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not free:
        yield ()
        return
    first, rest = free[0], free[1:]
    mates = [c for c in rest if problem.collectives[c].key == problem.collectives[first].key]
    for size in range(len(mates) + 1):
        for chosen in combinations(mates, size):
            bucket = (first, *chosen)
            if size and not _allowed(problem, caps, bucket):
                continue
            for others in _partitions(problem, caps, [c for c in rest if c not in chosen]):
                yield (bucket, *others) if size else others


def _allowed(problem: Problem, caps: Caps, bucket: tuple[int, ...]) -> bool:
    members = [problem.collectives[c] for c in bucket]
    starts = [m.start for m in members]
    too_big = (
        caps.bucket_cap_bytes is not None
        and sum(m.size_bytes for m in members) > caps.bucket_cap_bytes
    )
    too_wide = caps.max_topo_span is not None and max(starts) - min(starts) > caps.max_topo_span
    return not too_big and not too_wide


def _as_planned(problem: Problem, buckets: tuple[tuple[int, ...], ...]) -> bool:
    """Whether groups of the plan are together, and closed ones by themselves."""
    groups: dict[int, set[int]] = {}
    for c, collective in enumerate(problem.collectives):
        if collective.restriction.group is not None:
            groups.setdefault(collective.restriction.group, set()).add(c)
    for group in groups.values():
        touched = [set(bucket) for bucket in buckets if group & set(bucket)]
        if not (len(group) == 1 and not touched) and not (
            len(touched) == 1 and group <= touched[0]
        ):
            return False
        if (
            touched
            and any(problem.collectives[c].restriction.closed for c in group)
            and touched[0] != group
        ):
            return False
    return True


def _confirmed(
    problem: Problem, caps: Caps, value: tuple[int, int, int], schedule: Schedule
) -> Optimum:
    timeline = simulate(problem, schedule)
    assert not verify(problem, schedule, caps), verify(problem, schedule, caps)
    assert value == (timeline.step_time_ticks, timeline.peak_memory_bytes, timeline.num_launches), (
        value,
        timeline,
    )
    return Optimum(*value, schedule)


class _Walk(Steps):
    """The search with the buckets given."""

    def __init__(
        self,
        problem: Problem,
        caps: Caps,
        buckets: tuple[tuple[int, ...], ...],
        copy_in_apart: bool,
        coalesced: frozenset[int],
    ) -> None:
        super().__init__(problem, caps, buckets, copy_in_apart, coalesced)
        self.least_time = self._rest(self.first.after)((0, 0, *(0 for _ in problem.streams)))

    def least_peak(self) -> int | None:
        """Return the least peak, whatever the time and the cap on memory."""
        level = {self.first.after: self.first.peak}
        for _ in self.blocks:
            following: dict[int, int] = {}
            for done, peak in level.items():
                for _, move in self.moves(done):
                    worst = max(peak, move.peak)
                    if worst < following.get(move.after, worst + 1):
                        following[move.after] = worst
            level = following
        return level.get(self.end)

    def fastest(
        self, limit: int, to_beat: tuple[int, int, int] | None
    ) -> tuple[tuple[tuple[int, int, int], Schedule] | None, bool]:
        """Return the best schedule no slower than ``limit`` that beats ``to_beat``, and whether
        ``limit`` cut anything.

        A label is (t, peak, time each stream is free, ends still to be waited for by start step);
        every time is lifted to t, since what ended in the past is the same as what ends now.
        """
        cap = self.caps.memory_cap_bytes
        streams = len(self.problem.streams)
        cut = False
        if cap is not None and self.first.peak > cap:
            return None, False
        root: _Label = (
            (self.first.ticks_before, self.first.peak, *(self.first.ticks_before,) * streams),
            (),
            None,
            self.first.steps,
        )
        level: dict[int, list[_Label]] = {self.first.after: [root]}
        for _ in self.blocks:
            following: dict[int, list[_Label]] = {}
            for done, labels in level.items():
                for k, move in self.moves(done):
                    if cap is not None and move.peak > cap:
                        continue
                    rest = self._rest(move.after)
                    for label in labels:
                        child = self._child(label, k, move)
                        ends = rest(child[0])
                        if ends > limit:
                            cut = True
                        elif to_beat is None or (ends, child[0][1], len(self.launches)) < to_beat:
                            _insert(following.setdefault(move.after, []), child)
            level = following
        finished = [
            ((max(label[0][0], *label[0][2:]), label[0][1], len(self.launches)), label)
            for label in level.get(self.end, ())
        ]
        if not finished:
            return None, cut
        value, label = min(finished, key=lambda f: f[0])
        return (value, self._schedule(label)), cut

    def _rest(self, done: int) -> Callable[[tuple[int, ...]], int]:
        """Return a function from the times after ``done`` to a bound on the end."""
        work = sum(ticks for k, ticks in enumerate(self.ticks) if not done >> k & 1)
        coming = [0] * len(self.problem.streams)
        for start, launch in self.launches.items():
            if not done >> start & 1:
                coming[launch.stream] += launch.ticks

        def bound(times: tuple[int, ...]) -> int:
            return max(times[0] + work, *(times[2 + s] + ticks for s, ticks in enumerate(coming)))

        return bound

    def _child(self, label: "_Label", k: int, move: Move) -> "_Label":
        times, ends, _, _ = label
        t, peak, frees = times[0] + move.ticks_before, max(times[1], move.peak), list(times[2:])
        flying = dict(ends)
        if (launch := self.launches.get(k)) is not None:
            frees[launch.stream] = flying[k] = max(t, frees[launch.stream]) + launch.ticks
        elif (start := self.launch_of_wait.get(k)) is not None:
            t = max(t, flying.pop(start))
        t += move.ticks_after
        lifted = tuple((start, max(end, t)) for start, end in sorted(flying.items()))
        return (t, peak, *(max(free, t) for free in frees)), lifted, label, move.steps

    def _schedule(self, label: "_Label | None") -> Schedule:
        blocks = []
        while label is not None:
            blocks.append(label[3])
            label = label[2]
        steps = tuple(self.steps[k] for block in reversed(blocks) for k in block)
        buckets = tuple(
            Bucket(members, coalesced=b in self.coalesced) for b, members in enumerate(self.buckets)
        )
        return Schedule(buckets=buckets, steps=steps)


_Label = tuple[tuple[int, ...], tuple[tuple[int, int], ...], "_Label | None", tuple[int, ...]]


def _insert(front: list[_Label], new: _Label) -> None:
    """Add ``new`` to labels none of which is as good as another in everything."""
    if any(_no_worse(old, new) for old in front):
        return
    front[:] = [old for old in front if not _no_worse(new, old)]
    front.append(new)


def _no_worse(a: _Label, b: _Label) -> bool:
    return all(x <= y for x, y in zip(a[0], b[0], strict=True)) and all(
        x[1] <= y[1] for x, y in zip(a[1], b[1], strict=True)
    )
