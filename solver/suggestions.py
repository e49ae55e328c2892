"""The changes that would help a schedule most: the buckets of one kind on one group, or the places
of launches and waits, each tried and simulated.

The changes build on each other: the first is the best change of the schedule, the second the best
in addition to the first, and so on. Each ends in a whole schedule, checked by ``verify`` and
simulated; compute stays as captured.
"""

from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored
from apsched.schedule.schedule import Schedule
from apsched.schedule.score import score
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.front import Candidate
from apsched.solver.search.late_waits import late_waits
from apsched.solver.search.local_search import FIRST_POLICIES, Search, policies
from apsched.solver.search.start_partitions import families

_ENOUGH_EVALUATIONS = 2**62
_WORTH_SAYING = 1e-4
"""Share of the step time below which a change is not worth saying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, and the schedule with it and all before it."""

    key: int | None
    """Whose buckets change (an index into ``Problem.keys``), launches and waits with them;
    ``None``: only places of launches and waits.
    """
    scored: Scored


def best_changes(
    problem: Problem, caps: Caps, start: Scored, floor_memory_bytes: int, count: int = 3
) -> tuple[Change, ...]:
    """Return up to ``count`` changes, each of which makes the schedule before it faster within
    ``caps``.
    """
    instance = Instance.of(problem, caps)
    search = Search(
        instance=instance,
        report=lambda stage, ticks: None,
        max_evaluations=_ENOUGH_EVALUATIONS,
        floor_bytes=floor_memory_bytes,
    )
    partitions = list(families(search.pricer, caps))
    labels = labels_of(problem, start.schedule)
    best, found = start, list[Change]()
    kept: Candidate | None = None
    for _ in range(count):
        tried: list[tuple[tuple[int, int, int], int, Candidate]] = []
        for policy in policies(instance.arrays):
            for steer in (None, floor_memory_bytes):
                _add(tried, -1, search.evaluate(labels, policy, steer))
        ways = (
            [(policy, None) for policy in FIRST_POLICIES]
            if kept is None
            else [(kept.policy, kept.steer_bytes)]
        )
        for key in range(len(problem.keys)):
            for partition in partitions:
                mixed = np.where(instance.arrays.key == key, partition, labels)
                if not np.array_equal(mixed, labels):
                    for policy, steer in ways:
                        _add(tried, key, search.evaluate(mixed, policy, steer))
        if not tried:
            break
        _, key, kept = min(tried, key=lambda entry: entry[:2])
        search.best = kept
        scored = score(
            problem,
            start.name,
            expand(instance, late_waits(instance, search.program())),
            caps,
        )
        if not scored.fits or scored.step_time_ticks >= best.step_time_ticks * (1 - _WORTH_SAYING):
            break
        found.append(Change(key=None if key < 0 else key, scored=scored))
        best, labels = scored, kept.labels
    return tuple(found)


def labels_of(problem: Problem, schedule: Schedule) -> Ints:
    """Return for each collective the lowest member of its bucket in ``schedule``."""
    labels = np.arange(len(problem.collectives))
    for bucket in schedule.buckets:
        labels[list(bucket.members)] = min(bucket.members)
    return labels


def _add(
    tried: list[tuple[tuple[int, int, int], int, Candidate]], key: int, candidate: Candidate | None
) -> None:
    if candidate is not None:
        tried.append((candidate.value, key, candidate))
