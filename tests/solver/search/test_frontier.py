"""One problem under one memory cap after another."""

import random
from dataclasses import replace

import pytest

from apsched.config import Caps, SolveOptions
from apsched.schedule.verify import verify
from apsched.solver import AlongCaps, Known, least_memory, solve, solve_requested
from tests.helpers.problems.random_schedules import compute_moves
from tests.helpers.problems.strategies import layered_problem, random_problem


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


@pytest.mark.parametrize(("seed", "share"), [(23, 0.5), (29, 1.0)])
def test_where_compute_moves_for_short_memory_both_orders_are_searched(
    seed: int, share: float
) -> None:
    """Between the floor and that as captured only the order of the start fits; from there on the
    order as captured is faster.
    """
    problem, caps = layered_problem(random.Random(seed), num_layers=9), Caps(max_compute_move=200)
    options = SolveOptions(budget=3)
    captured, _ = least_memory(problem, replace(caps, max_compute_move=0), options)
    least, _ = least_memory(problem, caps, options)
    free = solve_requested(problem, caps, options)
    start = solve_requested(problem, replace(caps, memory_cap_bytes=least), options).best
    assert start is not None
    known = Known(
        bound_ticks=free.bound_ticks,
        bound_source=free.bound_source,
        floor_memory_bytes=least,
        floor_bound_bytes=free.floor_bound_bytes,
    )
    cap = least + int(share * (captured - least))
    found = AlongCaps(problem, caps, options).at(cap, (start.schedule,), known).best
    assert found is not None
    assert verify(problem, found.schedule, replace(caps, memory_cap_bytes=cap)) == ()
    assert found.step_time_ticks < start.step_time_ticks * 0.95
