"""Problem -> schedule. Knows no torch."""

from apsched.solver.along_caps import AlongCaps, Known
from apsched.solver.changes import Change, best_changes
from apsched.solver.least_memory import least_memory
from apsched.solver.milp_answer import solve_with_milp
from apsched.solver.solve import solve

__all__ = [
    "AlongCaps",
    "Change",
    "Known",
    "best_changes",
    "least_memory",
    "solve",
    "solve_with_milp",
]
