"""Problem -> schedule. Knows no torch."""

from apsched.solver.compute_move_cap import moving_where_it_pays
from apsched.solver.frontier import AlongCaps, Known
from apsched.solver.inner_loops import ORDERS, SEARCH, compile_part, missing_parts
from apsched.solver.interleave.least_memory import (
    has_chains,
    least_memory,
    schedule_of_least_memory,
)
from apsched.solver.milp.answer import solve_with_milp
from apsched.solver.requested import completed, solve_requested
from apsched.solver.solve import solve, with_reasons
from apsched.solver.suggestions import Change, best_changes

__all__ = [
    "ORDERS",
    "SEARCH",
    "AlongCaps",
    "Change",
    "Known",
    "best_changes",
    "compile_part",
    "completed",
    "has_chains",
    "least_memory",
    "missing_parts",
    "moving_where_it_pays",
    "schedule_of_least_memory",
    "solve",
    "solve_requested",
    "solve_with_milp",
    "with_reasons",
]
