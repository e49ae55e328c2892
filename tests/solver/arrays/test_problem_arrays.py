"""Properties of the arrays of a problem equal their definitions, also after a change."""

import random
from dataclasses import replace

import numpy as np
import pytest

from apsched.solver.arrays.problem_arrays import ALL_GATHER, problem_arrays
from tests.helpers.problems.strategies import random_problem


@pytest.mark.parametrize("seed", range(20))
def test_what_follows_is_what_the_problem_says(seed: int) -> None:
    problem = random_problem(random.Random(seed), max_collectives=6, max_compute=8)
    arrays = problem_arrays(problem)
    ticks = [problem.duration_ticks[node] for node in problem.compute_order]
    places = range(len(ticks) + 1)
    assert arrays.time_before.tolist() == [sum(ticks[:k]) for k in places]
    assert arrays.time_after.tolist() == [sum(ticks[k:]) for k in places]
    cs = problem.collectives
    assert arrays.own_work.tolist() == [
        sum(problem.duration_ticks[n] for n in (*c.prologue, *c.epilogue)) for c in cs
    ]
    assert arrays.cast_ticks.tolist() == [
        sum(problem.duration_ticks[n] for n in c.cast[:1]) for c in cs
    ]
    for c, collective in enumerate(cs):
        is_gather = arrays.kind[c] == ALL_GATHER
        is_needed = arrays.need_slot[c] < len(ticks)
        assert arrays.gathers[c] == (is_gather and not collective.on_path and is_needed)
        assert arrays.reductions[c] == (not (is_gather or collective.on_path or is_needed))
        assert len(arrays.prologue_of(c)) == len(collective.prologue)
        assert len(arrays.epilogue_of(c)) == len(collective.epilogue)
        before = [arrays.late_ready_slot[d] for d in arrays.awaited_by(c)]
        assert arrays.late_ready_slot[c] == max([arrays.ready_slot[c], *before])


def test_a_changed_copy_keeps_nothing_of_the_first() -> None:
    problem = random_problem(random.Random(3), max_collectives=6, max_compute=8)
    arrays = problem_arrays(problem)
    twice = replace(arrays, compute_ticks=2 * arrays.compute_ticks)
    assert np.array_equal(arrays.time_before * 2, twice.time_before)
    assert arrays.time_before[-1] > 0
    everything = replace(arrays, on_path=np.ones_like(arrays.on_path))
    assert arrays.gathers.any() or arrays.reductions.any()
    assert not (everything.gathers.any())
    assert not (everything.reductions.any())
