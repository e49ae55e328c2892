"""Problem -> schedule. Knows no torch."""

from apsched.solver.along_caps import AlongCaps, Known
from apsched.solver.changes import Change, best_changes
from apsched.solver.least_memory import least_memory
from apsched.solver.least_period import CurvePoint, LeastPeriod, PeriodCurve, period_curve
from apsched.solver.milp_answer import solve_with_milp
from apsched.solver.solve import solve

__all__ = [
    "AlongCaps",
    "Change",
    "CurvePoint",
    "Known",
    "LeastPeriod",
    "PeriodCurve",
    "best_changes",
    "least_memory",
    "period_curve",
    "solve",
    "solve_with_milp",
]
