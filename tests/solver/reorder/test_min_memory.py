"""The bound on memory holds for all schedules that ``verify`` accepts, and is no less than what is
proven.
"""

import random
from dataclasses import replace

import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.memory import memory_bound_of_any_order
from apsched.solver.cpsat.model import ExactModel
from apsched.solver.reorder.min_memory import least_memory
from tests.helpers.problems.strategies import random_problem
from tests.helpers.verify_oracle import find_schedule


def drawn(seed: int) -> Problem:
    return random_problem(random.Random(seed), max_collectives=4, max_compute=5)


def test_a_schedule_outside_the_normal_form_may_need_less() -> None:
    problem, caps = drawn(0), Caps(max_compute_move=0)
    least, bound = least_memory(problem, caps)
    lower = find_schedule(problem, replace(caps, memory_cap_bytes=least - 512))
    assert lower is not None
    assert bound == least - 512


@pytest.mark.parametrize("seed", [28, 79])
def test_what_the_caller_keeps_is_part_of_what_is_proven(seed: int) -> None:
    problem, caps = drawn(seed), Caps(max_compute_move=0)
    assert problem.kept_bytes > 0
    assert least_memory(problem, caps) == (2560, 2560)
    assert find_schedule(problem, replace(caps, memory_cap_bytes=2559)) is None


def test_without_a_proof_the_bound_is_that_of_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    minimize_peak = ExactModel.minimize_peak

    def nothing_proven(self: ExactModel, *args: object) -> object:
        return replace(minimize_peak(self, *args), program=None, bound=0, infeasible=False)  # type: ignore[arg-type]

    monkeypatch.setattr(ExactModel, "minimize_peak", nothing_proven)
    problem = drawn(10)
    bound = memory_bound_of_any_order(Orders(Instance.of(problem)), 200)
    least, proven = least_memory(problem, Caps(max_compute_move=200))
    assert proven == bound < least
