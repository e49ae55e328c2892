"""Execute a schedule on the machine of the design: one compute stream, one stream for each process
group, exact memory.

    t_k   = max(t_{k-1}, max over waits w just before k of end(w)) + d_k
    end_c = max(t at the point of launch, end of the collective before c on its stream) + T_c

Nodes of a kernel that the order cuts take longer (:mod:`apsched.schedule.kernel_cuts`). Where the
problem has contention (:mod:`apsched.problem.contention`), durations grow with the work that runs
at the same time (:class:`apsched.schedule.clocks.SharedClock`).

Memory follows the order, not the clock: live bytes at a step are those of all storages born at or
before it whose last use is at or after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.clocks import Clock, FreeClock, SharedClock
from apsched.schedule.kernel_cuts import cuts_made, extra_ticks
from apsched.schedule.memory import live_bytes
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One launch on a group's stream."""

    members: tuple[int, ...]
    """Collectives it carries."""
    stream: int
    size_bytes: int
    coalesced: bool
    start_step: int
    wait_step: int
    begin_ticks: int
    end_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The times of a schedule."""

    begin_ticks: tuple[int, ...]
    """When each step begins on the compute stream."""
    end_ticks: tuple[int, ...]
    """When each step ends on the compute stream; a wait lasts as long as the stream
    stalls.
    """
    transfers: tuple[Transfer, ...]
    """In order of launch."""
    live_bytes: tuple[int, ...]
    """At each step."""
    in_flight_bytes: tuple[int, ...]
    """Output bytes of all collectives, started and not yet waited for, at each step."""
    step_time_ticks: int
    exposed_ticks: int
    """Time that the compute stream stalls, the tail after its last node included."""
    compute_ticks: int
    """Time that the compute stream works."""

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes alive at any step."""
        return max(self.live_bytes, default=0)

    @property
    def peak_in_flight_bytes(self) -> int:
        """The most bytes in flight at any step."""
        return max(self.in_flight_bytes, default=0)

    @property
    def num_launches(self) -> int:
        """Number of collectives launched."""
        return len(self.transfers)


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Return the timeline of ``schedule``, which must be complete and ordered (see ``verify``)."""
    launched_by, waited_by = _launches(problem, schedule)
    begin: list[int] = []
    end: list[int] = []
    clock = clock_of(problem)
    transfers: list[tuple[tuple[int, ...], int, int, bool, int]] = []
    transfer_of: dict[tuple[int, ...], int] = {}
    wait_step: dict[int, int] = {}
    extra = extra_ticks(cuts_made(problem, schedule))
    for k, step in enumerate(schedule.steps):
        begin.append(clock.now)
        if (members := launched_by.get(k)) is not None:
            clock.run(_launch_ticks(problem, step, members))
            size = sum(problem.collectives[c].size_bytes for c in members)
            coalesced = step.kind is StepKind.START and schedule.buckets[step.index].coalesced
            key = problem.keys[problem.collectives[members[0]].key]
            for_members = len(members) * (key.coalesced_member_ticks or 0) if coalesced else 0
            transfer_of[members] = clock.launch(
                key.stream, key.price(size) + for_members, key.price(0) + for_members
            )
            transfers.append((members, key.stream, size, coalesced, k))
        elif (members := waited_by.get(k)) is not None:
            index = transfer_of[members]
            wait_step[index] = k
            clock.wait(index)
        else:
            longer = extra.get(step.index, 0) if step.kind is StepKind.NODE else 0
            clock.run(_work_ticks(problem, schedule, step) + longer)
        end.append(clock.now)
    t = clock.now
    stalled = sum(end[k] - begin[k] for k in waited_by)
    step_time = clock.finish()
    done = tuple(
        Transfer(
            members=m,
            stream=s,
            size_bytes=b,
            coalesced=f,
            start_step=k,
            wait_step=wait_step[i],
            begin_ticks=begins,
            end_ticks=ends,
        )
        for i, ((m, s, b, f, k), begins, ends) in enumerate(
            zip(transfers, clock.begins, clock.ends, strict=True)
        )
    )
    return Timeline(
        begin_ticks=tuple(begin),
        end_ticks=tuple(end),
        transfers=done,
        live_bytes=live_bytes(problem, schedule),
        in_flight_bytes=_in_flight_bytes(problem, done, len(schedule.steps)),
        step_time_ticks=step_time,
        exposed_ticks=stalled + step_time - t,
        compute_ticks=t - stalled,
    )


def clock_of(problem: Problem) -> Clock:
    """Return the clock of the machine that ``problem`` runs on."""
    if problem.contention is None:
        return FreeClock(len(problem.streams))
    links = [problem.contention.links_of(group) for group in problem.streams]
    return SharedClock(
        links, *(Fraction(*ratio) for ratio in problem.contention.slowdowns.values())
    )


def _launches(
    problem: Problem, schedule: Schedule
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Return for each launching step, and for each waiting step, the collectives it is about."""
    launched: dict[int, tuple[int, ...]] = {}
    waited: dict[int, tuple[int, ...]] = {}
    for k, step in enumerate(schedule.steps):
        if step.kind is StepKind.NODE:
            if problem.kinds[step.index] is NodeKind.START:
                launched[k] = (problem.collective_of_node[step.index],)
            elif problem.kinds[step.index] is NodeKind.WAIT:
                waited[k] = (problem.collective_of_node[step.index],)
        elif step.kind is StepKind.START:
            launched[k] = schedule.buckets[step.index].members
        elif step.kind is StepKind.WAIT:
            waited[k] = schedule.buckets[step.index].members
    return launched, waited


def _launch_ticks(problem: Problem, step: Step, members: tuple[int, ...]) -> int:
    """Return the price of a launch on the compute stream: as captured, or of a bucket that of its
    key.
    """
    if step.kind is StepKind.NODE:
        return problem.duration_ticks[step.index]
    return problem.keys[problem.collectives[members[0]].key].launch_ticks


def _work_ticks(problem: Problem, schedule: Schedule, step: Step) -> int:
    if step.kind is StepKind.NODE:
        return (
            problem.duration_ticks[step.index]
            if problem.kinds[step.index] is NodeKind.COMPUTE
            else 0
        )
    if step.kind is StepKind.COPY_IN:
        return problem.copy_price(copy_in_bytes(problem, schedule.buckets[step.index]))
    return problem.copy_price(problem.collectives[step.index].output_bytes)  # COPY_OUT


def copy_in_bytes(problem: Problem, bucket: Bucket) -> int:
    """Return the bytes that the copy-in of ``bucket`` moves: the inputs of its members, before a
    cast if it casts them on the way.
    """
    return sum(problem.collectives[c].copied_bytes for c in bucket.members)


def _in_flight_bytes(
    problem: Problem, transfers: Iterable[Transfer], num_steps: int
) -> tuple[int, ...]:
    delta = [0] * (num_steps + 1)
    for transfer in transfers:
        size = sum(problem.collectives[c].output_bytes for c in transfer.members)
        delta[transfer.start_step] += size
        delta[transfer.wait_step] -= size
    return tuple(accumulate(delta[:num_steps]))
