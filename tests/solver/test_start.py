"""A schedule found under other caps as a start: never worse than it, no search where it is good
enough, nothing where it does not fit.
"""

import random
from dataclasses import replace

import pytest

from apsched.config import Caps, SolveOptions
from apsched.schedule.schedule import as_captured
from apsched.schedule.verify import verify
from apsched.solver import moving_where_it_pays, solve, solve_requested
from apsched.solver.reorder.min_memory import is_small
from apsched.solver.search.local_search import Search
from tests.helpers.problems.strategies import layered_problem

OPTIONS = SolveOptions(budget=0.5, time_slack=0.05)


@pytest.fixture(scope="module")
def near():
    """A problem too large for the whole formulation, and its answer under a tight cap, which is
    near the bound of a looser one.
    """
    for seed in range(40):
        problem = layered_problem(random.Random(seed), num_layers=6)
        if is_small(problem):
            continue
        free = solve(problem, Caps(), OPTIONS)
        tight = solve(problem, Caps(memory_cap_bytes=free.best.peak_memory_bytes), OPTIONS)
        if tight.best is not None and tight.best.step_time_ticks <= tight.bound_ticks * (
            1 + OPTIONS.time_slack / 2
        ):
            return problem, tight
    raise AssertionError("no such problem")


def test_a_start_that_is_good_enough_saves_the_search(near, monkeypatch):
    problem, tight = near
    without = solve(problem, Caps(), OPTIONS)
    runs = []
    portfolio = Search.portfolio
    monkeypatch.setattr(
        Search, "portfolio", lambda search: runs.append(search) or portfolio(search)
    )
    solve(problem, Caps(), OPTIONS)
    assert runs, "the search is what is saved"
    runs.clear()
    answer = solve(problem, Caps(), OPTIONS, start=tight.best.schedule)
    assert not runs
    assert answer.solved_by == "start"
    assert answer.best.schedule == tight.best.schedule
    assert answer.bound_ticks == without.bound_ticks
    assert answer.best.step_time_ticks <= without.bound_ticks * (1 + OPTIONS.time_slack / 2)
    assert answer == solve(problem, Caps(), OPTIONS, start=tight.best.schedule)


def test_nothing_slower_than_the_start_is_returned(near):
    problem, tight = near
    poor = replace(OPTIONS, budget=0.0, time_slack=0.0)
    assert (
        solve(problem, Caps(), poor, start=tight.best.schedule).best.step_time_ticks
        <= tight.best.step_time_ticks
    )


@pytest.mark.parametrize("seed", [4, 20])
def test_a_start_that_moves_compute_counts_where_moving_does_not_seem_to_pay(seed):
    """As that of one graph, made of the schedules of both halves."""
    problem, caps = layered_problem(random.Random(seed), num_layers=2), Caps(max_compute_move=20)
    as_captured_caps = moving_where_it_pays(problem, caps)
    assert as_captured_caps.max_compute_move == 0
    start = solve(problem, caps, SolveOptions(budget=0.2, time_slack=0.0)).best
    assert verify(problem, start.schedule, as_captured_caps), "it moves compute"
    poor = SolveOptions(budget=0.0, time_slack=0.0)
    without = solve_requested(problem, caps, poor).best
    found = solve_requested(problem, caps, poor, start=start.schedule).best
    assert found.step_time_ticks <= start.step_time_ticks < without.step_time_ticks


def test_a_start_that_breaks_a_cap_or_belongs_elsewhere_is_not_looked_at(near):
    problem, tight = near
    caps = Caps(memory_cap_bytes=tight.best.peak_memory_bytes - 512)
    assert verify(problem, tight.best.schedule, caps)
    plain = solve(problem, caps, OPTIONS)
    assert solve(problem, caps, OPTIONS, start=tight.best.schedule) == plain
    assert solve(problem, caps, OPTIONS, start=as_captured(problem.num_nodes - 1)) == plain
