"""Problem -> schedule. Knows no torch."""

from apsched.solver.milp_answer import solve_with_milp
from apsched.solver.solve import least_memory, solve

__all__ = ["least_memory", "solve", "solve_with_milp"]
