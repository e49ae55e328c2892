"""The cause of each stall of the compute stream, in one sentence, read off the timeline."""

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.quantities import show_bytes, show_us
from apsched.report.binding import step_name
from apsched.schedule.analysis.critical_path import Cause, cause_of
from apsched.schedule.schedule import Schedule
from apsched.schedule.simulate import Timeline, Transfer
from apsched.units import ticks_to_us


def transfer_name(problem: Problem, transfer: Transfer) -> str:
    """Return the name of a transfer: its kind, the parameter (or node) of its first member, and the
    number of further members.
    """
    first = problem.collectives[transfer.members[0]]
    more = f" (+{len(transfer.members) - 1})" if len(transfer.members) > 1 else ""
    return (
        f"{problem.keys[first.key].kind} of {first.module or problem.node_names[first.start]}{more}"
    )


def stalls(problem: Problem, schedule: Schedule, timeline: Timeline, caps: Caps) -> dict[int, str]:
    """Return for each step that stalls why it does; the key -1 is the tail behind the last step,
    where there is one.
    """
    queue = _queues(timeline)
    sentences: dict[int, str] = {}
    last_end = timeline.end_ticks[-1] if timeline.end_ticks else 0
    for i, transfer in enumerate(timeline.transfers):
        k = transfer.wait_step
        if timeline.end_ticks[k] > timeline.begin_ticks[k]:
            sentences[k] = _sentence(problem, schedule, timeline, caps, i, queue)
        if transfer.end_ticks == timeline.step_time_ticks > last_end:
            sentences[-1] = _sentence(problem, schedule, timeline, caps, i, queue)
    return sentences


def _queues(timeline: Timeline) -> list[tuple[int, ...]]:
    """Return for each transfer those that it was queued behind without a break, the first of them
    first.
    """
    last: dict[int, int] = {}
    queue: list[tuple[int, ...]] = []
    for i, transfer in enumerate(timeline.transfers):
        before = last.get(transfer.stream)
        launched = timeline.end_ticks[transfer.start_step]
        queue.append(
            (*queue[before], before)
            if before is not None and timeline.transfers[before].end_ticks > launched
            else ()
        )
        last[transfer.stream] = i
    return queue


def _sentence(
    problem: Problem,
    schedule: Schedule,
    timeline: Timeline,
    caps: Caps,
    i: int,
    queue: list[tuple[int, ...]],
) -> str:
    transfer = timeline.transfers[i]
    size, where = show_bytes(transfer.size_bytes), f"group {problem.streams[transfer.stream]}"
    length = show_us(ticks_to_us(transfer.end_ticks - transfer.begin_ticks))
    text = f"waits for {transfer_name(problem, transfer)}: {size} over {where} take {length}"
    first = i
    if queue[i]:
        first = queue[i][0]
        nearest = transfer_name(problem, timeline.transfers[queue[i][-1]])
        since = show_us(ticks_to_us(transfer.begin_ticks - timeline.end_ticks[transfer.start_step]))
        more = f" and {len(queue[i]) - 1} more" if len(queue[i]) > 1 else ""
        text += f"; it was queued for {since} behind {nearest}{more}"
    return f"{text}. {_because(problem, schedule, timeline, caps, first, queued=bool(queue[i]))}"


def _because(
    problem: Problem, schedule: Schedule, timeline: Timeline, caps: Caps, i: int, *, queued: bool
) -> str:
    """Return why the first of a queue is not launched sooner."""
    cause, at_step = cause_of(problem, schedule, timeline, caps, i)
    who = f"The first of them, {transfer_name(problem, timeline.transfers[i])}," if queued else "It"
    at = step_name(problem, schedule.steps[at_step])
    reasons = {
        Cause.START: "is launched as the step begins",
        Cause.DATA: "cannot be launched sooner: its input is made right before",
        Cause.STREAM: "is launched as soon as its stream is free",
        Cause.MEMORY: f"cannot be launched sooner: that would break the memory cap at {at}",
        Cause.IN_FLIGHT: f"cannot be launched sooner: that would break the in-flight cap at {at}",
        Cause.PREFETCH: f"cannot be launched sooner: that would break the prefetch cap at {at}",
        Cause.CHOICE: "could be launched sooner: this order launches it here",
    }
    return f"{who} {reasons[cause]}."
