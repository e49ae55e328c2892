"""Gathers of parts that compute has made, as those of parameters that are resharded in their node
where forward and backward are one graph: claims of answers hold for all schedules that ``verify``
accepts, and PuLP agrees.
"""

import random

import pytest

from apsched.config import Caps, SolveOptions
from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from apsched.solver import solve
from apsched.solver.milp.model import solve_milp
from tests.helpers.claims import judged, random_case
from tests.helpers.problems.strategies import random_problem
from tests.helpers.verify_oracle import TooLargeError

PARTS = 0.9


def num_of_parts(problem: Problem) -> int:
    """Return the number of gathers that may move, and whose input compute makes."""
    return sum(
        problem.keys[c.key].kind == CollectiveKind.ALL_GATHER
        and not c.on_path
        and any(
            problem.kinds[node] is NodeKind.COMPUTE and node not in c.prologue
            for node in problem.predecessors[c.start]
        )
        for c in problem.collectives
    )


@pytest.mark.parametrize("first_seed", range(0, 300, 100))
def test_claims_hold(first_seed: int) -> None:
    num_judged = 0
    for seed in range(first_seed, first_seed + 100):
        if not num_of_parts(random_case(seed, parts=PARTS)[0]):
            continue
        try:
            result, broken = judged(seed, parts=PARTS)
        except TooLargeError:
            continue
        assert broken == [], (seed, result.status, result.bound_source)
        num_judged += 1
    assert num_judged >= 10


def test_pulp_agrees() -> None:
    num_solved = 0
    for seed in range(200):
        problem = random_problem(random.Random(seed), max_collectives=3, max_compute=3, parts=PARTS)
        if not num_of_parts(problem):
            continue
        expected = solve(problem, Caps(), SolveOptions(time_slack=0.0))
        assert expected.best is not None
        assert solve_milp(problem, Caps()).step_time_ticks == expected.best.step_time_ticks, seed
        num_solved += 1
    assert num_solved >= 8
