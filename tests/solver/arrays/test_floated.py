"""The relaxation without normal form: the order that the cap on moves fixes."""

import random
from collections.abc import Iterable, Sequence

import pytest

from apsched.config import Caps
from apsched.solver.arrays.floated import floated
from apsched.solver.arrays.instance import Instance
from tests.helpers.problems.strategies import layered_problem, random_problem


def sooner(predecessors: Sequence[Iterable[int]]) -> list[set[int]]:
    """Return the nodes that stand before each node in every order."""
    found: list[set[int]] = []
    for before in predecessors:
        found.append(set(before).union(*(found[node] for node in before)))
    return found


@pytest.mark.parametrize("max_move", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(8))
def test_few_pairs_fix_the_order_of_all_that_are_captured_too_far_apart(
    seed: int, max_move: int
) -> None:
    rng = random.Random(seed)
    problem = (
        layered_problem(rng, num_layers=4) if seed % 2 else random_problem(rng, max_compute=12)
    )
    relaxed = floated(Instance.of(problem, Caps(max_compute_move=max_move))).problem
    every_pair, captured = [set(before) for before in problem.predecessors], problem.captured_order
    for place, node in enumerate(captured):
        every_pair[node] |= set(captured[: max(place - 2 * max_move, 0)])
    assert sooner(relaxed.predecessors) == sooner(every_pair)
    stated = sum(map(len, relaxed.predecessors)) - sum(map(len, problem.predecessors))
    assert stated <= (2 * max_move + 1) * len(captured)
