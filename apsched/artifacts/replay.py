"""A schedule file back on its graph: checked against every dependence, and against the caps it was
made for.
"""

from collections.abc import Sequence

from apsched.artifacts.schedule_file import ScheduleFile, bind_schedule
from apsched.config import Caps
from apsched.errors import InputError
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored
from apsched.schedule.schedule import Schedule
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify

_SHOWN = 3


def replay(problem: Problem, file: ScheduleFile) -> Scored:
    """Return the schedule of ``file`` with its figures on ``problem``.

    Raises ``InputError`` if the file belongs to another graph (with the difference), if its order
    breaks a dependence, or if it breaks a cap that it states.
    """
    schedule = bind_schedule(file, problem)
    wrong = verify(problem, schedule, file.caps)
    if wrong:
        raise _refused(file, "a schedule of this graph within its caps", wrong)
    timeline = simulate(problem, schedule)
    return Scored(
        name="replayed",
        schedule=schedule,
        step_time_ticks=timeline.step_time_ticks,
        exposed_ticks=timeline.exposed_ticks,
        peak_memory_bytes=timeline.peak_memory_bytes,
        num_launches=timeline.num_launches,
        violations=(),
    )


def possible(problem: Problem, file: ScheduleFile) -> Schedule:
    """Return the schedule of ``file``, which may break caps.

    Raises ``InputError`` if the file belongs to another graph (with the difference), or if its
    order breaks a dependence: the figures of such an order mean nothing.
    """
    schedule = bind_schedule(file, problem)
    wrong = verify(problem, schedule, Caps(max_compute_move=None))
    if wrong:
        raise _refused(file, "a schedule of this graph", wrong)
    return schedule


def _refused(file: ScheduleFile, expected: str, wrong: Sequence[str]) -> InputError:
    more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
    return InputError(
        f"{file.path}: not {expected}: {'; '.join(wrong[:_SHOWN])}{more}; solve the graph again"
    )
