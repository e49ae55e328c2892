"""All schedules that ``verify`` accepts, searched exhaustively: is there one that a claim denies?

Written from the design alone; it shares nothing with the solver, its normal form included: casts,
prologues, epilogues, waits and copies stand wherever the data allow, kernels may be torn. Every
bucketing and every total order is looked at, but for orders that are no better than others: inputs
and views stand as early as they can, and so does a wait that costs no time (all of which only
frees). Buckets are coalesced where that has a price. What is found is checked by ``verify``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from apsched.config import Caps
from apsched.kinds import COALESCED_KINDS, CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.kernel_cuts import cuts_made, extra_ticks
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.units import allocated_bytes


class TooLargeError(Exception):
    """The search would take too long."""


def find_schedule(
    problem: Problem,
    caps: Caps,
    *,
    limit_ticks: int | None = None,
    most_launches: int | None = None,
    most_states: int = 8_000,
) -> Schedule | None:
    """Return a schedule within ``caps`` and the limits, or ``None`` where there is none at all.

    ``TooLargeError`` where more than ``most_states`` sets of steps would have to be looked at.
    """
    assert problem.contention is None
    left = [most_states]
    for buckets in bucketings(problem, caps):
        bundled = sum(len(bucket.members) - 1 for bucket in buckets)
        if most_launches is not None and len(problem.collectives) - bundled > most_launches:
            continue
        for order in _orders(problem, caps):
            search = _Search(problem, caps, buckets, order, limit_ticks, left)
            if (steps := search.run()) is not None:
                schedule = Schedule(buckets=buckets, steps=tuple(steps))
                wrong = verify(problem, schedule, caps)
                assert not wrong, wrong
                timeline = simulate(problem, schedule)
                assert limit_ticks is None or timeline.step_time_ticks <= limit_ticks
                return schedule
    return None


def bucketings(problem: Problem, caps: Caps) -> Iterator[tuple[Bucket, ...]]:
    """Yield all sets of buckets that the caps and the plan allow."""
    for blocks in _partitions(list(range(len(problem.collectives)))):
        if all(_allowed(problem, caps, block) for block in blocks):
            yield from _forms(problem, [block for block in blocks if len(block) > 1])


def _partitions(members: list[int]) -> Iterator[list[list[int]]]:
    if not members:
        yield []
        return
    for rest in _partitions(members[1:]):
        yield [[members[0]], *rest]
        for i, block in enumerate(rest):
            yield [*rest[:i], [members[0], *block], *rest[i + 1 :]]


def _allowed(problem: Problem, caps: Caps, block: list[int]) -> bool:
    members = [problem.collectives[c] for c in block]
    groups = {m.restriction.group for m in members}
    for c, other in enumerate(problem.collectives):
        if c not in block and other.restriction.group in groups - {None}:
            return False
    if any(m.restriction.closed for m in members) and len(groups) > 1:
        return False
    if len(block) == 1:
        return True
    ranks = [m.start for m in members]
    size = sum(m.size_bytes for m in members)
    return (
        len({m.key for m in members}) == 1
        and all(m.may_share for m in members)
        and (caps.bucket_cap_bytes is None or size <= caps.bucket_cap_bytes)
        and (caps.max_topo_span is None or max(ranks) - min(ranks) <= caps.max_topo_span)
    )


def _forms(problem: Problem, blocks: list[list[int]]) -> Iterator[tuple[Bucket, ...]]:
    if not blocks:
        yield ()
        return
    members = [problem.collectives[c] for c in blocks[0]]
    payload = sorted(blocks[0], key=lambda c: (problem.collectives[c].restriction.payload, c))
    key = problem.keys[members[0].key]
    may = (
        key.kind in COALESCED_KINDS
        and key.coalesced_member_ticks is not None
        and not any(m.restriction.flat for m in members)
    )
    for rest in _forms(problem, blocks[1:]):
        for coalesced in (False, True) if may else (False,):
            yield (Bucket(members=tuple(payload), coalesced=coalesced), *rest)


def _orders(problem: Problem, caps: Caps) -> Iterator[tuple[int, ...] | None]:
    """Yield ``None``: the search finds the order of the compute; where cuts of kernels have prices,
    each order that is possible.
    """
    if not problem.cuts or caps.max_compute_move == 0:
        yield None
        return
    captured = problem.captured_order
    most = len(captured) if caps.max_compute_move is None else caps.max_compute_move
    ancestors: list[set[int]] = []
    for before in problem.predecessors:
        ancestors.append(set(before).union(*(ancestors[p] for p in before)))

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(captured):
            yield order
        for place, node in enumerate(captured):
            if (
                node not in order
                and abs(place - len(order)) <= most
                and all(p in order for p in captured if p in ancestors[node])
            ):
                yield from extend((*order, node))

    yield from extend(())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """A launch on a group's stream, of one collective or of a bucket."""

    members: tuple[int, ...]
    stream: int
    transfer_ticks: int
    output_bytes: int
    start: int
    wait: int
    needs: int
    """Steps that need its result, as bits; 0 where ``max_prefetch`` says nothing of it."""


class _Search:
    """Orders of the steps of one bucketing."""

    def __init__(
        self,
        problem: Problem,
        caps: Caps,
        buckets: tuple[Bucket, ...],
        order: tuple[int, ...] | None,
        limit_ticks: int | None,
        left: list[int],
    ) -> None:
        self.problem, self.caps, self.buckets, self.limit = problem, caps, buckets, limit_ticks
        self.left = left
        bucket_of = {c: b for b, bucket in enumerate(buckets) for c in bucket.members}
        steps, at = _steps(problem, buckets, bucket_of)
        self.steps = steps
        index = {step: i for i, step in enumerate(steps)}
        self.place_of = {
            index[Step(StepKind.NODE, n)]: k for n, k in problem.captured_places.items()
        }
        self.compute = _bits(self.place_of)
        self.fixed = None if order is None else [index[Step(StepKind.NODE, n)] for n in order]
        self.before, self.possible = _before(problem, buckets, index, at)
        self.launches = _launches(problem, buckets, bucket_of, index, at, caps)
        self.start_of = {launch.start: i for i, launch in enumerate(self.launches)}
        self.wait_of = {launch.wait: i for i, launch in enumerate(self.launches)}
        self.ticks = [_ticks(problem, buckets, step) for step in steps]
        if order is not None:
            only = Schedule(buckets=(), steps=tuple(Step(StepKind.NODE, n) for n in order))
            for node, more in extra_ticks(cuts_made(problem, only)).items():
                self.ticks[index[Step(StepKind.NODE, node)]] += more
        self.lives = _lives(problem, buckets, bucket_of, index)
        self.born = [0] * len(steps)
        for birth, _, size in self.lives:
            if birth >= 0:
                self.born[birth] += size
        self.slots = _slots(problem, buckets, bucket_of, index)
        self.free_steps = [
            i
            for i, step in enumerate(steps)
            if step.kind is StepKind.NODE
            and problem.kinds[step.index] in (NodeKind.INPUT, NodeKind.VIEW)
        ]
        self.all = (1 << len(steps)) - 1
        self.bytes_after: dict[int, int] = {}
        self.seen: dict[tuple, list[tuple[int, ...]]] = {}

    def run(self) -> list[int] | None:
        """Return the steps in an order that keeps everything; ``None`` where none does."""
        if not self.possible:
            return None
        given = sum(size for birth, _, size in self.lives if birth < 0)
        cap = self.caps.memory_cap_bytes
        if cap is not None and given + self.problem.kept_bytes > cap:
            return None
        streams = len(self.problem.streams)
        found = self._from(0, 0, (0,) * streams, (), ())
        return None if found is None else [self.steps[i] for i in found]

    def _from(
        self,
        done: int,
        now: int,
        free: tuple[int, ...],
        ends: tuple[tuple[int, int], ...],
        counts: tuple[tuple[int, int], ...],
    ) -> list[int] | None:
        """Return what follows ``done``: ``ends`` are launches that are open, ``counts`` compute
        nodes before launches of which nothing was needed yet.
        """
        forced: list[int] = []
        while True:
            step = self._free_step(done, now, ends)
            if step < 0:
                break
            forced.append(step)
            done |= 1 << step
            if step in self.wait_of:
                ends = tuple(e for e in ends if e[0] != self.wait_of[step])
        if done == self.all:
            last = max((now, *free))
            return forced if self.limit is None or last <= self.limit else None
        if self.limit is not None:
            if now + sum(t for i, t in enumerate(self.ticks) if not done >> i & 1) > self.limit:
                return None
            free = tuple(max(f, now) for f in free)
            rest = list(free)
            for launch in self.launches:
                if not done >> launch.start & 1:
                    rest[launch.stream] += launch.transfer_ticks
            if max(rest) > self.limit:
                return None
            figures: tuple[int, ...] = (now, *free, *(end for _, end in ends))
        else:
            now, free, figures = 0, (0,) * len(free), ()
            ends = tuple((i, 0) for i, _ in ends)
        known = self.seen.setdefault((done, counts), [])
        if any(all(a <= b for a, b in zip(old, figures, strict=True)) for old in known):
            return None
        known.append(figures)
        self.left[0] -= 1
        if self.left[0] < 0:
            raise TooLargeError
        for step in range(len(self.steps)):
            if done >> step & 1 or self.before[step] & ~done:
                continue
            after = self._take(step, done, now, free, ends, counts)
            if after is None:
                continue
            if (rest_steps := self._from(done | 1 << step, *after)) is not None:
                return [*forced, step, *rest_steps]
        return None

    def _free_step(self, done: int, now: int, ends: tuple[tuple[int, int], ...]) -> int:
        """Return a step that costs nothing and only frees, where there is one."""
        for step in self.free_steps:
            if not done >> step & 1 and not self.before[step] & ~done:
                return step
        if self.limit is not None:
            for i, end in ends:
                wait = self.launches[i].wait
                if end <= now and wait not in self.slots and not self.before[wait] & ~done:
                    return wait
            return -1
        for i, _ in ends:
            wait = self.launches[i].wait
            if wait not in self.slots and not self.before[wait] & ~done:
                return wait
        return -1

    def _take(
        self,
        step: int,
        done: int,
        now: int,
        free: tuple[int, ...],
        ends: tuple[tuple[int, int], ...],
        counts: tuple[tuple[int, int], ...],
    ) -> tuple | None:
        """Return time and open launches behind ``step``; ``None`` where it may not stand here."""
        caps = self.caps
        place = (done & self.compute).bit_count()
        if step in self.place_of:
            most = caps.max_compute_move
            if most is not None and abs(self.place_of[step] - place) > most:
                return None
            if self.fixed is not None and self.fixed[place] != step:
                return None
        if step in self.slots and not self.slots[step][0] <= place <= self.slots[step][1]:
            return None
        cap = caps.memory_cap_bytes
        if cap is not None and self._bytes(done) + self.born[step] > cap:
            return None
        launch = self.start_of.get(step)
        if launch is not None and caps.in_flight_cap_bytes is not None:
            size = sum(self.launches[i].output_bytes for i, _ in ends)
            if size + self.launches[launch].output_bytes > caps.in_flight_cap_bytes:
                return None
        if caps.max_prefetch is not None:
            if step in self.place_of:
                kept = []
                for i, count in counts:
                    if self.launches[i].needs >> step & 1:
                        if place - count > caps.max_prefetch:
                            return None
                    elif place + 1 - count > caps.max_prefetch:
                        return None  # what needs it comes later still
                    else:
                        kept.append((i, count))
                counts = tuple(kept)
            if launch is not None and self.launches[launch].needs:
                counts = tuple(sorted((*counts, (launch, place))))
        now += self.ticks[step]
        if launch is not None:
            stream = self.launches[launch].stream
            end = max(now, free[stream]) + self.launches[launch].transfer_ticks
            free = (*free[:stream], end, *free[stream + 1 :])
            ends = tuple(sorted((*ends, (launch, end))))
        elif step in self.wait_of:
            i = self.wait_of[step]
            now = max(now, next(end for j, end in ends if j == i))
            ends = tuple(e for e in ends if e[0] != i)
        return now, free, tuple((i, max(end, now)) for i, end in ends), counts

    def _bytes(self, done: int) -> int:
        """Return the bytes alive at whatever follows ``done``, but for what that allocates."""
        if done not in self.bytes_after:
            self.bytes_after[done] = self.problem.kept_bytes + sum(
                size
                for birth, uses, size in self.lives
                if (birth < 0 or done >> birth & 1) and uses & ~done
            )
        return self.bytes_after[done]


def _bits(values) -> int:
    found = 0
    for value in values:
        found |= 1 << value
    return found


def _gathers(problem: Problem, bucket: Bucket) -> bool:
    key = problem.keys[problem.collectives[bucket.members[0]].key]
    return key.kind == CollectiveKind.ALL_GATHER and not bucket.coalesced


def _steps(
    problem: Problem, buckets: tuple[Bucket, ...], bucket_of: dict[int, int]
) -> tuple[list[Step], dict[int, Step]]:
    """Return all steps, and for each node the step at which its result is there."""
    at = {node: Step(StepKind.NODE, node) for node in range(problem.num_nodes)}
    steps: list[Step] = []
    for c, b in bucket_of.items():
        member, flat = problem.collectives[c], not buckets[b].coalesced
        at[member.start], at[member.wait] = Step(StepKind.START, b), Step(StepKind.WAIT, b)
        if flat:
            at.update((node, Step(StepKind.COPY_IN, b)) for node in member.cast)
        if _gathers(problem, buckets[b]):
            at[member.wait] = Step(StepKind.COPY_OUT, c)
            steps.append(Step(StepKind.COPY_OUT, c))
    for b, bucket in enumerate(buckets):
        steps += [Step(StepKind.START, b), Step(StepKind.WAIT, b)]
        steps += [] if bucket.coalesced else [Step(StepKind.COPY_IN, b)]
    steps += [step for node, step in at.items() if step == Step(StepKind.NODE, node)]
    return steps, at


def _before(
    problem: Problem, buckets: tuple[Bucket, ...], index: dict[Step, int], at: dict[int, Step]
) -> tuple[list[int], bool]:
    """Return the steps before each step, and whether none comes before itself."""
    before = [0] * len(index)
    flat = [bucket for bucket in buckets if not bucket.coalesced]
    inside = {n for bucket in flat for c in bucket.members for n in problem.collectives[c].cast[1:]}
    possible = True
    for node, earlier in enumerate(problem.predecessors):
        for p in earlier:
            if node not in inside:
                possible &= at[p] != at[node]
                before[index[at[node]]] |= 1 << index[at[p]]
    for b, bucket in enumerate(buckets):
        start, wait = index[Step(StepKind.START, b)], index[Step(StepKind.WAIT, b)]
        before[wait] |= 1 << start
        if bucket.coalesced:
            continue
        copy_in = index[Step(StepKind.COPY_IN, b)]
        before[start] |= 1 << copy_in
        for c in bucket.members:
            for p in problem.predecessors[problem.collectives[c].start]:
                if index[at[p]] != copy_in:
                    before[copy_in] |= 1 << index[at[p]]
            if _gathers(problem, bucket):
                before[index[Step(StepKind.COPY_OUT, c)]] |= 1 << wait
    for node, kind in enumerate(problem.kinds):
        if kind is NodeKind.OUTPUT:
            last = index[Step(StepKind.NODE, node)]
            before[last] |= (1 << len(index)) - 1 & ~(1 << last)
    return before, possible


def _launches(
    problem: Problem,
    buckets: tuple[Bucket, ...],
    bucket_of: dict[int, int],
    index: dict[Step, int],
    at: dict[int, Step],
    caps: Caps,
) -> list[_Launch]:
    alone = [(c,) for c in range(len(problem.collectives)) if c not in bucket_of]
    launches = []
    for members in (*(bucket.members for bucket in buckets), *alone):
        first = problem.collectives[members[0]]
        key, b = problem.keys[first.key], bucket_of.get(members[0])
        size = sum(problem.collectives[c].size_bytes for c in members)
        transfer = key.price(size)
        if b is not None and buckets[b].coalesced:
            transfer += len(members) * (key.coalesced_member_ticks or 0)
        needs = {node for c in members for node in problem.needs[c]}
        launches.append(
            _Launch(
                members=members,
                stream=key.stream,
                transfer_ticks=transfer,
                output_bytes=sum(problem.collectives[c].output_bytes for c in members),
                start=index[at[first.start]],
                wait=index[at[first.wait] if b is None else Step(StepKind.WAIT, b)],
                needs=_bits(index[at[node]] for node in needs)
                if caps.max_prefetch is not None
                else 0,
            )
        )
    return launches


def _ticks(problem: Problem, buckets: tuple[Bucket, ...], step: Step) -> int:
    match step.kind:
        case StepKind.NODE:
            timed = problem.kinds[step.index] in (NodeKind.COMPUTE, NodeKind.START)
            return problem.duration_ticks[step.index] if timed else 0
        case StepKind.COPY_IN:
            members = [problem.collectives[c] for c in buckets[step.index].members]
            return problem.copy_price(sum(m.copied_bytes for m in members))
        case StepKind.START:
            first = problem.collectives[buckets[step.index].members[0]]
            return problem.keys[first.key].launch_ticks
        case StepKind.COPY_OUT:
            return problem.copy_price(problem.collectives[step.index].output_bytes)
        case _:
            return 0


def _lives(
    problem: Problem,
    buckets: tuple[Bucket, ...],
    bucket_of: dict[int, int],
    index: dict[Step, int],
) -> list[tuple[int, int, int]]:
    """Return storages that the caller does not keep, and buffers: (step that allocates, steps that
    use it, bytes).
    """
    used_at = {node: Step(StepKind.NODE, node) for node in range(problem.num_nodes)}
    copied_out: dict[int, int] = {}
    inside: dict[int, int] = {}
    released: dict[int, set[int]] = {}
    not_made: set[int] = set()
    for c, b in bucket_of.items():
        member = problem.collectives[c]
        if buckets[b].coalesced:
            used_at[member.start] = Step(StepKind.START, b)
            used_at[member.wait] = Step(StepKind.WAIT, b)
            continue
        used_at[member.start] = used_at[member.wait] = Step(StepKind.COPY_IN, b)
        used_at.update((node, Step(StepKind.COPY_IN, b)) for node in member.cast)
        released.setdefault(member.input_storage, set()).add(member.wait)
        if member.cast:
            not_made.add(member.input_storage)
        if _gathers(problem, buckets[b]):
            used_at[member.wait] = Step(StepKind.COPY_OUT, c)
            copied_out[member.output_storage] = index[Step(StepKind.COPY_OUT, c)]
        else:
            used_at[member.wait] = Step(StepKind.WAIT, b)
            inside[member.output_storage] = b
    lives, last_uses = [], [1 << index[Step(StepKind.WAIT, b)] for b in range(len(buckets))]
    for s, storage in enumerate(problem.storages):
        if storage.kept or s in not_made:
            continue
        uses = _bits(index[used_at[u]] for u in storage.uses if u not in released.get(s, ()))
        if s in inside:
            last_uses[inside[s]] |= uses
            continue
        birth = -1 if storage.birth < 0 else index[used_at[storage.birth]]
        lives.append((copied_out.get(s, birth), uses, storage.size_bytes))
    for b, bucket in enumerate(buckets):
        if bucket.coalesced:
            continue
        members = [problem.collectives[c] for c in bucket.members]
        copy_in, start, wait = (
            index[Step(kind, b)] for kind in (StepKind.COPY_IN, StepKind.START, StepKind.WAIT)
        )
        outputs = allocated_bytes(sum(m.output_bytes for m in members))
        if _gathers(problem, bucket):
            outs = _bits(index[Step(StepKind.COPY_OUT, c)] for c in bucket.members)
            lives.append((copy_in, outs, outputs))
        elif problem.keys[members[0].key].kind == CollectiveKind.ALL_REDUCE:
            lives.append((copy_in, last_uses[b], outputs))
        else:
            inputs = allocated_bytes(sum(m.input_bytes for m in members))
            lives += [(copy_in, 1 << wait, inputs), (start, last_uses[b], outputs)]
    return lives


def _slots(
    problem: Problem,
    buckets: tuple[Bucket, ...],
    bucket_of: dict[int, int],
    index: dict[Step, int],
) -> dict[int, tuple[int, int]]:
    """Return where the plan lets steps stand among the compute nodes."""
    slots: dict[int, tuple[int, int]] = {}

    def limit(step: Step, first: int, last: int) -> None:
        old = slots.get(index[step], (0, problem.num_nodes))
        slots[index[step]] = (max(old[0], first), min(old[1], last))

    for c, member in enumerate(problem.collectives):
        b = bucket_of.get(c)
        if (asked := member.restriction.start_slots) is not None:
            start = Step(StepKind.NODE, member.start) if b is None else Step(StepKind.START, b)
            limit(start, *asked)
            if b is not None and not buckets[b].coalesced:
                limit(Step(StepKind.COPY_IN, b), *asked)
        if (asked := member.restriction.wait_slots) is not None and b is None:
            limit(Step(StepKind.NODE, member.wait), *asked)
    return slots
