"""A problem with its nodes in another order is the same problem."""

import random

import pytest

from apsched.config import Caps
from apsched.problem.permuted import brought_back, permuted
from apsched.problem.problem import check_problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import layered_problem, random_problem, with_kernels


def a_problem(seed):
    rng = random.Random(seed)
    return random_problem(rng) if seed % 2 else layered_problem(rng, num_layers=3)


def random_order(problem, seed):
    rng = random.Random(seed)
    left = {node: set(before) for node, before in enumerate(problem.predecessors)}
    order = []
    while left:
        ready = [node for node, before in left.items() if not before]
        node = rng.choice([n for n in ready if n != problem.num_nodes - 1] or ready)
        order.append(node)
        del left[node]
        for before in left.values():
            before.discard(node)
    return tuple(order)


@pytest.mark.parametrize("seed", range(12))
def test_a_schedule_is_worth_the_same_in_both(seed):
    problem = with_kernels(a_problem(seed), seed)
    order = random_order(problem, seed)
    there = permuted(problem, order)
    check_problem(there)
    for schedule in (random_schedule(there, seed), as_captured(there.num_nodes)):
        back = brought_back(problem, order, schedule)
        assert not verify(problem, back, Caps(max_compute_move=None))
        mine, theirs = simulate(problem, back), simulate(there, schedule)
        assert mine.step_time_ticks == theirs.step_time_ticks
        assert mine.live_bytes == theirs.live_bytes
        assert mine.num_launches == theirs.num_launches


def test_the_order_as_captured_changes_nothing():
    problem = a_problem(3)
    order = tuple(range(problem.num_nodes))
    assert permuted(problem, order) == problem
    schedule = random_schedule(problem, 3)
    assert brought_back(problem, order, schedule) == schedule
