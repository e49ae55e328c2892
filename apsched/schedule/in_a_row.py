"""Schedules of the parts of a graph, one behind the other, as one schedule of the graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a graph with a schedule of its own."""

    problem: Problem
    schedule: Schedule
    places: Sequence[int]
    """Rank in the whole graph of each node of the part; -1 for a node that the whole has not."""


def in_a_row(whole: Problem, parts: Iterable[Part]) -> Schedule | None:
    """Return the schedules of ``parts``, which have all nodes of ``whole`` but its output, one
    behind the other; ``None`` if the collectives are others. Whether it keeps caps is for
    ``verify`` to say.
    """
    at_start = {one.start: c for c, one in enumerate(whole.collectives)}
    buckets: list[Bucket] = []
    steps: list[Step] = []
    for part in parts:
        starts = [part.places[one.start] for one in part.problem.collectives]
        if any(start not in at_start for start in starts):
            return None
        number = [at_start.pop(start) for start in starts]
        num_before = len(buckets)
        for bucket in part.schedule.buckets:
            members = tuple(number[c] for c in bucket.members)
            buckets.append(Bucket(members, coalesced=bucket.coalesced))
        for step in part.schedule.steps:
            index = step.index + num_before
            if step.kind is StepKind.NODE:
                index = part.places[step.index]
            elif step.kind is StepKind.COPY_OUT:
                index = number[step.index]
            if index >= 0:
                steps.append(Step(step.kind, index))
    if at_start:
        return None
    given = [step for step in steps if _is_input(whole, step)]
    rest = [step for step in steps if not _is_input(whole, step)]
    end = Step(StepKind.NODE, whole.num_nodes - 1)
    return Schedule(buckets=tuple(buckets), steps=(*sorted(given), *rest, end))


def _is_input(whole: Problem, step: Step) -> bool:
    return step.kind is StepKind.NODE and whole.kinds[step.index] is NodeKind.INPUT
