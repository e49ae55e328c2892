"""Which compute nodes count as moved: the fewest whose moving makes the order."""

import random
from dataclasses import replace
from itertools import combinations

import pytest

from apsched.problem.problem import Problem
from apsched.schedule.analysis.moved_compute import compute_places, furthest_move, moved_compute
from apsched.schedule.schedule import as_captured
from tests.helpers.problems.by_hand import ByHand, schedule


def independent(count: int) -> Problem:
    b = ByHand()
    x = b.input("x", 512)
    return b.output(*[b.compute(f"n{k}", 1_000, x, size=512) for k in range(count)])


def names(problem: Problem, order: str) -> set[str]:
    return {
        problem.node_names[node]
        for node in moved_compute(problem, schedule(problem, f"x {order} output"))
    }


def test_nothing_moves_as_captured() -> None:
    problem = independent(4)
    assert moved_compute(problem, as_captured(problem.num_nodes)) == frozenset()
    assert compute_places(problem, as_captured(problem.num_nodes)) == (0, 1, 2, 3)


def test_one_that_is_put_off_moves_and_those_that_it_lets_pass_do_not() -> None:
    problem = independent(6)
    assert names(problem, "n1 n2 n3 n0 n4 n5") == {"n0"}
    assert names(problem, "n0 n4 n1 n2 n3 n5") == {"n4"}
    assert names(problem, "n5 n1 n2 n3 n4 n0") == {"n0", "n5"}
    assert furthest_move(problem, schedule(problem, "x n1 n2 n3 n0 n4 n5 output")) == 3


@pytest.mark.parametrize("seed", range(30))
def test_no_fewer_would_do(seed: int) -> None:
    problem = independent(7)
    places = random.Random(seed).sample(range(7), 7)
    moved = moved_compute(
        problem, schedule(problem, f"x {' '.join(f'n{k}' for k in places)} output")
    )
    kept = [k for k in places if problem.captured_order[k] not in moved]
    assert kept == sorted(kept)
    larger = len(kept) + 1
    assert not any(list(few) == sorted(few) for few in combinations(places, larger))


def test_the_order_of_a_moved_problem_does_not_matter() -> None:
    """Places are those of the graph as captured, whatever order the problem looks at."""
    problem = independent(3)
    moved = replace(problem, reordered=tuple(reversed(problem.captured_order)))
    assert compute_places(moved, schedule(problem, "x n2 n0 n1 output")) == (2, 0, 1)
