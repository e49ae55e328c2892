"""Legal schedules without a solver: random buckets in random order, or a bucket for each layer in
the order as captured.
"""

import random
from collections import defaultdict
from collections.abc import Callable

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind


def random_schedule(problem: Problem, seed: int, *, max_members: int = 6) -> Schedule:
    """Return a schedule that ``verify`` accepts without caps: nothing stays where it was but
    inputs, first and in order, and the output.
    """
    rng = random.Random(seed)
    buckets = random_buckets(problem, rng, max_members)
    while (steps := _random_order(problem, buckets, rng)) is None:
        buckets = rng.sample(
            buckets, len(buckets) - 1
        )  # two buckets wait for each other, or a member for another
    return Schedule(buckets=tuple(buckets), steps=steps)


def schedule_with_buckets(problem: Problem, buckets: list[Bucket], seed: int = 0) -> Schedule:
    """Return a random order with these buckets."""
    steps = _random_order(problem, buckets, random.Random(seed))
    assert steps is not None, "these buckets can't be ordered"
    return Schedule(buckets=tuple(buckets), steps=steps)


def compute_moves(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """Return for each compute node as captured (but those that travel) by how many places it moved
    among them.
    """
    place = {step.index: k for k, step in enumerate(schedule.steps) if step.kind is StepKind.NODE}
    now = {node: k for k, node in enumerate(sorted(problem.captured_order, key=place.__getitem__))}
    return tuple(now[node] - k for k, node in enumerate(problem.captured_order))


def random_buckets(problem: Problem, rng: random.Random, max_members: int) -> list[Bucket]:
    by_key = defaultdict(list)
    for c, collective in enumerate(problem.collectives):
        if collective.may_share:
            by_key[collective.key].append(c)
    buckets = []
    for collectives in by_key.values():
        rng.shuffle(collectives)
        while len(collectives) > 1:
            size = rng.randint(1, max_members)
            members, collectives = collectives[:size], collectives[size:]
            if len(members) > 1:
                buckets.append(
                    Bucket(
                        tuple(members),
                        coalesced=_may_be_coalesced(problem, members) and rng.random() < 0.5,
                    )
                )
    return buckets


def _may_be_coalesced(problem: Problem, members: list[int]) -> bool:
    priced = problem.keys[problem.collectives[members[0]].key].coalesced_member_ticks is not None
    return priced and all(problem.collectives[c].may_be_coalesced for c in members)


def step_precedence(problem: Problem, buckets: list[Bucket]) -> dict[Step, set[Step]]:
    """Return for each step the steps that must come before it."""
    needs_at: dict[int, Step] = {}
    done_at: dict[int, Step] = {}
    before: dict[Step, set[Step]] = {}
    for b, bucket in enumerate(buckets):
        copy_in, start, wait = (
            Step(kind, b) for kind in (StepKind.COPY_IN, StepKind.START, StepKind.WAIT)
        )
        before |= (
            {start: set(), wait: {start}}
            if bucket.coalesced
            else {copy_in: set(), start: {copy_in}, wait: {start}}
        )
        for c in bucket.members:
            member = problem.collectives[c]
            if bucket.coalesced:
                needs_at[member.start] = done_at[member.start] = start
                needs_at[member.wait] = done_at[member.wait] = wait
                continue
            needs_at[member.start], done_at[member.start] = copy_in, start
            needs_at |= dict.fromkeys(member.cast, copy_in)
            done_at |= dict.fromkeys(member.cast, copy_in)
            needs_at[member.wait] = done_at[member.wait] = wait
            if problem.keys[member.key].kind == "all_gather":
                done_at[member.wait] = Step(StepKind.COPY_OUT, c)
                before[done_at[member.wait]] = {wait}
    for node in range(problem.num_nodes):
        step = needs_at.setdefault(node, Step(StepKind.NODE, node))
        done_at.setdefault(node, step)
        before.setdefault(step, set())
    for node, predecessors in enumerate(problem.predecessors):
        before[needs_at[node]] |= {done_at[p] for p in predecessors if done_at[p] != needs_at[node]}
    return before


def layer_schedule(problem: Problem, layer_of: Callable[[str], str]) -> Schedule:
    """Return one bucket for each layer (``layer_of`` maps a module's name to it) and key, all else
    as early as it was captured.
    """
    by_layer = defaultdict(list)
    for c, collective in enumerate(problem.collectives):
        if collective.may_share:
            by_layer[collective.key, layer_of(collective.module)].append(c)
    buckets = [Bucket(tuple(members)) for members in by_layer.values() if len(members) > 1]
    steps = _order(
        problem,
        buckets,
        lambda ready: ready.index(
            min(ready, key=lambda step: _captured_at(problem, buckets, step))
        ),
    )
    assert steps is not None, "one bucket for each layer can't be ordered"
    return Schedule(buckets=tuple(buckets), steps=steps)


def _captured_at(problem: Problem, buckets: list[Bucket], step: Step) -> tuple[int, Step]:
    """Return the rank of the node that ``step`` stands for, the first of a bucket."""
    if step.kind is StepKind.NODE:
        return step.index, step
    if step.kind is StepKind.COPY_OUT:
        return problem.collectives[step.index].wait, step
    members = [problem.collectives[c] for c in buckets[step.index].members]
    return min(m.wait if step.kind is StepKind.WAIT else m.start for m in members), step


def _random_order(
    problem: Problem, buckets: list[Bucket], rng: random.Random
) -> tuple[Step, ...] | None:
    return _order(problem, buckets, lambda ready: rng.randrange(len(ready)))


def _order(
    problem: Problem, buckets: list[Bucket], choose: Callable[[list[Step]], int]
) -> tuple[Step, ...] | None:
    """Return inputs, then a topological order of the rest, the output last; None where there is a
    cycle.

    ``choose`` says which of the steps that are ready is next.
    """
    before = step_precedence(problem, buckets)
    inputs = [
        Step(StepKind.NODE, i) for i, kind in enumerate(problem.kinds) if kind is NodeKind.INPUT
    ]
    output = Step(StepKind.NODE, problem.num_nodes - 1)
    before[output] = set(before) - {output}
    after = defaultdict(list)
    for step, earlier in before.items():
        for other in earlier:
            after[other].append(step)
    missing = {step: len(earlier) for step, earlier in before.items()}
    steps, ready = (
        [],
        [step for step, count in missing.items() if count == 0 and step not in inputs],
    )
    while inputs or ready:
        step = inputs.pop(0) if inputs else ready.pop(choose(ready))
        steps.append(step)
        for other in sorted(after[step]):
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    return tuple(steps) if len(steps) == len(before) else None
