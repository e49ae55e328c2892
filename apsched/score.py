"""A schedule and what it is worth: figures of ``simulate``, and the caps that it breaks as ``verify`` sees them."""

from apsched.config import Caps
from apsched.problem import Problem
from apsched.result import Scored
from apsched.schedule import Schedule
from apsched.simulate import simulate
from apsched.verify import verify


def score(problem: Problem, name: str, schedule: Schedule, caps: Caps) -> Scored:
    """Return ``schedule`` with its exact figures and the caps that it breaks."""
    return scored(problem, name, schedule, violations=verify(problem, schedule, caps))


def scored(problem: Problem, name: str, schedule: Schedule, *, violations: tuple[str, ...] = ()) -> Scored:
    """Return ``schedule``, which must keep all dependences and was verified, with its exact figures."""
    timeline = simulate(problem, schedule)
    return Scored(
        name=name,
        schedule=schedule,
        step_time_ticks=timeline.step_time_ticks,
        exposed_ticks=timeline.exposed_ticks,
        peak_memory_bytes=timeline.peak_memory_bytes,
        num_launches=timeline.num_launches,
        violations=violations,
    )
