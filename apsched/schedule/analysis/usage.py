"""A schedule in the terms of the knobs it replaces: bucket size, topo-span, prefetch, in-flight
bytes.
"""

from dataclasses import dataclass

from apsched.problem.problem import Problem
from apsched.schedule.analysis.moved_compute import furthest_move, moved_compute
from apsched.schedule.schedule import Schedule, StepKind
from apsched.schedule.simulate import Timeline
from apsched.schedule.verify import prefetch_distances


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The largest value of each quantity that a cap could limit; results, not knobs."""

    bucket_bytes: int
    """Of the largest bucket, counted once; 0 without buckets."""
    topo_span: int
    """Of the widest bucket; 0 without buckets."""
    prefetch: int
    """Compute nodes between a start and the first compute node that needs it, of the earliest
    launch.
    """
    in_flight_bytes: int
    """Output bytes of FSDP collectives started and not yet waited for, at the worst step."""
    moved_nodes: int
    """The fewest compute nodes that have to move to make the order out of the one as captured."""
    compute_move: int
    """Places by which the compute node stands apart from its own that does most."""


def chosen(problem: Problem, schedule: Schedule, timeline: Timeline) -> Chosen:
    """Return these figures of ``schedule``, whose timeline is ``timeline``."""
    collectives = problem.collectives
    sizes = [sum(collectives[c].size_bytes for c in bucket.members) for bucket in schedule.buckets]
    ranks = [[collectives[c].start for c in bucket.members] for bucket in schedule.buckets]
    return Chosen(
        bucket_bytes=max(sizes, default=0),
        topo_span=max((max(r) - min(r) for r in ranks), default=0),
        prefetch=max(
            prefetch_distances(problem, schedule, launch_positions(problem, schedule)).values(),
            default=0,
        ),
        in_flight_bytes=timeline.peak_in_flight_bytes,
        moved_nodes=len(moved_compute(problem, schedule)),
        compute_move=furthest_move(problem, schedule),
    )


def launch_positions(problem: Problem, schedule: Schedule) -> list[int]:
    """Return the step of every node that has one of its own, and of every member's start that of
    its bucket.
    """
    position = [-1] * problem.num_nodes
    for k, step in enumerate(schedule.steps):
        if step.kind is StepKind.NODE:
            position[step.index] = k
        elif step.kind is StepKind.START:
            for c in schedule.buckets[step.index].members:
                position[problem.collectives[c].start] = k
    return position
