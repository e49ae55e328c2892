"""A looser cap on prefetch is never slower than one of the sequence."""

import random
from itertools import pairwise
from typing import Any

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import SolveResult
from apsched.schedule.verify import verify
from apsched.solver import large
from apsched.solver.program.evaluate import evaluate
from apsched.solver.reorder.min_memory import is_small, least_memory
from apsched.solver.rungs import prefetch_rungs
from apsched.solver.solve import solve
from tests.helpers.problems.strategies import layered_problem


def solved(problem: Problem, caps: Caps) -> SolveResult:
    return solve(problem, caps, SolveOptions(budget=0.3, time_slack=0.0))


def test_the_sequence_ends_below_the_cap() -> None:
    assert prefetch_rungs(None) == ()
    assert prefetch_rungs(0) == prefetch_rungs(2) == ()
    assert prefetch_rungs(16) == (2, 4, 8)
    assert prefetch_rungs(300) == (2, 4, 8, 16, 64, 256)


@pytest.mark.parametrize("move", [0, 20])
@pytest.mark.parametrize("share", [None, 1.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_looser_cap_is_never_slower_than_one_of_the_sequence(
    seed: int, share: float | None, move: int
) -> None:
    """To the tick, where memory may cost no step time; ``share``: the memory cap over the least."""
    problem = layered_problem(random.Random(seed), num_layers=9)
    assert not is_small(problem)
    cap = None
    if share is not None:
        cap = int(share * least_memory(problem, Caps(max_compute_move=move))[0])
    known = None
    for low, high in pairwise(prefetch_rungs(65)):
        caps = [
            Caps(memory_cap_bytes=cap, max_prefetch=p, max_compute_move=move)
            for p in (low, (low + high) // 2)
        ]
        found = [solved(problem, one) for one in caps]
        times = []
        for result, one in zip(found, caps, strict=True):
            assert result.best is not None
            assert not verify(problem, result.best.schedule, one)
            times.append(result.best.step_time_ticks)
        assert times[1] <= times[0]
        assert known is None or times[0] <= known
        known = times[0]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_under_tighter_caps_is_laid_out_as_it_was(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier launches may take memory that is not there."""
    searches: list[large.Climb] = []

    def spied(*task: Any) -> large.Climb:
        searches.append(climbed(*task))
        return searches[-1]

    climbed = large.climbed
    monkeypatch.setattr(large, "climbed", spied)
    problem = layered_problem(random.Random(seed), num_layers=9)
    caps = Caps(max_prefetch=17, max_compute_move=20)
    solved(problem, caps)
    (climb,) = searches
    late = 0
    for found in (*climb.base.front, *climb.moved):
        search = climb.around(found, caps, 1)
        search.consider(found.candidate)
        assert evaluate(found.instance.arrays, search.program()) == found.candidate.figures
        late += found.candidate.policy.most_ahead is not None
    assert late
