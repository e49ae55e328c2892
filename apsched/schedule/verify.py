"""Check a schedule against every dependence and cap. Shares no code with the solver."""

from bisect import bisect_left, bisect_right
from collections import Counter

from apsched.config import Caps
from apsched.kinds import COALESCED_KINDS, CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.schedule.simulate import Timeline, simulate
from apsched.schedule.verify_plan import broken_rules


def verify(problem: Problem, schedule: Schedule, caps: Caps) -> tuple[str, ...]:
    """Return the faults of ``schedule``, a sentence each; empty if it keeps every dependence and
    every cap.
    """
    return verified(problem, schedule, caps)[0]


def verified(
    problem: Problem, schedule: Schedule, caps: Caps
) -> tuple[tuple[str, ...], Timeline | None]:
    """As :func:`verify`, and with its timeline; ``None`` where the order is impossible."""
    wrong = _completeness(problem, schedule)
    if wrong:
        return tuple(wrong), None  # the rest needs every step to exist once
    position = _positions(problem, schedule)
    wrong += _precedence(problem, schedule, position)
    wrong += _output_last(problem, schedule)
    wrong += _bucket_order(problem, schedule)
    wrong += _buckets(problem, schedule, caps)
    wrong += _compute_moves(problem, position, caps)
    wrong += broken_rules(problem, schedule)
    if wrong:
        return tuple(wrong), None  # a timeline of an impossible order means nothing
    timeline = simulate(problem, schedule)
    wrong += over_memory(problem, schedule, timeline, caps)
    wrong += _prefetch(problem, schedule, position, caps)
    return tuple(wrong), timeline


def _completeness(problem: Problem, schedule: Schedule) -> list[str]:
    """Every node is there once, or, for the start and wait of a bucket's member, the steps of its
    bucket are.
    """
    wrong = []
    expected: Counter[Step] = Counter()
    replaced: set[int] = set()
    for b, bucket in enumerate(schedule.buckets):
        if len(bucket.members) < 2:
            wrong.append(f"bucket {b} has {len(bucket.members)} members; a bucket has at least two")
        if not all(0 <= c < len(problem.collectives) for c in bucket.members):
            return [*wrong, f"bucket {b} names a collective that does not exist"]
        expected.update(
            [Step(StepKind.START, b), Step(StepKind.WAIT, b)]
            + ([] if bucket.coalesced else [Step(StepKind.COPY_IN, b)])
        )
        for c in bucket.members:
            member = problem.collectives[c]
            if member.start in replaced:
                wrong.append(f"{problem.node_names[member.start]} is a member of two buckets")
            replaced |= {member.start, member.wait, *(() if bucket.coalesced else member.cast)}
            if problem.keys[member.key].kind == CollectiveKind.ALL_GATHER and not bucket.coalesced:
                expected[Step(StepKind.COPY_OUT, c)] += 1
    expected.update(Step(StepKind.NODE, i) for i in range(problem.num_nodes) if i not in replaced)
    found = Counter(schedule.steps)
    wrong += [f"step {_show(problem, s)} is missing" for s in expected - found]
    wrong += [
        f"step {_show(problem, s)} is there too often, or does not belong" for s in found - expected
    ]
    return wrong


def _positions(problem: Problem, schedule: Schedule) -> list[int]:
    """Return for each node the step at which its result exists (a member's start: its bucket's
    START; its cast, flat: the COPY_IN).
    """
    position = [-1] * problem.num_nodes
    waited: dict[int, int] = {}
    started: dict[int, int] = {}
    copied: dict[int, int] = {}
    for k, step in enumerate(schedule.steps):
        match step.kind:
            case StepKind.NODE:
                position[step.index] = k
            case StepKind.COPY_IN:
                copied[step.index] = k
            case StepKind.START:
                started[step.index] = k
            case StepKind.WAIT:
                waited[step.index] = k
            case StepKind.COPY_OUT:
                position[problem.collectives[step.index].wait] = k
    for b, bucket in enumerate(schedule.buckets):
        for c in bucket.members:
            member = problem.collectives[c]
            position[member.start] = started[b]
            for node in () if bucket.coalesced else member.cast:
                position[node] = copied[b]
            if position[member.wait] < 0:
                position[member.wait] = waited[b]
    return position


def _precedence(problem: Problem, schedule: Schedule, position: list[int]) -> list[str]:
    """No node comes before one that it depends on; a copy-in that replaces nodes does their work in
    their order.
    """
    flat = [bucket for bucket in schedule.buckets if not bucket.coalesced]
    inside = {
        node for bucket in flat for c in bucket.members for node in problem.collectives[c].cast[1:]
    }
    return [
        f"{problem.node_names[node]} comes before {problem.node_names[p]}, which it depends on"
        for node, before in enumerate(problem.predecessors)
        for p in before
        if position[p] >= position[node] and node not in inside
    ]


def _output_last(problem: Problem, schedule: Schedule) -> list[str]:
    """Nothing comes after the output: a graph ends there, and so does the life of its results."""
    return [
        f"{_show(problem, step)} is not the last step"
        for step in schedule.steps[:-1]
        if step.kind is StepKind.NODE and problem.kinds[step.index] is NodeKind.OUTPUT
    ]


def _bucket_order(problem: Problem, schedule: Schedule) -> list[str]:
    """The producers of all members come before the copy-in, that before the start, that before the
    wait and the copy-outs.
    """
    wrong = []
    at = {step: k for k, step in enumerate(schedule.steps)}
    position = _positions(problem, schedule)
    for b, bucket in enumerate(schedule.buckets):
        if bucket.coalesced:
            start, wait = at[Step(StepKind.START, b)], at[Step(StepKind.WAIT, b)]
            wrong += (
                []
                if start < wait
                else [
                    f"bucket {b}: start and wait are at steps {start} and {wait}; they must follow"
                    " each other"
                ]
            )
            continue
        copy_in, start, wait = (
            at[Step(kind, b)] for kind in (StepKind.COPY_IN, StepKind.START, StepKind.WAIT)
        )
        if not copy_in < start < wait:
            wrong.append(
                f"bucket {b}: copy-in, start and wait are at steps {copy_in}, {start} and {wait};"
                " they must follow each other"
            )
        for c in bucket.members:
            member = problem.collectives[c]
            late = [p for p in problem.predecessors[member.start] if position[p] > copy_in]
            wrong += [
                f"bucket {b}: the copy-in comes before {problem.node_names[p]}, whose result it"
                " copies"
                for p in late
            ]
            if (
                problem.keys[member.key].kind == CollectiveKind.ALL_GATHER
                and at[Step(StepKind.COPY_OUT, c)] < wait
            ):
                wrong.append(
                    f"bucket {b}: {problem.node_names[member.start]} is copied out before the wait"
                )
    return wrong


def _buckets(problem: Problem, schedule: Schedule, caps: Caps) -> list[str]:
    """Members share a key, may be bucketed, and keep the caps on bytes and span."""
    wrong = []
    for b, bucket in enumerate(schedule.buckets):
        members = [problem.collectives[c] for c in bucket.members]
        if len({m.key for m in members}) > 1:
            wrong.append(f"bucket {b}: members differ in group, kind, reduce op, dtype or device")
        wrong += [
            f"bucket {b}: {problem.node_names[m.start]} cannot share a launch"
            for m in members
            if not m.may_share
        ]
        wrong += [f"bucket {b}: {reason}" for reason in _form(problem, bucket)]
        size = sum(m.size_bytes for m in members)
        if caps.bucket_cap_bytes is not None and size > caps.bucket_cap_bytes:
            wrong.append(
                f"bucket {b} has {size} bytes, more than the bucket cap of {caps.bucket_cap_bytes}"
            )
        span = max(m.start for m in members) - min(m.start for m in members)
        if caps.max_topo_span is not None and span > caps.max_topo_span:
            wrong.append(
                f"bucket {b} spans {span} ranks, more than the topo-span cap of"
                f" {caps.max_topo_span}"
            )
    return wrong


def _form(problem: Problem, bucket: Bucket) -> list[str]:
    """Gathers and reduce-scatters may be coalesced, unless the plan rests on the payload order of a
    flat buffer.
    """
    members = [problem.collectives[c] for c in bucket.members] if bucket.coalesced else []
    kinds = {problem.keys[m.key].kind for m in members} - {*COALESCED_KINDS}
    wrong = [f"{', '.join(sorted(kinds))} cannot be coalesced"] if kinds else []
    return wrong + [
        f"{problem.node_names[m.start]} must be in a flat bucket"
        for m in members
        if m.restriction.flat
    ]


def _compute_moves(problem: Problem, position: list[int], caps: Caps) -> list[str]:
    """A compute node keeps its place among the compute nodes of its own chain up to
    ``max_compute_move``; most graphs have one chain. A node of no chain follows those it depends
    on, and has no place to keep: the sums of gradients move with the micro-batches. With 0 they
    keep theirs, too.
    """
    if caps.max_compute_move is None:
        return []
    wrong = []
    still = (problem.shared_order,) if caps.max_compute_move == 0 else ()
    for chain in (*problem.captured_chains, *still):
        place = {node: k for k, node in enumerate(sorted(chain, key=position.__getitem__))}
        wrong += [
            f"{problem.node_names[node]} moved by {abs(place[node] - k)} compute nodes, more than"
            f" {caps.max_compute_move}"
            for k, node in enumerate(chain)
            if abs(place[node] - k) > caps.max_compute_move
        ]
    return wrong


def over_memory(problem: Problem, schedule: Schedule, timeline: Timeline, caps: Caps) -> list[str]:
    """The caps on live and in-flight bytes hold at every step of ``timeline``, that of
    ``schedule``.
    """
    wrong = []
    for label, cap, series in (
        ("live", caps.memory_cap_bytes, timeline.live_bytes),
        ("in-flight", caps.in_flight_cap_bytes, timeline.in_flight_bytes),
    ):
        if cap is None or not series:
            continue
        k = max(range(len(series)), key=series.__getitem__)
        if series[k] > cap:
            wrong.append(
                f"{series[k]} {label} bytes at {_show(problem, schedule.steps[k])}, more than the"
                f" cap of {cap}"
            )
    return wrong


def _prefetch(problem: Problem, schedule: Schedule, position: list[int], caps: Caps) -> list[str]:
    """No start is further ahead of the first compute node that needs its result than
    ``max_prefetch`` compute nodes.
    """
    if caps.max_prefetch is None:
        return []
    name, cap = problem.node_names, caps.max_prefetch
    return [
        f"{name[problem.collectives[members[0]].start]} is launched {distance} compute nodes ahead,"
        f" more than {cap}"
        for members, distance in prefetch_distances(problem, schedule, position).items()
        if distance > cap
    ]


def prefetch_distances(
    problem: Problem, schedule: Schedule, position: list[int]
) -> dict[tuple[int, ...], int]:
    """Return for each launch (its members) that a compute node needs the compute nodes between it
    and the first such node.
    """
    steps = sorted(position[node] for node in problem.compute_order)
    bucketed = {c for bucket in schedule.buckets for c in bucket.members}
    launches = [bucket.members for bucket in schedule.buckets]
    launches += [(c,) for c in range(len(problem.collectives)) if c not in bucketed]
    distances = {}
    for members in launches:
        needs = [position[node] for c in members for node in problem.needs[c]]
        if needs:
            distances[members] = _count_between(
                steps, position[problem.collectives[members[0]].start], min(needs)
            )
    return distances


def _count_between(steps: list[int], after: int, before: int) -> int:
    return bisect_left(steps, before) - bisect_right(steps, after)


def _show(problem: Problem, step: Step) -> str:
    match step.kind:
        case StepKind.NODE if 0 <= step.index < problem.num_nodes:
            return problem.node_names[step.index]
        case StepKind.COPY_OUT if 0 <= step.index < len(problem.collectives):
            return f"copy-out of {problem.node_names[problem.collectives[step.index].start]}"
        case _:
            return f"{step.kind.name.lower().replace('_', '-')} {step.index}"
