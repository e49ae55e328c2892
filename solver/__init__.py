"""Problem -> schedule. Knows no torch."""

from apsched.solver.compute_move_cap import moving_where_it_pays
from apsched.solver.frontier import AlongCaps, Known
from apsched.solver.milp.answer import solve_with_milp
from apsched.solver.reorder.min_memory import least_memory, schedule_of_least_memory
from apsched.solver.requested import solve_requested
from apsched.solver.search.decoder import must_compile
from apsched.solver.solve import solve
from apsched.solver.suggestions import Change, best_changes

__all__ = [
    "AlongCaps",
    "Change",
    "Known",
    "best_changes",
    "least_memory",
    "moving_where_it_pays",
    "must_compile",
    "schedule_of_least_memory",
    "solve",
    "solve_requested",
    "solve_with_milp",
]
