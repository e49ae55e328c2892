"""Gathers of parts that compute has made, as those of parameters that are resharded in their node
where forward and backward are one graph: claims of answers hold for all schedules that ``verify``
accepts, and PuLP agrees.
"""

import pytest

from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from tests.helpers.claims import num_as_pulp_solves_them, num_with_true_claims

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
    seeds = range(first_seed, first_seed + 100)
    assert num_with_true_claims(seeds, num_of_parts, parts=PARTS) >= 10


def test_pulp_agrees() -> None:
    assert num_as_pulp_solves_them(range(200), num_of_parts, parts=PARTS) >= 8
