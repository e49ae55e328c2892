"""Launches that a plan places: search puts the others around them in order of need."""

import pytest

from apsched.config import SolveOptions
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.rules import Plan, Rule
from apsched.problem.problem import Problem
from apsched.solver import solve
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.random_plans import named

_KIB = 1024
_GATHERS = 40


def gathers_in_a_row() -> Problem:
    """A gather for each compute node, so many that search decides."""
    b = ByHand(prices={"all_gather": line(20, 10)}, bucket_launch_ticks=2)
    x = b.input("x", _KIB)
    shards = [b.input(f"s{i}", _KIB, kept=True) for i in range(_GATHERS)]
    for i, shard in enumerate(shards):
        start = b.start("all_gather", f"ag{i}", shard, _KIB, 8 * _KIB, launch_ticks=2)
        x = b.compute(f"f{i}", 120, x, b.wait(f"w{i}", start), size=_KIB)
    return named(b.output(x))


@pytest.mark.parametrize("needed", [1, 2])
def test_a_launch_at_the_beginning_comes_before_those_needed_later(needed: int) -> None:
    """The plan keeps what is fastest without it: the launch of the first or second gather at the
    beginning.
    """
    problem = gathers_in_a_row()
    options = SolveOptions(budget=1.0)
    free = solve(problem, options=options).best
    rule = Rule(match=rf".*\.w{needed}", prefetch=needed + 1)
    planned = solve(restricted(problem, Plan(rules=(rule,))), options=options).best
    assert free is not None
    assert planned is not None
    assert planned.step_time_ticks <= 1.005 * free.step_time_ticks
