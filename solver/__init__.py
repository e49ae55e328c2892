"""Problem -> schedule. Knows no torch."""

from apsched.solver.along_caps import AlongCaps, Known
from apsched.solver.least_memory import least_memory
from apsched.solver.least_period import CurvePoint, LeastPeriod, PeriodCurve, period_curve
from apsched.solver.milp_answer import solve_with_milp
from apsched.solver.solve import solve

__all__ = ["AlongCaps", "CurvePoint", "Known", "LeastPeriod", "PeriodCurve", "least_memory", "period_curve", "solve", "solve_with_milp"]
