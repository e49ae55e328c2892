"""Reductions whose results later compute adds, as micro-batches that reduce their own gradients do:
claims of answers hold for all schedules that ``verify`` accepts, and PuLP agrees.
"""

import pytest

from apsched.config import Caps, SolveOptions
from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from apsched.solver import least_memory, solve
from tests.helpers.claims import num_as_pulp_solves_them, num_with_true_claims
from tests.helpers.problems.by_hand import ByHand, line

ADDED = 0.7


def num_added(problem: Problem) -> int:
    """Return the number of reductions that may move, and whose results compute takes."""
    return sum(
        problem.keys[c.key].kind != CollectiveKind.ALL_GATHER
        and not c.on_path
        and any(
            problem.kinds[node] is NodeKind.COMPUTE and node not in c.epilogue
            for node in problem.successors[c.wait]
        )
        for c in problem.collectives
    )


@pytest.mark.parametrize("first_seed", range(0, 300, 100))
def test_claims_hold(first_seed: int) -> None:
    seeds = range(first_seed, first_seed + 100)
    assert num_with_true_claims(seeds, num_added, added=ADDED) >= 10


def test_each_ends_before_the_next_gradient_where_memory_is_short() -> None:
    """Forty gradients of 64 KiB, reduced to 1 KiB and added at the end: two are never alive."""
    b = ByHand(prices={"reduce_scatter": line(10)})
    x = b.input("x", 512)
    reduced = []
    for i in range(40):
        gradient = b.compute(f"g{i}", 20, x, size=65_536)
        start = b.start("reduce_scatter", f"rs{i}", gradient, 65_536, 1_024)
        reduced.append(b.wait(f"w{i}", start))
    sums = [b.compute(f"sum{i}", 1, *reduced[i : i + 2], size=1_024) for i in range(0, 40, 2)]
    problem = b.output(*sums)
    least = least_memory(problem, Caps())[0]
    assert least < 3 * 65_536
    answer = solve(problem, Caps(memory_cap_bytes=least), SolveOptions())
    assert answer.best is not None
    assert answer.best.step_time_ticks == 40 * (20 + 10) + 20


def test_pulp_agrees() -> None:
    assert num_as_pulp_solves_them(range(200), num_added, added=ADDED) >= 8
