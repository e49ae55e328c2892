"""The steps of a schedule once the buckets are given: what must precede what, what a decision makes
run, what is alive. See oracle.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from apsched.config import Caps
from apsched.kinds import NodeKind
from apsched.problem.problem import Key, Problem
from apsched.schedule.schedule import Step, StepKind

_N, _IN, _START, _WAIT, _OUT = (
    StepKind.NODE,
    StepKind.COPY_IN,
    StepKind.START,
    StepKind.WAIT,
    StepKind.COPY_OUT,
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A transfer: a bucket, or a collective on its own."""

    stream: int
    ticks: int
    in_flight_bytes: int
    earliest: int
    """Compute nodes that must be done at its start, by the cap on prefetch."""
    latest: int
    """Compute nodes that may be done at its start, by the plan."""


@dataclass(frozen=True, slots=True)
class Move:
    """One decision from one set of done steps: the block of steps that it makes run."""

    after: int
    """Set of steps done afterwards."""
    steps: tuple[int, ...]
    ticks_before: int
    ticks_after: int
    peak: int


class Steps:
    """The steps that there are with the buckets given. A set of steps is an integer, one bit
    each.
    """

    def __init__(
        self,
        problem: Problem,
        caps: Caps,
        buckets: tuple[tuple[int, ...], ...],
        copy_in_apart: bool = True,
        coalesced: frozenset[int] = frozenset(),
    ) -> None:
        self.problem, self.caps, self.buckets, self.copy_in_apart = (
            problem,
            caps,
            buckets,
            copy_in_apart,
        )
        self.coalesced = coalesced
        self.flat = {b: bucket for b, bucket in enumerate(buckets) if b not in coalesced}
        self.in_flat = {c: b for b, bucket in self.flat.items() for c in bucket}
        self.steps = self._list_steps()
        self.bit = {step: 1 << k for k, step in enumerate(self.steps)}
        self.produced_by, self.taken_by = self._places()
        self.before = self._precedence()
        self.ticks = [self._ticks(step) for step in self.steps]
        self.launches = {self._index(start): launch for start, launch in self._launches()}
        self.launch_of_wait = {
            self._index(wait): self._index(start) for start, wait in self._pairs()
        }
        self.planned = self._planned()
        self.pieces = self._pieces()
        self.blocks = self._decisions()
        self.moves_from: dict[int, list[tuple[int, Move]]] = {}
        self.end = (1 << len(self.steps)) - 1
        first = self._run(0, [])
        assert first is not None
        self.first = first

    def _list_steps(self) -> list[Step]:
        problem = self.problem
        members = {c for bucket in self.buckets for c in bucket}
        replaced = {
            node for c in members for m in (problem.collectives[c],) for node in (m.start, m.wait)
        }
        replaced |= {node for c in self.in_flat for node in problem.collectives[c].cast}
        steps = [Step(_N, i) for i in range(problem.num_nodes) if i not in replaced]
        for b, bucket in enumerate(self.buckets):
            steps += (
                [Step(_START, b), Step(_WAIT, b)]
                if b in self.coalesced
                else [Step(_IN, b), Step(_START, b), Step(_WAIT, b)]
            )
            if self._kind(bucket) == "all_gather" and b in self.flat:
                steps += [Step(_OUT, c) for c in bucket]
        return steps

    def _kind(self, bucket: tuple[int, ...]) -> str:
        return self.problem.keys[self.problem.collectives[bucket[0]].key].kind

    def _index(self, step: Step) -> int:
        return self.bit[step].bit_length() - 1

    def _places(self) -> tuple[list[Step], list[Step]]:
        """For each node the step after which its result is there, and the step that takes its
        inputs.
        """
        there = [Step(_N, i) for i in range(self.problem.num_nodes)]
        taken = list(there)
        for b, bucket in enumerate(self.buckets):
            for c in bucket:
                m = self.problem.collectives[c]
                if b in self.coalesced:
                    taken[m.start] = there[m.start] = Step(_START, b)
                    taken[m.wait] = there[m.wait] = Step(_WAIT, b)
                    continue
                taken[m.start], there[m.start] = Step(_IN, b), Step(_START, b)
                for node in m.cast:
                    taken[node] = there[node] = Step(_IN, b)
                there[m.wait] = taken[m.wait] = (
                    Step(_OUT, c) if self._kind(bucket) == "all_gather" else Step(_WAIT, b)
                )
        return there, taken

    def _precedence(self) -> list[int]:
        before = [0] * len(self.steps)

        def add(earlier: Step, later: Step) -> None:
            if earlier == later:
                return  # one step does the work of several nodes
            before[self._index(later)] |= self.bit[earlier]

        for node, predecessors in enumerate(self.problem.predecessors):
            for p in predecessors:
                add(self.produced_by[p], self.taken_by[node])
        for b, bucket in enumerate(self.buckets):
            add(Step(_START, b), Step(_WAIT, b))
            if b in self.coalesced:
                continue
            add(Step(_IN, b), Step(_START, b))
            if self._kind(bucket) == "all_gather":
                for c in bucket:
                    add(Step(_WAIT, b), Step(_OUT, c))
        compute_order = self.problem.compute_order
        for a, b in pairwise(compute_order):
            add(Step(_N, a), Step(_N, b))
        return before

    def _ticks(self, step: Step) -> int:
        """Time on the compute stream; of a start its launch."""
        problem = self.problem
        match step.kind:
            case StepKind.NODE:
                return (
                    problem.duration_ticks[step.index]
                    if problem.kinds[step.index] in (NodeKind.COMPUTE, NodeKind.START)
                    else 0
                )
            case StepKind.COPY_IN:
                return problem.copy_price(
                    sum(problem.collectives[c].copied_bytes for c in self.buckets[step.index])
                )
            case StepKind.START:
                return problem.keys[
                    problem.collectives[self.buckets[step.index][0]].key
                ].launch_ticks
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

    def _launches(self) -> Iterator[tuple[Step, Launch]]:
        place = {node: k for k, node in enumerate(self.problem.compute_order)}
        for start, _, members in self._units():
            collectives = [self.problem.collectives[c] for c in members]
            key = self.problem.keys[collectives[0].key]
            asked = [c.restriction.start_slots or (0, len(place)) for c in collectives]
            needed = [place[self.problem.needs[c][0]] for c in members if self.problem.needs[c]]
            yield (
                start,
                Launch(
                    stream=key.stream,
                    ticks=key.price(sum(m.size_bytes for m in collectives))
                    + self._for_members(start, key, len(members)),
                    in_flight_bytes=sum(m.output_bytes for m in collectives),
                    earliest=max(
                        0
                        if self.caps.max_prefetch is None
                        else min(needed, default=0) - self.caps.max_prefetch,
                        *(first for first, _ in asked),
                    ),
                    latest=min(last for _, last in asked),
                ),
            )

    def _for_members(self, start: Step, key: Key, num_members: int) -> int:
        """What a coalesced bucket pays for each member."""
        return (
            num_members * (key.coalesced_member_ticks or 0)
            if start.kind is _START and start.index in self.coalesced
            else 0
        )

    def _planned(self) -> dict[int, tuple[int, int]]:
        """For copy-ins and waits the compute nodes that must, and may, be done before, by the
        plan.
        """
        last = len(self.problem.compute_order)
        planned = {}
        for b, bucket in enumerate(self.buckets):
            firsts = [
                slots[0]
                for c in bucket
                if (slots := self.problem.collectives[c].restriction.start_slots)
            ]
            if b in self.flat:
                planned[self._index(Step(_IN, b))] = max(firsts, default=0), last
        for m in self.problem.collectives:
            if m.restriction.wait_slots is not None:
                planned[self._index(Step(_N, m.wait))] = m.restriction.wait_slots
        return planned

    def _pieces(self) -> list[tuple[int, int, int]]:
        """(bytes, step that allocates or 0, steps that use) of every storage that is not kept,
        buffers included.
        """
        problem, members = self.problem, self.in_flat
        let_go = {
            (problem.collectives[c].input_storage, problem.collectives[c].wait) for c in members
        }
        gathered = {
            problem.collectives[c].output_storage: c
            for c, b in members.items()
            if self._kind(self.buckets[b]) == "all_gather"
        }
        shared = {
            problem.collectives[c].output_storage: b
            for c, b in members.items()
            if self._kind(self.buckets[b]) != "all_gather"
        }
        cast_away = {
            problem.collectives[c].input_storage for c in members if problem.collectives[c].cast
        }
        pieces, shared_uses = [], [0] * len(self.buckets)
        for s, storage in enumerate(problem.storages):
            if storage.kept or s in cast_away:
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
                pieces.append(
                    (
                        storage.size_bytes,
                        0 if storage.birth < 0 else self.bit[self.taken_by[storage.birth]],
                        uses,
                    )
                )
        for b, bucket in self.flat.items():
            pieces += self._buffers(b, bucket, shared_uses[b])
        return pieces

    def _buffers(self, b: int, bucket: tuple[int, ...], uses: int) -> list[tuple[int, int, int]]:
        collectives = [self.problem.collectives[c] for c in bucket]
        copy_in, start, wait = (self.bit[Step(kind, b)] for kind in (_IN, _START, _WAIT))
        inputs, outputs = (
            -(-sum(sizes) // 512) * 512
            for sizes in (
                [m.input_bytes for m in collectives],
                [m.output_bytes for m in collectives],
            )
        )
        match self._kind(bucket):
            case "all_gather":
                return [(outputs, copy_in, sum(self.bit[Step(_OUT, c)] for c in bucket))]
            case "all_reduce":
                return [(outputs, copy_in, uses | wait)]
        return [(inputs, copy_in, wait), (outputs, start, uses | wait)]

    def _decisions(self) -> list[tuple[int, list[int]]]:
        """Each step that is placed by decision, with the steps that stand right before it."""
        problem, travels = self.problem, self.problem.travels
        leading: dict[Step, list[int]] = {}
        for m in problem.collectives:
            led_in = (Step(_N, node) for node in m.prologue)
            leading.setdefault(self.taken_by[m.start], []).extend(
                self._index(step) for step in led_in if step in self.bit
            )
        for nodes in leading.values():
            nodes.sort()
        if not self.copy_in_apart:
            for b in self.flat:
                leading[Step(_START, b)] = [*leading.pop(Step(_IN, b)), self._index(Step(_IN, b))]
        led = {k for steps in leading.values() for k in steps}
        decided = [
            k
            for k, step in enumerate(self.steps)
            if k not in led
            and (
                step.kind is not _N
                or (
                    problem.kinds[step.index] in (NodeKind.COMPUTE, NodeKind.START, NodeKind.WAIT)
                    and step.index not in travels
                )
            )
        ]
        self.last = [
            k
            for k, step in enumerate(self.steps)
            if step.kind is _N and problem.kinds[step.index] is NodeKind.OUTPUT
        ]
        self.early = [k for k in range(len(self.steps)) if k not in {*decided, *led, *self.last}]
        return [(k, leading.get(self.steps[k], [])) for k in decided]

    def _run(self, done: int, block: list[int]) -> Move | None:
        """Run the steps of ``block``, whose last one decides, and after each what comes by itself;
        None where one is not ready.
        """
        steps: list[int] = []
        ticks = [0, 0]  # up to the deciding step, and after it
        peak = self._alive(done, 0) if not block else 0
        queue = list(block)
        while (step := self._by_itself(done)) is not None or queue:
            if step is None:
                step = queue.pop(0)
                if self.before[step] & ~done:
                    return None
            decided = bool(block) and block[-1] in steps
            peak = max(peak, self._alive(done, 1 << step))
            done |= 1 << step
            steps.append(step)
            ticks[decided] += self.ticks[step]
        return Move(done, tuple(steps), ticks[0], ticks[1], peak)

    def _by_itself(self, done: int) -> int | None:
        """Return the step that comes next of itself after ``done``, if one does."""
        ready = next(
            (k for k in self.early if not done >> k & 1 and not self.before[k] & ~done), None
        )
        if ready is None and all(
            done >> k & 1 for k in range(len(self.steps)) if k not in self.last
        ):
            ready = next((k for k in self.last if not done >> k & 1), None)
        return ready

    def _alive(self, done: int, now: int) -> int:
        """Return the bytes alive at step ``now`` after ``done``."""
        have = done | now
        return self.problem.kept_bytes + sum(
            size
            for size, born, uses in self.pieces
            if (not born or born & have) and (uses & ~done or now & born)
        )

    def moves(self, done: int) -> list[tuple[int, Move]]:
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
        compute_done = sum(
            1 for node in self.problem.compute_order if done & self.bit[Step(_N, node)]
        )
        first, last = self.planned.get(k, (0, compute_done))
        if not first <= compute_done <= last:
            return False
        if (launch := self.launches.get(k)) is None:
            return True
        if not launch.earliest <= compute_done <= launch.latest:
            return False
        if self.caps.in_flight_cap_bytes is None:
            return True
        flying = sum(
            self.launches[start].in_flight_bytes
            for wait, start in self.launch_of_wait.items()
            if (done >> start & 1 and not done >> wait & 1) or start == k
        )
        return flying <= self.caps.in_flight_cap_bytes
