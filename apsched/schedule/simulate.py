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

from collections.abc import Iterable, Sequence
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


class Replay:
    """Runs the steps of a schedule, in order, on a clock that others may drive, too. ``streams``
    has the stream of the clock for each stream of the problem; by default they are the same.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        clock: Clock,
        streams: Sequence[int] | None = None,
    ) -> None:
        self.clock = clock
        self.launched_by, self.waited_by = _launches(problem, schedule)
        self.launches: list[tuple[tuple[int, ...], int, int, bool, int, int]] = []
        """Of each launch: members, stream, bytes, whether it is coalesced, step, and transfer of
        the clock.
        """
        self.wait_step: dict[int, int] = {}
        """Transfer of the clock -> step that waits for it."""
        self._problem, self._schedule = problem, schedule
        self._streams = range(len(problem.streams)) if streams is None else streams
        self._transfer_of: dict[tuple[int, ...], int] = {}
        self._extra = extra_ticks(cuts_made(problem, schedule))

    def run(self, k: int) -> None:
        """Run step ``k``."""
        problem, step = self._problem, self._schedule.steps[k]
        if (members := self.launched_by.get(k)) is not None:
            self.clock.run(_launch_ticks(problem, step, members))
            self._launch(k, members)
        elif k in self.waited_by:
            index = self.transfer_of(k)
            self.wait_step[index] = k
            self.clock.wait(index)
        else:
            longer = self._extra.get(step.index, 0) if step.kind is StepKind.NODE else 0
            self.clock.run(_work_ticks(problem, self._schedule, step) + longer)

    def transfer_of(self, k: int) -> int:
        """Return the transfer of the clock that step ``k`` waits for."""
        return self._transfer_of[self.waited_by[k]]

    def _launch(self, k: int, members: tuple[int, ...]) -> None:
        step = self._schedule.steps[k]
        size = sum(self._problem.collectives[c].size_bytes for c in members)
        coalesced = step.kind is StepKind.START and self._schedule.buckets[step.index].coalesced
        key = self._problem.keys[self._problem.collectives[members[0]].key]
        for_members = len(members) * (key.coalesced_member_ticks or 0) if coalesced else 0
        index = self.clock.launch(
            self._streams[key.stream], key.price(size) + for_members, key.price(0) + for_members
        )
        self._transfer_of[members] = index
        self.launches.append((members, key.stream, size, coalesced, k, index))


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Return the timeline of ``schedule``, which must be complete and ordered (see ``verify``)."""
    clock = clock_of(problem)
    replay = Replay(problem, schedule, clock)
    begin: list[int] = []
    end: list[int] = []
    for k in range(len(schedule.steps)):
        begin.append(clock.now)
        replay.run(k)
        end.append(clock.now)
    t = clock.now
    stalled = sum(end[k] - begin[k] for k in replay.waited_by)
    step_time = clock.finish()
    done = tuple(
        Transfer(
            members=members,
            stream=stream,
            size_bytes=size,
            coalesced=coalesced,
            start_step=k,
            wait_step=replay.wait_step[index],
            begin_ticks=clock.begins[index],
            end_ticks=clock.ends[index],
        )
        for members, stream, size, coalesced, k, index in replay.launches
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
