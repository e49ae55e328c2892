"""A looser memory cap is never slower than one of the sequence, and none of these shows a schedule
within the slack that needs much less memory.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import SolveResult, TradeOff
from apsched.solver.arrays.instance import Instance
from apsched.solver.reorder.min_memory import is_small, least_memory
from apsched.solver.requested import solve_requested
from apsched.solver.rungs import climb, memory_rungs
from apsched.solver.solve import solve
from tests.helpers.problems.strategies import layered_problem


def problem_of(seed: int) -> Problem:
    problem = layered_problem(random.Random(seed), num_layers=9)
    assert not is_small(problem)
    return problem


def solved(problem: Problem, cap_bytes: int | None, move: int, slack: float) -> SolveResult:
    caps = Caps(memory_cap_bytes=cap_bytes, max_compute_move=move)
    return solve(problem, caps, SolveOptions(budget=1, time_slack=slack))


def sequence(problem: Problem, move: int) -> tuple[int, ...]:
    caps = Caps(max_compute_move=move)
    floor_bytes = least_memory(problem, caps, SolveOptions(budget=1))[0]
    return memory_rungs(Instance.of(problem, caps), floor_bytes)


@pytest.mark.parametrize("move", [0, 20])
@pytest.mark.parametrize("seed", range(6))
def test_a_looser_memory_cap_is_never_slower_than_one_of_the_sequence(seed: int, move: int) -> None:
    """To the tick, where memory may cost no step time."""
    problem = problem_of(seed)
    known = None
    for low, high in pairwise((*sequence(problem, move), None)):
        between = low * 9 // 8 if high is None else (low + high) // 2
        times = [
            result.best.step_time_ticks
            for cap in (low, between, high)
            if (result := solved(problem, cap, move, 0.0)).best is not None
        ]
        assert len(times) == 3
        assert max(times[1:]) <= times[0]
        assert known is None or times[0] <= known
        known = times[0]


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_cap_that_the_fastest_without_a_cap_fits_is_no_slower(seed: int) -> None:
    """Though search without a cap passes through schedules that do not fit it. With seed 0 the
    fastest itself fits only when its peak has been lowered.
    """
    problem = problem_of(seed)
    free = solved(problem, None, 0, 0.0)
    assert free.best is not None
    cap = max(free.best.peak_memory_bytes, sequence(problem, 0)[-1]) + 1
    within = solved(problem, cap, 0, 0.0)
    assert within.best is not None
    assert within.best.step_time_ticks <= free.fastest_ticks


@pytest.mark.parametrize("seed", range(6))
def test_no_cap_of_the_sequence_shows_a_schedule_within_the_slack_that_needs_much_less(
    seed: int,
) -> None:
    problem, slack = problem_of(seed), 0.05
    free = solved(problem, None, 0, slack)
    assert free.best is not None
    for cap in sequence(problem, 0):
        result = solved(problem, cap, 0, slack)
        assert result.best is not None
        if result.best.step_time_ticks <= free.fastest_ticks * (1 + slack):
            assert free.best.peak_memory_bytes <= 1.02 * result.best.peak_memory_bytes


@pytest.mark.parametrize("seed", range(4))
def test_memory_is_laid_against_step_time(seed: int) -> None:
    """Each point costs more memory and less time than the one before, and slack reaches it."""
    problem = layered_problem(random.Random(seed), num_layers=9)
    options = SolveOptions(budget=1, time_slack=0.0)
    answer = solve(problem, Caps(max_compute_move=0), options)
    points = answer.trade_offs
    assert points[-1].step_time_ticks == answer.fastest_ticks
    for small, fast in pairwise(points):
        assert small.peak_memory_bytes < fast.peak_memory_bytes
        assert small.step_time_ticks > fast.step_time_ticks
    for point in points[:: max(len(points) // 3, 1)]:
        slack = point.step_time_ticks / answer.fastest_ticks - 1 + 1e-9
        within = solve(problem, Caps(max_compute_move=0), replace(options, time_slack=slack)).best
        assert within is not None
        # slack is never so large that a baseline that fits becomes faster
        least = min((b.step_time_ticks for b in answer.baselines if b.fits), default=None)
        if least is None or point.step_time_ticks <= least:
            assert within.peak_memory_bytes <= point.peak_memory_bytes


@pytest.mark.parametrize("move", [0, DEFAULT_COMPUTE_MOVE])
def test_an_answer_with_the_claims_of_what_was_requested_has_the_trade_offs(move: int) -> None:
    problem = problem_of(16)  # nothing on the path: the search keeps the compute as captured
    caps, options = Caps(max_compute_move=move), SolveOptions(budget=1)
    answer = solve_requested(problem, caps, options, progress=None, start=None)
    assert len(answer.trade_offs) >= 2
    assert answer.trade_offs[-1].step_time_ticks <= answer.fastest_ticks


def test_a_large_slack_does_not_end_the_search_earlier() -> None:
    """The fastest that is found is the same, and the memory within the slack is less."""
    problem = problem_of(16)
    little, much = solved(problem, None, 0, 0.001), solved(problem, None, 0, 0.3)
    assert little.best is not None
    assert much.best is not None
    assert much.fastest_ticks == little.fastest_ticks
    assert much.best.peak_memory_bytes < little.best.peak_memory_bytes


def test_the_knee_is_where_more_memory_begins_to_gain_little() -> None:
    def answer(*points: tuple[int, int]) -> SolveResult:
        problem = layered_problem(random.Random(0), num_layers=9)
        result = solve(problem, options=SolveOptions(budget=0.1))
        found = (TradeOff(peak_memory_bytes=m, step_time_ticks=t) for m, t in points)
        return replace(result, trade_offs=tuple(found))

    found = answer((10, 200), (12, 120), (20, 110), (30, 100)).knee
    assert found == TradeOff(peak_memory_bytes=12, step_time_ticks=120)
    assert answer((10, 200), (30, 100)).knee is None
    assert answer().knee is None


@pytest.mark.parametrize("seed", range(4))
def test_the_work_under_a_cap_is_a_part_of_that_under_a_looser_one(seed: int) -> None:
    problem = layered_problem(random.Random(seed), num_layers=20)
    caps = sequence(problem, 0)
    assert caps == tuple(sorted(set(caps)))
    assert len(caps) == 3

    needed = 0

    class Looked:
        """A search in which each cap makes the step shorter, up to a number of them; the fastest
        takes the ``needed`` bytes.
        """

        def __init__(self, most: int) -> None:
            self.at: list[int | None] = []
            self.most = most

        def under(self, cap_bytes: int | None) -> None:
            self.at.append(cap_bytes)

        def fastest_ticks(self, cap_bytes: int | None) -> int | None:
            more = 1 if cap_bytes is not None and cap_bytes < needed else 0
            return 10**6 - 1000 * min(len(self.at), self.most) + more

        def is_done(self, cap_bytes: int | None) -> bool:
            return False

    def looked(cap_bytes: int | None, most: int, *, is_loose: bool = False) -> list[int | None]:
        climber = Looked(most)
        below = memory_rungs(Instance.of(problem, Caps(memory_cap_bytes=cap_bytes)), caps[0])
        climb(below, cap_bytes, climber, is_loose=is_loose)
        return climber.at

    assert looked(None, 100) == [*caps, None]
    assert looked(caps[2], 100) == [*caps[:2], caps[2]]
    assert looked(caps[1] + 1, 100) == [*caps[:2], caps[1] + 1]
    assert looked(None, 1) == [*caps[:3], None]  # two caps that gain nothing
    loose = caps[2] + 10
    assert looked(loose, 100, is_loose=True) == [*caps, None]
    needed = loose + 1
    assert looked(loose, 100, is_loose=True) == [*caps, None, loose]
