"""A looser memory cap is never slower, and no cap finds a schedule within the slack that needs much
less memory: both hold by the sequence of caps that a search goes through.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from apsched.config import Caps, SolveOptions
from apsched.schedule.result import SolveResult, TradeOff
from apsched.solver.arrays.instance import Instance
from apsched.solver.memory_rungs import Rung, climb, rungs
from apsched.solver.reorder.min_memory import is_small, least_memory
from apsched.solver.solve import solve
from tests.helpers.problems.strategies import layered_problem

CAPS = (1.0, 1.04, 1.1, 1.15, 1.3, 1.5, 2.0, 4.0, None)
"""Of the least memory."""


def solved(seed: int, move: int, slack: float) -> list[SolveResult]:
    problem = layered_problem(random.Random(seed), num_layers=9)
    assert not is_small(problem)
    options = SolveOptions(budget=1, time_slack=slack)
    floor_bytes = least_memory(problem, Caps(max_compute_move=move), options)[0]
    caps = [None if share is None else int(floor_bytes * share) for share in CAPS]
    return [
        solve(problem, Caps(memory_cap_bytes=cap, max_compute_move=move), options) for cap in caps
    ]


@pytest.mark.parametrize("move", [0, 20])
@pytest.mark.parametrize("seed", range(6))
def test_a_looser_memory_cap_is_never_slower(seed: int, move: int) -> None:
    """To the tick, where memory may cost no step time."""
    times = [
        result.best.step_time_ticks for result in solved(seed, move, 0.0) if result.best is not None
    ]
    assert len(times) == len(CAPS)
    assert all(looser <= tighter for tighter, looser in pairwise(times)), times


@pytest.mark.parametrize("seed", range(6))
def test_no_cap_shows_a_schedule_within_the_slack_that_needs_much_less(seed: int) -> None:
    slack = 0.05
    results = solved(seed, 0, slack)
    free = results[-1]
    assert free.best is not None
    for result in results:
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
    problem = layered_problem(random.Random(seed), num_layers=9)
    floor_bytes = least_memory(problem, options=SolveOptions(budget=0.1))[0]
    free = list(rungs(Instance.of(problem), floor_bytes))
    caps = [rung.cap_bytes for rung in free]
    assert caps[0] == floor_bytes
    assert caps == sorted(caps, key=lambda cap: cap or 0)
    assert [rung.full for rung in free].count(True) >= 3

    class Looked:
        """A search in which each cap up to a limit makes the step shorter."""

        def __init__(self) -> None:
            self.at: list[Rung] = []

        def under(self, rung: Rung) -> None:
            self.at.append(rung)

        def fastest_ticks(self, cap_bytes: int | None) -> int | None:
            return 10**6 - 1000 * min(len(self.at), 9)

        def is_done(self, cap_bytes: int | None) -> bool:
            return False

    def looked(cap_bytes: int | None) -> list[Rung]:
        climber = Looked()
        climb(Instance.of(problem, Caps(memory_cap_bytes=cap_bytes)), floor_bytes, climber)
        return climber.at

    most = looked(None)
    for rung in most:
        if rung.cap_bytes is not None:
            part = looked(rung.cap_bytes)
            assert part == most[: len(part)]
            assert part[-1] == rung or part == most
