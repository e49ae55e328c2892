"""A schedule and its score: the figures of ``simulate``, and the caps that it breaks according to
``verify``.
"""

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored
from apsched.schedule.schedule import Schedule
from apsched.schedule.simulate import Timeline, simulate
from apsched.schedule.verify import verified


def score(problem: Problem, name: str, schedule: Schedule, caps: Caps) -> Scored:
    """Return ``schedule`` with its exact figures and the caps that it breaks."""
    violations, timeline = verified(problem, schedule, caps)
    return scored(problem, name, schedule, violations=violations, timeline=timeline)


def scored(
    problem: Problem,
    name: str,
    schedule: Schedule,
    *,
    violations: tuple[str, ...] = (),
    timeline: Timeline | None = None,
) -> Scored:
    """Return ``schedule``, which must keep all dependences and was verified, with its exact
    figures, those of ``timeline``.
    """
    timeline = timeline or simulate(problem, schedule)
    return Scored(
        name=name,
        schedule=schedule,
        step_time_ticks=timeline.step_time_ticks,
        exposed_ticks=timeline.exposed_ticks,
        peak_memory_bytes=timeline.peak_memory_bytes,
        num_launches=timeline.num_launches,
        violations=violations,
    )
