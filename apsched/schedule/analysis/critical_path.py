"""The critical path of a timeline, traced back from the end of the step: the owners of the step
time.

Every tick of the step has one owner: a step on the compute stream, or a transfer on a group's
stream. Going back in time:

- a compute step begins when the step before it ends; a wait that stalls ends when its transfer
  does, and the path goes there;
- a transfer begins when it is launched (the path goes to the compute stream) or when the one before
  it on its stream ends.

A stretch of transfers on the path begins with a launch. The *cause* of the stretch is the obstacle
to an earlier launch: its data, a cap, or nothing at all (the solver's choice, within its slack).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from apsched.config import Caps
from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.simulate import Timeline, Transfer


class Where(StrEnum):
    """The part of the step that a stretch of transfers belongs to."""

    HEAD = "head"  # before the first compute
    MIDDLE = "middle"
    TAIL = "tail"  # it ends the step, after the last compute


class Cause(StrEnum):
    """The reason why the first launch of a stretch is not sooner."""

    START = "start"  # the step begins with it
    DATA = "data"  # what it sends is made right before
    STREAM = "stream"  # its stream is busy until then
    MEMORY = "memory"  # one step sooner its result would break the memory cap
    IN_FLIGHT = "in_flight"  # the same for the cap on bytes in flight
    PREFETCH = "prefetch"  # the same for the cap on prefetch
    CHOICE = "choice"  # nothing that this order shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Transfers of one stream, in one part of the step, that follow each other on the critical
    path.
    """

    stream: int
    transfers: tuple[int, ...]
    """Indices into ``Timeline.transfers``, in order of time."""
    begin_ticks: int
    end_ticks: int
    exposed_ticks: int
    """Of it, the time that the compute stream stalls."""
    where: Where
    cause: Cause
    at_step: int
    """The step at which a cap would be broken; the launch itself where no cap is the cause."""

    @property
    def ticks(self) -> int:
        """Its length."""
        return self.end_ticks - self.begin_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Shares of the step time; they add up to it."""

    step_time_ticks: int
    compute_ticks: int
    """Compute nodes on the path."""
    overhead_ticks: int
    """Launches, copies and the nodes that travel with them (casts, divisions), on the path."""
    stretches: tuple[Stretch, ...]
    """In order of time."""
    full_step: int
    """First step where the next gather would not fit under the memory cap, with a stall behind it;
    -1 for none.
    """


def critical_path(
    problem: Problem, schedule: Schedule, timeline: Timeline, caps: Caps
) -> CriticalPath:
    """Return the owner of each tick of ``timeline``, that of ``schedule`` under ``caps``."""
    steps, runs = _trace(timeline, len(problem.streams))
    compute_order = frozenset(problem.compute_order)
    compute = overhead = 0
    for k in steps:
        step = schedule.steps[k]
        ticks = timeline.end_ticks[k] - timeline.begin_ticks[k]
        if step.kind is StepKind.NODE and step.index in compute_order:
            compute += ticks
        else:
            overhead += ticks
    compute_steps = [
        k
        for k, s in enumerate(schedule.steps)
        if s.kind is StepKind.NODE and s.index in compute_order
    ]
    first = timeline.begin_ticks[compute_steps[0]] if compute_steps else timeline.step_time_ticks
    last = timeline.end_ticks[compute_steps[-1]] if compute_steps else 0
    exposed = _Exposed(timeline)
    stretches = []
    for run in runs:
        cause, at_step = cause_of(problem, schedule, timeline, caps, run[0])
        for where, part in groupby(run, key=lambda i: _where(timeline.transfers[i], first, last)):
            transfers = tuple(part)
            begin, end = (
                timeline.transfers[transfers[0]].begin_ticks,
                timeline.transfers[transfers[-1]].end_ticks,
            )
            stretches.append(
                Stretch(
                    stream=timeline.transfers[run[0]].stream,
                    transfers=transfers,
                    begin_ticks=begin,
                    end_ticks=end,
                    exposed_ticks=exposed.between(begin, end),
                    where=where,
                    cause=cause,
                    at_step=at_step,
                )
            )
            cause, at_step = Cause.STREAM, timeline.transfers[transfers[-1]].start_step
    return CriticalPath(
        step_time_ticks=timeline.step_time_ticks,
        compute_ticks=compute,
        overhead_ticks=overhead,
        stretches=tuple(stretches),
        full_step=_full_step(problem, timeline, caps),
    )


def _where(transfer: Transfer, first_compute: int, last_compute: int) -> Where:
    if transfer.begin_ticks < first_compute:
        return Where.HEAD
    return Where.TAIL if transfer.end_ticks > last_compute else Where.MIDDLE


def _trace(timeline: Timeline, num_streams: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the steps on the path that take time, and the runs of transfers on it, both in order
    of time.
    """
    waited = {t.wait_step: i for i, t in enumerate(timeline.transfers)}
    before = _before_on_stream(timeline, num_streams)
    steps: list[int] = []
    runs: list[tuple[int, ...]] = []
    k, transfer = len(timeline.end_ticks) - 1, -1
    if timeline.step_time_ticks > (timeline.end_ticks[-1] if timeline.end_ticks else 0):
        transfer = next(
            i
            for i, t in reversed(list(enumerate(timeline.transfers)))
            if t.end_ticks == timeline.step_time_ticks
        )
    while k >= 0 or transfer >= 0:
        if transfer < 0:
            stalls = k in waited and timeline.end_ticks[k] > timeline.begin_ticks[k]
            if stalls:
                transfer = waited[k]
            elif timeline.end_ticks[k] > timeline.begin_ticks[k]:
                steps.append(k)
            k -= 1
            continue
        run = [transfer]
        while (
            timeline.transfers[run[-1]].begin_ticks
            > timeline.end_ticks[timeline.transfers[run[-1]].start_step]
        ):
            run.append(before[run[-1]])
        runs.append(tuple(reversed(run)))
        k, transfer = timeline.transfers[run[-1]].start_step, -1
    return steps[::-1], runs[::-1]


def _before_on_stream(timeline: Timeline, num_streams: int) -> list[int]:
    last, before = [-1] * num_streams, []
    for i, t in enumerate(timeline.transfers):
        before.append(last[t.stream])
        last[t.stream] = i
    return before


class _Exposed:
    """Stall time of the compute stream between two points in time."""

    def __init__(self, timeline: Timeline) -> None:
        done = timeline.end_ticks[-1] if timeline.end_ticks else 0
        waits = sorted(t.wait_step for t in timeline.transfers)
        self.stalls = [
            (timeline.begin_ticks[k], timeline.end_ticks[k])
            for k in waits
            if timeline.end_ticks[k] > timeline.begin_ticks[k]
        ]
        if timeline.step_time_ticks > done:
            self.stalls.append((done, timeline.step_time_ticks))

    def between(self, begin: int, end: int) -> int:
        return sum(
            max(0, min(e, end) - max(b, begin)) for b, e in self.stalls if b < end and e > begin
        )


def cause_of(
    problem: Problem, schedule: Schedule, timeline: Timeline, caps: Caps, transfer: int
) -> tuple[Cause, int]:
    """Return the reason why the launch of ``transfer`` is not before the step that the compute
    stream is busy with until then.
    """
    t = timeline.transfers[transfer]
    first = _first_step(problem, schedule, t.members, t.start_step)
    ready = _ready_step(problem, schedule, t.members, first)
    sooner = next(
        (k for k in range(first - 1, ready, -1) if timeline.end_ticks[k] > timeline.begin_ticks[k]),
        -1,
    )
    if sooner < 0:
        return (Cause.START if ready < 0 else Cause.DATA), t.start_step
    queued = any(
        other.wait_step == sooner and other.stream == t.stream for other in timeline.transfers
    )
    if queued:
        return Cause.STREAM, t.start_step
    members = [problem.collectives[c] for c in t.members]
    held = sum(m.output_bytes for m in members)
    if (
        caps.memory_cap_bytes is not None
        and timeline.live_bytes[sooner] + held > caps.memory_cap_bytes
    ):
        return Cause.MEMORY, sooner
    if (
        caps.in_flight_cap_bytes is not None
        and timeline.in_flight_bytes[sooner] + held > caps.in_flight_cap_bytes
    ):
        return Cause.IN_FLIGHT, sooner
    if (
        caps.max_prefetch is not None
        and _prefetch(problem, schedule, t.members, sooner) > caps.max_prefetch
    ):
        return Cause.PREFETCH, sooner
    return Cause.CHOICE, t.start_step


def _full_step(problem: Problem, timeline: Timeline, caps: Caps) -> int:
    """Return the first step where the next gather would not fit with the live bytes, if a stall
    follows; -1 for none.
    """
    if caps.memory_cap_bytes is None:
        return -1
    stalls = [
        t.wait_step
        for t in timeline.transfers
        if timeline.end_ticks[t.wait_step] > timeline.begin_ticks[t.wait_step]
    ]
    past = 0
    for t in timeline.transfers:
        cs = [problem.collectives[c] for c in t.members]
        if cs[0].on_path or problem.keys[cs[0].key].kind != CollectiveKind.ALL_GATHER:
            continue
        room = caps.memory_cap_bytes - sum(c.output_bytes for c in cs)
        for k in range(past, t.start_step):
            if timeline.live_bytes[k] > room and any(wait > k for wait in stalls):
                return k
        past = t.start_step
    return -1


def _first_step(
    problem: Problem, schedule: Schedule, members: tuple[int, ...], start_step: int
) -> int:
    """Return the first of the steps right before ``start_step`` that are part of the launch: its
    copy-in and its prologue.
    """
    own = {node for c in members for node in problem.collectives[c].prologue}
    k = start_step
    while k > 0 and _part_of_launch(schedule.steps[k - 1], own, schedule, members):
        k -= 1
    return k


def _part_of_launch(
    step: Step, own: set[int], schedule: Schedule, members: tuple[int, ...]
) -> bool:
    if step.kind is StepKind.COPY_IN:
        return schedule.buckets[step.index].members == members
    return step.kind is StepKind.NODE and step.index in own


def _ready_step(problem: Problem, schedule: Schedule, members: tuple[int, ...], before: int) -> int:
    """Return the last step before ``before`` that the launch depends on and that takes a place of
    its own; -1 for none.
    """
    needed, stack = (
        set(),
        [
            n
            for c in members
            for n in (problem.collectives[c].start, *problem.collectives[c].prologue)
        ],
    )
    seen = set(stack)
    while stack:
        for node in problem.predecessors[stack.pop()]:
            if node in seen:
                continue
            seen.add(node)
            if problem.kinds[node] is NodeKind.VIEW:
                stack.append(node)
            elif problem.kinds[node] is not NodeKind.INPUT:
                needed.add(node)
    collectives = {
        problem.collective_of_node[n] for n in needed if problem.kinds[n] is NodeKind.WAIT
    }
    return next(
        (
            k
            for k in range(before - 1, -1, -1)
            if _provides(schedule, schedule.steps[k], needed, collectives)
        ),
        -1,
    )


def _provides(schedule: Schedule, step: Step, needed: set[int], collectives: set[int]) -> bool:
    if step.kind is StepKind.NODE:
        return step.index in needed
    if step.kind is StepKind.COPY_OUT:
        return step.index in collectives
    return step.kind is StepKind.WAIT and not collectives.isdisjoint(
        schedule.buckets[step.index].members
    )


def _prefetch(problem: Problem, schedule: Schedule, members: Sequence[int], at_step: int) -> int:
    """Return the prefetch distance of a launch right before step ``at_step``."""
    needs = {node for c in members for node in problem.needs[c]}
    compute_order = frozenset(problem.compute_order)
    distance = 0
    for step in schedule.steps[at_step:]:
        if step.kind is StepKind.NODE and step.index in compute_order:
            if step.index in needs:
                return distance
            distance += 1
    return 0  # nothing needs it
