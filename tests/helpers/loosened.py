"""A problem as the bounds for every order of the compute see it."""

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.bound import loose_program
from apsched.solver.bounds.any_order.jobs import Loose
from apsched.solver.bounds.linear_program import costs_of


def loosened(problem: Problem, caps: Caps) -> tuple[Instance, Loose]:
    """Return ``problem`` under ``caps``, and what holds for every order of its compute."""
    instance = Instance.of(problem, caps)
    return instance, loose_program(instance, Orders(Instance.of(problem)), costs_of(instance))
