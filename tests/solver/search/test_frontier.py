"""One problem under one memory cap after another."""

import random

from apsched.config import Caps, SolveOptions
from apsched.schedule.verify import verify
from apsched.solver import AlongCaps, Known, solve
from tests.helpers.problems.random_schedules import compute_moves
from tests.helpers.problems.strategies import random_problem


def test_a_schedule_with_its_compute_moved_is_a_start_under_every_cap_that_it_keeps() -> None:
    """Under a cap with room for it the answer is at least as fast; under one without, the other
    start is.
    """
    problem = random_problem(random.Random(11), max_collectives=3, max_compute=5)
    caps, options = Caps(max_compute_move=None), SolveOptions(budget=0.1)
    loose = solve(problem, caps, options)
    tight = solve(
        problem, Caps(max_compute_move=None, memory_cap_bytes=loose.floor_memory_bytes), options
    )
    assert loose.best is not None
    assert tight.best is not None
    assert any(compute_moves(problem, loose.best.schedule))
    assert tight.best.peak_memory_bytes < loose.best.peak_memory_bytes
    along = AlongCaps(problem, caps, options)
    known = Known(
        bound_ticks=loose.bound_ticks,
        bound_source=loose.bound_source,
        floor_memory_bytes=loose.floor_memory_bytes,
        floor_bound_bytes=loose.floor_bound_bytes,
    )
    starts = (loose.best.schedule, tight.best.schedule)
    for cap, least in (
        (loose.best.peak_memory_bytes, loose.best.step_time_ticks),
        (loose.best.peak_memory_bytes - 1, tight.best.step_time_ticks),
        (tight.best.peak_memory_bytes, tight.best.step_time_ticks),
    ):
        found = along.at(cap, starts, known).best
        assert found is not None
        assert found.step_time_ticks <= least
        allowed = Caps(max_compute_move=None, memory_cap_bytes=cap)
        assert verify(problem, found.schedule, allowed) == ()
