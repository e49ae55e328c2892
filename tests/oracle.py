"""Exhaustive search over the design's decisions, for small problems. Shares no code with the solver.

What is enumerated: every partition of the bucketable collectives of each key into buckets (any subsets), and for each partition
every order of the decisions: starts, waits, copy-ins, copy-outs, among each other and between the compute nodes, which keep the order as
captured. The rest follows from the decisions (the normal form of the solver):

- inputs come first, the output last;
- the prologue of a collective stands right before its start or, in a bucket, right before the copy-in;
- views, and the epilogue of a collective, come as soon as what they depend on is there, smallest node first.

The order of the payload changes neither time nor memory, so members are listed in ascending order.

The search walks over sets of done steps. What is alive or in flight after a set is a function of the set; what is left of the past is
the time of the compute stream, of each group's stream, of the ends still to be waited for, and the peak. Of two ways to the same set,
one that is no worse in all of these is enough. A limit on time that starts at a bound and is raised keeps the walk short.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from apsched.config import Caps
from apsched.graph.dag import NodeKind
from apsched.problem import Problem
from apsched.schedule import Bucket, Schedule, Step, StepKind
from apsched.simulate import simulate
from apsched.verify import verify

_N, _IN, _START, _WAIT, _OUT = StepKind.NODE, StepKind.COPY_IN, StepKind.START, StepKind.WAIT, StepKind.COPY_OUT


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


def best_schedule(problem: Problem, caps: Caps) -> Optimum | None:
    """Return the optimum within ``caps``, or None where no schedule keeps them."""
    walks = [_Walk(problem, caps, buckets) for buckets in partitions(problem, caps)]
    walks = sorted((w for w in walks if w.possible), key=lambda w: w.least_time)
    if not walks:
        return None
    limit = walks[0].least_time
    while True:
        best: tuple[tuple[int, int, int], Schedule] | None = None
        pruned = False
        for walk in walks:
            if walk.least_time > limit:
                pruned = True
                continue
            found, cut = walk.fastest(limit if best is None else best[0][0], None if best is None else best[0])
            pruned |= cut
            best = found or best
        if best is not None:
            return _confirmed(problem, caps, *best)
        if not pruned:
            return None
        limit += max(1, limit // 8)


def least_memory(problem: Problem, caps: Caps) -> int | None:
    """Return the least peak that a schedule within the other caps can have, or None where none keeps them."""
    peaks = [walk.least_peak() for buckets in partitions(problem, caps) if (walk := _Walk(problem, caps, buckets)).possible]
    return min((peak for peak in peaks if peak is not None), default=None)


def partitions(problem: Problem, caps: Caps) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every set of buckets (two or more members each) that the caps on bytes and span allow."""
    free = [c for c, collective in enumerate(problem.collectives) if collective.bucketable]
    yield from _partitions(problem, caps, free)


def _partitions(problem: Problem, caps: Caps, free: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
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
    too_big = caps.bucket_cap_bytes is not None and sum(m.size_bytes for m in members) > caps.bucket_cap_bytes
    too_wide = caps.max_topo_span is not None and max(starts) - min(starts) > caps.max_topo_span
    return not too_big and not too_wide


def _confirmed(problem: Problem, caps: Caps, value: tuple[int, int, int], schedule: Schedule) -> Optimum:
    timeline = simulate(problem, schedule)
    assert not verify(problem, schedule, caps), verify(problem, schedule, caps)
    assert value == (timeline.step_time_ticks, timeline.peak_memory_bytes, timeline.num_launches), (value, timeline)
    return Optimum(*value, schedule)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A transfer: a bucket, or a collective on its own."""

    stream: int
    ticks: int
    in_flight_bytes: int
    earliest: int
    """Spine nodes that must be done at its start, by the cap on prefetch."""


@dataclass(frozen=True, slots=True)
class _Move:
    """One decision from one set of done steps: the block of steps that it makes run."""

    after: int
    """Set of steps done afterwards."""
    steps: tuple[int, ...]
    ticks_before: int
    ticks_after: int
    peak: int


class _Walk:
    """The search with the buckets given. A set of steps is an integer, one bit each."""

    def __init__(self, problem: Problem, caps: Caps, buckets: tuple[tuple[int, ...], ...]) -> None:
        self.problem, self.caps, self.buckets = problem, caps, buckets
        self.steps = self._list_steps()
        self.bit = {step: 1 << k for k, step in enumerate(self.steps)}
        self.produced_by, self.taken_by = self._places()
        self.before = self._precedence()
        self.ticks = [self._ticks(step) for step in self.steps]
        self.launches = {self._index(start): launch for start, launch in self._launches()}
        self.launch_of_wait = {self._index(wait): self._index(start) for start, wait in self._pairs()}
        self.pieces = self._pieces()
        self.blocks = self._decisions()
        self.moves_from: dict[int, list[tuple[int, _Move]]] = {}
        everything = (1 << len(self.steps)) - 1
        self.end = everything
        self.num_launches = len(self.launches)
        first = self._run(0, [])
        self.possible = first is not None
        if first is not None:
            self.first = first
            self.least_time = self._least_end(first.after, 0, [0] * len(problem.streams))

    # ---- what the steps are

    def _list_steps(self) -> list[Step]:
        problem = self.problem
        members = {c for bucket in self.buckets for c in bucket}
        replaced = {node for c in members for node in (problem.collectives[c].start, problem.collectives[c].wait)}
        steps = [Step(_N, i) for i in range(problem.num_nodes) if i not in replaced]
        for b, bucket in enumerate(self.buckets):
            steps += [Step(_IN, b), Step(_START, b), Step(_WAIT, b)]
            if self._kind(bucket) == "all_gather":
                steps += [Step(_OUT, c) for c in bucket]
        return steps

    def _kind(self, bucket: tuple[int, ...]) -> str:
        return self.problem.keys[self.problem.collectives[bucket[0]].key].kind

    def _index(self, step: Step) -> int:
        return self.bit[step].bit_length() - 1

    def _places(self) -> tuple[list[Step], list[Step]]:
        """For each node the step after which its result is there, and the step that takes its inputs."""
        there = [Step(_N, i) for i in range(self.problem.num_nodes)]
        taken = list(there)
        for b, bucket in enumerate(self.buckets):
            for c in bucket:
                m = self.problem.collectives[c]
                taken[m.start], there[m.start] = Step(_IN, b), Step(_START, b)
                there[m.wait] = taken[m.wait] = Step(_OUT, c) if self._kind(bucket) == "all_gather" else Step(_WAIT, b)
        return there, taken

    def _precedence(self) -> list[int]:
        before = [0] * len(self.steps)

        def add(earlier: Step, later: Step) -> None:
            before[self._index(later)] |= self.bit[earlier]

        for node, predecessors in enumerate(self.problem.predecessors):
            for p in predecessors:
                add(self.produced_by[p], self.taken_by[node])
        for b, bucket in enumerate(self.buckets):
            add(Step(_IN, b), Step(_START, b))
            add(Step(_START, b), Step(_WAIT, b))
            if self._kind(bucket) == "all_gather":
                for c in bucket:
                    add(Step(_WAIT, b), Step(_OUT, c))
        spine = self.problem.spine
        for a, b in zip(spine, spine[1:], strict=False):
            add(Step(_N, a), Step(_N, b))
        return before

    def _ticks(self, step: Step) -> int:
        """Time on the compute stream; of a start its launch."""
        problem = self.problem
        match step.kind:
            case StepKind.NODE:
                return problem.duration_ticks[step.index] if problem.kinds[step.index] in (NodeKind.COMPUTE, NodeKind.START) else 0
            case StepKind.COPY_IN:
                return problem.copy_price(sum(problem.collectives[c].input_bytes for c in self.buckets[step.index]))
            case StepKind.START:
                return problem.keys[problem.collectives[self.buckets[step.index][0]].key].launch_ticks
            case StepKind.COPY_OUT:
                return problem.copy_price(problem.collectives[step.index].output_bytes)
        return 0

    def _units(self) -> Iterator[tuple[Step, Step, tuple[int, ...]]]:
        bucketed = {c for bucket in self.buckets for c in bucket}
        for c, m in enumerate(self.problem.collectives):
            if c not in bucketed:
                yield Step(_N, m.start), Step(_N, m.wait), (c,)
        for b, bucket in enumerate(self.buckets):
            yield Step(_START, b), Step(_WAIT, b), bucket

    def _pairs(self) -> Iterator[tuple[Step, Step]]:
        return ((start, wait) for start, wait, _ in self._units())

    def _launches(self) -> Iterator[tuple[Step, _Launch]]:
        place = {node: k for k, node in enumerate(self.problem.spine)}
        for start, _, members in self._units():
            collectives = [self.problem.collectives[c] for c in members]
            key = self.problem.keys[collectives[0].key]
            needed = [place[self.problem.needs[c][0]] for c in members if self.problem.needs[c]]
            yield (
                start,
                _Launch(
                    stream=key.stream,
                    ticks=key.price(sum(m.size_bytes for m in collectives)),
                    in_flight_bytes=sum(m.output_bytes for m in collectives if not m.on_path),
                    earliest=0 if self.caps.max_prefetch is None else max(needed, default=0) - self.caps.max_prefetch,
                ),
            )

    def _pieces(self) -> list[tuple[int, int, int]]:
        """(bytes, step that allocates or 0, steps that use) of every storage that is not kept, buffers included."""
        problem, members = self.problem, {c: b for b, bucket in enumerate(self.buckets) for c in bucket}
        let_go = {(problem.collectives[c].input_storage, problem.collectives[c].wait) for c in members}
        gathered = {problem.collectives[c].output_storage: c for c, b in members.items() if self._kind(self.buckets[b]) == "all_gather"}
        shared = {problem.collectives[c].output_storage: b for c, b in members.items() if self._kind(self.buckets[b]) != "all_gather"}
        pieces, shared_uses = [], [0] * len(self.buckets)
        for s, storage in enumerate(problem.storages):
            if storage.kept:
                continue
            uses = 0
            for node in storage.uses:
                if (s, node) not in let_go:
                    uses |= self.bit[self.taken_by[node]]
            if s in shared:
                shared_uses[shared[s]] |= uses
            elif s in gathered:
                pieces.append((storage.size_bytes, self.bit[Step(_OUT, gathered[s])], uses))
            else:
                pieces.append((storage.size_bytes, 0 if storage.birth < 0 else self.bit[self.taken_by[storage.birth]], uses))
        for b, bucket in enumerate(self.buckets):
            pieces += self._buffers(b, bucket, shared_uses[b])
        return pieces

    def _buffers(self, b: int, bucket: tuple[int, ...], uses: int) -> list[tuple[int, int, int]]:
        collectives = [self.problem.collectives[c] for c in bucket]
        copy_in, start, wait = (self.bit[Step(kind, b)] for kind in (_IN, _START, _WAIT))
        inputs, outputs = (
            -(-sum(sizes) // 512) * 512 for sizes in ([m.input_bytes for m in collectives], [m.output_bytes for m in collectives])
        )
        match self._kind(bucket):
            case "all_gather":
                return [(outputs, copy_in, sum(self.bit[Step(_OUT, c)] for c in bucket))]
            case "all_reduce":
                return [(outputs, copy_in, uses | wait)]
        return [(inputs, copy_in, wait), (outputs, start, uses | wait)]

    def _decisions(self) -> list[tuple[int, list[int]]]:
        """Each step that is placed by decision, with the prologue that stands right before it."""
        problem, travels = self.problem, self.problem.travels
        prologue: dict[Step, list[int]] = {}
        for m in problem.collectives:
            prologue.setdefault(self.taken_by[m.start], []).extend(m.prologue)
        decided = [
            step
            for step in self.steps
            if step.kind is not _N
            or (problem.kinds[step.index] in (NodeKind.COMPUTE, NodeKind.START, NodeKind.WAIT) and step.index not in travels)
        ]
        chosen = {self._index(step) for step in decided}
        self.leading = {self._index(Step(_N, node)) for nodes in prologue.values() for node in nodes}
        self.early = [k for k in range(len(self.steps)) if k not in chosen and k not in self.leading]
        self.last = [k for k in self.early if problem.kinds[self.steps[k].index] is NodeKind.OUTPUT]
        self.early = [k for k in self.early if k not in self.last]
        return [(self._index(step), [self._index(Step(_N, node)) for node in sorted(prologue.get(step, []))]) for step in decided]

    # ---- what a decision does

    def _run(self, done: int, block: list[int]) -> _Move | None:
        """Run the steps of ``block``, and after each what comes by itself; None where one is not ready or a cap breaks."""
        steps: list[int] = []
        main = block[-1] if block else -1
        ticks = [0, 0]
        side, peak = 0, self.problem.kept_bytes if block else self._alive(0, 0)
        for k in [-1, *block]:
            for step in self._with_early(done, k):
                if step < 0 or self.before[step] & ~done:
                    return None
                peak = max(peak, self._alive(done, 1 << step))
                done |= 1 << step
                steps.append(step)
                ticks[side] += self.ticks[step]
                side |= step == main
        return _Move(done, tuple(steps), ticks[0], ticks[1], peak)

    def _with_early(self, done: int, k: int) -> Iterator[int]:
        if k >= 0:
            if self.before[k] & ~done:
                yield -1
                return
            yield k
            done |= 1 << k
        while True:
            ready = next((e for e in self.early if not done >> e & 1 and not self.before[e] & ~done), None)
            if ready is None:
                everything_else = self.end_without_last() & ~done
                ready = next((e for e in self.last if not done >> e & 1 and not everything_else), None)
            if ready is None:
                return
            yield ready
            done |= 1 << ready

    def end_without_last(self) -> int:
        return ((1 << len(self.steps)) - 1) & ~sum(1 << k for k in self.last)

    def _alive(self, done: int, now: int) -> int:
        """Return the bytes alive at step ``now`` after ``done``."""
        have = done | now
        return self.problem.kept_bytes + sum(
            size for size, born, uses in self.pieces if (not born or born & have) and (uses & ~done or now & born)
        )

    def _moves(self, done: int) -> list[tuple[int, _Move]]:
        if (moves := self.moves_from.get(done)) is None:
            moves = []
            for k, prologue in self.blocks:
                if done >> k & 1 or not self._may_start(done, k):
                    continue
                move = self._run(done, [*prologue, k])
                if move is not None:
                    moves.append((k, move))
            self.moves_from[done] = moves
        return moves

    def _may_start(self, done: int, k: int) -> bool:
        if (launch := self.launches.get(k)) is None:
            return True
        spine_done = sum(1 for node in self.problem.spine if done & self.bit[Step(_N, node)])
        if spine_done < launch.earliest:
            return False
        if self.caps.in_flight_cap_bytes is None:
            return True
        flying = sum(
            self.launches[start].in_flight_bytes
            for wait, start in self.launch_of_wait.items()
            if (done >> start & 1 and not done >> wait & 1) or start == k
        )
        return flying <= self.caps.in_flight_cap_bytes

    # ---- the walks

    def least_peak(self) -> int | None:
        """Return the least peak, whatever the time and the cap on memory."""
        level = {self.first.after: self.first.peak}
        for _ in self.blocks:
            following: dict[int, int] = {}
            for done, peak in level.items():
                for _, move in self._moves(done):
                    worst = max(peak, move.peak)
                    if worst < following.get(move.after, worst + 1):
                        following[move.after] = worst
            level = following
        return level.get(self.end)

    def _least_end(self, done: int, t: int, frees: list[int]) -> int:
        """Return a time before which nothing that goes on from here ends."""
        on_streams = list(frees)
        for start, launch in self.launches.items():
            if not done >> start & 1:
                on_streams[launch.stream] = max(on_streams[launch.stream], t) + launch.ticks
        return max(t + sum(ticks for k, ticks in enumerate(self.ticks) if not done >> k & 1), *on_streams)

    def fastest(self, limit: int, to_beat: tuple[int, int, int] | None) -> tuple[tuple[tuple[int, int, int], Schedule] | None, bool]:
        """Return the best schedule no slower than ``limit`` that beats ``to_beat``, and whether ``limit`` cut anything.

        A label is (t, peak, time each stream is free, ends still to be waited for by start step); every time is lifted to t, since
        what ended in the past is the same as what ends now.
        """
        cap = self.caps.memory_cap_bytes
        streams = len(self.problem.streams)
        cut = False
        if cap is not None and self.first.peak > cap:
            return None, False
        root: _Label = ((self.first.ticks_before, self.first.peak, *(self.first.ticks_before,) * streams), (), None, self.first.steps)
        level: dict[int, list[_Label]] = {self.first.after: [root]}
        for _ in self.blocks:
            following: dict[int, list[_Label]] = {}
            for done, labels in level.items():
                for k, move in self._moves(done):
                    if cap is not None and move.peak > cap:
                        continue
                    rest = self._rest(move.after)
                    for label in labels:
                        child = self._child(label, k, move)
                        ends = rest(child[0])
                        if ends > limit:
                            cut = True
                        elif to_beat is None or (ends, child[0][1], self.num_launches) < to_beat:
                            _insert(following.setdefault(move.after, []), child)
            level = following
        finished = [((max(label[0][0], *label[0][2:]), label[0][1], self.num_launches), label) for label in level.get(self.end, ())]
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

    def _child(self, label: "_Label", k: int, move: _Move) -> "_Label":
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
        return Schedule(buckets=tuple(Bucket(members) for members in self.buckets), steps=steps)


_Label = tuple[tuple[int, ...], tuple[tuple[int, int], ...], "_Label | None", tuple[int, ...]]


def _insert(front: list[_Label], new: _Label) -> None:
    """Add ``new`` to labels none of which is as good as another in everything."""
    if any(_no_worse(old, new) for old in front):
        return
    front[:] = [old for old in front if not _no_worse(new, old)]
    front.append(new)


def _no_worse(a: _Label, b: _Label) -> bool:
    return all(x <= y for x, y in zip(a[0], b[0], strict=True)) and all(x[1] <= y[1] for x, y in zip(a[1], b[1], strict=True))
