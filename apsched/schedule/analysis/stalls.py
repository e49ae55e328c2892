"""The collectives that stall the compute stream, and the causes: for each wait that stalls, the
state of its transfer until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.quantities import show_bytes, show_us
from apsched.schedule.schedule import Schedule, StepKind
from apsched.schedule.simulate import Timeline, Transfer
from apsched.units import ticks_to_us


class StallCause(StrEnum):
    """The cause of a stall."""

    AT_ONCE = "waited for at once"  # no compute between launch and wait
    QUEUE = "behind others"  # its stream was busy for longer than the stall
    SHORT = "too little compute"  # compute between launch and wait is shorter than the transfer
    TAIL = "nothing left to compute"  # behind the last compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One transfer that stalls the compute stream."""

    name: str
    """Kind, and module or node of its first member."""
    num_members: int
    size_bytes: int
    on_path: bool
    stall_ticks: int
    transfer_ticks: int
    queued_ticks: int
    """From its launch until its stream is free."""
    hidden_ticks: int
    """Compute between its launch and its wait."""
    why: StallCause

    @property
    def reason(self) -> str:
        """Why, with the numbers."""
        takes = f"takes {show_us(ticks_to_us(self.transfer_ticks))}"
        match self.why:
            case StallCause.AT_ONCE:
                return f"{self.why}: {takes}, and no compute runs between launch and wait" + (
                    "; it is on the path" if self.on_path else ""
                )
            case StallCause.QUEUE:
                return (
                    f"{self.why} on its stream for {show_us(ticks_to_us(self.queued_ticks))};"
                    f" {takes}"
                )
            case StallCause.SHORT:
                return (
                    f"{self.why}: {takes}, {show_us(ticks_to_us(self.hidden_ticks))} of compute"
                    " between launch and wait"
                )
            case _:
                return f"{self.why}: {takes}, at the end of the step"


def exposed(problem: Problem, schedule: Schedule, timeline: Timeline) -> tuple[Stall, ...]:
    """Return every transfer that is waited for, the longest stall first; stalls add up to the
    exposed time before the last step ends.
    """
    compute_order = frozenset(problem.compute_order)
    compute = [
        k
        for k, step in enumerate(schedule.steps)
        if step.kind is StepKind.NODE and step.index in compute_order
    ]
    last = compute[-1] if compute else -1
    work = _work_before(problem, schedule, timeline)
    found = []
    for transfer in timeline.transfers:
        stall = timeline.end_ticks[transfer.wait_step] - timeline.begin_ticks[transfer.wait_step]
        if stall > 0:
            found.append(_exposed(problem, timeline, transfer, stall, work, last))
    return tuple(sorted(found, key=lambda e: -e.stall_ticks))


def _exposed(
    problem: Problem,
    timeline: Timeline,
    transfer: Transfer,
    stall: int,
    work: Sequence[int],
    last: int,
) -> Stall:
    first = problem.collectives[transfer.members[0]]
    queued = transfer.begin_ticks - timeline.end_ticks[transfer.start_step]
    hidden = work[transfer.wait_step] - work[transfer.start_step + 1]
    if transfer.wait_step > last:
        why = StallCause.TAIL
    elif queued >= stall:
        why = StallCause.QUEUE
    else:
        why = StallCause.SHORT if hidden else StallCause.AT_ONCE
    return Stall(
        name=f"{problem.keys[first.key].kind} of {first.module or problem.node_names[first.start]}",
        num_members=len(transfer.members),
        size_bytes=transfer.size_bytes,
        on_path=first.on_path,
        stall_ticks=stall,
        transfer_ticks=transfer.end_ticks - transfer.begin_ticks,
        queued_ticks=queued,
        hidden_ticks=hidden,
        why=why,
    )


def _work_before(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[int]:
    """Return for each step the time that the compute stream works before it: all but waits."""
    waits = {t.wait_step for t in timeline.transfers}
    before = [0]
    for k, step in enumerate(schedule.steps):
        launches = step.kind is StepKind.START or (
            step.kind is StepKind.NODE and problem.kinds[step.index] is NodeKind.START
        )
        ticks = 0 if k in waits or launches else timeline.end_ticks[k] - timeline.begin_ticks[k]
        before.append(before[-1] + ticks)
    return before


def exposed_lines(found: Sequence[Stall], most: int = 5) -> tuple[str, ...]:
    """Return the longest stalls for people, and the sum of the others by cause."""
    lines = []
    for e in found[:most]:
        more = f" (+{e.num_members - 1})" if e.num_members > 1 else ""
        lines.append(
            f"    {show_us(ticks_to_us(e.stall_ticks)):>12}  {e.name}{more},"
            f" {show_bytes(e.size_bytes)}: {e.reason}"
        )
    others = found[most:]
    for why in StallCause:
        of_reason = [e for e in others if e.why is why]
        if of_reason:
            total = show_us(ticks_to_us(sum(e.stall_ticks for e in of_reason)))
            lines.append(f"    {total:>12}  {len(of_reason)} more, {why}")
    return tuple(lines)
